"""What every peer tells of its training, as a signed record in the DHT, and how a monitor reads it."""

from __future__ import annotations

from typing import Annotated

import msgspec

import shoal
from shoal.dht.validation import RecordValidator, SchemaValidator, owner_marker

LIFETIME = 120.0  # seconds; of a peer that says nothing for so long, nothing is shown

Number = Annotated[float, msgspec.Meta(ge=0, le=1e15)]


class Metrics(msgspec.Struct, frozen=True):
    """One peer's training since its last record.

    Attributes:
        epoch: that it is at.
        samples_per_second: that it makes.
        samples: behind the gradients of its steps.
        loss: summed over its steps.
        steps: that it made.
    """

    epoch: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
    samples_per_second: Number
    samples: Number
    loss: Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
    steps: Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


def key_of(run_id: str) -> str:
    """Where the peers of a run write."""
    return f"{run_id}/metrics"


def rules(run_id: str) -> list[RecordValidator]:
    """For `shoal.DHT`: what is kept under the key has this form. That each peer writes only its own, its signature
    shows: the subkey names its owner."""
    subkey = Annotated[str, msgspec.Meta(pattern=r"^\[owner:[^\]]+\]$", max_length=200)]
    return [SchemaValidator({key_of(run_id): dict[subkey, Metrics]})]


def publish(dht: shoal.DHT, run_id: str, metrics: Metrics) -> None:
    """Write this peer's record, without waiting."""
    dht.store(
        key_of(run_id),
        msgspec.to_builtins(metrics),
        shoal.get_dht_time() + LIFETIME,
        subkey=owner_marker(dht.peer_id),
        return_future=True,
    )


def collect(dht: shoal.DHT, run_id: str) -> list[Metrics]:
    """The newest record of each peer that is still at it."""
    found = dht.get(key_of(run_id), latest=True)
    if found is None or not isinstance(found.value, dict):
        return []
    return [msgspec.convert(record.value, Metrics) for record in found.value.values()]

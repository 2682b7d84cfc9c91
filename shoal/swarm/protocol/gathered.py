"""What members tell each other in a round (`gather`): plain data, as msgpack."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.contribution import Outcome
from shoal.swarm.protocol.messages import MAX_GATHER_BYTES

log = logging.getLogger(__name__)


def encode_gathered(value: Any) -> bytes:
    """`value` as bytes. Raises ValueError if it is not plain data, or takes more than 64 KiB."""
    try:
        data = msgspec.msgpack.encode(value)
    except (TypeError, OverflowError, RecursionError) as error:
        raise ValueError(f"gather must be plain data that msgpack can write: {error}") from error
    if len(data) > MAX_GATHER_BYTES:
        raise ValueError(f"gather takes {len(data)} bytes; at most {MAX_GATHER_BYTES} are allowed")
    return data


def decode_gathered(data: bytes) -> Any:
    """What `data`, which comes from another peer, says; None for b"". Raises ValueError if it is not plain data."""
    try:
        return msgspec.msgpack.decode(data) if data else None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"what it gathers is not plain data in msgpack: {error}") from error


def told(outcome: Outcome) -> dict[PeerID, Any]:
    """What the members of a round gathered. A round does not fail by what one of them says: None of what can't be
    read."""
    values: dict[PeerID, Any] = {}
    for member in outcome.begin.members:
        try:
            values[member.peer] = decode_gathered(outcome.gathered.get(member.key, b""))
        except ValueError as error:
            log.warning("%r: %s", member.peer, error)
            values[member.peer] = None
    return values

"""The messages of a peer process to its parent: one JSON object per line on standard output.

``at`` is ``time.monotonic()`` of the peer; on one machine that clock is the same for all processes.
"""

from __future__ import annotations

import time

import msgspec


class _Timed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    at: float = msgspec.field(default_factory=time.monotonic)


class Listening(_Timed, frozen=True, kw_only=True):
    """The peer's DHT node answers at these multiaddrs."""

    peer_id: str
    addresses: list[str]


class Ready(_Timed, frozen=True, kw_only=True):
    """The peer has its text, model and optimizer, and waits for the parent's word to start."""


class Baseline(_Timed, frozen=True, kw_only=True):
    """The task, from the peer that evaluates: the loss to beat in nats per character, and sizes."""

    bigram_loss: float
    parameters: int
    train_characters: int
    held_out_characters: int


class Progress(_Timed, frozen=True, kw_only=True):
    """The peer's own part of an epoch: its mean training loss in nats per character, and its samples per second."""

    epoch: int
    loss: float
    samples_per_second: float


class Committed(_Timed, frozen=True, kw_only=True):
    """The peer made a step, after which it is in ``epoch``. ``state_digest`` is the digest of the parameters then."""

    epoch: int
    samples: float
    num_peers: int
    coordinator: str
    round_seconds: float
    matchmaking_seconds: float
    allreduce_seconds: float
    bytes_sent: int
    bytes_received: int
    state_digest: str


class Downloaded(_Timed, frozen=True, kw_only=True):
    """The peer downloaded the state of ``epoch`` from ``donors`` peers. ``state_digest`` is the digest of its
    parameters.
    """

    epoch: int
    seconds: float
    bytes: int
    donors: int
    state_digest: str


class Evaluated(_Timed, frozen=True, kw_only=True):
    """Held-out loss in nats per character when the peer's epoch was ``epoch``."""

    epoch: int
    held_out_loss: float


class Finished(_Timed, frozen=True, kw_only=True):
    """The peer has reached the last epoch and stays in the swarm. ``sample`` is generated text, from the peer that
    evaluates."""

    epoch: int
    sample: str


Message = Listening | Ready | Baseline | Progress | Committed | Downloaded | Evaluated | Finished

encode = msgspec.json.Encoder().encode
decode = msgspec.json.Decoder(Message).decode

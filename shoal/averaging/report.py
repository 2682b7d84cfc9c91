"""What an averager tells its user about a round."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.contribution import Outcome


@dataclass(frozen=True, slots=True)
class RoundReport:
    """How a committed round went, on this peer. Times in seconds, sizes in bytes of payload.

    Attributes:
        members: who was in it.
        coordinator: who called it.
        matchmaking_seconds: from the call of `step` to BEGIN.
        allreduce_seconds: from BEGIN to COMMIT.
        join_to_begin_seconds: from the last JOIN to BEGIN; None on members that did not coordinate.
        bytes_sent: to other members.
        bytes_received: from other members.
        digest: of the averaged tensors, 64 hex digits; equal on all members.
    """

    members: tuple[PeerID, ...]
    coordinator: PeerID
    matchmaking_seconds: float
    allreduce_seconds: float
    join_to_begin_seconds: float | None
    bytes_sent: int
    bytes_received: int
    digest: str

    @classmethod
    def of(cls, outcome: Outcome) -> RoundReport:
        return cls(
            members=tuple(member.peer for member in outcome.begin.members),
            coordinator=outcome.coordinator,
            matchmaking_seconds=outcome.matchmaking_seconds,
            allreduce_seconds=outcome.allreduce_seconds,
            join_to_begin_seconds=outcome.join_to_begin_seconds,
            bytes_sent=outcome.bytes_sent,
            bytes_received=outcome.bytes_received,
            digest=outcome.commit.root.hex(),
        )

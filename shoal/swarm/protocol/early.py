"""Chunks that have overtaken the plan by which they were sent: the plan comes from the coordinator, they do not."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.p2p.errors import Refused
from shoal.swarm.protocol.messages import Part, Result

MAX_EARLY = 64  # of one member
MAX_EARLY_BYTES = 1 << 28  # of all members together

Chunk = tuple[bytes, Part | Result, Sequence[memoryview]]


class EarlyChunks:
    """Keeps chunks by a plan (a BEGIN or a Repair) that has not come yet."""

    def __init__(self) -> None:
        self._kept: list[Chunk] = []

    def keep(self, peer: bytes, message: Part | Result, buffers: Sequence[memoryview]) -> None:
        """Raises Refused if they are too many, or too large."""
        nbytes = sum(buffer.nbytes for _, _, held in [*self._kept, (peer, message, buffers)] for buffer in held)
        if sum(sender == peer for sender, _, _ in self._kept) >= MAX_EARLY or nbytes > MAX_EARLY_BYTES:
            raise Refused("too many chunks by a plan that this peer does not have")
        # Copies, since these must not take the memory in which chunks come for as long as that lasts.
        self._kept.append((peer, message, [memoryview(bytearray(buffer)) for buffer in buffers]))

    def take(self, round_id: bytes) -> list[Chunk]:
        """The chunks of that round, in the order in which they came; the others belong nowhere any more."""
        kept, self._kept = self._kept, []
        return [chunk for chunk in kept if chunk[1].round == round_id]

    def clear(self) -> None:
        """No plan is waited for."""
        self._kept.clear()

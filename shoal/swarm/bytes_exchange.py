"""What a round asks of the exchange of its bytes: an interface that knows no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shoal.p2p.leases import Leases
from shoal.swarm.protocol.book import Book
from shoal.swarm.protocol.messages import Part, Repair, Result, Source


class BytesExchange(Protocol):
    """One member's side of the all-reduce of one round; `Exchange` is it for flat tensors.

    Attributes:
        book: what is owed to whom.
        progressed: counts what has come.
    """

    book: Book
    progressed: int

    def start(self, weight: float, leases: Leases) -> None:
        """Send the first parts; `weight` is what this member's input weighs. What others send waits in `leases` for the
        output's memory, until `close`."""

    def part(self, sender: bytes, part: Part, buffers: Sequence[memoryview]) -> None:
        """A member's part of a chunk has come. Raises RuleBroken if it does not belong here."""

    def result(self, sender: bytes, result: Result, buffers: Sequence[memoryview]) -> None:
        """The average of a chunk has come. Raises RuleBroken if it does not belong here."""

    def put_out(self, keys: Sequence[bytes]) -> None:
        """Go on without these members."""

    def repair(self, repair: Repair) -> list[Source]:
        """Follow a repair; returns what is to be fetched. Raises RuleBroken if it does not fit the round."""

    def await_fetched(self, chunk: int, holder: bytes, leases: Leases) -> None:
        """That holder is about to be asked for a chunk; until it has come, its memory waits in `leases`."""

    def fetched(self, chunk: int, digest: bytes, data: memoryview) -> None:
        """A chunk has come from a holder. Raises RuleBroken if it is not the one with that digest."""

    def close(self) -> None:
        """Nothing is written into the output any more, by whatever still comes."""

    def chunk_bytes(self, chunk: int) -> memoryview:
        """The average of a chunk that is here, uncompressed."""

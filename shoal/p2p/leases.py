"""The registry of the memory into which lanes open chunks. The receiving threads ask it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.p2p.identity import PeerID


@dataclass(eq=False, slots=True)
class Target:
    """Memory that waits for a chunk.

    Attributes:
        name: the name of the chunk.
        source: the only peer that may send it.
        memory: memory of exactly its size. Its content is arbitrary until the chunk is delivered.
        leased: whether the chunk is being opened into it now.
        filled: whether the chunk has been opened into it.
    """

    name: bytes
    source: PeerID
    memory: memoryview
    leased: bool = False
    filled: bool = False


class Leases:
    """The memory that waits for chunks, by their names. Any thread may call this.

    A target is leased while its chunk is opened into it. That takes milliseconds, and never includes waiting for bytes.
    So `withdraw` is quick, and afterwards nothing is written to the memory.
    """

    def __init__(self) -> None:
        self._targets: dict[bytes, Target] = {}
        self._changed = threading.Condition()

    def register(self, name: bytes, source: PeerID, memory: memoryview) -> Target:
        """Let the chunk with that name, from that peer, be opened into `memory`, once.

        Raises:
            ValueError: if that chunk is expected already. A chunk has one source at a time.
        """
        target = Target(name, source, memory.cast("B"))
        with self._changed:
            if self._targets.setdefault(name, target) is not target:
                raise ValueError(f"chunk {name.hex()} is waited for already")
        return target

    def withdraw(self, targets: Iterable[Target]) -> None:
        """Remove these targets, and return when nothing can be written into them any more. Filled targets are removed
        already.
        """
        withdrawn = list(targets)
        with self._changed:
            for target in withdrawn:
                if self._targets.get(target.name) is target:
                    del self._targets[target.name]
            self._changed.wait_for(lambda: not any(target.leased for target in withdrawn))

    def lease(self, name: bytes, source: PeerID, size: int) -> Target | None:
        """The target of a chunk that is to be opened now; None if there is none with this name, source and size."""
        with self._changed:
            target = self._targets.get(name)
            if target is None or target.leased or target.source != source or len(target.memory) != size:
                return None
            target.leased = True
            return target

    def give_back(self, target: Target, filled: bool) -> None:
        """The chunk has been opened, or that failed. If it failed, the target waits for its chunk as before."""
        with self._changed:
            target.leased, target.filled = False, filled
            if filled and self._targets.get(target.name) is target:
                del self._targets[target.name]
            self._changed.notify_all()


class Expected:
    """The memory that waits for the numbered chunks of one transfer.

    Args:
        leases: the registry of that memory.
    """

    def __init__(self, leases: Leases) -> None:
        self.leases = leases
        self._targets: dict[int, Target] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._targets

    def expect(self, number: int, name: bytes, source: PeerID, memory: memoryview) -> None:
        """Let that peer's chunk be opened into `memory`, and no other peer's from now on."""
        self.stop(number)
        self._targets[number] = self.leases.register(name, source, memory)

    def stop(self, number: int, source: PeerID | None = None) -> bool:
        """Stop waiting for a chunk, and return when nothing is written into its memory any more.

        Args:
            number: the number of the chunk.
            source: if given, do nothing unless this peer is the chunk's source.

        Returns:
            Whether the chunk has been opened into the memory.
        """
        target = self._targets.get(number)
        if target is None or source not in (None, target.source):
            return False
        del self._targets[number]
        self.leases.withdraw([target])
        return target.filled

    def close(self) -> None:
        """Return when nothing is written into any of the memory any more."""
        for number in list(self._targets):
            self.stop(number)

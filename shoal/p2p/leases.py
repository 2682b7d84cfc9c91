"""Which memory the chunks of lanes belong to: asked in the threads that receive them."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.p2p.identity import PeerID


@dataclass(eq=False, slots=True)
class Target:
    """Memory that waits for a chunk.

    Attributes:
        name: of the chunk.
        source: the only peer that may bring it.
        memory: of exactly its size. Until the chunk is delivered, anything may stand there.
        filled: whether the chunk was opened into it.
    """

    name: bytes
    source: PeerID
    memory: memoryview
    leased: bool = False
    filled: bool = False


class Leases:
    """The memory that waits for chunks, by their names. May be called from any thread.

    A target is leased while its chunk is opened into it: milliseconds, and never while bytes are waited for. So
    `withdraw` is quick, and after it nothing is written to the memory any more.
    """

    def __init__(self) -> None:
        self._targets: dict[bytes, Target] = {}
        self._changed = threading.Condition()

    def register(self, name: bytes, source: PeerID, memory: memoryview) -> Target:
        """Let the chunk of that name, from that peer, be opened into `memory`; once. A chunk has one source at a time:
        raises ValueError if this one is waited for already."""
        target = Target(name, source, memory.cast("B"))
        with self._changed:
            if self._targets.setdefault(name, target) is not target:
                raise ValueError(f"chunk {name.hex()} is waited for already")
        return target

    def withdraw(self, targets: Iterable[Target]) -> None:
        """Return when nothing can be written into these targets any more. Those that are filled are no targets."""
        withdrawn = list(targets)
        with self._changed:
            for target in withdrawn:
                if self._targets.get(target.name) is target:
                    del self._targets[target.name]
            self._changed.wait_for(lambda: not any(target.leased for target in withdrawn))

    def lease(self, name: bytes, source: PeerID, size: int) -> Target | None:
        """The target of a chunk that is to be opened now; None if there is none for this name, source and size."""
        with self._changed:
            target = self._targets.get(name)
            if target is None or target.leased or target.source != source or len(target.memory) != size:
                return None
            target.leased = True
            return target

    def give_back(self, target: Target, filled: bool) -> None:
        """The opening is over. If it failed, the target waits for its chunk as before."""
        with self._changed:
            target.leased, target.filled = False, filled
            if filled and self._targets.get(target.name) is target:
                del self._targets[target.name]
            self._changed.notify_all()


class Expected:
    """The memory that waits for the numbered chunks of one transfer.

    Args:
        leases: where the memory waits.
    """

    def __init__(self, leases: Leases) -> None:
        self.leases = leases
        self._targets: dict[int, Target] = {}

    def __contains__(self, number: int) -> bool:
        return number in self._targets

    def expect(self, number: int, name: bytes, source: PeerID, memory: memoryview) -> None:
        """Let that peer's chunk be opened into `memory`, and nobody else's any more."""
        self.stop(number)
        self._targets[number] = self.leases.register(name, source, memory)

    def stop(self, number: int, source: PeerID | None = None) -> bool:
        """Return when nothing is written into the memory of that chunk any more.

        Args:
            source: if given, the memory continues to wait for any other peer.

        Returns:
            Whether the chunk was opened there.
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

"""Knows which optimizers one thread trains in turn, and when that thread waits, so that the others can be lent.

[Note: why a waiting thread lends its other optimizers]
A script with two models has an `Optimizer` for each, and one thread steps them in turn. Without lending, peer A may wait
in the step of the first for peer B, which waits in the step of the second for A. So while a thread waits inside Shoal,
its other optimizers are lent: each may close its epoch on its own thread, as the trainer's thread would. The trainer's
thread takes them back when its wait is over. Then it waits only for an optimizer that is just being closed.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, wait
from typing import Protocol, TypeVar

T = TypeVar("T")

SHORT_SECONDS = 0.01  # a shorter wait lends nothing

_of_thread = threading.local()


class Member(Protocol):
    """An optimizer that a thread trains in turn with others."""

    def tell_waiting(self) -> None:
        """The thread waits from now on. Called in that thread; must not block."""

    def watch(self) -> None:
        """The thread has other optimizers, too."""


class Turn:
    """The optimizers that one thread trains in turn. Any thread may call the methods."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._members: weakref.WeakSet[Member] = weakref.WeakSet()
        self._waits = self._borrowed = 0

    @classmethod
    def of_this_thread(cls) -> Turn:
        """The turn of the calling thread."""
        turn: Turn | None = getattr(_of_thread, "turn", None)
        if turn is None:
            turn = _of_thread.turn = cls()
        return turn

    @property
    def is_waiting(self) -> bool:
        """Whether the thread waits inside Shoal."""
        return self._waits > 0

    @property
    def has_several(self) -> bool:
        """Whether the thread has several optimizers."""
        return len(self._members) > 1

    def add(self, member: Member) -> list[Member]:
        """Add an optimizer. Returns all that are here."""
        with self._changed:
            self._members.add(member)
            return list(self._members)

    def remove(self, member: Member) -> None:
        """Remove an optimizer, if it is here."""
        with self._changed:
            self._members.discard(member)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Within this context the thread waits, and its optimizers are lent."""
        with self._changed:
            self._waits += 1
            members = list(self._members)
        try:
            for member in members:
                member.tell_waiting()
            yield
        finally:
            with self._changed:
                self._waits -= 1
                self._changed.wait_for(lambda: not self._borrowed)

    @contextlib.contextmanager
    def borrowed(self, trainer: threading.RLock) -> Iterator[bool]:
        """Within this context, the calling thread may act for the thread, which can't return from its wait.

        Args:
            trainer: the lock that is held by a thread which is in the optimizer.

        Yields:
            Whether it may: the thread waits, and no thread is in the optimizer.
        """
        with self._changed:
            may = self.is_waiting and trainer.acquire(blocking=False)
            self._borrowed += may
        try:
            yield may
        finally:
            if may:
                trainer.release()
                with self._changed:
                    self._borrowed -= 1
                    self._changed.notify_all()


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """A context within which the calling thread waits for other peers, and its optimizers are lent. Costs nothing if
    the thread has at most one optimizer."""
    turn: Turn | None = getattr(_of_thread, "turn", None)
    if turn is None or not turn.has_several:
        yield
    else:
        with turn.waiting():
            yield


def result_of(future: Future[T]) -> T:
    """The result of a future that waits for other peers. If that takes a while, the thread's optimizers are lent."""
    turn: Turn | None = getattr(_of_thread, "turn", None)
    if turn is not None and turn.has_several and not wait([future], SHORT_SECONDS).done:
        with turn.waiting():
            return future.result()
    return future.result()

"""Knows which optimizers one thread trains in turn, and when that thread waits, so that the others can be lent.

[Note: why a waiting thread lends its other optimizers]
A script with two models has an `Optimizer` for each, and one thread steps them in turn. Without lending, peer A may
wait in the step of the first for peer B, which waits in the step of the second for A. So while a thread waits in Shoal,
its other optimizers are lent: each may end its epoch on its own thread, as the trainer's thread would, and average
there. It applies the average in its own next `step`, and not before: a script may hold a graph of one model while it
steps another, and a step behind its back would spoil the backward pass. So an optimizer can be lent once. When its next
round is called, it calls the trainer's thread back, which leaves its wait and goes on: then the optimizer that it has
waited in averages in the background, as one that is lent.

The trainer's thread takes its optimizers back when its wait is over. It waits only for one that is just being closed.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, Protocol, TypeVar

from shoal.interrupts import any_finished, finished

T = TypeVar("T")

SHORT_SECONDS = 0.01  # a shorter wait lends nothing

_of_thread = threading.local()


class InTurn(Protocol):
    """An optimizer that a thread trains in turn with others.

    Attributes:
        run_id: its run.
    """

    run_id: str

    def tell_waiting(self) -> None:
        """The thread waits from now on. Called in that thread; must not block."""

    def watch(self) -> None:
        """The thread has other optimizers, too."""


class Turn:
    """The optimizers that one thread trains in turn. Any thread may call the methods.

    Attributes:
        has_several: whether they are of several runs. (Several peers of one run, in a test for example, are not lent to
            each other.)
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._members: weakref.WeakSet[InTurn] = weakref.WeakSet()
        self.has_several = False
        self._waits = self._borrowed = 0
        self._recall: Future[None] | None = None  # ends the present wait, if it may be left

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

    def add(self, member: InTurn) -> None:
        """Add an optimizer."""
        with self._changed:
            self._members.add(member)
            members = self._count()
        for each in members:
            each.watch()

    def remove(self, member: InTurn) -> None:
        """Remove an optimizer, if it is here."""
        with self._changed:
            self._members.discard(member)
            self._count()

    def _count(self) -> list[InTurn]:
        """Returns the members if they are of several runs."""
        self.has_several = len({member.run_id for member in self._members}) > 1
        return list(self._members) if self.has_several else []

    def is_alone(self, member: InTurn) -> bool:
        """Whether no other optimizer here is of the same run."""
        with self._changed:
            return not any(other.run_id == member.run_id and other is not member for other in self._members)

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
    def may_leave(self, recall: Future[None]) -> Iterator[None]:
        """Within this context, `call_back` sets the result of `recall`, upon which the thread leaves its wait."""
        self._recall = recall
        try:
            yield
        finally:
            self._recall = None

    def call_back(self) -> bool:
        """An optimizer that can't be lent again needs the thread. Returns whether the thread leaves its wait."""
        with self._changed:
            recall = self._recall
            if recall is not None and not recall.done():
                recall.set_result(None)
        return recall is not None

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
    """A context within which the calling thread waits for other peers, and its optimizers are lent. Does nothing if the
    thread trains in one run only."""
    turn: Turn | None = getattr(_of_thread, "turn", None)
    if turn is None or not turn.has_several:
        yield
    else:
        with turn.waiting():
            yield


def result_of(future: Future[T]) -> T:
    """See `shoal.interrupts.result_of`. If the wait takes a while, the thread's optimizers are lent."""
    try:
        wait_for(future)
    except BaseException:  # of a signal handler: nobody waits for the result any more
        future.cancel()
        raise
    return future.result()


def wait_for(future: Future[Any]) -> None:
    """Wait until a future of other peers is done. If that takes a while, the thread's optimizers are lent."""
    turn: Turn | None = getattr(_of_thread, "turn", None)
    if turn is None or not turn.has_several:
        finished(future)
    elif not finished(future, SHORT_SECONDS):
        with turn.waiting():
            finished(future)


def is_called_away(future: Future[Any]) -> bool:
    """As `wait_for`, but only until another optimizer of this thread needs the thread. Returns whether it does: then
    the thread should leave the future, which is not done, and go on."""
    turn: Turn | None = getattr(_of_thread, "turn", None)
    if turn is None or not turn.has_several or finished(future, SHORT_SECONDS):
        return False
    recall: Future[None] = Future()
    with turn.may_leave(recall), turn.waiting():
        any_finished((future, recall))
    return not future.done()


def are_several() -> bool:
    """Whether this thread trains in several runs."""
    turn: Turn | None = getattr(_of_thread, "turn", None)
    return turn is not None and turn.has_several

"""One call of all ranks of a cluster, as each kind of rank makes it. `Team` says what they promise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, TypeAlias, TypeVar

import msgspec
from torch import distributed as dist

from shoal.cluster.messages import Answered, Awaited, HandedIn, WaitOver
from shoal.cluster.question import NOTHING, Nothing, Question
from shoal.cluster.ties import HAS_LEFT, ClusterError, Ties, framed, text_of

M = TypeVar("M")
T = TypeVar("T")
Decide: TypeAlias = Callable[[list[M]], T]
Then: TypeAlias = Callable[[T], object]

# After so many seconds in which rank 0 waits for ranks, it tells them for what. So a rank that waits for rank 0 at
# another place raises an error.
LATE_SECONDS = 1.0

_encode = msgspec.msgpack.Encoder().encode


class RankCall:
    """One call at this rank. As it is, a call that a callback of the user makes within another one: it does what
    concerns this rank, and exchanges nothing. The others are calls of all ranks.

    Args:
        name: the name of the call.
        outer: the name of the call within which a callback makes it; "" if there is none.

    Attributes:
        name: as given.
        has_failed: whether the call has failed at all ranks.
    """

    def __init__(self, name: str, outer: str = "") -> None:
        self.name, self.has_failed, self._outer = name, False, outer

    def _refused(self) -> RuntimeError:
        return RuntimeError(
            f"{self.name} within {self._outer}: all ranks of the cluster make that call at once, so a callback can't "
            f"make it; call it after {self._outer}"
        )

    def decided(self, question: Question[M, T], decide: Decide[M, T], mine: M | Nothing, then: Then[T]) -> T:
        """See `Team`."""
        raise self._refused()

    def ends(self, make: Callable[[], Future[None]]) -> AbstractContextManager[Future[None]]:
        """See `Team`."""
        raise self._refused()

    def flush(self) -> None:
        """See `Team`."""
        raise self._refused()

    def _check(self) -> None:
        """Raise ClusterError if the call has failed, and the caller has gone on."""
        if self.has_failed:
            raise ClusterError(f"{self.name} has failed before, at all ranks of the cluster")

    def end(self) -> None:
        """End the call."""

    def fail(self, error: BaseException) -> None:
        """End the call by an error of this rank."""


class Led(RankCall):
    """A call at rank 0.

    Args:
        name: the name of the call.
        number: the number of the call.
        ties: the connections to the other ranks.
        failed: the number of the last call that has failed. Errors of other ranks in it and before are known.
    """

    def __init__(self, name: str, number: int, ties: Ties, failed: int) -> None:
        super().__init__(name)
        self._number, self._ties, self._known = number, ties, failed
        self._unsaid = b""  # messages to be sent together with the next ones: each wakes its receivers
        self._waits = 0
        self._wait: Future[None] | None = None  # the present wait of `ends`, until the others know of its end

    def decided(self, question: Question[M, T], decide: Decide[M, T], mine: M | Nothing, then: Then[T]) -> T:
        """See `Team`."""
        self._check()
        try:
            answer = decide([] if mine is NOTHING else self._gathered(question, mine))
            self._unsaid += framed(Answered(self._number, self.name, question.name, _encode(answer)))
            if not question.may_wait:
                self.flush()
        except Exception as error:  # now, because the caller may catch it
            self.fail(error)
            raise
        return answer

    def _gathered(self, question: Question[M, T], mine: M) -> list[M]:
        """Wait for what each other rank brings."""
        values, missing = {0: mine}, list(range(1, self._ties.size))
        patience: float | None = LATE_SECONDS

        def is_news() -> bool:
            return any(map(self._ties.has_news, missing)) or self._has_ended_wait

        self.flush()
        while missing:
            if not self._ties.until(is_news, patience):
                self._ties.send(framed(Awaited(self._number, self.name, question.name)), missing)
                patience = None
            if self._has_ended_wait:
                self._end_wait()
                self.flush()
            for rank in missing:
                brought = self._brought(rank, question.name)
                if brought is not None:
                    values[rank] = question.brought(brought.value, self._ties.names[rank])
            missing = [rank for rank in missing if rank not in values]
        return [value for _, value in sorted(values.items())]

    def _brought(self, rank: int, question: str) -> HandedIn | None:
        """What a rank has brought to a question; None if it is not there yet."""
        while (message := self._ties.take(rank)) is not None:
            assert isinstance(message, HandedIn)
            if message.error and message.number > self._known:
                raise ClusterError(f"{self._ties.names[rank]} has raised {message.error}")
            if message.number < self._number:
                continue
            here, there = (self.name, question), (message.call, message.question)
            if here != there:
                raise _unlike(self._ties.names, here, rank, there)
            return message
        return None

    @contextlib.contextmanager
    def ends(self, make: Callable[[], Future[None]]) -> Iterator[Future[None]]:
        """See `Team`."""
        self._check()
        self.flush()
        self._waits += 1
        self._wait = future = make()
        future.add_done_callback(lambda _: self._ties.wake())
        try:
            yield future
        except BaseException:  # Ctrl-C, too: the others must hear that this wait is over; raised again
            if self._wait is not None:
                self._end_wait()
            raise
        finally:
            if self._has_ended_wait:
                self._end_wait()
            self._wait = None
            future.cancel()

    @property
    def _has_ended_wait(self) -> bool:
        """Whether the present wait is over, and the others do not know that."""
        return self._wait is not None and self._wait.done()

    def _end_wait(self) -> None:
        self._unsaid += framed(WaitOver(self._number, self._waits))
        self._wait = None

    def flush(self) -> None:
        """See `RankCall`."""
        unsaid, self._unsaid = self._unsaid, b""
        if unsaid:
            self._ties.send(unsaid)

    def end(self) -> None:
        """See `RankCall`."""
        if not self.has_failed:
            self._unsaid += framed(Answered(self._number, self.name))
            self.flush()

    def fail(self, error: BaseException) -> None:
        """See `RankCall`."""
        if self.has_failed:
            return
        self.has_failed = True
        self._unsaid += framed(Answered(self._number, self.name, error=text_of(error)))
        _tell(self._ties, self._unsaid, error)


class Followed(RankCall):
    """A call at another rank.

    Args:
        name: the name of the call.
        number: the number of the call.
        ties: the connection to rank 0.
    """

    def __init__(self, name: str, number: int, ties: Ties) -> None:
        super().__init__(name)
        self._number, self._ties = number, ties
        self._waits = 0
        self._own: Exception | None = None  # what a `then` has raised

    def decided(self, question: Question[M, T], decide: Decide[M, T], mine: M | Nothing, then: Then[T]) -> T:
        """See `Team`."""
        self._check()
        if mine is not NOTHING:
            if self._own is not None:
                raise self._own
            self._ties.send(framed(HandedIn(self._number, self.name, question.name, _encode(mine))))
        answer = question.answered(self._heard(question.name))
        try:
            then(answer)
        except Exception as error:  # noqa: BLE001 (it is raised where this rank next brings something)
            self._own = self._own or error
        return answer

    def _heard(self, question: str = "") -> bytes:
        """Wait for the answer to a question, or for the end of the call."""
        while True:
            message = self._ties.hear(0)
            if not isinstance(message, Answered | Awaited) or message.number < self._number:
                continue  # of a wait that is over, or of a call that an error of this rank has ended
            if isinstance(message, Answered) and message.error:
                self.has_failed = True
                raise ClusterError(f"{self._ties.names[0]} has raised {message.error}")
            here, there = (self.name, question), (message.call, message.question)
            if here != there:
                raise _unlike(self._ties.names, there, self._ties.rank, here)
            if isinstance(message, Answered):
                return message.value

    def ends(self, make: Callable[[], Future[None]]) -> AbstractContextManager[Future[None]]:
        """See `Team`."""
        self._waits += 1
        return _watched(self._ties, self._number, self._waits)

    def flush(self) -> None:
        """See `RankCall`."""

    def end(self) -> None:
        """See `RankCall`."""
        if not self.has_failed:
            self._heard()
        if self._own is not None:
            raise self._own

    def fail(self, error: BaseException) -> None:
        """See `RankCall`."""
        if not self.has_failed:
            _tell(self._ties, framed(HandedIn(self._number, self.name, "", error=text_of(error))), error)


def _tell(ties: Ties, said: bytes, error: BaseException) -> None:
    """Tell other ranks of an error. If a rank is lost, that is why there was an error: raise ClusterError from it."""
    try:
        ties.send(said)
    except ClusterError as why:
        if not (ties.is_whole or isinstance(error, ClusterError)):
            raise why from error


@contextlib.contextmanager
def _watched(ties: Ties, number: int, wait: int) -> Iterator[Future[None]]:
    """A context of a future that is done when rank 0 has ended that wait, or that call."""

    def is_over() -> bool:
        return any(
            message == over or (isinstance(message, Answered) and not message.question and message.number == number)
            for message in ties.inbox[0]
        )

    over = WaitOver(number, wait)
    future = ties.watch(is_over)
    try:
        yield future
    finally:
        future.cancel()


class AfterAll(RankCall):
    """A call of ranks that have left. If all have left in order, they exchange by collectives.

    Args:
        name: the name of the call.
        ties: the former connections.
        group: the process group.
    """

    def __init__(self, name: str, ties: Ties, group: dist.ProcessGroup | None) -> None:
        super().__init__(name)
        self._ties, self._group = ties, group

    def decided(self, question: Question[M, T], decide: Decide[M, T], mine: M | Nothing, then: Then[T]) -> T:
        """See `Team`."""
        brought: list[M] = []
        if mine is not NOTHING:
            values = self._shared(question.name, _encode(mine))
            brought = [question.brought(*each) for each in zip(values, self._ties.names, strict=True)]
        data, failed = b"", None
        if self._ties.rank == 0:
            try:
                data = _encode(decide(brought))
            except Exception as error:  # noqa: BLE001 (it is raised when the others have it)
                failed = error
        answer = question.answered(self._shared(question.name, data, failed)[0])
        if self._ties.rank:
            then(answer)
        return answer

    def _shared(self, question: str, data: bytes, failed: Exception | None = None) -> list[bytes]:
        """What each rank gives. Raises `failed`, or ClusterError if another rank gives an error."""
        self.flush()
        found: list[Any] = [None] * self._ties.size
        dist.all_gather_object(found, ((self.name, question), data, text_of(failed)), group=self._group)
        if failed is not None:
            raise failed
        for rank, (place, _, error) in enumerate(found):
            if error:
                raise ClusterError(f"{self._ties.names[rank]} has raised {error}")
            if place != found[0][0]:
                raise _unlike(self._ties.names, found[0][0], rank, place)
        return [given for _, given, _ in found]

    def ends(self, make: Callable[[], Future[None]]) -> AbstractContextManager[Future[None]]:
        """See `Team`. Nobody waits in rounds any more."""
        raise ClusterError(HAS_LEFT)

    def flush(self) -> None:
        """See `RankCall`."""
        if not (self._ties.left_in_order and dist.is_initialized()):
            self._ties.check()


def _unlike(names: Sequence[str], at_first: tuple[str, str], rank: int, there: tuple[str, str]) -> ClusterError:
    """The error for ranks that are at different places, each of which is the name of a call and that of a question."""
    (call, _), (other, _) = at_first, there
    if call != other:
        return ClusterError(
            f"{names[0]} has called {call} and {names[rank]} {other}: the ranks of a cluster make the same calls"
        )
    places = [f"is at {question!r}" if question else "has ended it" for _, question in (at_first, there)]
    return ClusterError(
        f"in {call}, {names[0]} {places[0]} and {names[rank]} {places[1]}: the ranks of a cluster do the same in "
        "each call"
    )

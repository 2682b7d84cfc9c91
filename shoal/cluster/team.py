"""The ranks of a peer that make each call of the optimizer together. Every rank runs the same code, rank 0 decides, and
all ranks get its decision. A process that is alone is a team, too.

A *call* is a method of the optimizer that all ranks call at the same time, such as a step. Within it they exchange
values, each time about a named `Question`: first each other rank sends one message to rank 0 with what it brings, and
then rank 0 sends one answer to all. Answers that may wait are sent together: with the next one that may not, when rank
0 waits for other ranks, before collectives, and with the end of the call.

An error of one rank is an error of all. If rank 0 raises within a call, the end of the call has the error. If another
rank does, it tells rank 0, which raises in its next exchange. The rank raises its own error, the others a
`ClusterError` with its name. Afterwards, all ranks can make the next call. What rank 0 still gets of earlier calls is
dropped.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, TypeVar, cast

from torch import distributed as dist

from shoal.cluster.calls import AfterAll, Followed, Led, RankCall
from shoal.cluster.question import NOTHING, Nothing, Question
from shoal.cluster.ties import Ties, meet

M = TypeVar("M")
T = TypeVar("T")


class Team(ABC):
    """The only object that knows other ranks.

    All ranks come to the same questions in each call. So whether a rank comes to one must not hang on what it alone
    knows, such as its clock, the run, or how far it got before an error. It hangs on an earlier answer.

    Attributes:
        rank: the rank of this process. Rank 0 is the peer of the run.
        size: the number of ranks.
        names: readable names of all ranks, for messages.
    """

    rank: int
    size: int
    names: list[str]

    @abstractmethod
    def call(self, name: str) -> AbstractContextManager[None]:
        """A context for one call of all ranks. All methods that exchange something belong into one.

        Within a call, a callback of the user may make another one at its rank. That one exchanges nothing.

        Args:
            name: the name of the method, for errors.

        Raises:
            ClusterError: if a rank is lost, has made another call, or has raised an error.
        """

    @abstractmethod
    def decided(
        self,
        question: Question[M, T],
        decide: Callable[[list[M]], T],
        mine: M | Nothing = NOTHING,
        then: Callable[[T], object] = lambda _: None,
    ) -> T:
        """Let rank 0 decide. All ranks get its decision.

        Args:
            question: what is decided.
            decide: called at rank 0, with what all ranks bring, in their order. What is to be expected, such as a
                download that fails, is a value. If this raises an error, the call has failed at all ranks.
            mine: what this rank brings. If it is left out, `decide` gets an empty list, and no rank sends anything to
                rank 0.
            then: what the other ranks do with the decision. Rank 0 has done the same in `decide`. If it raises an
                error, this rank takes part until the next exchange to which it brings something, or until the end of
                the call, so that the others do not wait for it in collectives. There it raises the error.

        Raises:
            ClusterError: if a rank is lost, has raised an error, or is at another place.
        """

    def all(self, question: Question[M, list[M]], mine: M) -> list[M]:
        """Exchange a value. Returns the values of all ranks, in their order. Raises ClusterError as `decided`."""
        return self.decided(question, list, mine)

    def at_first(self, make: Callable[[], T]) -> T:
        """What rank 0 makes for itself. At other ranks, a stand-in: each access to one of its attributes raises
        AttributeError."""
        return make() if self.rank == 0 else cast(T, _AtRank0())

    @property
    def me(self) -> str:
        """The name of this rank."""
        return self.names[self.rank]

    def said(self, rank: int, why: str) -> str:
        """What a rank has said, with its name if there are several."""
        return why if self.size == 1 else f"{self.names[rank]}: {why}"

    def refuse(self, question: Question[str, list[str]], why: str) -> None:
        """Raise a ValueError at all ranks with the first reason that a rank has. "" is none."""
        for rank, each in enumerate(self.all(question, why)):
            if each:
                raise ValueError(self.said(rank, each))

    @abstractmethod
    def ends(self, make: Callable[[], Future[None]]) -> AbstractContextManager[Future[None]]:
        """A context for a wait of all ranks, which rank 0 may end. Collect what they have waited for within it.

        At rank 0 it gives the future that `make` returns, and cancels that at its end. At other ranks it gives a future
        that is done when the one of rank 0 is done within its context, when rank 0 leaves the context or the call by an
        error, or when a rank is lost.
        """

    @abstractmethod
    def flush(self) -> None:
        """Send the answers of rank 0 now. RankCall this before work that takes time and that all ranks do at once."""

    @abstractmethod
    def collectives(self) -> AbstractContextManager[None]:
        """A context for collectives of all ranks. If they fail because a rank is lost, they raise ClusterError."""

    @abstractmethod
    def when_lost(self, stop: Callable[[], object]) -> None:
        """RankCall a function in a thread of its own when a rank is lost; now, if one is lost already."""

    @abstractmethod
    def leave(self, error: BaseException | None = None) -> None:
        """Leave the team. The others hear which error has ended the training of this rank, if one has: `error`, or the
        one that is being handled. A second call does nothing.

        After all have left in order, exchanges still work as long as torch's process group does.
        """

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """Whether this rank has not left, and no rank is lost."""


class _AtRank0:
    """Stands in, at other ranks, for what rank 0 has."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} is at rank 0 of the cluster only, which is the peer of the run")

    def __setattr__(self, name: str, value: object) -> None:
        self.__getattr__(name)


class Alone(Team):
    """A process that is alone."""

    def __init__(self) -> None:
        self.rank, self.size, self.names = 0, 1, ["this process"]
        self._has_left = False

    def call(self, name: str) -> AbstractContextManager[None]:
        """See `Team`."""
        return contextlib.nullcontext()

    def decided(
        self,
        question: Question[M, T],
        decide: Callable[[list[M]], T],
        mine: M | Nothing = NOTHING,
        then: Callable[[T], object] = lambda _: None,
    ) -> T:
        """See `Team`."""
        return decide([] if mine is NOTHING else [mine])

    @contextlib.contextmanager
    def ends(self, make: Callable[[], Future[None]]) -> Iterator[Future[None]]:
        """See `Team`."""
        future = make()
        try:
            yield future
        finally:
            future.cancel()

    def flush(self) -> None:
        """See `Team`."""

    def collectives(self) -> AbstractContextManager[None]:
        """See `Team`."""
        return contextlib.nullcontext()

    def when_lost(self, stop: Callable[[], object]) -> None:
        """See `Team`."""

    def leave(self, error: BaseException | None = None) -> None:
        """See `Team`."""
        self._has_left = True

    @property
    def is_alive(self) -> bool:
        """See `Team`."""
        return not self._has_left


class Gang(Team):
    """The ranks of a process group.

    Args:
        ties: the connections of this rank, see `team_of`.
        group: the process group, for exchanges after all have left; None if there are none.
    """

    def __init__(self, ties: Ties, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size, self.names = ties.rank, ties.size, ties.names
        self._ties, self._group = ties, group
        self._call: RankCall | None = None  # the present one
        self._number = 0  # of the last call
        self._failed = 0  # number of the last call that has failed at this rank

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        """See `Team`."""
        outer, self._call = self._call, self._begun(name)
        call, self._ties.in_call = self._call, True
        try:
            yield
            call.end()
        except Exception as error:
            call.fail(error)
            raise
        except BaseException as error:  # Ctrl-C: elsewhere the next call would hear messages of this one
            self.leave(error) if self.rank else call.fail(error)
            raise
        finally:
            self._call, self._ties.in_call = outer, outer is not None
            if call.has_failed:
                self._failed = self._number

    def _begun(self, name: str) -> RankCall:
        if self._call is not None:
            return RankCall(name, self._call.name)
        if self._ties.has_left:
            return AfterAll(name, self._ties, self._group)
        self._ties.check()
        self._number += 1
        if self.rank == 0:
            return Led(name, self._number, self._ties, self._failed)
        return Followed(name, self._number, self._ties)

    @property
    def _now(self) -> RankCall:
        if self._call is None:
            raise RuntimeError("the ranks of a cluster exchange something, but within no call")
        return self._call

    def decided(
        self,
        question: Question[M, T],
        decide: Callable[[list[M]], T],
        mine: M | Nothing = NOTHING,
        then: Callable[[T], object] = lambda _: None,
    ) -> T:
        """See `Team`."""
        return self._now.decided(question, decide, mine, then)

    def ends(self, make: Callable[[], Future[None]]) -> AbstractContextManager[Future[None]]:
        """See `Team`."""
        return self._now.ends(make)

    def flush(self) -> None:
        """See `Team`."""
        self._now.flush()

    @contextlib.contextmanager
    def collectives(self) -> Iterator[None]:
        """See `Team`."""
        self.flush()
        with self._ties.collectives():
            yield

    def when_lost(self, stop: Callable[[], object]) -> None:
        """See `Team`."""
        self._ties.when_lost(stop)

    def leave(self, error: BaseException | None = None) -> None:
        """See `Team`."""
        self._ties.leave(error)

    @property
    def is_alive(self) -> bool:
        """See `Team`."""
        return not self._ties.is_over


def team_of(group: dist.ProcessGroup | None) -> Team:
    """The team of a process group; None is a single process. All ranks call this at once.

    Raises:
        ClusterError: if the ranks can't connect, or one of them has failed before (see `told_to_all`).
    """
    if group is None or dist.get_world_size(group) == 1:
        return Alone()
    return Gang(Ties(*meet(group)), group)

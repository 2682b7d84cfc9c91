"""How rank 0 of a cluster makes all ranks do the same, each with its share of the state."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import msgspec

from shoal.cluster.gang import Gang
from shoal.cluster.messages import Do
from shoal.cluster.ties import ClusterError


class Crew:
    """Tells the other ranks what to do, in a call of all ranks. Only rank 0 tells; at other ranks `tell` does nothing.

    The others answer each message of `tell` once, in order. Rank 0 may `hear` the answers later, so it need not wait
    for answers without content. After rank 0 has finished, it tells nothing. Then all ranks make the same calls, and
    each does its part by itself.

    Args:
        gang: the connections to the other ranks.
    """

    def __init__(self, gang: Gang) -> None:
        self._gang, self._leads, self._owed = gang, gang.rank == 0, 0

    @property
    def has_finished(self) -> bool:
        """Whether this rank has left the cluster in order."""
        return self._gang.has_finished

    @property
    def names(self) -> list[str]:
        """Readable names of all ranks, for messages."""
        return self._gang.names

    def tell(self, what: str, *given: Any) -> None:
        """Tell the others to do `what`, with the arguments `given`.

        Raises:
            ClusterError: if a rank is lost.
        """
        if self._leads and self._gang.size > 1 and not self.has_finished:
            self._gang.say(Do(what, msgspec.msgpack.encode(given)))
            self._owed += 1

    def tell_quietly(self, what: str, *given: Any) -> None:
        """As `tell`, without an answer. It is sent with the next message, and an error in it ends the next call."""
        if self._leads and self._gang.size > 1:
            self._gang.say(Do(what, msgspec.msgpack.encode(given), is_quiet=True), at_once=False)

    def hear(self) -> list[Any]:
        """Wait for all answers. Returns those to the last message, in the order of the ranks; none at other ranks.

        Raises:
            ClusterError: if a rank is lost, or if it has raised an error while it did what it was told.
        """
        answers: list[Any] = []
        failed = ""
        while self._owed:
            self._owed -= 1
            done = self._gang.hear_answers()
            for rank, one in enumerate(done, 1):
                failed = failed or (one.error and f"{self._gang.names[rank]} has raised {one.error}")
            answers = [None if one.error else msgspec.msgpack.decode(one.answer) for one in done]
        self._gang.check()  # a rank that has heard of a lost one may have sent an empty answer
        if failed:
            raise ClusterError(failed)
        return answers

    def has_answered(self, over: Future[None]) -> bool:
        """Wait until all ranks have answered, at most until `over` is done. Returns whether they have.

        Raises:
            ClusterError: if a rank is lost.
        """
        return self._gang.wait_for_answers(self._owed, over)

    def interrupted(self) -> Future[None]:
        """At another rank: a future that is done when rank 0 sends a new message, or when a rank is lost."""
        return self._gang.news()

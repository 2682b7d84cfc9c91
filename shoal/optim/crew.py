"""How rank 0 of a cluster has all of its ranks do the same, each with its share of the state."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import msgspec

from shoal.cluster.gang import ClusterError, Gang
from shoal.cluster.messages import Do


class Crew:
    """The other ranks, as rank 0 sees them in a call of all. At those ranks themselves there is nobody to tell.

    Each thing that is told is answered once, in order. Answers may be heard later, so nobody waits for those that have
    nothing to say. Once rank 0 has finished, it tells nobody: the others do of their own accord what all do.

    Args:
        gang: the ties to them.
    """

    def __init__(self, gang: Gang) -> None:
        self._gang, self._leads, self._owed = gang, gang.rank == 0, 0

    @property
    def has_finished(self) -> bool:
        """Whether this rank has left the cluster in order."""
        return self._gang.has_finished

    def tell(self, what: str, *given: Any) -> None:
        """Have the others do that, too. Raises ClusterError."""
        if self._leads and self._gang.size > 1 and not self.has_finished:
            self._gang.say(Do(what, msgspec.msgpack.encode(given)))
            self._owed += 1

    def tell_quietly(self, what: str, *given: Any) -> None:
        """As `tell`, of what has no answer: it goes with the next message, and what goes wrong ends the next call."""
        if self._leads and self._gang.size > 1:
            self._gang.say(Do(what, msgspec.msgpack.encode(given), is_quiet=True), at_once=False)

    def hear(self) -> list[Any]:
        """The answers of the others to what they were told last, in their order; none at other ranks.

        Raises:
            ClusterError: if a rank is lost, or has raised an error in anything that it was told.
        """
        answers: list[Any] = []
        failed = ""
        while self._owed:
            self._owed -= 1
            done = self._gang.hear_answers()
            for rank, one in enumerate(done, 1):
                failed = failed or (one.error and f"{self._gang.names[rank]} has raised {one.error}")
            answers = [None if one.error else msgspec.msgpack.decode(one.answer) for one in done]
        self._gang.check()  # who has heard of a loss may have answered with nothing
        if failed:
            raise ClusterError(failed)
        return answers

    def has_answered(self, over: Future[None]) -> bool:
        """Wait until all have answered, at most until `over` is done; whether they have. Raises ClusterError."""
        return self._gang.wait_for_answers(self._owed, over)

    def interrupted(self) -> Future[None]:
        """At another rank: a future that is done when rank 0 says something new, or a rank is lost."""
        return self._gang.news()

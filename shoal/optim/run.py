"""One peer's part in a run. The trainer's thread calls it, and the reactor does the work."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from shoal.dht.dht import DHT
from shoal.interrupts import Interrupted, finished, held, unbroken
from shoal.optim.faults import Faults
from shoal.optim.turns import result_of
from shoal.p2p.identity import PeerID
from shoal.swarm.directory import DHTDirectory
from shoal.swarm.protocol.contribution import Contribution, Outcome
from shoal.swarm.protocol.errors import AveragingError
from shoal.swarm.protocol.messages import Terms
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.protocol.view import Role
from shoal.swarm.swarm import Place, Swarm

T = TypeVar("T")
log = logging.getLogger(__name__)


class Run:
    """A peer's `Swarm`.

    Args:
        dht: a started DHT.
        run_id: the name of the run.
        terms: the options that must be equal in the run.
        rules: the rules of the run's rounds.
        place: the options that this peer chooses for itself.

    Attributes:
        dht, run_id, rules: as given.
        faults: counts this peer's faults.
        me: this peer's key.
        swarm: what this peer knows of the run. Any thread may read its properties.
    """

    def __init__(self, dht: DHT, run_id: str, terms: Terms, rules: Rules, place: Place) -> None:
        self.dht, self.run_id, self.rules, self.me = dht, run_id, rules, dht.peer_id.key
        self.faults = Faults()
        directory = DHTDirectory(dht.dht_node, run_id)
        self.swarm = Swarm(dht.node, dht.get_visible_maddrs(), directory, run_id, terms, rules, place)
        self._state_changed = asyncio.Event()
        self._under_way: set[Future[Any]] = set()
        self._left = False
        self._starting: asyncio.Task[None] | None = None
        self._has_started = False
        self._averaging: asyncio.Task[Outcome] | None = None
        self._outcome: Outcome | None = None  # of the last round, until it is used

    def start(self) -> None:
        """Meet the other peers of the run. Newcomers may ask for the state as soon as they meet this peer, so it serves
        the state before."""

        async def start() -> None:
            self._starting = asyncio.current_task()
            await self.swarm.start()
            self._has_started = True

        with held():
            try:
                self._wait(start())
            except BaseException:  # Ctrl-C, too: nothing is left of it when this call ends
                with unbroken():
                    self._undo_start()
                raise

    def _undo_start(self) -> None:
        """Wait for the end of a start that was cancelled, and leave the run if it came before that."""

        async def undo() -> None:
            if self._starting is not None:
                self._starting.cancel()
                await asyncio.wait([self._starting])
            if self._has_started:
                self.swarm.stop()

        if self.dht.is_alive():
            finished(self.dht.submit(undo()))

    def stop(self, timeout: float | None) -> bool:
        """Leave the run, if the DHT is still alive. Calls of other threads that wait here fail.

        Returns:
            Whether this peer has left within `timeout` seconds.
        """
        self._left = True
        for future in list(self._under_way):
            future.cancel()

        async def stop() -> None:
            self.swarm.stop()

        if not self.dht.is_alive():
            return True
        future = self.dht.reactor.submit(stop())
        return finished(future, timeout) and not future.cancelled() and future.result() is None

    # -- in any thread

    @property
    def is_over(self) -> bool:
        """Whether this peer has left the run, or its DHT was shut down."""
        return self._left or not self.dht.is_alive()

    # -- on the reactor

    async def state_changed(self) -> None:
        """Return when `tell_state_changed` is called."""
        self._state_changed.clear()
        await self._state_changed.wait()

    # -- in the trainer's thread

    def average(self, contribution: Contribution, timeout: float) -> Outcome:
        """See `Swarm.average`. If a signal handler ends the wait, `unused_outcome` has the outcome of a round that was
        over by then."""

        async def average() -> Outcome:
            self._averaging = asyncio.current_task()
            try:
                self._outcome = await self.swarm.average(contribution, timeout)
            except asyncio.CancelledError:
                found = self.swarm.peer.participant.given.finished
                if found is None or found.begin.tip != contribution.tip:
                    raise
                self._outcome = found
            return self._outcome

        async def end() -> None:
            if self._averaging is not None:
                await asyncio.wait([self._averaging])

        try:
            outcome = self._wait(average())
        except Interrupted:
            with unbroken():  # the round reads and writes the memory of the gradients until it is left
                self._wait(end())
            raise
        self._outcome = None
        return outcome

    def unused_outcome(self, tip: Tip) -> Outcome | None:
        """The outcome of the round from this tip, if nobody has waited for its end; else None."""
        outcome, self._outcome = self._outcome, None
        return outcome if outcome is not None and outcome.begin.tip == tip else None

    def wait_for_contributors(self, count: int, timeout: float) -> int:
        """Wait at most `timeout` seconds until `count` peers that contribute are connected, this peer included.

        Returns:
            The number of such peers.

        Raises:
            Rejected: if this peer is a newcomer, and the run has other terms.
        """

        def found() -> int:
            return sum(member.contributes for member in self.swarm.peer.view.connected())

        async def wait() -> int:
            if found() < count and not self.swarm.made:
                await self.swarm.contacts.check_terms()  # peers with other terms are never found
            await until(lambda: found() >= count, self.swarm.contacts.seen, timeout)
            return found()

        return self._wait(wait())

    def wait_for_call(self, timeout: float) -> bool:
        """Wait at most `timeout` seconds until the round of the swarm's tip is called. Returns whether it was."""

        self._wait(until(lambda: self.swarm.called, self.swarm.news, timeout))
        return self.swarm.called

    def wait_for_round(self, tip: Tip, timeout: float) -> None:
        """Wait at most `timeout` seconds until the round of this tip is called or over, or until another state outranks
        the tip."""
        swarm = self.swarm

        def is_over() -> bool:
            return swarm.called or swarm.tip != tip or swarm.behind is not None

        self._wait(until(is_over, swarm.news, timeout))

    def wait_for_pin(self, number: int, timeout: float) -> None:
        """Wait at most `timeout` seconds until a connected member holds a state with that pin."""
        self._wait(until(lambda: self.swarm.behind_pin >= number, self.swarm.news, timeout))

    def donors(self) -> list[PeerID]:
        """The connected peers that may have the state."""
        members = self.call(self.swarm.peer.view.connected)
        return [m.peer for m in members if m.key != self.me and m.role is not Role.AUXILIARY]

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """A context in which this peer loads the run's state: the members hear how long that takes, and may wait."""
        self.call(self.swarm.begin_loading)
        try:
            yield
        finally:
            with contextlib.suppress(AveragingError):  # the run was left meanwhile
                self.call(self.swarm.end_loading)

    def relayed(self) -> list[PeerID]:
        """The members that this peer reaches by relays only. Runs on the reactor."""
        return [member.peer for member in self.swarm.peer.view.members.values() if member.is_relayed]

    def download(self, donors: Sequence[PeerID], download: Callable[[], Coroutine[Any, Any, T]], *, to_join: bool) -> T:
        """Wait for a download, see `Donors.download`.

        Args:
            donors: the peers that are asked.
            download: begins it; called on the reactor.
            to_join: give up if the state comes too late to take part in the run's rounds.

        Raises:
            DoesNotFit: if it has given up.
        """

        async def wait() -> T:
            loading = self.swarm.loading
            with self.swarm.watching(donor.key for donor in donors):
                return await (download() if loading is None or not to_join else loading.unless_refused(download()))

        return self._wait(wait())

    def begin_replay(self) -> None:
        """Within `loading`: this peer is about to replay rounds, and the members hear how long that takes."""
        donors, loading = self.donors(), self.swarm.loading
        assert loading is not None
        self.call(lambda: loading.replay(donors))

    def learn_of_round(self) -> bool:
        """See `Swarm.learn_of_round`."""
        return self._wait(self.swarm.learn_of_round())

    def follow(self, tip: Tip, after: Tip | None = None) -> bool:
        """Tell the swarm that this peer's state is `tip` now.

        Args:
            after: the tip from which this peer has made `tip` alone. Then the swarm follows only if it is still at
                `after`.

        Returns:
            Whether the swarm followed.
        """

        self._outcome = None

        def follow() -> bool:
            if after is not None and (self.swarm.tip != after or self.swarm.missed):
                return False
            if self.swarm.tip != tip:
                self.swarm.move(tip, made=after is not None)
            return True

        return self.call(follow)

    def ask_where_they_are(self, peers: Iterable[PeerID]) -> None:
        """Ask these peers for the tips of their present states."""

        async def ask() -> None:
            await asyncio.gather(*map(self.swarm.contacts.meet_peer, peers))

        self._wait(ask())

    def wait_for_those_behind(self, idle: float, longest: float, served_at: Callable[[], float]) -> None:
        """Wait for the peers that are behind, see `Swarm.wait_for_those_behind`. Meanwhile they may download this
        peer's state, and `served_at` returns when somebody last did."""
        behind = self._wait(self.swarm.wait_for_those_behind(idle, longest, served_at))
        if behind:
            log.warning(
                "left the run although others are behind its last epoch and did not catch up within %g s: %s. They end "
                "it with a state of their own; give a longer averaging_timeout than their longest step takes",
                idle, ", ".join(str(member.peer) for member in behind),
            )  # fmt: skip

    def tell_state_changed(self) -> None:
        """Note that this peer's state has another tip than before. Any thread may call this."""
        self.dht.reactor.loop.call_soon_threadsafe(self._state_changed.set)

    def past(self, tip: Tip) -> Future[None]:
        """A future that is done when the swarm is no longer at this tip. Cancel it when it is no longer needed."""
        return self._submit(until(lambda: self.swarm.tip != tip, self.swarm.news, None))

    def call(self, function: Callable[[], T]) -> T:
        """Call a function on the reactor, and return its result."""

        async def call() -> T:
            return function()

        with unbroken():  # it takes no time, and callers rely on what it did
            return self._wait(call())

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = self._submit(coroutine)
        self._under_way.add(future)
        if self._left:  # `stop` may have looked through `_under_way` before this future was in it
            future.cancel()
        try:
            return result_of(future)
        except CancelledError:
            raise AveragingError(f"{'the run was left' if self._left else 'the DHT was shut down'} meanwhile") from None
        finally:
            self._under_way.discard(future)

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start the coroutine on the reactor.

        Raises:
            AveragingError: if this peer has left the run, or if the DHT was shut down.
        """
        try:
            if not self.is_over:
                return self.dht.submit(coroutine)
        except RuntimeError as error:
            if self.dht.is_alive():
                raise  # this process was forked from the DHT's
            log.debug("%s", error)  # the DHT was shut down since `is_over` looked
        coroutine.close()
        raise AveragingError("the run was left" if self._left else "the DHT was shut down")


async def until(is_so: Callable[[], bool], news: Callable[[], Awaitable[None]], timeout: float | None) -> None:
    """Wait at most `timeout` seconds until `is_so()` is true. It is asked at first and after each `news()`."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            while not is_so():
                await news()

"""One peer's part in a run, for the trainer's thread: what is asked here is done on the reactor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, TypeVar

from shoal.averaging.exchange import compute_serially
from shoal.dht.dht import DHT
from shoal.p2p.identity import PeerID
from shoal.swarm.directory import DHTDirectory
from shoal.swarm.protocol.contribution import Contribution, Outcome
from shoal.swarm.protocol.errors import AveragingError
from shoal.swarm.protocol.member import MAX_ADDRESSES, Member, Role
from shoal.swarm.protocol.messages import Terms
from shoal.swarm.protocol.reach import Reachability
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.tensors import Tensors
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.swarm import JOIN_TIMEOUT, Swarm
from shoal.transfer.donor import EncodedState, StateDonor
from shoal.transfer.transfer import Downloaded, download_state

T = TypeVar("T")
log = logging.getLogger(__name__)


class Run:
    """A peer's `Swarm` and `StateDonor`.

    Args:
        dht: this peer's place in the DHT, started.
        run_id: names the run.
        terms: what must be equal in the run.
        rules: when a round begins.
        role: what this peer does in rounds; a client declares no addresses, even if the DHT has some.
        bandwidth: of `Member`.
        chunk_timeout: seconds of silence after which a member that holds up a round is left out; None for the default.
        sender_timeout, reducer_timeout: of `Swarm`; None for the default.
        request_timeout: seconds that the coordinator may take to answer; None for the default.
        shares_state: whether newcomers get this peer's state.
        tensors: of `Swarm`.
    """

    def __init__(
        self,
        dht: DHT,
        run_id: str,
        terms: Terms,
        rules: Rules,
        *,
        role: Role,
        bandwidth: float | None = None,
        chunk_timeout: float | None,
        sender_timeout: float | None = None,
        reducer_timeout: float | None = None,
        request_timeout: float | None = None,
        shares_state: bool = True,
        tensors: Sequence[Tensors] = (),
    ) -> None:
        visible = () if role is Role.CLIENT else dht.get_visible_maddrs()
        addresses = tuple(str(address) for address in visible)[:MAX_ADDRESSES]
        me = Member(dht.peer_id.key, addresses, role, bandwidth)
        directory = DHTDirectory(dht.dht_node, run_id)
        self.dht = dht
        self.swarm = Swarm(
            dht.node,
            directory,
            run_id,
            me,
            terms,
            rules,
            chunk_timeout=chunk_timeout,
            sender_timeout=sender_timeout,
            reducer_timeout=reducer_timeout,
            request_timeout=JOIN_TIMEOUT if request_timeout is None else request_timeout,
            keeps_state=role is not Role.AUXILIARY,
            tensors=tensors,
        )
        self._state_service, self._shares_state = f"state/{run_id}", shares_state
        self._random = random.Random(me.key)
        self._state_changed = asyncio.Event()
        self._under_way: set[Future[Any]] = set()
        self._left = False

    def start(
        self,
        take_snapshot: Callable[[], Awaitable[EncodedState]],
        current_tip: Callable[[], Tip],
        priority: Callable[[], float],
    ) -> None:
        """Meet the other peers of the run, and serve the state.

        Args:
            take_snapshot: copies this peer's state for a newcomer; on the reactor.
            current_tip: of the state that this peer holds.
            priority: of that state among those that newcomers are offered.
        """

        async def start() -> StateDonor:
            compute_serially()
            try:
                await self.swarm.start()
            except BaseException:  # cancelled, too: who did not start must not stay listed
                self.swarm.stop()
                raise
            return StateDonor(
                self.dht.node, self._state_service, take_snapshot, current_tip, self._shares_state, priority
            )

        self._donor = self._wait(start())

    @property
    def me(self) -> bytes:
        """This peer's key."""
        return self.dht.peer_id.key

    @property
    def tip(self) -> Tip:
        """The state that the swarm, as far as this peer follows it, is at."""
        return self.swarm.tip

    def average(self, contribution: Contribution, timeout: float) -> Outcome:
        """See `Swarm.average`."""
        return self._wait(self.swarm.average(contribution, timeout))

    @property
    def made(self) -> bool:
        """Whether this peer has ended an epoch since its start: then it is no newcomer any more."""
        return self.swarm.made

    @property
    def got_on_at(self) -> float:
        """When a round was last seen to get on, in seconds of `time.monotonic`."""
        return self.swarm.got_on_at

    def wait_for_contributors(self, count: int, timeout: float) -> int:
        """Wait until so many peers that contribute are connected, this one included, at most `timeout` seconds; returns
        how many there are."""

        async def waited() -> int:
            swarm, found = self.swarm, 0
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    while (found := sum(member.contributes for member in swarm.peer.view.connected())) < count:
                        await swarm.contacts.seen()
            return found

        return self._wait(waited())

    def reachability(self) -> Iterator[Reachability]:
        """What has changed in whom this peer reaches, since that was last asked."""
        reports = self.swarm.contacts.reports
        while reports:
            yield reports.popleft()

    def donors(self) -> list[PeerID]:
        """Who could be asked for the state now."""

        async def connected() -> list[PeerID]:
            members = self.swarm.peer.view.connected()
            return [m.peer for m in members if m.key != self.me and m.role is not Role.AUXILIARY]

        return self._wait(connected())

    def download(
        self,
        donors: Sequence[PeerID],
        timeout: float,
        max_nbytes: int,
        wanted: Callable[[Tip], bool],
        awaited: bool = False,
    ) -> Downloaded:
        """See `download_state`. If this peer wants to be `awaited`, it takes a state that no round has followed on yet:
        that round begins only when this peer is there, or `matchmaking_time` after the call."""

        async def download() -> Downloaded:
            with self.swarm.watching(donor.key for donor in donors):
                return await download_state(
                    self.dht.node,
                    self._state_service,
                    donors,
                    timeout=timeout,
                    rng=self._random,
                    max_nbytes=max_nbytes,
                    wanted=wanted,
                    reserve=self.swarm.be_awaited if awaited else None,
                )

        return self._wait(download())

    def follow(self, tip: Tip, after: Tip | None = None) -> bool:
        """This peer's state is `tip` now. With `after`, it has made that alone, and goes there only if the swarm has
        not gone on from there: returns whether it did so."""

        async def follow() -> bool:
            if after is not None and (self.swarm.tip != after or self.swarm.missed):
                return False
            if self.swarm.tip != tip:
                self.swarm.move(tip, made=after is not None)
            return True

        return self._wait(follow())

    def ask_where_they_are(self, peers: Iterable[PeerID]) -> None:
        """Hear at which states these are now."""

        async def ask() -> None:
            await asyncio.gather(*map(self.swarm.contacts.meet_peer, peers))

        self._wait(ask())

    def tell_state_changed(self) -> None:
        """This peer's state is at another tip than it was; in any thread."""
        self.dht.reactor.loop.call_soon_threadsafe(self._state_changed.set)

    async def state_changed(self) -> None:
        """Return when that is told; on the reactor."""
        self._state_changed.clear()
        await self._state_changed.wait()

    def past(self, tip: Tip) -> Future[None]:
        """Done when the swarm is at another state than this one; to be cancelled by who needs it no more."""

        async def past() -> None:
            while self.swarm.tip == tip:
                await self.swarm.news()

        return self._submit(past())

    def wait_for_call(self, timeout: float) -> bool:
        """Wait until the round of the swarm's tip is called; whether it was within `timeout` seconds."""

        async def waited() -> bool:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout):
                    while not self.swarm.called:
                        await self.swarm.news()
            return self.swarm.called

        return self._wait(waited())

    def catch_up(self) -> Tip:
        """See `Swarm.catch_up`."""

        async def catch_up() -> Tip:
            return self.swarm.catch_up()

        return self._wait(catch_up())

    def forget_behind(self) -> None:
        """Nobody could bring the better state that was heard of: go on without it for a while."""

        async def forget() -> None:
            self.swarm.forget_behind()

        self._wait(forget())

    def stop(self, timeout: float) -> None:
        """Leave the run, if the DHT is still there; what other threads wait for here fails."""
        self._left = True
        for future in list(self._under_way):
            future.cancel()

        async def stop() -> None:
            self.swarm.stop()
            self._donor.close()

        if self.dht.is_alive():
            try:
                self.dht.reactor.submit(stop()).result(timeout)
            except (TimeoutError, CancelledError):
                log.warning("leaving the run took longer than %g s", timeout)

    def _wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        future = self._submit(coroutine)
        self._under_way.add(future)
        if self._left:  # since `stop` looked what is under way
            future.cancel()
        try:
            return future.result()
        except CancelledError:
            raise AveragingError(f"{'the run was left' if self._left else 'the DHT was shut down'} meanwhile") from None
        except BaseException:  # Ctrl-C too: nobody waits for it any more
            future.cancel()
            raise
        finally:
            self._under_way.discard(future)

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Begin it on the reactor. Raises AveragingError if there is no run any more."""
        try:
            if not self._left and self.dht.is_alive():
                return self.dht.submit(coroutine)
        except RuntimeError as error:
            if self.dht.is_alive():
                raise  # this is no process of the DHT's: it was forked
            log.debug("%s", error)  # since it was looked at
        coroutine.close()
        raise AveragingError("the run was left" if self._left else "the DHT was shut down")

"""How far the peers of a run have come in the current epoch, as the trainer's thread asks and tells it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec

from shoal.dht.records import get_dht_time
from shoal.optim.performance import PerformanceEMA, StepTime
from shoal.optim.refresh import Refresh
from shoal.p2p.errors import P2PError
from shoal.p2p.identity import PeerID
from shoal.p2p.reactor import Reactor
from shoal.swarm.protocol.errors import AveragingError
from shoal.swarm.protocol.member import Role
from shoal.swarm.protocol.messages import Count, Progress
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.swarm import Swarm

log = logging.getLogger(__name__)

SHORTEST_WAIT = 0.02  # seconds until a peer that was told to wait asks again, at least
TOGETHER = 0.005  # seconds for which reports that can't matter yet are kept, to be told together;
SOON = 4 * TOGETHER  # not if the target will be reached within these: the others have to know then
STEPS_OF_WAITING = 3  # of its own that a peer waits in one epoch's end at most, or `matchmaking_time`


@dataclass(frozen=True, slots=True)
class LocalProgress:
    """This peer's part of the epoch.

    Attributes:
        peer_id: of this peer.
        epoch: the number of the epoch.
        samples_accumulated: since it began.
        samples_per_second: a moving average.
        client_mode: whether it can't be dialled.
    """

    peer_id: PeerID
    epoch: int
    samples_accumulated: float
    samples_per_second: float
    client_mode: bool


@dataclass(frozen=True, slots=True)
class GlobalProgress:
    """What all peers have, as the coordinator last told it.

    Attributes:
        epoch: the number of the epoch.
        samples_accumulated: by all peers.
        target_batch_size: at which the epoch ends.
        num_peers: that have reported in this epoch.
        num_clients: members of the run that can't be dialled, and that this peer trains with, directly or through
            others; itself if it is one.
        eta_next_epoch: when the target will be reached, in seconds of `get_dht_time()`; an estimate.
    """

    epoch: int
    samples_accumulated: float
    target_batch_size: int
    num_peers: int
    num_clients: int
    eta_next_epoch: float


class RunProgress:
    """Reports this peer's samples to the run's coordinator, and learns from it what all peers have.

    Reporting costs the trainer nothing until the answer can matter: only when the target may be reached in this peer's
    next step, by what the coordinator last said and the rate at which the others go, is its answer waited for. If then
    the others need no more of this peer's samples, it waits for the end of the epoch rather than beginning a step
    whose samples would come too late (`shoal.swarm.protocol.pace`). The epoch itself ends on samples that were
    reported, never on an estimate.

    Args:
        swarm: the run.
        reactor: on which it lives.
        target_batch_size: samples of all peers after which the epoch ends.
        performance_ema_alpha: see `PerformanceEMA`.
        refresh: how often it asks what others have when there is nothing to report.
        may_wait: whether this peer may be told to wait. Not where the trainer goes on during a round.
    """

    def __init__(
        self,
        swarm: Swarm,
        reactor: Reactor,
        target_batch_size: int,
        *,
        performance_ema_alpha: float = 0.1,
        refresh: Refresh | None = None,
        may_wait: bool = True,
    ) -> None:
        self.target_batch_size = target_batch_size
        self.performance_ema = PerformanceEMA(performance_ema_alpha)
        self._swarm, self._reactor, self._may_wait = swarm, reactor, may_wait
        self._refresh = refresh or Refresh()
        self._tip = swarm.tip  # of the state on which samples are accumulated
        self._samples = 0.0
        self._step = StepTime()
        self._since: float | None = None  # when the step that is under way began; not known before the first report
        self._pending: Future[Count | None] | Future[None] | None = None
        self._due: Progress | None = None  # to be told a moment later, by
        self._is_due = (
            False  # what was submitted: written before `_due` is read there, and read after it is written here
        )
        # The rest belongs to the reactor's thread.
        self._count: tuple[Count, float, Progress] | None = None  # with when it came, and what it answers
        self._latest: Progress | None = None
        self._sending: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._running = False

    @property
    def local_progress(self) -> LocalProgress:
        """This peer's part of the epoch."""
        me, speed = self._swarm.me, self.performance_ema.samples_per_second
        return LocalProgress(me.peer, self._tip.epoch, self._samples, speed, me.role is Role.CLIENT)

    @property
    def global_progress(self) -> GlobalProgress:
        """What all peers have, as the coordinator last told it."""
        samples, _, peers = self._estimate(0.0)  # counted ones only
        clients = self._swarm.peer.view.num_clients()
        eta = self.estimated_next_update_time
        return GlobalProgress(self.global_epoch, samples, self.target_batch_size, peers, clients, eta)

    @property
    def global_epoch(self) -> int:
        """The number of the newest epoch that this peer has heard of."""
        behind = self._swarm.behind
        return max(self._swarm.tip.epoch, behind.epoch if behind is not None else 0)

    @property
    def ready_to_update_epoch(self) -> bool:
        """Whether the round of this epoch is due, or was held without this peer."""
        return self._swarm.called or self._swarm.tip != self._tip

    @property
    def estimated_next_update_time(self) -> float:
        """When the target will be reached, in seconds of `get_dht_time()`, if all go on at their rate; infinity while
        no rate is known."""
        samples, rate, _ = self._estimate(time.monotonic())
        missing = self.target_batch_size - samples
        if missing <= 0 or self.ready_to_update_epoch:
            return get_dht_time()
        return get_dht_time() + missing / rate if rate > 0 else float("inf")

    def report_local_progress(self, samples: float, at_once: bool = False) -> None:
        """This peer has accumulated `samples` in this epoch; updates `ready_to_update_epoch`. Returns when it makes
        sense to begin another step, or to end the epoch; or `at_once`, whatever the answer.

        Raises Behind if the run is at a state that outranks this peer's, Rejected if it goes by other terms.
        """
        now, added = time.monotonic(), samples - self._samples
        self._samples = samples
        if added > 0 and self._since is not None:
            self.performance_ema.update(added, now - self._since)
            self._step.update(added, now - self._since)
        try:
            if not self.ready_to_update_epoch:
                self._tell(now, another=added > 0, at_once=at_once)
        finally:
            self.restart_clock()

    def start_epoch(self, tip: Tip) -> None:
        """A new epoch begins, with no samples, from the state `tip`; the coordinator hears that a step is begun."""
        self._tip, self._samples = tip, 0.0
        self._count = self._pending = self._due = None
        if self._step.samples:
            self._pending = self._reactor.submit(self._report(self._progress(another=True)))

    def restart_clock(self) -> None:
        """What passed until now belongs to no step: a download."""
        self._since = time.monotonic()
        self.performance_ema.reset_timer()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """What passes within belongs to no step: a round that the trainer waits for."""
        began = time.monotonic()
        try:
            yield
        finally:
            if self._since is not None:
                self._since += time.monotonic() - began

    def start(self) -> None:
        """From now on, ask what others have when there is nothing to tell."""
        self._running = True
        self._reactor.loop.call_soon_threadsafe(self._look_later)

    def stop(self) -> None:
        """Ask no more, and tell no more."""
        self._running, self._due = False, None
        self._reactor.loop.call_soon_threadsafe(self._look_later)

    def is_alive(self) -> bool:
        """Whether it asks, that is between `start` and `stop`."""
        return self._running

    # -- in the trainer's thread

    def _tell(self, now: float, another: bool, at_once: bool) -> None:
        self._due = None  # what is told now has it in it
        pending = self._pending
        if pending is not None and pending.done():
            self._pending = None
            _take(pending)
        report = self._progress(another)
        if at_once:
            self._pending = self._reactor.submit(self._report(report))
        elif another and self._may_wait and self._may_be_reached(now, report.seconds):
            _take(self._reactor.submit(self._ask(report)))
        elif self._may_be_reached(now, 0.0):
            _take(self._reactor.submit(self._report(report)))
        elif self._is_near(now):
            self._pending = self._reactor.submit(self._report(report))
        else:
            self._due = report
            if not self._is_due:
                self._is_due = True
                self._pending = self._reactor.submit(self._report_later())

    def _progress(self, another: bool) -> Progress:
        """What there is to report; `another` step follows, as far as is known."""
        step, seconds = (self._step.samples, self._step.seconds) if another else (0.0, 0.0)
        return Progress(self._tip, self._samples, self.performance_ema.samples_per_second, step, seconds)

    def _may_be_reached(self, now: float, seconds: float) -> bool:
        """Whether the target may be reached within so many seconds from now, by what is known here."""
        counted = self._count
        if counted is None or counted[0].tip != self._tip:
            return True
        samples, rate, _ = self._estimate(now)
        others = max(0.0, rate - self.performance_ema.samples_per_second)
        soon = others * seconds + counted[0].under_way if seconds else 0.0
        return samples + soon >= self.target_batch_size

    def _is_near(self, now: float) -> bool:
        """Whether the target will be reached soon."""
        samples, rate, _ = self._estimate(now)
        return samples + rate * SOON >= self.target_batch_size

    def _estimate(self, now: float) -> tuple[float, float, int]:
        """The samples of all peers at `now` (of `time.monotonic`), counted ones and what the others will have made
        since; their rate; and how many peers they are. This peer is one if it trains, also before it is counted in a
        new epoch."""
        counted, tip, me = self._count, self._swarm.tip, 1 if self._samples or self._step.samples else 0
        mine, speed = (self._samples, self.performance_ema.samples_per_second) if tip == self._tip else (0.0, 0.0)
        if counted is None or counted[0].tip != tip:
            return mine, speed, me
        count, counted_at, answered = counted
        others = max(0.0, count.rate - answered.rate)
        made_since = others * max(0.0, now - counted_at)
        return count.samples - answered.samples + mine + made_since, others + speed, max(count.peers, me)

    # -- on the reactor

    async def _ask(self, report: Progress) -> None:
        """Report, and wait as long as the coordinator counts on others, until the round is called or this peer hears of
        a better state."""
        now = time.monotonic()
        until = now + max(STEPS_OF_WAITING * report.seconds, self._swarm.rules.matchmaking_time)
        while True:
            count = await self._report(msgspec.structs.replace(report, asks=True))
            if count is None or not count.wait or self._swarm.behind is not None or self.ready_to_update_epoch:
                return
            if time.monotonic() >= until:
                await self._report(report)
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(SHORTEST_WAIT, min(count.wait, report.seconds))):
                    await self._swarm.news()

    async def _report_later(self) -> None:
        """Report what can't matter yet: of short steps several at once, and while the trainer is in its next pass and
        needs no GIL rather than when its step ends."""
        await asyncio.sleep(TOGETHER)
        self._is_due = False
        due = self._due  # read once: the trainer's thread may set it to None meanwhile
        if due is not None:
            await self._report(due)

    async def _report(self, report: Progress) -> Count | None:
        """Have the coordinator know this; its answer, or None if the epoch is over. Raises as `Swarm.report`."""
        self._latest = report
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        await asyncio.shield(self._sending)
        return self._count[0] if self._count is not None and self._count[0].tip == report.tip else None

    async def _send(self) -> None:
        """Never more than one report is under way; the next one says what has come together meanwhile."""
        sent = None
        try:
            while sent != self._latest:
                sent = self._latest
                assert sent is not None
                if self._swarm.tip != sent.tip:
                    return  # the epoch is over; the trainer's thread will see it
                count = await self._answer(sent)
                if count is not None and count.tip == sent.tip:
                    self._count = (count, time.monotonic(), sent)
                    self._look_later()
        finally:
            self._sending = None

    async def _answer(self, report: Progress) -> Count | None:
        """The coordinator's; None if there is other news first: one that hangs would keep the trainer from the round
        that another has called."""
        asking, news = asyncio.ensure_future(self._swarm.report(report)), asyncio.ensure_future(self._swarm.news())
        try:
            await asyncio.wait({asking, news}, return_when=asyncio.FIRST_COMPLETED)
            return asking.result() if asking.done() else None
        finally:
            asking.cancel()
            news.cancel()

    def _look_later(self) -> None:
        """Ask what all have, if nothing is reported for a while."""
        if self._timer is not None:
            self._timer.cancel()
        if self._running:
            eta = max(0.0, self.estimated_next_update_time - get_dht_time())
            peers = 0 if self._count is None else self._count[0].peers
            self._timer = self._reactor.loop.call_later(self._refresh.seconds(eta, peers), self._look)

    def _look(self) -> None:
        self._looking = asyncio.create_task(self._look_now())

    async def _look_now(self) -> None:
        tip, latest = self._swarm.tip, self._latest
        if latest is None or latest.tip != tip:
            question = Progress(tip, 0.0, 0.0, counted=False)
        else:
            question = msgspec.structs.replace(latest, asks=False)
        try:
            if self._sending is None:
                await self._report(question)
                log.log(self._refresh.status_loglevel, "%s", self.global_progress)
        except (P2PError, AveragingError, TimeoutError) as error:
            log.debug("could not ask for progress: %s", error)
        finally:
            self._look_later()


def _take(report: Future[Count | None] | Future[None]) -> None:
    """Wait for a report to arrive; that it did not is no error of the trainer's."""
    try:
        report.result()
    except (P2PError, TimeoutError) as error:
        # The coordinator is gone or out of reach; the swarm reports again to its successor by itself.
        log.debug("could not report progress: %s", error)


__all__ = ["GlobalProgress", "LocalProgress", "RunProgress"]

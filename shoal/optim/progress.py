"""The progress of the peers of a run in the current epoch: the trainer's thread reports this peer's, and asks for
that of all."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from shoal.dht.records import get_dht_time
from shoal.optim.run import Run
from shoal.optim.settings import FRACTION, LEVEL, NOT_NEGATIVE, POSITIVE, SECONDS, check_fields, whole
from shoal.optim.turns import is_called_away, wait_for
from shoal.optim.without_effect import WITHOUT_EFFECT
from shoal.p2p.errors import P2PError
from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.errors import AveragingError, Rejected
from shoal.swarm.protocol.messages import Count, Progress
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.protocol.view import Role
from shoal.swarm.swarm import Swarm

log = logging.getLogger(__name__)

SHORTEST_WAIT = 0.02  # the shortest time in seconds until a peer that was told to wait asks again
TOGETHER = 0.005  # seconds for which reports that can't matter yet are kept back, to be sent as one
SOON = 4 * TOGETHER  # no report is kept back if the target will be reached within so many seconds
STEPS_OF_WAITING = 3  # at the end of an epoch, a peer waits for at most so many of its steps, or `matchmaking_time`
RECENT = 5  # the median of so many steps predicts the next one: the first steps of a run are slower than later ones


@dataclass(frozen=True, slots=True)
class LocalProgress:
    """The progress of this peer in the current epoch.

    Attributes:
        peer_id: this peer.
        epoch: the number of the epoch.
        samples_accumulated: the samples since the epoch began, rounded down to a whole number; with
            `DiLoCo(inner_steps=…)`, the inner steps.
        samples_per_second: a moving average of this peer's speed.
        client_mode: whether this peer does not listen for connections.
    """

    peer_id: PeerID
    epoch: int
    samples_accumulated: int
    samples_per_second: float
    client_mode: bool


@dataclass(frozen=True, slots=True)
class GlobalProgress:
    """The progress of all peers, as last reported by the coordinator.

    Attributes:
        epoch: the number of the epoch.
        samples_accumulated: the samples of all peers in this epoch, rounded down to a whole number; with
            `DiLoCo(inner_steps=…)`, the inner steps.
        target_batch_size: the number of samples (or inner steps) at which the epoch ends, rounded down, too.
        num_peers: the number of peers that have reported in this epoch.
        num_clients: the number of members in client mode with which this peer trains, directly or through others. It
            includes this peer, if it is in client mode.
        eta_next_epoch: an estimate of the time at which the epoch ends, in seconds of `get_dht_time()`; infinity if it
            is unknown.
    """

    epoch: int
    samples_accumulated: int
    target_batch_size: int
    num_peers: int
    num_clients: int
    eta_next_epoch: float


class PerformanceEMA:
    """Measures samples per second, as an exponential moving average of the seconds per sample.

    The average starts at 0 and is corrected for that as in Adam (Kingma and Ba 2014, arXiv 1412.6980, section 3).

    Args:
        alpha: the weight of the newest interval, over 0 and at most 1.
        eps: the smallest number of seconds per sample, over 0.
        paused: begin with a paused clock, see `pause`.

    Attributes:
        alpha: as given.
        eps: as given.
        paused: whether the clock is paused.
        ema_seconds_per_sample: the average before the correction.
        num_updates: the number of intervals in the average.

    Raises:
        ValueError: for an `alpha` or `eps` out of range.
    """

    def __init__(self, alpha: float = 0.1, eps: float = 1e-20, paused: bool = False) -> None:
        self.alpha: float = FRACTION.check("alpha", alpha)
        self.eps: float = POSITIVE.check("eps", eps)
        self.paused = paused
        self.ema_seconds_per_sample, self.num_updates = 0.0, 0
        self._since = time.monotonic()
        self._lock = threading.Lock()

    @property
    def samples_per_second(self) -> float:
        """The average speed; 0 before the first sample."""
        if not self.num_updates:
            return 0.0
        return 1 / max(self.ema_seconds_per_sample / (1 - (1 - self.alpha) ** self.num_updates), self.eps)

    def update(self, task_size: float, interval: float | None = None) -> float:
        """Count samples and the time that they took.

        Args:
            task_size: the number of samples, over 0.
            interval: the time in seconds. None: the time since the last call of this method or of `reset_timer`.

        Returns:
            The average number of samples per second.

        Raises:
            ValueError: if there are no samples, or if the clock is paused and no interval is given.
        """
        if not task_size > 0:
            raise ValueError(f"task_size={task_size!r}: give a number of samples over 0")
        if interval is None:
            if self.paused:
                raise ValueError("the clock is paused: give the interval, in seconds")
            interval = time.monotonic() - self._since
        self.reset_timer()
        self.ema_seconds_per_sample += self.alpha * (max(interval, 1e-9) / task_size - self.ema_seconds_per_sample)
        self.num_updates += 1
        return self.samples_per_second

    def reset_timer(self) -> None:
        """Do not count the time until now, for example that of a round or a download."""
        self._since = time.monotonic()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Do not count the time within this context."""
        self.paused, before = True, self.paused
        try:
            yield
        finally:
            self.paused = before
            self.reset_timer()

    @contextlib.contextmanager
    def update_threadsafe(self, task_size: float) -> Iterator[None]:
        """Count samples that are processed within this context. Several threads may do so at once: an interval begins
        where the last one ended, so two threads at work count as twice the speed.

        Args:
            task_size: the number of samples, over 0.

        Raises:
            ValueError: if there are no samples.
        """
        started = time.monotonic()
        yield
        with self._lock:
            self.update(task_size, time.monotonic() - max(started, self._since))

    def __repr__(self) -> str:
        return f"PerformanceEMA({self.samples_per_second:.5g} samples/s, {self.num_updates} updates)"


class StepTime:
    """Predicts how long the next step takes: the median of the last few, which a single slow step does not move."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)  # seconds per sample
        self.samples = 0.0  # the samples of the last step

    def update(self, samples: float, seconds: float) -> None:
        """Count a step of `samples` samples that took `seconds` seconds."""
        self.samples = samples
        self._recent.append(seconds / samples)

    @property
    def seconds(self) -> float:
        """The predicted time of another step like the last one; 0 before the first."""
        if not self._recent:
            return 0.0
        recent = sorted(self._recent)  # `statistics.median` would take 1 µs of each step
        return (recent[(len(recent) - 1) // 2] + recent[len(recent) // 2]) / 2 * self.samples


@dataclass(frozen=True, slots=True)
class Refresh:
    """How often a peer that has nothing to report asks for the progress of all peers.

    While it knows of no peers, it asks every `default_refresh_period`. Otherwise it asks before the epoch is expected
    to end, because new peers may end it earlier. The wait is eta * peers / expected: `eta` seconds are left of the
    epoch, `peers` take part now, and `expected` may take part by then. It is at least `min_refresh_period` and at most
    `max_refresh_period`.

    Attributes:
        min_refresh_period: the shortest wait in seconds, over 0 and at most a day.
        max_refresh_period: the longest wait in seconds, over 0 and at most a day.
        default_refresh_period: the wait in seconds while this peer knows of no peers, over 0 and at most a day.
        expected_drift_peers: how many peers may come in an epoch, as a number.
        expected_drift_rate: the same as a fraction of the present peers. The larger of the two counts.
        status_loglevel: the level of the log lines with the progress.

    Raises:
        ValueError: for values that make no sense.
    """

    min_refresh_period: Annotated[float, SECONDS] = 0.5
    max_refresh_period: Annotated[float, SECONDS] = 10.0
    default_refresh_period: Annotated[float, SECONDS] = 3.0
    expected_drift_peers: Annotated[float, NOT_NEGATIVE] = 3.0
    expected_drift_rate: Annotated[float, NOT_NEGATIVE] = 0.2
    status_loglevel: Annotated[int, LEVEL] = logging.DEBUG

    def __post_init__(self) -> None:
        check_fields(self)
        least, most = self.min_refresh_period, self.max_refresh_period
        if least > most:
            raise ValueError(f"min_refresh_period={least:g} is more than max_refresh_period={most:g}")

    def seconds(self, eta: float, peers: int) -> float:
        """Seconds until the next question, if the epoch ends in `eta` seconds."""
        if peers == 0:
            return self.default_refresh_period
        expected = max(peers + self.expected_drift_peers, peers * (1 + self.expected_drift_rate))
        return min(max(eta * peers / expected, self.min_refresh_period), self.max_refresh_period)


def refresh_of(tracker_opts: Mapping[str, Any] | None) -> Refresh:
    """The refresh options among the `tracker_opts` of an `Optimizer`.

    Raises:
        ValueError: with the name of an option that a tracker does not have, or that is an argument of the `Optimizer`.
    """
    without_effect = WITHOUT_EFFECT["tracker_opts"]
    given = {name: value for name, value in (tracker_opts or {}).items() if name not in without_effect}
    unknown = sorted(set(given) - set(Refresh.__dataclass_fields__))
    own = [name for name in unknown if name in ("client_mode", "performance_ema_alpha", "target_batch_size")]
    if own:
        raise ValueError(f"tracker_opts has {', '.join(own)}: that is an argument of the optimizer itself")
    if unknown:
        known = ", ".join((*Refresh.__dataclass_fields__, *without_effect))
        raise ValueError(f"tracker_opts has no option {', '.join(unknown)}; there are {known}")
    return Refresh(**given)


@dataclass(frozen=True, slots=True)
class _Counted:
    """An answer of the coordinator. The reactor makes it, and any thread reads it as a whole.

    Attributes:
        count: the count of all peers.
        at: the time of its arrival, in seconds of `time.monotonic`.
        answered: the report that it answers.
    """

    count: Count
    at: float
    answered: Progress


class RunProgress:
    """Reports this peer's samples to the run's coordinator, and learns from it the progress of all peers.

    A report costs the trainer no time until the answer can matter. The trainer waits for an answer only if the peers
    may reach the target during this peer's next step, by the coordinator's last answer and the speed of the other
    peers. If the others then need no more samples of this peer, the trainer waits for the end of the epoch. It does not
    begin a step whose samples would come too late (`shoal.swarm.protocol.pace`). Estimates decide only about waiting:
    an epoch ends when the samples that peers have reported reach the target.

    [Note: threads] The trainer's thread owns this object. It publishes `_mine`, an immutable report, and hands reports
    over through an `_Outbox`. The reactor owns the `_Reports`, which publish `counted`, an immutable answer. Any thread
    may read the properties.

    Args:
        run: the run.
        target_batch_size: the number of samples of all peers at which the epoch ends.
        refresh: how often this peer asks for the progress of others when it has nothing to report.
        alpha: see `PerformanceEMA`.
        may_wait: whether the coordinator may make this peer wait. It may not if the trainer continues during a round,
            or if the target counts inner steps.

    Attributes:
        target_batch_size: as given, an int if it is whole.
        performance_ema: measures this peer's samples per second, a `PerformanceEMA`.
        steps_made: the number of this peer's steps since the start.
        samples_made: the number of this peer's samples since the start.
    """

    def __init__(
        self, run: Run, target_batch_size: float, refresh: Refresh, *, alpha: float = 0.1, may_wait: bool = True
    ) -> None:
        self.target_batch_size = whole(target_batch_size)
        self.performance_ema = PerformanceEMA(alpha)
        self._run, self._swarm, self._reactor, self._may_wait = run, run.swarm, run.dht.reactor, may_wait
        self._step = StepTime()
        # This peer's progress, with the tip of the state on which it accumulates.
        self._mine = Progress(run.swarm.tip, 0.0, 0.0)
        self._since: float | None = None  # when the step that is under way began; unknown before the first report
        self._pending: Future[Count | None] | Future[None] | None = None  # a report that nobody has waited for yet
        self._waited_in_vain_at: Tip | None = None  # the tip at which this peer waited for others that did not come
        self._outbox = _Outbox()
        self._running = False
        self.steps_made, self.samples_made = 0, 0.0
        self._waited = 0.0
        self._behind, self._per_sample = 0.0, 1.0  # samples of this epoch; how much of the target one sample counts
        self._reports = _Reports(run.swarm, refresh, self)

    @property
    def step_seconds(self) -> float:
        """The predicted time of this peer's next step; 0 before the first."""
        return self._step.seconds

    @property
    def local_progress(self) -> LocalProgress:
        """The progress of this peer in the current epoch."""
        me, mine, speed = self._swarm.me, self._mine, self.performance_ema.samples_per_second
        return LocalProgress(me.peer, mine.tip.epoch, int(mine.samples), speed, me.role is Role.CLIENT)

    @property
    def global_progress(self) -> GlobalProgress:
        """The progress of all peers, as last reported by the coordinator."""
        samples, _, peers = self._estimate(0.0)  # without an estimate of later samples
        clients, eta = self._swarm.peer.view.num_clients(), self.estimated_next_update_time
        return GlobalProgress(self.global_epoch, int(samples), int(self._target), peers, clients, eta)

    @property
    def global_epoch(self) -> int:
        """The number of the newest epoch that this peer has heard of."""
        behind = self._swarm.behind
        return max(self._swarm.tip.epoch, behind.epoch if behind is not None else 0)

    @property
    def ready_to_update_epoch(self) -> bool:
        """Whether the round of this epoch is due, or has taken place without this peer."""
        return self._swarm.called or self._swarm.tip != self._mine.tip

    @property
    def estimated_next_update_time(self) -> float:
        """The time at which the peers will reach the target at their present speed, in seconds of `get_dht_time()`;
        infinity while no speed is known."""
        samples, rate, _ = self._estimate(time.monotonic())
        missing = self._target - samples
        if missing <= 0 or self.ready_to_update_epoch:
            return get_dht_time()
        return get_dht_time() + missing / rate if rate > 0 else float("inf")

    @property
    def _target(self) -> float:
        """The count of all peers at which the epoch ends, by the coordinator's last answer."""
        counted = self._reports.counted
        is_of_tip = counted is not None and counted.count.tip == self._mine.tip
        told = counted.count.target if counted is not None and is_of_tip else 0.0
        return told or self.target_batch_size

    def report(
        self, samples: float, at_once: bool = False, *, behind: float | None = None, rests: bool = False
    ) -> None:
        """Report what this peer has accumulated in this epoch, and update `ready_to_update_epoch`.

        The call returns when the trainer should begin another step, or end the epoch.

        Args:
            samples: the samples in this epoch; the inner steps, if the target counts them.
            at_once: return without waiting for the answer.
            behind: the samples in this epoch, if the target counts inner steps.
            rests: this peer begins no other step before the round.

        Raises:
            Behind: if the run is at a state that outranks this peer's.
            Rejected: if the run has other terms.
        """
        now, added = time.monotonic(), samples - self._mine.samples
        made = added if behind is None else max(0.0, behind - self._behind)
        self._behind = samples if behind is None else behind
        if added > 0:
            self.steps_made, self.samples_made = self.steps_made + 1, self.samples_made + made
        if made > 0:
            self._per_sample = added / made
        if added > 0 and made > 0 and self._since is not None:
            self.performance_ema.update(made, now - self._since)
            self._step.update(added, now - self._since)
        another = added > 0 and not rests
        self._mine = self._progress(self._mine.tip, samples, another)
        try:
            if not self.ready_to_update_epoch:
                self._tell(self._mine, now, another=another, at_once=at_once or rests)
        except Rejected:
            self._reports.rejected = None
            raise
        finally:
            self._waited += time.monotonic() - now
            self.restart_clock()

    def take_waited(self) -> float:
        """The seconds for which this peer has waited for samples of others since the last call of this method: in
        `report`, and within `waiting`."""
        waited, self._waited = self._waited, 0.0
        return waited

    def start_epoch(self, tip: Tip) -> None:
        """Begin a new epoch, with no samples, from the state `tip`. The coordinator hears that this peer has begun a
        step."""
        self._outbox.report, self._behind = None, 0.0
        self._mine, self._pending = self._progress(tip, 0.0, another=True), None
        if self._step.samples:
            self._pending = self._reactor.submit(self._reports.tell(self._mine))

    def restart_clock(self) -> None:
        """Count the time until now to no step, for example that of a download."""
        self._since = time.monotonic()
        self.performance_ema.reset_timer()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count the time within this context to no step, for example that of a round that the trainer waits for. If the
        clock is restarted within it, for example after a download, the context leaves out what follows until its end.
        """
        began = time.monotonic()
        try:
            yield
        finally:
            if self._since is not None:
                self._since += time.monotonic() - max(began, self._since)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """A context in which this peer waits for samples of others; see `paused` and `take_waited`."""
        began = time.monotonic()
        try:
            with self.paused():
                yield
        finally:
            self._waited += time.monotonic() - began

    def start(self) -> None:
        """From now on, ask for the progress of others when this peer has nothing to report."""
        self._running = True
        self._reactor.loop.call_soon_threadsafe(self._reports.look, True)

    def stop(self) -> None:
        """Ask and report nothing more."""
        self._running, self._outbox.report = False, None
        self._reactor.loop.call_soon_threadsafe(self._reports.look, False)

    def is_alive(self) -> bool:
        """Whether this object is between `start` and `stop`."""
        return self._running

    def _tell(self, report: Progress, now: float, *, another: bool, at_once: bool) -> None:
        if self._reports.rejected is not None:
            raise self._reports.rejected
        self._outbox.report = None  # this report includes it
        if self._pending is not None and self._pending.done():
            pending, self._pending = self._pending, None
            _take(pending)
        counted, reports = self._reports.counted, self._reports
        samples, rate, _ = self._estimate(now)
        others, missing = max(0.0, rate - report.rate), self._target - samples
        is_unknown = counted is None or counted.count.tip != report.tip
        # Whether the peers may reach the target during this peer's next step, as far as this peer knows.
        under_way = counted.count.under_way if counted is not None and report.seconds else 0.0
        soon = is_unknown or missing <= others * report.seconds + under_way
        if at_once:  # other members may wait for it
            self._pending = self._reactor.submit(reports.tell(report))
        elif another and self._may_wait and soon and self._waited_in_vain_at != report.tip:
            asking = self._reactor.submit(self._ask(report))
            if is_called_away(asking):
                asking.cancel()
            else:
                _take(asking)
        elif is_unknown or missing <= 0:
            _take(self._reactor.submit(reports.tell(report)))
        elif missing <= rate * SOON:
            self._pending = self._reactor.submit(reports.tell(report))
        elif self._outbox.put(report):
            self._pending = self._reactor.submit(reports.tell_later(self._outbox))

    def _progress(self, tip: Tip, samples: float, another: bool) -> Progress:
        """The report of `samples`. With `another`, it announces one more step."""
        step, seconds = (self._step.samples, self._step.seconds) if another else (0.0, 0.0)
        rate = self.performance_ema.samples_per_second * self._per_sample
        return Progress(tip, float(samples), rate, step, seconds)

    def _estimate(self, now: float) -> tuple[float, float, int]:
        """Estimate the progress of all peers at `now` (of `time.monotonic`).

        Returns:
            The samples: those counted, and those that the others have probably made since. The samples per second of
            all peers. The number of peers; this peer counts as one if it trains, also before the coordinator has
            counted it in a new epoch.
        """
        counted, tip, mine = self._reports.counted, self._swarm.tip, self._mine
        me = 1 if mine.samples or mine.rate else 0
        own, speed = (mine.samples, mine.rate) if tip == mine.tip else (0.0, 0.0)
        if counted is None or counted.count.tip != tip:
            return own, speed, me
        count, answered = counted.count, counted.answered
        others = max(0.0, count.rate - answered.rate)
        made_since = others * max(0.0, now - counted.at)
        return count.samples - answered.samples + own + made_since, others + speed, max(count.peers, me)

    async def _ask(self, report: Progress) -> None:
        """Report, and wait while the coordinator expects the missing samples from others. The wait ends when the round
        is called, or when this peer hears of a better state. Runs on the reactor."""
        until = time.monotonic() + max(STEPS_OF_WAITING * report.seconds, self._swarm.rules.matchmaking_time)
        while True:
            count = await self._reports.tell(msgspec.structs.replace(report, asks=True))
            if count is None or not count.wait or self._swarm.behind is not None or self.ready_to_update_epoch:
                return
            if time.monotonic() >= until:
                self._waited_in_vain_at = report.tip
                await self._reports.tell(report)
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(SHORTEST_WAIT, min(count.wait, report.seconds))):
                    await self._swarm.news()


class _Outbox:
    """Hands the newest report from the trainer's thread to a coroutine on the reactor, which takes it a little later.

    Attributes:
        report: the report to send, or None. The trainer's thread writes it, and the reactor reads it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_expected = False  # whether a coroutine is on its way to take the report
        self.report: Progress | None = None

    def put(self, report: Progress) -> bool:
        """Replace the report. Returns whether the caller has to start a coroutine that takes it."""
        with self._lock:
            self.report, was_expected, self._is_expected = report, self._is_expected, True
        return not was_expected

    def take(self) -> Progress | None:
        """Return the report. The next report needs another coroutine."""
        with self._lock:
            self._is_expected = False
            return self.report


class _Reports:
    """Exchanges reports and answers with the coordinator, on the reactor. Other threads only read `counted`.

    Args:
        swarm: this peer's part in the swarm of the run.
        refresh: how often to ask when there is nothing to report.
        progress: estimates when the epoch ends.

    Attributes:
        counted: the last answer of the coordinator.
        rejected: the error that the run has other terms, until the trainer's thread has raised it.
    """

    def __init__(self, swarm: Swarm, refresh: Refresh, progress: RunProgress) -> None:
        self._swarm, self._refresh, self._progress = swarm, refresh, progress
        self.counted: _Counted | None = None
        self.rejected: Rejected | None = None
        self._latest: Progress | None = None
        self._sending: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._meeting: asyncio.Task[None] | None = None
        self._looks = False  # whether to ask when there is nothing to report

    def look(self, yes: bool) -> None:
        """From now on, ask when there is nothing to report; with False, stop asking."""
        self._looks = yes
        if not yes and self._meeting is not None:
            self._meeting.cancel()
        self._look_later()

    async def tell_later(self, outbox: _Outbox) -> None:
        """Send a report that can't matter yet, a moment later. Thus the reports of several short steps become one
        message, and this work is done while the trainer computes without the GIL, not at the end of its step."""
        await asyncio.sleep(TOGETHER)
        report = outbox.take()
        if report is not None:
            await self.tell(report)

    async def tell(self, report: Progress) -> Count | None:
        """Send a report to the coordinator. Returns its answer, or None if the epoch is over. Raises the errors of
        `Swarm.report`."""
        self._latest = report
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        try:
            await asyncio.shield(self._sending)
        except Rejected as error:
            self.rejected = error  # the trainer's next report raises it, even if it does not wait for an answer
            raise
        counted = self.counted
        return counted.count if counted is not None and counted.count.tip == report.tip else None

    async def _send(self) -> None:
        """Send the latest report, until none is newer. Only one report at a time is under way."""
        sent = None
        try:
            while sent != self._latest:
                sent = self._latest
                assert sent is not None
                if self._swarm.tip != sent.tip:
                    return  # the epoch is over; the trainer's thread will see it
                count = await self._answer(sent)
                if count is not None and count.tip == sent.tip:
                    self.counted = _Counted(count, time.monotonic(), sent)
                    self._look_later()
        finally:
            self._sending = None

    async def _answer(self, report: Progress) -> Count | None:
        """The coordinator's answer; None if other news comes first. Otherwise a coordinator that hangs would keep the
        trainer from a round that another peer has called."""
        asking, news = asyncio.ensure_future(self._swarm.report(report)), asyncio.ensure_future(self._swarm.news())
        try:
            await asyncio.wait({asking, news}, return_when=asyncio.FIRST_COMPLETED)
            return asking.result() if asking.done() else None
        finally:
            asking.cancel()
            news.cancel()

    def _look_later(self) -> None:
        """Ask for the progress of all, if nothing is reported for a while."""
        if self._timer is not None:
            self._timer.cancel()
        if self._looks:
            eta = max(0.0, self._progress.estimated_next_update_time - get_dht_time())
            peers = 0 if self.counted is None else self.counted.count.peers
            seconds = self._refresh.seconds(eta, peers)
            if peers < 2:  # a script may wait for the first other peer before it trains
                if self._has_company:
                    seconds = self._refresh.min_refresh_period
                elif self._meeting is None or self._meeting.done():
                    self._meeting = asyncio.create_task(self._meet())
            self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    @property
    def _has_company(self) -> bool:
        """Whether another peer that trains is connected."""
        view = self._swarm.peer.view
        return any(member.contributes and member is not view.me for member in view.connected())

    async def _meet(self) -> None:
        """Ask as soon as this peer has met another one that trains."""
        while not self._has_company:
            await self._swarm.contacts.seen()
        self._meeting = None
        self._look_later()

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
                await self.tell(question)
                log.log(self._refresh.status_loglevel, "%s", self._progress.global_progress)
        except (P2PError, AveragingError, TimeoutError) as error:
            log.debug("could not ask for progress: %s", error)
        finally:
            self._look_later()


def _take(report: Future[Any]) -> None:
    """Wait until a report has arrived. If it does not arrive, the trainer gets no error."""
    wait_for(report)
    try:
        report.result()
    except (P2PError, TimeoutError) as error:
        # The coordinator is gone or out of reach; the swarm reports again to its successor by itself.
        log.debug("could not report progress: %s", error)

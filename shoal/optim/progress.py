"""How far the peers of a run have come in the current epoch."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import Future
from dataclasses import dataclass

from shoal.averaging.messages import Count
from shoal.averaging.swarm import Swarm
from shoal.averaging.tip import Tip
from shoal.dht.records import get_dht_time
from shoal.p2p.errors import P2PError
from shoal.p2p.reactor import Reactor

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LocalProgress:
    """This peer's part of the epoch.

    Attributes:
        epoch: the number of the epoch.
        samples_accumulated: since it began.
        samples_per_second: a moving average.
    """

    epoch: int
    samples_accumulated: float
    samples_per_second: float


@dataclass(frozen=True, slots=True)
class GlobalProgress:
    """What all peers have, as the coordinator last told it.

    Attributes:
        epoch: the number of the epoch.
        samples_accumulated: by all peers.
        target_batch_size: at which the epoch ends.
        num_peers: that have reported in this epoch.
        eta_next_epoch: when the target will be reached, in seconds of `get_dht_time()`; an estimate.
    """

    epoch: int
    samples_accumulated: float
    target_batch_size: int
    num_peers: int
    eta_next_epoch: float


class PerformanceEMA:
    """Samples per second: an exponential moving average of the time per sample.

    Args:
        alpha: weight of the newest interval, over 0 and at most 1.
    """

    def __init__(self, alpha: float) -> None:
        self.alpha = alpha
        self._seconds_per_sample: float | None = None
        self._since = time.monotonic()

    @property
    def samples_per_second(self) -> float:
        """The average; 0 before the first sample."""
        return 1.0 / self._seconds_per_sample if self._seconds_per_sample else 0.0

    def update(self, samples: float) -> None:
        """So many samples were processed since the last call or `restart`."""
        now = time.monotonic()
        if samples > 0:
            interval = max(now - self._since, 1e-9) / samples
            old = self._seconds_per_sample
            self._seconds_per_sample = interval if old is None else self.alpha * interval + (1 - self.alpha) * old
        self._since = now

    def restart(self) -> None:
        """What passed until now is not to be counted: a round, a download."""
        self._since = time.monotonic()


class ProgressTracker:
    """Reports this peer's samples to the run's coordinator, and learns from it what all peers have.

    Reporting costs the trainer nothing until the answer can matter: only when the target may have been reached, by what
    the coordinator last said and the rate at which the others go, is its answer waited for. The epoch itself ends on
    samples that were reported, never on an estimate.

    Args:
        swarm: the run.
        reactor: on which it lives.
        target_batch_size: samples of all peers after which the epoch ends.
        performance_ema_alpha: see `PerformanceEMA`.
    """

    def __init__(
        self, swarm: Swarm, reactor: Reactor, target_batch_size: int, *, performance_ema_alpha: float = 0.1
    ) -> None:
        self.target_batch_size = target_batch_size
        self.performance_ema = PerformanceEMA(performance_ema_alpha)
        self._swarm, self._reactor = swarm, reactor
        self._tip = swarm.tip  # of the state on which samples are accumulated
        self._samples = 0.0
        self._pending: Future[None] | None = None
        # The rest belongs to the reactor's thread.
        self._count: tuple[Count, float, float, float] | None = None  # with when it came, our samples and rate in it
        self._latest: tuple[Tip, float, float] = (self._tip, 0.0, 0.0)
        self._sending: asyncio.Task[None] | None = None

    @property
    def local_progress(self) -> LocalProgress:
        """This peer's part of the epoch."""
        return LocalProgress(self._tip.epoch, self._samples, self.performance_ema.samples_per_second)

    @property
    def global_progress(self) -> GlobalProgress:
        """What all peers have, as the coordinator last told it."""
        samples, _, peers = self._estimate(0.0)  # counted ones only
        eta = self.estimated_next_update_time
        return GlobalProgress(self.global_epoch, samples, self.target_batch_size, peers, eta)

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

    def report_local_progress(self, samples: float) -> None:
        """This peer has accumulated `samples` in this epoch; updates `ready_to_update_epoch`.

        Raises Behind if the run is at a state that outranks this peer's, Rejected if it goes by other terms.
        """
        self.performance_ema.update(samples - self._samples)
        self._samples = samples
        if self.ready_to_update_epoch:
            return
        previous, self._pending = self._pending, None
        if previous is not None and previous.done():
            _take(previous)
        future = self._reactor.submit(self._report(self._tip, samples, self.performance_ema.samples_per_second))
        if self._count is None or self._estimate(time.monotonic())[0] >= self.target_batch_size:
            _take(future)
        else:
            self._pending = future

    def start_epoch(self, tip: Tip) -> None:
        """A new epoch begins, with no samples, from the state `tip`."""
        self._tip, self._samples = tip, 0.0
        self._count = None
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        self.performance_ema.restart()

    async def _report(self, tip: Tip, samples: float, rate: float) -> None:
        """Have the coordinator know this; returns when it does."""
        self._latest = (tip, samples, rate)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send())
        await asyncio.shield(self._sending)

    async def _send(self) -> None:
        """Never more than one report is under way; the next one says what has come together meanwhile."""
        sent = None
        try:
            while sent != self._latest:
                sent = tip, samples, rate = self._latest
                if self._swarm.tip != tip:
                    return  # the epoch is over; the trainer's thread will see it
                count = await self._swarm.report(samples, rate)
                if tip == count.tip:
                    self._count = (count, time.monotonic(), samples, rate)
        finally:
            self._sending = None

    def _estimate(self, now: float) -> tuple[float, float, int]:
        """The samples of all peers at `now` (of `time.monotonic`), counted ones and what the others will have made
        since; their rate; and how many peers they are."""
        counted, mine = self._count, self.performance_ema.samples_per_second
        if counted is None or counted[0].tip != self._tip:
            return self._samples, mine, 1
        count, counted_at, counted_samples, counted_rate = counted
        others = max(0.0, count.rate - counted_rate)
        made_since = others * max(0.0, now - counted_at)
        return count.samples - counted_samples + self._samples + made_since, others + mine, count.peers


def _take(future: Future[None]) -> None:
    """Wait for a report to arrive; that it did not is no error of the trainer's."""
    try:
        future.result()
    except (P2PError, TimeoutError) as error:
        # The coordinator is gone or out of reach; the swarm reports again to its successor by itself.
        log.debug("could not report progress: %s", error)


__all__ = ["GlobalProgress", "LocalProgress", "PerformanceEMA", "ProgressTracker"]

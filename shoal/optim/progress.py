"""How far the peers of a run have come in the current epoch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from shoal.averaging.messages import Count
from shoal.averaging.swarm import Swarm
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
        if not 0 < alpha <= 1:
            raise ValueError(f"performance_ema_alpha={alpha}: give a number over 0 and at most 1")
        self.alpha = alpha
        self._seconds_per_sample: float | None = None
        self._since = time.monotonic()

    @property
    def samples_per_second(self) -> float:
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
        self._samples = 0.0
        self._count: Count | None = None
        self._counted_at = 0.0
        self._counted_mine = 0.0
        self._pending: Future[Count] | None = None

    @property
    def local_progress(self) -> LocalProgress:
        """This peer's part of the epoch."""
        return LocalProgress(self._swarm.tip.epoch, self._samples, self.performance_ema.samples_per_second)

    @property
    def global_progress(self) -> GlobalProgress:
        """What all peers have, as the coordinator last told it."""
        count = self._current_count()
        samples = self._samples if count is None else count.samples + self._samples - self._counted_mine
        peers = 1 if count is None else count.peers
        eta = self.estimated_next_update_time
        return GlobalProgress(self._swarm.tip.epoch, samples, self.target_batch_size, peers, eta)

    @property
    def ready_to_update_epoch(self) -> bool:
        """Whether the round of this epoch is due."""
        return self._swarm.called

    @property
    def estimated_next_update_time(self) -> float:
        """When the target will be reached, in seconds of `get_dht_time()`, if all go on at their rate; infinity while
        no rate is known."""
        count = self._current_count()
        samples = self._samples if count is None else self._estimate(count)
        rate = self.performance_ema.samples_per_second if count is None else count.rate
        missing = self.target_batch_size - samples
        if missing <= 0 or self.ready_to_update_epoch:
            return get_dht_time()
        return get_dht_time() + missing / rate if rate > 0 else float("inf")

    def report_local_progress(self, samples: float) -> None:
        """This peer has accumulated `samples` in this epoch; updates `ready_to_update_epoch`.

        Raises Behind if the run has gone on to another state.
        """
        self.performance_ema.update(samples - self._samples)
        self._samples = samples
        if self._swarm.called:
            return
        previous, self._pending = self._pending, None
        if previous is not None and previous.done():
            self._take(previous)
        future = self._reactor.submit(self._swarm.report(samples, self.performance_ema.samples_per_second))
        future.add_done_callback(self._noted(samples))
        count = self._current_count()
        if count is None or self._estimate(count) >= self.target_batch_size:
            self._take(future)
        else:
            self._pending = future

    def start_epoch(self) -> None:
        """A new epoch begins, with no samples."""
        self._samples = self._counted_mine = 0.0
        self._count = None
        if self._pending is not None:
            self._pending.cancel()
            self._pending = None
        self.performance_ema.restart()

    def _noted(self, mine: float) -> Callable[[Future[Count]], None]:
        def note(future: Future[Count]) -> None:
            if not future.cancelled() and future.exception() is None:
                self._count, self._counted_at, self._counted_mine = future.result(), time.monotonic(), mine

        return note

    def _take(self, future: Future[Count]) -> None:
        try:
            future.result()
        except (P2PError, TimeoutError) as error:
            # The coordinator is gone or out of reach; the swarm reports again to its successor by itself.
            log.debug("could not report progress: %s", error)

    def _current_count(self) -> Count | None:
        count = self._count
        return count if count is not None and count.tip == self._swarm.tip else None

    def _estimate(self, count: Count) -> float:
        """The samples of all peers now: what was counted, and what the others will have made since."""
        mine = self.performance_ema.samples_per_second
        others = max(0.0, count.rate - mine) * (time.monotonic() - self._counted_at)
        return count.samples - self._counted_mine + self._samples + others


__all__ = ["GlobalProgress", "LocalProgress", "PerformanceEMA", "ProgressTracker"]

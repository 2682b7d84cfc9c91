"""How fast this peer is."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

RECENT = 5  # steps by whose median the next one is foretold: the first ones of a run are slower than those to come


class PerformanceEMA:
    """Samples per second: an exponential moving average of the time per sample, freed from the weight of its start (as
    Adam does it: Kingma and Ba 2014, section 3).

    Args:
        alpha: weight of the newest interval, over 0 and at most 1.
        eps: seconds per sample below which nothing is taken for faster; over 0.
        paused: begin without a running clock, see `pause`.

    Attributes:
        ema_seconds_per_sample: the average with the weight of its start, which is 0.
        num_updates: so many intervals are in it.
    """

    def __init__(self, alpha: float = 0.1, eps: float = 1e-20, paused: bool = False) -> None:
        if not 0 < alpha <= 1:
            raise ValueError(f"alpha={alpha!r}: give a number over 0 and at most 1")
        if not eps > 0:
            raise ValueError(f"eps={eps!r}: give a number over 0")
        self.alpha, self.eps, self.paused = alpha, eps, paused
        self.ema_seconds_per_sample, self.num_updates = 0.0, 0
        self._since = time.monotonic()
        self._lock = threading.Lock()

    @property
    def samples_per_second(self) -> float:
        """The average; 0 before the first sample."""
        if not self.num_updates:
            return 0.0
        return 1 / max(self.ema_seconds_per_sample / (1 - (1 - self.alpha) ** self.num_updates), self.eps)

    def update(self, task_size: float, interval: float | None = None) -> float:
        """So many samples were processed in `interval` seconds (None: since the last call or `reset_timer`); returns
        the samples per second. Raises ValueError if there are none, or if it is paused and no interval is given."""
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
        """What passed until now is not to be counted: a round, a download."""
        self._since = time.monotonic()

    @contextmanager
    def pause(self) -> Iterator[None]:
        """What passes within is not counted."""
        self.paused, before = True, self.paused
        try:
            yield
        finally:
            self.paused = before
            self.reset_timer()

    @contextmanager
    def update_threadsafe(self, task_size: float) -> Iterator[None]:
        """So many samples are processed within, while other threads may do the same: an interval begins where the last
        one ended, so that what two threads do at the same time counts as twice the speed."""
        started = time.monotonic()
        yield
        with self._lock:
            self.update(task_size, time.monotonic() - max(started, self._since))

    def __repr__(self) -> str:
        return f"PerformanceEMA({self.samples_per_second:.5g} samples/s, {self.num_updates} updates)"


class StepTime:
    """How long the next step will take: the median of the last few, which a single slow one does not move."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=RECENT)  # seconds per sample
        self.samples = 0.0  # of the last step

    def update(self, samples: float, seconds: float) -> None:
        """A step of so many samples has taken so many seconds."""
        self.samples = samples
        self._recent.append(seconds / samples)

    @property
    def seconds(self) -> float:
        """Of another step like the last one; 0 before the first."""
        return statistics.median(self._recent) * self.samples if self._recent else 0.0

"""How fast a peer says it is, and how long it thinks that its next step takes."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from shoal.optim.progress import PerformanceEMA, StepTime


class Clock:
    def __init__(self) -> None:
        self.now = 100.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("time.monotonic", lambda: clock.now)
    return clock


def test_moving_average_is_of_the_time_per_sample(clock: Clock) -> None:
    ema = PerformanceEMA(alpha=0.25)
    assert ema.samples_per_second == 0.0
    clock.now += 2.0
    assert ema.update(4) == pytest.approx(2.0), "the first one alone is the average"
    clock.now += 1.0
    ema.update(10)
    # Weights of Adam's kind: those of the intervals add up to 1.
    assert ema.samples_per_second == pytest.approx((0.75 * 0.25 + 0.25) / (0.75 * 0.25 * 0.5 + 0.25 * 0.1))
    assert ema.num_updates == 2
    assert ema.ema_seconds_per_sample == pytest.approx(0.75 * 0.25 * 0.5 + 0.25 * 0.1)
    for _ in range(200):
        ema.update(1, interval=0.2)
    assert ema.samples_per_second == pytest.approx(5.0)


def test_what_is_not_counted(clock: Clock) -> None:
    ema = PerformanceEMA(alpha=1.0)
    clock.now += 50.0
    ema.reset_timer()
    clock.now += 1.0
    assert ema.update(4) == pytest.approx(4.0)
    with ema.pause():
        clock.now += 50.0
        with pytest.raises(ValueError, match="interval"):
            ema.update(1)
        assert ema.update(6, interval=2.0) == pytest.approx(3.0)
    clock.now += 0.5
    assert ema.update(4) == pytest.approx(8.0)
    with pytest.raises(ValueError, match="interval"):
        PerformanceEMA(paused=True).update(1)


def test_several_threads_add_up(clock: Clock) -> None:
    ema = PerformanceEMA(alpha=1.0)
    clock.now += 50.0
    with ema.update_threadsafe(4):
        clock.now += 1.0
        with ema.update_threadsafe(4):
            clock.now += 1.0
        assert ema.samples_per_second == pytest.approx(4.0), "from where it began"
        clock.now += 0.5
    assert ema.samples_per_second == pytest.approx(8.0), "from where the other one ended"


@pytest.mark.parametrize("alpha", [0.0, -1.0, 1.5, float("nan")])
def test_weights_that_are_none(alpha: float) -> None:
    with pytest.raises(ValueError, match="alpha"):
        PerformanceEMA(alpha)


@pytest.mark.parametrize("kind", ["float32", "float64", ""])
def test_numbers_of_other_libraries(kind: str) -> None:
    weight: Any = getattr(pytest.importorskip("numpy"), kind)(0.25) if kind else Fraction(1, 4)
    ema = PerformanceEMA(weight, eps=weight)
    assert (ema.alpha, ema.eps) == (0.25, 0.25)
    assert type(ema.update(1, interval=1.0)) is float, "it travels in messages"


@pytest.mark.parametrize("samples", [0, -3])
def test_no_samples(samples: int) -> None:
    with pytest.raises(ValueError, match="task_size"):
        PerformanceEMA().update(samples)


def test_a_slow_step_does_not_change_what_is_expected() -> None:
    step = StepTime()
    assert (step.samples, step.seconds) == (0.0, 0.0)
    for seconds in (9.0, 1.0, 1.1, 0.9, 1.0):
        step.update(10, seconds)
    assert step.seconds == pytest.approx(1.0)
    step.update(20, 2.0)
    assert step.seconds == pytest.approx(2.0), "the next one is as large as the last"


def test_arguments_are_in_hiveminds_order() -> None:
    ema = PerformanceEMA(0.5, 1.0, True)
    assert ema.paused
    assert ema.update(10, 0.1) == 1.0, "no faster than a sample per eps"
    with pytest.raises(ValueError, match="eps=0: give a number over 0"):
        PerformanceEMA(eps=0)

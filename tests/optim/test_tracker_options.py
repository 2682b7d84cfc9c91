"""`tracker_opts` and `performance_ema_alpha` of an Optimizer do what they say."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import pytest

import shoal
from tests.optim.conftest import Alone, Clock
from tests.optim.models import OPTIMIZERS, backward, fixed_batch, make_model

pytestmark = pytest.mark.processes


@pytest.mark.long
def test_how_often_the_others_are_asked_for(alone: Alone, caplog: pytest.LogCaptureFixture) -> None:
    """With nothing to report; and at the level that was given."""
    often = {"min_refresh_period": 0.05, "default_refresh_period": 0.05, "max_refresh_period": 0.1}
    counts = {}

    def asked() -> int:
        return sum(record.name == "shoal.optim.progress" for record in caplog.records)

    for name, periods in (("often", often), ("as it is", {})):
        caplog.clear()
        options = {**periods, "status_loglevel": logging.INFO}
        optimizer = alone(make_model(), optimizer=OPTIMIZERS["sgd"], target_batch_size=64, tracker_opts=options)
        with caplog.at_level(logging.INFO, "shoal.optim.progress"):
            began = time.monotonic()
            while time.monotonic() < began + 1.0 or (name == "often" and asked() < 4):
                assert time.monotonic() < began + 60.0, "nobody is asked"
                time.sleep(0.02)
        counts[name] = asked()
        optimizer.shutdown()
        caplog.clear()
        with caplog.at_level(logging.INFO, "shoal.optim.progress"):
            time.sleep(0.3)
        assert caplog.records == [], "it asks after it was shut down"
    assert counts["as it is"] <= 2 < counts["often"]


def test_unknown_ones_are_refused_by_name(alone: Alone) -> None:
    for options, name in (({"refresh_period": 1.0}, "refresh_period"), ({"client_mode": True}, "client_mode")):
        with pytest.raises(ValueError, match=f"tracker_opts has .*{name}"):
            alone(make_model(), optimizer=OPTIMIZERS["sgd"], target_batch_size=64, tracker_opts=options)


def test_weight_of_the_newest_measurement(alone: Alone, clock: Clock) -> None:
    model = make_model()
    optimizer = alone(model, optimizer=OPTIMIZERS["sgd"], target_batch_size=640, performance_ema_alpha=1.0)
    assert isinstance(optimizer, shoal.Optimizer)
    backward(model, *fixed_batch(0))
    speeds = []
    for pause in (0.02, 0.4):
        clock.sleep(pause)
        optimizer.step(batch_size=8)
        speeds.append(optimizer.tracker.local_progress.samples_per_second)
    assert speeds == [pytest.approx(8 / 0.02), pytest.approx(8 / 0.4)], "only the last one counts"


@pytest.mark.parametrize("option", [{}, {"delay_optimizer_step": True}, {"delay_grad_averaging": True}])
def test_the_speed_is_that_of_the_steps_in_every_mode(
    alone: Alone, clock: Clock, option: dict[str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model()
    optimizer = alone(model, optimizer=OPTIMIZERS["sgd"], target_batch_size=32, **option)
    average = optimizer._run.average

    def slowly(*arguments: Any) -> Any:
        if threading.current_thread() is threading.main_thread():  # else the trainer goes on meanwhile
            clock.sleep(1.0)
        return average(*arguments)

    monkeypatch.setattr(optimizer._run, "average", slowly)
    while optimizer.local_epoch < 4:
        clock.sleep(0.05)
        backward(model, *fixed_batch(0))
        optimizer.step(batch_size=8)
    assert optimizer.tracker.performance_ema.samples_per_second == pytest.approx(8 / 0.05), "rounds are no work"

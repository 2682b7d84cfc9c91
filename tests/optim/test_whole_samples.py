"""Where hivemind has ints, Shoal has ints, of type `int`: scripts check them strictly."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shoal
from tests.optim.conftest import Alone

WHOLE = (8, np.int64(8), np.int32(8), np.float64(8.0), 8.0)


def types_of(progress: object, *names: str) -> set[type]:
    return {type(getattr(progress, name)) for name in names}


def check(tracker: Any) -> None:
    local, world = tracker.local_progress, tracker.global_progress
    assert types_of(local, "epoch", "samples_accumulated") == {int}
    assert types_of(world, "epoch", "samples_accumulated", "target_batch_size", "num_peers", "num_clients") == {int}
    assert types_of(local, "samples_per_second") == types_of(world, "eta_next_epoch") == {float}
    assert types_of(tracker, "target_batch_size", "global_epoch") == {int}
    assert type(local.client_mode) is bool


@pytest.mark.parametrize("samples", WHOLE)
def test_of_an_optimizer(alone: Alone, samples: Any) -> None:
    model = nn.Linear(2, 1)
    optimizer = alone(
        model,
        target_batch_size=samples * 100,
        batch_size_per_step=samples,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
    )
    check(optimizer.tracker)
    for given in (None, samples):
        model(torch.ones(8, 2)).sum().backward()
        optimizer.step(batch_size=given)
        check(optimizer.tracker)
    assert optimizer.tracker.local_progress.samples_accumulated == 16
    assert optimizer.tracker.global_progress.samples_accumulated == 16
    assert optimizer.local_progress.samples_accumulated == 16
    if samples == int(samples) and not isinstance(samples, float):
        assert types_of(optimizer, "target_batch_size", "batch_size_per_step", "local_epoch") == {int}


@pytest.mark.parametrize(
    "mode", [{"use_local_updates": True}, {"reuse_grad_buffers": True}, {"outer": shoal.DiLoCo(inner_steps=4)}]
)
def test_in_other_modes(alone: Alone, mode: dict[str, Any]) -> None:
    model = nn.Linear(2, 1)
    target = None if "outer" in mode else 100
    optimizer = alone(model, target_batch_size=target, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **mode)
    model(torch.ones(8, 2)).sum().backward()
    optimizer.step(batch_size=np.int64(8))
    check(optimizer.tracker)


@pytest.mark.parametrize("samples", WHOLE)
def test_of_a_tracker(dht: shoal.DHT, samples: Any) -> None:
    tracker = shoal.ProgressTracker(dht, f"whole {samples!r}", samples * 100)
    try:
        tracker.report_local_progress(0, samples)
        check(tracker)
        assert tracker.local_progress.samples_accumulated == tracker.global_progress.samples_accumulated == 8
        with tracker.pause_updates():
            assert type(tracker.update_epoch(np.int64(1))) is int
        check(tracker)
    finally:
        tracker.shutdown()


def test_a_part_of_a_sample_is_not_counted_there(dht: shoal.DHT) -> None:
    """It counts for the end of the epoch."""
    tracker = shoal.ProgressTracker(dht, "parts", 1.5)  # type: ignore[arg-type]
    try:
        tracker.report_local_progress(0, 0.75)
        assert (tracker.local_progress.samples_accumulated, tracker.global_progress.target_batch_size) == (0, 1)
        assert not tracker.ready_to_update_epoch
        tracker.report_local_progress(0, 1.5)
        assert tracker.ready_to_update_epoch
    finally:
        tracker.shutdown()


@pytest.mark.parametrize("samples", WHOLE)
def test_of_a_gradient_averager(dht: shoal.DHT, samples: Any) -> None:
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    averager = shoal.GradientAverager([parameter], dht=dht, prefix=f"whole {samples!r}", start=False)
    assert type(averager.local_samples_accumulated) is int
    averager.accumulate_grads_(samples)
    assert (averager.local_samples_accumulated, type(averager.local_samples_accumulated)) == (8, int)
    averager.local_samples_accumulated = samples
    assert types_of(averager, "local_samples_accumulated", "local_times_accumulated") == {int}


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), "3", -1, None, True])
def test_what_is_no_number_of_samples_is_refused_by_name(dht: shoal.DHT, wrong: Any) -> None:
    tracker = shoal.ProgressTracker(dht, f"wrong {wrong}", 100)
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.ones(2)
    averager = shoal.GradientAverager([parameter], dht=dht, prefix=f"wrong {wrong}", start=False)
    try:
        tracker.report_local_progress(0, 3)
        with pytest.raises(ValueError, match=r"^samples_accumulated=.*: give a number of samples, at least 0"):
            tracker.report_local_progress(1, wrong)
        with pytest.raises(ValueError, match=r"^local_epoch=.*: give the number of an epoch"):
            tracker.report_local_progress(wrong, 3)
        if wrong is not None:
            with (
                tracker.pause_updates(),
                pytest.raises(ValueError, match=r"^new_epoch=.*: give the number of an epoch"),
            ):
                tracker.update_epoch(wrong)
        assert (tracker.local_progress.epoch, tracker.local_progress.samples_accumulated) == (0, 3)
    finally:
        tracker.shutdown()
    with pytest.raises(
        ValueError, match=r"^batch_size=.*: give the number of samples behind the gradients, at least 1"
    ):
        averager.accumulate_grads_(wrong)
    with pytest.raises(ValueError, match=r"^local_samples_accumulated=.*: give a number of samples"):
        averager.local_samples_accumulated = wrong
    assert (averager.local_samples_accumulated, averager.local_times_accumulated) == (0, 0)

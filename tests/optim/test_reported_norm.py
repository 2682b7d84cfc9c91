"""The report of an epoch has the norm of the averaged gradient where `max_grad_norm` measures it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.optim.reports import EpochReport
from tests.optim.conftest import Alone


@pytest.mark.parametrize(
    "mode",
    [
        {},
        {"reuse_grad_buffers": True},
        {"delay_grad_averaging": True},
        {"grad_averager_factory": shoal.GradientAverager},
        {"outer": shoal.DiLoCo(inner_steps=1)},
        {"use_local_updates": True},
    ],
    ids=lambda mode: next(iter(mode), "default"),
)
def test_the_norm_before_clipping(alone: Alone, mode: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    limited = {} if "use_local_updates" in mode else {"max_grad_norm": 0.5}
    target = {} if "outer" in mode else {"target_batch_size": 4}
    optimizer = alone(
        model, optimizer=lambda p: torch.optim.SGD(p, lr=0.25), batch_size_per_step=4, **target, **limited, **mode
    )
    reports: list[Any] = []
    optimizer.on_event = reports.append
    model(torch.ones(4, 3)).sum(dim=1).mean().backward()  # each of the 6 elements is 1
    optimizer.step()
    optimizer.settle()
    [norm] = [report.grad_norm for report in reports if isinstance(report, EpochReport)]
    if not limited:
        assert norm is None
    else:
        assert norm == pytest.approx(6**0.5 * (0.25 if "outer" in mode else 1.0))
    optimizer.shutdown()

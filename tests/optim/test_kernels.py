"""Steps on the host are made by torch's fused kernel, unless the user chose another."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from tests.optim.conftest import Alone
from tests.optim.models import backward, fixed_batch, make_model

MODES: list[dict[str, Any]] = [
    {},
    {"offload_optimizer": True},
    {"delay_optimizer_step": True},
    {"use_local_updates": True},
]


@pytest.mark.parametrize("chosen", [None, False], ids=lambda fused: f"fused={fused}")
@pytest.mark.parametrize("options", MODES, ids=str)
def test_steps_are_fused_unless_another_kernel_was_chosen(
    alone: Alone, options: dict[str, Any], chosen: bool | None
) -> None:
    model = make_model()
    optimizer = alone(
        model, target_batch_size=8, optimizer=functools.partial(torch.optim.Adam, fused=chosen), **options
    )
    while optimizer.local_epoch < 1:
        backward(model, *fixed_batch(0))
        optimizer.step(batch_size=8)
    assert optimizer.optimizer.param_groups[0]["fused"] is (True if chosen is None else chosen)

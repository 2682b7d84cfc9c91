"""Checkpoints by safetensors, which takes tensors that share a storage for one tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_file, save_model

import shoal
from tests.optim.models import OPTIMIZERS, backward, fixed_batch, make_model


@pytest.mark.parametrize("offload", [False, True])
def test_the_model_gradients_and_state_are_saved_whole(
    alone: Callable[..., shoal.Optimizer], tmp_path: Path, offload: bool
) -> None:
    model, other = make_model(), make_model(seed=3)
    options: dict[str, Any] = {"offload_optimizer": True} if offload else {}
    optimizer = alone(model, target_batch_size=64, optimizer=OPTIMIZERS["adamw"], **options)
    for epoch in range(2):
        backward(model, *fixed_batch(epoch))
        optimizer.step(batch_size=64)
    save_model(model, str(tmp_path / "model"))
    load_model(other, str(tmp_path / "model"))
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    state = optimizer.state_dict()["state"]
    moments = {str(key): values["exp_avg"] for key, values in state.items() if key != "local_epoch"}
    save_file(moments, str(tmp_path / "state"))
    assert len(moments) == len(list(model.parameters()))

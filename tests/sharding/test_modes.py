"""`ZeroRedundancyOptimizer` called within torch's modes: it steps as it does outside of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shoal

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "fake": lambda: FakeTensorMode(allow_non_fake_inputs=False),
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"parameters_as_bucket_view": True},
    "reducing": {"reduce_scatter": True},
    "on the host": {"offload": True},
    "wide": {"master_weights": True},
}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def backward(model: nn.Module) -> None:
    model(torch.arange(12).view(4, 3).bfloat16() / 12).square().mean().backward()


def trained(given: dict[str, Any], mode: Callable[[], AbstractContextManager[Any]]) -> list[torch.Tensor]:
    """The parameters after some steps. All calls but the backward passes are made within `mode`."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    with mode():
        optimizer = shoal.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.05, **given)
    for _ in range(3):
        backward(model)
        with mode():
            optimizer.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.consolidate_state_dict()
            optimizer.load_state_dict(optimizer.state_dict())
    backward(model)
    optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_steps_as_outside(kind: str, mode: str) -> None:
    plain = trained(KINDS[kind], torch.no_grad)
    torch.testing.assert_close(trained(KINDS[kind], MODES[mode]), plain, rtol=0, atol=0)


def test_a_closure_runs_in_the_users_modes_with_gradients() -> None:
    model = nn.Linear(3, 2)
    optimizer = shoal.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)

    def closure() -> torch.Tensor:
        loss = model(torch.ones(4, 3)).mean()
        assert loss.dtype is torch.bfloat16
        loss.backward()
        return loss

    with torch.autocast("cpu", dtype=torch.bfloat16):
        optimizer.step(closure)
    assert model.weight.grad is not None


def test_a_model_made_in_inference_mode_is_refused() -> None:
    with torch.inference_mode():
        model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"parameter 0, of shape \(2, 3\), is untrainable"):
        shoal.ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.05)

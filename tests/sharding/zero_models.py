"""Models, data and comparisons that the checks of `ZeroRedundancyOptimizer` share."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Uneven sizes: one large matrix, small ones, vectors shorter than a cache line."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 300), nn.Tanh(), nn.Conv1d(1, 3, 3), nn.Linear(298, 5)).to(dtype)


def copies(count: int, dtype: torch.dtype = torch.float32) -> list[nn.Module]:
    """Equal models."""
    first = model(dtype)
    return [first, *(copy.deepcopy(first) for _ in range(count - 1))]


def batches(count: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Inputs, other ones on every rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(4, 1, 7, generator=generator).to(dtype) for _ in range(count)]


def loss_of(network: nn.Module, batch: Tensor) -> Tensor:
    """A loss with gradients for all parameters."""
    return network(batch).float().pow(2).mean()


def assert_same_on_all_ranks(tensors: Iterable[Tensor]) -> None:
    """Equal to the bit."""
    mine = torch.cat([tensor.detach().cpu().reshape(-1).double() for tensor in tensors])
    assert mine.isfinite().all()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    assert all(torch.equal(mine, other) for other in everyone)


def assert_equal(ours: Iterable[Tensor], theirs: Iterable[Tensor], message: Any = "") -> None:
    """Equal to the bit."""
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(one, other), f"{message} tensor {number}: {(one - other).abs().max()}"


def assert_states_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Two state dicts with equal groups and states, to the bit."""
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert ours["state"][number].keys() == state.keys()
        for name, value in state.items():
            mine = ours["state"][number][name]
            same = torch.equal(mine, value) if isinstance(value, Tensor) else mine == value
            assert same, f"{name} of {number}"

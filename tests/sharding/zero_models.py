"""Models, data and comparisons that the checks of `ZeroRedundancyOptimizer` share.

What is compared to the bit was computed by the same kernels, in one thread: forward and backward passes of tensors of
the same shapes that all begin at multiples of 64 bytes, sums of the ranks' gradients in the same order, and steps of
whole parameters or of slices that are cut at multiples of 64 bytes, where torch's kernels round every element alike
(`tests/flat/test_rounding.py`). Everything else is compared by `assert_near`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

SMOOTH: dict[str, Any] = {"lr": 0.01, "eps": 0.01}
"""Options of Adam and AdamW where parameters are compared by `assert_near`. With torch's eps of 1e-8 the first step of
an element is lr times the sign of its gradient, however small that is: where a gradient is 0 but for rounding, rounding
decides the sign. With these options a step is at most as far off as the gradient is (lr / eps = 1)."""

NEAR = 1e-5
"""How far parameters may be apart that are equal but for rounding. A sum of float32 in another order (of the gradients
of up to 4 ranks, or of the squares in a norm) is off by a few units in the last place, 2**-23 each, of values below 2;
a step takes that over at most as it is (see `SMOOTH`), and no check makes more than 8 steps: 8 * 4 * 2 * 2**-23."""


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
    """Equal to the bit, as each rank steps its share alone and the others get copies."""
    mine = torch.cat([tensor.detach().cpu().reshape(-1).double() for tensor in tensors])
    assert mine.isfinite().all()
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    assert all(torch.equal(mine, other) for other in everyone)


def assert_equal(ours: Iterable[Tensor], theirs: Iterable[Tensor], message: Any = "") -> None:
    """Equal to the bit: shares that were stepped by their owners, and whole parameters (see the top of this file)."""
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert torch.equal(one, other), f"{message} tensor {number}: {(one - other).abs().max()}"


def assert_near(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    """Equal but for the rounding of sums that were added up in another order."""
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=NEAR)


def assert_states_equal(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Two state dicts with equal groups and states, to the bit, as `assert_equal`."""
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in theirs["state"].items():
        assert ours["state"][number].keys() == state.keys()
        for name, value in state.items():
            mine = ours["state"][number][name]
            same = torch.equal(mine, value) if isinstance(value, Tensor) else mine == value
            assert same, f"{name} of {number}"

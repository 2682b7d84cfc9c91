"""Which of torch's kernels an optimizer steps with, and what its peers may rely on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shoal.flat import pick_kernels

SIZES = [7, 1000, 70_001, 300_017]  # in vectors and parts of vectors, of less and more than a thread is given


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def trained(optimizer_class: Any, dtype: torch.dtype, threads: int, options: dict[str, Any]) -> torch.Tensor:
    """The parameters after three steps made by so many threads; the gradients are always the same."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.randn(size, generator=generator, dtype=dtype, requires_grad=True) for size in SIZES]
    optimizer = optimizer_class(parameters, **options)
    for _ in range(3):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=dtype) ** 5
        torch.set_num_threads(threads)
        pick_kernels(optimizer)
        optimizer.step()
        torch.set_num_threads(1)
    assert optimizer.param_groups[0]["fused"] is True
    return torch.cat([parameter.detach() for parameter in parameters])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        (torch.optim.Adam, {"amsgrad": True, "weight_decay": 0.01}),
        (torch.optim.AdamW, {}),
        (torch.optim.Adagrad, {"lr_decay": 0.1}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_fused_steps_are_the_same_bits_with_any_number_of_threads(
    optimizer_class: Any, options: dict[str, Any], dtype: torch.dtype
) -> None:
    """Of one kernel on the same memory: it divides the work among threads at cache lines only."""
    alone = trained(optimizer_class, dtype, 1, options)
    for threads in range(2, 9):
        assert torch.equal(trained(optimizer_class, dtype, threads, options), alone), f"{threads} threads"

"""How torch's kernels round the elements of a tensor, which is what all comparisons of steps to the bit rest on.

A kernel takes the elements of a tensor a few vector registers at a time, and those that are left at the end one by one,
which may round differently. So the same element may come out different in a long tensor and in a short one. These
tests say where it does not, in one thread, on every processor (`make test-capabilities`): with float32 and float64,
unless the kernel is fused; and, for all dtypes and kernels, in a part that begins and ends at multiples of 64 bytes.
`ContiguousParams` relies on the first, the cuts of `ZeroRedundancyOptimizer` on the second.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, optim

from shoal import QHM
from shoal.flat import Span

NUMEL = 1024

LOOPS: list[tuple[Any, dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    (optim.Adam, {"weight_decay": 0.01}),
    (optim.AdamW, {"amsgrad": True}),
    (optim.Adamax, {}),
    (optim.NAdam, {}),
    (optim.RAdam, {}),
    (optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01}),
    (optim.Adadelta, {}),
    (optim.RMSprop, {"centered": True, "momentum": 0.5}),
    (optim.Rprop, {}),
    (optim.ASGD, {"t0": 2}),
]

FUSED: list[tuple[Any, dict[str, Any]]] = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "fused": True}),
    (optim.Adam, {"weight_decay": 0.01, "fused": True}),
    (optim.AdamW, {"amsgrad": True, "fused": True}),
    (optim.Adagrad, {"lr": 0.1, "weight_decay": 0.1, "fused": True}),
]


def named(value: Any) -> str:
    return getattr(value, "__name__", "") or (str(value) if isinstance(value, torch.dtype) else "")


def stepped(optimizer: Any, options: dict[str, Any], dtype: torch.dtype, part: Span) -> Tensor:
    """The elements `part` of a parameter after 4 steps of a parameter that consists of these alone.

    In float16 Adam's eps is 0, so some become NaN, which equals nothing: a number stands for it.
    """
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(5, NUMEL, generator=generator).to(dtype)
    parameter = torch.nn.Parameter(values[0][part.slice])
    made = optimizer([parameter], **options)
    for row in values[1:]:
        parameter.grad = row[part.slice]
        made.step()
    return parameter.detach().nan_to_num(nan=12345.0)


@pytest.mark.parametrize("foreach", [False, True], ids=["loop", "foreach"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=named)
@pytest.mark.parametrize(("optimizer", "options"), LOOPS, ids=named)
def test_an_element_is_the_same_bits_in_a_tensor_of_any_length(
    optimizer: Any, options: dict[str, Any], dtype: torch.dtype, foreach: bool
) -> None:
    options = {**options, "foreach": foreach}
    whole = stepped(optimizer, options, dtype, Span(0, NUMEL))
    for length in (*range(1, 36), 63, 65, 127, 129):
        assert torch.equal(stepped(optimizer, options, dtype, Span(0, length)), whole[:length]), f"{length} elements"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=named)
@pytest.mark.parametrize(
    ("optimizer", "options"), [*LOOPS, *FUSED, (QHM, {"lr": 0.1, "momentum": 0.9, "nu": 0.7})], ids=named
)
def test_an_element_is_the_same_bits_in_a_part_cut_at_64_bytes(
    optimizer: Any, options: dict[str, Any], dtype: torch.dtype
) -> None:
    whole = stepped(optimizer, options, dtype, Span(0, NUMEL))
    unit = 64 // dtype.itemsize
    for start in (0, 1, 2, 3):
        for units in (1, 2, 3, 4, 7):
            part = Span(start * unit, (start + units) * unit)
            assert torch.equal(stepped(optimizer, options, dtype, part), whole[part.slice]), part
        rest = Span(start * unit, NUMEL - 5)  # the end of a parameter is where it is
        other = stepped(optimizer, options, dtype, Span(0, NUMEL - 5))
        assert torch.equal(stepped(optimizer, options, dtype, rest), other[rest.slice]), rest

"""Against torch.optim: 100 steps with random options, bit for bit with the same kernel on the same shapes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shoal.functional import FunctionalOptimizer, State, functional_optim_map
from tests.functional.options import OPTIONS, WITH_FUSED, shapes

KERNELS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}
CASES = [
    pytest.param(optimizer, kernel, id=f"{optimizer.__name__}-{kernel}")
    for optimizer in OPTIONS
    for kernel in KERNELS
    if kernel != "fused" or optimizer in WITH_FUSED
]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]


def gradients(params: list[Tensor], step: int, missing: float) -> list[Tensor | None]:
    """Made from the parameters, so that a difference grows; some of them None, but never all in the first step."""
    chance = torch.rand(len(params))
    return [
        None if step and chance[row] < missing else torch.randn_like(param) + 0.1 * param
        for row, param in enumerate(params)
    ]


def run_both(
    reference: torch.optim.Optimizer, functional: FunctionalOptimizer, params: list[Tensor], missing: float, steps: int
) -> tuple[list[Tensor], State]:
    """Step torch's optimizer of `params` and the functional one of copies with the same gradients."""
    ours = [param.detach().clone() for param in params]
    state = functional.init(ours)
    for step in range(steps):
        grads = gradients([param.detach() for param in params], step, missing)
        for param, grad in zip(params, grads, strict=True):
            param.grad = None if grad is None else grad.clone()
        reference.step()
        functional.step(ours, grads, state)
    return ours, state


def assert_same(reference: torch.optim.Optimizer, params: list[Tensor], ours: list[Tensor], state: State) -> None:
    for row, param in enumerate(params):
        torch.testing.assert_close(ours[row], param.detach(), rtol=0, atol=0, equal_nan=True)
        for name, value in reference.state[param].items():
            if value is not None:
                torch.testing.assert_close(state[name][row], value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("optimizer", "kernel"), CASES)
@settings(max_examples=8)
@given(data=st.data(), seed=st.integers(0, 2**31), dtype=st.sampled_from(DTYPES), missing=st.sampled_from([0, 0.3]))
def test_the_same_kernel_gives_the_same_bits(optimizer: Any, kernel: str, data, seed, dtype, missing) -> None:
    options = {**data.draw(OPTIONS[optimizer]), **KERNELS[kernel]}
    if kernel == "fused" and optimizer is torch.optim.SGD and dtype is torch.bfloat16:
        dtype = torch.float32  # torch's own is wrong there, see test_kernels
    if kernel == "fused" and dtype.is_complex:
        dtype = torch.float32  # there is none
    torch.manual_seed(seed)
    params = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in data.draw(shapes)]
    reference = optimizer(params, **options)
    functional: FunctionalOptimizer = functional_optim_map[optimizer](**options)  # type: ignore[assignment]
    ours, state = run_both(reference, functional, params, missing, steps=100)
    assert_same(reference, params, ours, state)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("capturable", [False, True], ids=["", "capturable"])
@pytest.mark.parametrize(("optimizer", "kernel"), CASES)
def test_the_same_kernel_gives_the_same_bits_on_cuda(optimizer: Any, kernel: str, capturable: bool) -> None:
    options: dict[str, Any] = dict(KERNELS[kernel])
    if capturable:
        if optimizer in (torch.optim.SGD, torch.optim.Adagrad):
            pytest.skip("torch has no such option there")
        options["capturable"] = True
    torch.manual_seed(0)
    params = [torch.randn(shape, device="cuda", requires_grad=True) for shape in ((33,), (5, 7), (), (0,))]
    functional: FunctionalOptimizer = functional_optim_map[optimizer](**options)  # type: ignore[assignment]
    if kernel == "fused" and fused_kernel_is_missing(functional, params):
        pytest.skip("this torch has no fused kernel of it on CUDA")
    reference = optimizer(params, **options)
    ours, state = run_both(reference, functional, params, missing=0.2, steps=20)
    assert_same(reference, params, ours, state)


def fused_kernel_is_missing(functional: FunctionalOptimizer, params: list[Tensor]) -> bool:
    try:
        functional.kernel(params)
    except RuntimeError:
        return True
    return False

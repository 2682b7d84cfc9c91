"""What is not finite is found wherever it is."""

from __future__ import annotations

import math

import pytest
import torch

from shoal.flat import is_finite

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_element_is_found(dtype: torch.dtype, value: float) -> None:
    for at in (0, 517, 40_000):
        tensor = torch.zeros(40_001, dtype=dtype)
        tensor[at] = value
        assert not is_finite(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_overflows_only_when_summed_is_finite(dtype: torch.dtype) -> None:
    assert is_finite(torch.full((100, 100), torch.finfo(dtype).max, dtype=dtype).t()[::3])


def test_nothing_and_whole_numbers_are_finite() -> None:
    assert is_finite(torch.empty(0))
    assert is_finite(torch.empty(3, 0, dtype=torch.complex64))
    assert is_finite(torch.tensor(2**62))

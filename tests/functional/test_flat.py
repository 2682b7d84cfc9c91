"""One flat tensor in the place of many: the same numbers within the tolerance that `shoal.functional` states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.functional import FunctionalOptimizer, functional_optim_map
from tests.functional.options import OPTIONS

ROUNDED_DIFFERENTLY = {torch.optim.SGD: 10, torch.optim.Adam: 2, torch.optim.AdamW: 2}
"""Whose fused kernels round the ends of tensors differently from the rest, and by how much after 100 steps: in units of
the last place of the largest parameter that there was. Momentum carries each step's difference on, so with SGD they add
up like the steps of a random walk, of which 100 go as far as 10. All others round every element of float32 and float64
alike, wherever it is (`tests/flat/test_rounding.py`), and give the same bits."""


@pytest.mark.parametrize("optimizer", OPTIONS, ids=lambda optimizer: optimizer.__name__)
@settings(max_examples=8)
@given(
    data=st.data(),
    seed=st.integers(0, 2**31),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    sizes=st.lists(st.integers(1, 200), min_size=2, max_size=5),
)
def test_flat_memory_differs_by_no_more_than_rounding(optimizer: Any, data, seed, dtype, sizes) -> None:
    make: Any = functional_optim_map[optimizer]
    functional: FunctionalOptimizer = make(**data.draw(OPTIONS[optimizer]))
    torch.manual_seed(seed)
    flat = torch.randn(sum(sizes), dtype=dtype)
    params = [part.clone() for part in flat.split(sizes)]
    flat_state, state = functional.init([flat]), functional.init(params)
    largest = 0.0
    for _ in range(100):
        grad = torch.randn_like(flat)
        functional.step([flat], [grad.clone()], flat_state)
        functional.step(params, list(grad.split(sizes)), state)
        largest = max(largest, flat.abs().max().item())
    atol = ROUNDED_DIFFERENTLY.get(optimizer, 0) * torch.finfo(dtype).eps * largest
    torch.testing.assert_close(flat, torch.cat(params), rtol=0, atol=atol, equal_nan=True)

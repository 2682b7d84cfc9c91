"""Norms of flat gradients are those of the parameters' gradients, for every order: padding and missing gradients, which
are zeros in the flat gradient, do not count.

Compared to rounding, since the flat norm is summed in another order: some 70 numbers of float32 at 2**-23 each, which a
norm of order 0.5 doubles.
"""

from __future__ import annotations

import copy
import math
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn.utils import clip_grad_norm_, clip_grads_with_norm_, get_total_norm

from shoal.flat import ContiguousParams

# torch's own norm of order 0 of complex numbers says so.
pytestmark = pytest.mark.filterwarnings("ignore:Casting complex values to real discards the imaginary part:UserWarning")

ORDERS = [0.5, 1, 2, 3, math.inf, -math.inf, -1, -2.5, 0, "inf", "-inf"]
assert_close = partial(torch.testing.assert_close, rtol=1e-5, atol=1e-6)

SHAPES = [(3, 5), (), (7,), (2, 2, 3), (33,)]


def twins(dtypes: list[torch.dtype], missing: tuple[int, ...] = ()) -> tuple[list[Any], list[Any], ContiguousParams]:
    """Two equal lists of parameters with gradients, of which one is in flat memory. One gradient is zero, one has a
    zero."""
    torch.manual_seed(0)
    values = [
        (torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)) for dtype in dtypes for shape in SHAPES
    ]
    values[2][1].zero_()
    values[4][1][0] = 0
    flat, plain = ([nn.Parameter(value.clone()) for value, _ in values] for _ in range(2))
    parameters = ContiguousParams(flat)
    for items in (flat, plain):
        for index, (item, (_, gradient)) in enumerate(zip(items, values, strict=True)):
            item.grad = None if index in missing else gradient.clone()
    return flat, plain, parameters


def without_zeros(items: list[Any]) -> None:
    with torch.no_grad():
        for item in items:
            if item.grad is not None:
                item.grad[item.grad == 0] = 0.5


def assert_same_gradients(flat: list[Any], plain: list[Any]) -> None:
    for mine, theirs in zip(flat, plain, strict=True):
        assert (mine.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            assert_close(mine.grad, theirs.grad)


CASES = pytest.mark.parametrize(
    ("dtypes", "missing"),
    [
        ([torch.float32], ()),
        ([torch.float32], (1, 3)),
        ([torch.float32, torch.float64], (6,)),
        ([torch.complex64], (0,)),
        ([torch.float32], tuple(range(5))),
    ],
    ids=["all", "some missing", "two dtypes", "complex", "none"],
)


@CASES
@pytest.mark.parametrize("zeros", [True, False], ids=["zeros", "no zeros"])
@pytest.mark.parametrize("order", ORDERS)
def test_clipping_is_that_of_the_parameters(order: Any, zeros: bool, dtypes: Any, missing: Any) -> None:
    for foreach in (None, False, True):
        flat, plain, parameters = twins(dtypes, missing)
        if not zeros:
            without_zeros(flat)
            without_zeros(plain)
        ours = clip_grad_norm_(parameters.contiguous(), 0.1, order, foreach=foreach)
        theirs = clip_grad_norm_(plain, 0.1, order, foreach=foreach)
        assert type(ours) is Tensor
        assert_close(ours, theirs)
        assert_same_gradients(flat, plain)
        parameters.assert_buffer_is_valid()


@CASES
@pytest.mark.parametrize("order", ORDERS)
def test_the_two_halves_of_clipping(order: Any, dtypes: Any, missing: Any) -> None:
    flat, plain, parameters = twins(dtypes, missing)
    norms = [
        get_total_norm([p.grad for p in items if p.grad is not None], order)
        for items in (parameters.contiguous(), plain)
    ]
    assert_close(*norms)
    for items, norm in zip((parameters.contiguous(), plain), norms, strict=True):
        clip_grads_with_norm_(items, 0.1, norm)
    assert_same_gradients(flat, plain)


@pytest.mark.parametrize("order", [2, math.inf, -math.inf, -1])
def test_a_norm_that_is_not_finite_is_an_error_where_it_is_one(order: float) -> None:
    for value in (math.nan, math.inf):
        flat, plain, parameters = twins([torch.float32])
        without_zeros(flat)
        without_zeros(plain)
        said = []
        for items, given in ((flat, parameters.contiguous()), (plain, plain)):
            items[0].grad[0, 0] = value
            try:
                clip_grad_norm_(given, 0.1, order, error_if_nonfinite=True)
                said.append("")
            except RuntimeError as error:
                said.append(str(error))
        assert said[0] == said[1]
        assert_close([p.grad for p in flat], [p.grad for p in plain], equal_nan=True)


def test_runs_that_were_split_and_parameters_beside_them() -> None:
    flat, plain, parameters = twins([torch.float32], missing=(2,))
    optimizers = [optim.SGD(parameters.contiguous(), lr=0.1), optim.SGD(plain, lr=0.1)]
    for optimizer in optimizers:
        optimizer.step()
    extra = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    assert len(parameters.contiguous()) == 3
    for order in (0, -math.inf, -1, 2):
        for items in (flat, plain, extra[:1], extra[1:]):
            for index, item in enumerate(items):
                item.grad = torch.full_like(item, 0.25 + index)
        given = [optimizer.param_groups[0]["params"] for optimizer in optimizers]
        norms = [clip_grad_norm_([*items, beside], 0.1, order) for items, beside in zip(given, extra, strict=True)]
        assert_close(*norms)
        assert_same_gradients(flat, plain)


def test_a_norm_taken_by_hand() -> None:
    _, plain, parameters = twins([torch.float32], missing=(1,))
    (run,) = parameters.contiguous()
    whole = torch.cat([p.grad.flatten() for p in plain if p.grad is not None])
    for order in (0, 2, -1, -math.inf, math.inf):
        expected = torch.linalg.vector_norm(whole, order)
        for found in (
            run.grad.norm(order),
            run.grad.norm(p=order),
            torch.norm(run.grad, order),
            torch.linalg.norm(run.grad, ord=order),
            torch.linalg.vector_norm(run.grad, order),
        ):
            assert_close(found + 0, expected)
    assert_close(run.grad.norm(), whole.norm())
    assert torch.linalg.vector_norm(run.grad, -1, dim=0) == 0  # of the numbers that are there


def test_everything_else_about_the_flat_gradient_is_plain() -> None:
    _, _, parameters = twins([torch.float32])
    (run,) = parameters.contiguous()
    for made in (run.grad + 1, run.grad.clone(), run.grad[2:5], copy.deepcopy(run.grad), run.grad.detach()):
        assert type(made) is Tensor
    assert type(pickle.loads(pickle.dumps(run.grad))) is Tensor
    same = run.grad.mul_(2)
    assert same is run.grad
    assert torch.equal(pickle.loads(pickle.dumps(run.grad)), run.grad)
    assert str(run.grad).startswith("FlatGradient(")

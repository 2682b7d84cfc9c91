"""Norms of flat gradients are those of the parameters' gradients, for every order: padding and missing gradients, which
are zeros in the flat gradient, do not count.

Compared to rounding, since the flat norm is summed in another order: some 70 numbers of float32 at 2**-23 each, which a
norm of order 0.5 doubles.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
from functools import partial
from itertools import product
from typing import Any

import numpy as np
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


class Twins:
    """Two equal lists of parameters, of which one is in flat memory."""

    def __init__(self, dtypes: list[torch.dtype], missing: tuple[int, ...] = ()) -> None:
        torch.manual_seed(0)
        self._missing = missing
        self._gradients = [torch.randn(shape, dtype=dtype) for dtype in dtypes for shape in SHAPES]
        self.flat: list[Any]
        self.plain: list[Any]
        self.flat, self.plain = ([nn.Parameter(torch.ones_like(g)) for g in self._gradients] for _ in range(2))
        self.parameters = ContiguousParams(self.flat)

    def backward(self, zero: float = 0.0) -> None:
        """Sets equal gradients. One is zero (or another number), and one has a zero."""
        for items in (self.flat, self.plain):
            for index, (item, gradient) in enumerate(zip(items, self._gradients, strict=True)):
                item.grad = None if index in self._missing else gradient.clone()
            if 2 not in self._missing:
                items[2].grad.fill_(zero)
            if 4 not in self._missing:
                items[4].grad[0] = zero


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
def test_clipping_is_that_of_the_parameters(dtypes: Any, missing: Any) -> None:
    twins = Twins(dtypes, missing)
    for order, zero, foreach in product(ORDERS, (0.0, 0.5), (None, False, True)):
        twins.backward(zero)
        ours = clip_grad_norm_(twins.parameters.contiguous(), 0.1, order, foreach=foreach)
        theirs = clip_grad_norm_(twins.plain, 0.1, order, foreach=foreach)
        assert type(ours) is Tensor
        assert_close(ours, theirs)
        assert_same_gradients(twins.flat, twins.plain)
    twins.parameters.assert_buffer_is_valid()


@CASES
def test_the_two_halves_of_clipping(dtypes: Any, missing: Any) -> None:
    twins = Twins(dtypes, missing)
    given = (twins.parameters.contiguous(), twins.plain)
    for order in ORDERS:
        twins.backward()
        norms = [get_total_norm([p.grad for p in items if p.grad is not None], order) for items in given]
        assert_close(*norms)
        for items, norm in zip(given, norms, strict=True):
            clip_grads_with_norm_(items, 0.1, norm)
        assert_same_gradients(twins.flat, twins.plain)


def test_a_norm_that_is_not_finite_is_an_error_where_it_is_one() -> None:
    twins = Twins([torch.float32])
    for order, value in product((2, math.inf, -math.inf, -1), (math.nan, math.inf)):
        twins.backward(0.5)
        said = []
        for items, given in ((twins.flat, twins.parameters.contiguous()), (twins.plain, twins.plain)):
            items[0].grad[0, 0] = value
            try:
                clip_grad_norm_(given, 0.1, order, error_if_nonfinite=True)
                said.append("")
            except RuntimeError as error:
                said.append(str(error))
        assert said[0] == said[1]
        assert_close([p.grad for p in twins.flat], [p.grad for p in twins.plain], equal_nan=True)


def test_runs_that_were_split_and_parameters_beside_them() -> None:
    twins = Twins([torch.float32], missing=(2,))
    flat, plain, parameters = twins.flat, twins.plain, twins.parameters
    twins.backward()
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
    twins = Twins([torch.float32], missing=(1,))
    twins.backward()
    (run,) = twins.parameters.contiguous()
    whole = torch.cat([p.grad.flatten() for p in twins.plain if p.grad is not None])
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


ALIASES: list[Any] = [Tensor.detach, lambda gradient: gradient.data, lambda gradient: gradient.detach().data]


@pytest.mark.parametrize("alias", ALIASES, ids=["detach", "data", "both"])
@pytest.mark.parametrize("order", [-math.inf, -2, -1, -0.5, 0, 2, np.float32(-1), np.int64(0)], ids=repr)
def test_norms_without_the_graph(alias: Any, order: Any) -> None:
    """As torch 1.x's clipping and that of Lightning take them."""
    twins = Twins([torch.float32, torch.float64], missing=(1,))
    twins.backward(0.5)
    norms = []
    for items in (twins.parameters.contiguous(), twins.plain):
        gradients = [alias(p.grad) for p in items if p.grad is not None]
        for convert in (Tensor.double, lambda norm: norm.cpu().detach().to(torch.float64)):
            each = [convert(torch.norm(gradient, float(order))) for gradient in gradients]
            norms.append(torch.norm(torch.stack(tensors=each), float(order)))
        norms.append(torch.linalg.vector_norm(alias(items[0].grad), order))
    if order != 0:
        whole = [p.grad.flatten() for p in twins.plain[: len(SHAPES)] if p.grad is not None]
        norms[-1] = torch.linalg.vector_norm(torch.cat(whole), order)
        assert_close(norms[:3], norms[3:])
    assert_close(norms[:2], norms[3:5])
    assert torch.equal(alias(twins.parameters.contiguous()[0].grad), twins.parameters.contiguous()[0].grad)


@pytest.mark.parametrize("order", [-math.inf, -1, 0, 2])
def test_arguments_by_name(order: float) -> None:
    twins = Twins([torch.float32], missing=(1,))
    twins.backward(0.5)
    (run,) = twins.parameters.contiguous()
    expected = torch.linalg.vector_norm(torch.cat([p.grad.flatten() for p in twins.plain if p.grad is not None]), order)
    out = torch.empty(())
    for found in (
        torch.linalg.vector_norm(x=run.grad, ord=order),
        torch.linalg.norm(input=run.grad, ord=order),
        torch.norm(input=run.grad, p=order),
        torch.linalg.vector_norm(run.grad, order, None),
        torch.linalg.vector_norm(x=run.grad.detach(), ord=float(order)),
        torch._foreach_norm([run.grad], ord=order)[0],
        torch.linalg.vector_norm(run.grad, torch.tensor(order)),
        torch.linalg.vector_norm(run.grad, order, out=out),
        torch.linalg.norm(run.grad, order, out=out),
        torch.linalg.vector_norm(run.grad, order, dtype=torch.float64).float(),
        torch.linalg.vector_norm(run.grad, order, keepdim=True).squeeze(),
    ):
        assert_close(found + 0, expected)
    assert_close(out, expected)
    assert_close(torch.linalg.vector_norm(x=run.grad), torch.linalg.norm(input=run.grad))


def test_copies_of_a_count_are_plain() -> None:
    twins = Twins([torch.float32])
    twins.backward()
    (run,) = twins.parameters.contiguous()
    count = run.grad.norm(0)
    saved = io.BytesIO()
    torch.save(count, saved)
    saved.seek(0)
    for made in (copy.deepcopy(count), pickle.loads(pickle.dumps(count)), torch.load(saved, weights_only=True)):
        assert type(made) is Tensor
        assert made == count


def test_everything_else_about_the_flat_gradient_is_plain() -> None:
    twins = Twins([torch.float32])
    twins.backward()
    (run,) = twins.parameters.contiguous()
    for made in (run.grad + 1, run.grad.clone(), run.grad[2:5], copy.deepcopy(run.grad)):
        assert type(made) is Tensor
    assert type(pickle.loads(pickle.dumps(run.grad))) is Tensor
    same = run.grad.mul_(2)
    assert same is run.grad
    assert torch.equal(pickle.loads(pickle.dumps(run.grad)), run.grad)
    assert str(run.grad).startswith("FlatGradient(")

"""Checks of `reduce_scatter=True`: gradients that go to their owners only."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import shoal
from shoal.sharding import Join, hook_with_zero_step, hook_with_zero_step_interleaved
from tests.sharding.zero_models import (
    SMOOTH,
    assert_equal,
    assert_near,
    assert_same_on_all_ranks,
    batches,
    copies,
    loss_of,
)


def assert_as_with_ddp(ours: nn.Module, plain: nn.Module) -> None:
    """Parameters stepped with the gradients that were reduced here, and with DDP's, neither clipped.

    Equal to the bit on 1 and 2 ranks, as a sum of two has one order; from 3 ranks on sums are in another order.
    """
    compare = assert_equal if dist.get_world_size() <= 2 else assert_near
    compare(ours.parameters(), plain.parameters())


def check_parity_with_ddp() -> None:
    for optimizer_class, options in (
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        (torch.optim.AdamW, {**SMOOTH, "fused": True}),
        (torch.optim.Adafactor, {}),
    ):
        for flat in (False, True):
            ours, plain = copies(2)
            for network in (ours, plain):
                network[0].unused = nn.Linear(3, 3)  # gets no gradient on any rank: weight decay must not touch it
            if dist.get_rank() == 1:
                nn.init.zeros_(ours[0].weight)  # rank 0's parameters are given to all
            zero: Any = shoal.ZeroRedundancyOptimizer(
                ours.parameters(), optimizer_class, reduce_scatter=True, parameters_as_bucket_view=flat, **options
            )
            wrapped = DDP(plain, find_unused_parameters=True)
            optimizer = optimizer_class(wrapped.parameters(), **options)  # type: ignore[operator]
            for batch in batches(4):
                for network, model, stepped in ((ours, zero, zero), (wrapped, wrapped, optimizer)):
                    stepped.zero_grad()
                    with model.no_sync():
                        loss_of(network, batch).backward()
                    loss_of(network, batch * 2).backward()
                    stepped.step()
                assert all(param.grad is None for param in ours.parameters())
            plain[0].unused.load_state_dict(ours[0].unused.state_dict())
            assert_as_with_ddp(ours, plain)
            assert_same_on_all_ranks(ours.parameters())


def check_clipping() -> None:
    ours, plain = copies(2)
    zero: Any = shoal.ZeroRedundancyOptimizer(ours.parameters(), torch.optim.SGD, reduce_scatter=True, lr=0.1)
    wrapped = DDP(plain)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for batch in batches(3):
        for norm_type in (2.0, float("inf")):
            loss_of(ours, batch).backward()
            loss_of(wrapped, batch).backward()
            norm = zero.clip_grad_norm_(0.05, norm_type)
            reference = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05, norm_type)
            torch.testing.assert_close(norm, reference)
            zero.step()
            optimizer.step()
            zero.zero_grad()
            optimizer.zero_grad()
    assert_near(ours.parameters(), plain.parameters())  # the norm is added up from the shares, not from the parameters
    assert_same_on_all_ranks(ours.parameters())


ORDERS = (0.5, 1.0, 2.0, 3.0, math.inf, -math.inf, -1.0, 0.0)


def check_norms_of_all_orders_and_of_complex_gradients() -> None:
    """Also where a rank has no share, where a gradient is missing, and where one is zero."""
    for dtype, partition, reduce_scatter in product(
        (torch.float32, torch.complex64), ("auto", "parameters"), (True, False)
    ):
        torch.manual_seed(0)
        shapes = [(5, 40), (), (7,), (3,), (9,)]
        values = [torch.randn(shape, dtype=dtype) for shape in shapes]
        ours, plain = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
        options: Any = {"partition": partition, "reduce_scatter": reduce_scatter, "lr": 0.1, "momentum": 0.9}
        zero: Any = shoal.ZeroRedundancyOptimizer(ours, torch.optim.SGD, **options)
        optimizer = torch.optim.SGD(plain, lr=0.1, momentum=0.9)
        for order in ORDERS:
            for parameters in (ours, plain):
                for one, value in zip(parameters[:4], values, strict=False):
                    one.grad = value.clone() if one.numel() != 3 or order == 0 else value + 1
                parameters[1].grad = torch.zeros((), dtype=dtype) if order >= 0 else torch.ones((), dtype=dtype)
            norm = zero.clip_grad_norm_(0.05, order)
            reference = nn.utils.clip_grad_norm_(plain, 0.05, order)
            torch.testing.assert_close(norm, reference, msg=f"{dtype} {order}: {norm} and {reference}")
            zero.step()
            optimizer.step()
            zero.zero_grad()
        assert_near(map(real, ours), map(real, plain))
        assert_same_on_all_ranks(map(real, ours))


def real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def check_a_norm_that_is_not_finite_leaves_the_gradients() -> None:
    for reduce_scatter in (True, False):
        weight = nn.Parameter(torch.ones(9))
        zero: Any = shoal.ZeroRedundancyOptimizer([weight], torch.optim.SGD, reduce_scatter=reduce_scatter, lr=0.5)
        weight.grad = torch.ones(9)
        weight.grad[4] = math.inf
        for order in (2.0, math.inf):
            with pytest.raises(RuntimeError, match=f"the norm of order {order} of the gradients is inf"):
                zero.clip_grad_norm_(1.0, order, error_if_nonfinite=True)
        zero.step()
        assert weight.tolist() == [0.5] * 4 + [-math.inf] + [0.5] * 4


def check_sparse_gradients() -> None:
    """As torch steps them, SparseAdam too; where they would be dense, it is refused before anything is sent."""
    for optimizer_class, partition, reduce_scatter, flat in product(
        (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam),
        ("auto", "elements"),
        (False, True),
        (False, True),
    ):
        torch.manual_seed(0)
        ours, plain = nn.Embedding(9, 3, sparse=True), nn.Embedding(9, 3, sparse=True)
        plain.load_state_dict(ours.state_dict())
        options: Any = {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {}
        options |= {"lr": 0.1}
        mine: Any = {"partition": partition, "reduce_scatter": reduce_scatter, "parameters_as_bucket_view": flat}
        if optimizer_class is torch.optim.SparseAdam and (reduce_scatter or partition == "elements"):
            with pytest.raises(TypeError, match="SparseAdam steps only the rows of sparse gradients"):
                shoal.ZeroRedundancyOptimizer(ours.parameters(), optimizer_class, **mine, **options)
            continue
        zero: Any = shoal.ZeroRedundancyOptimizer(ours.parameters(), optimizer_class, **mine, **options)
        optimizer = optimizer_class(plain.parameters(), **options)
        for rows in ([1, 4, 4], [0, 4, 8], [2, 2, 2]):
            for table, stepped in ((ours, zero), (plain, optimizer)):
                stepped.zero_grad()
                table(torch.tensor(rows)).square().sum().backward()
                stepped.step()
        assert_near(ours.parameters(), plain.parameters())


def check_clipping_in_double_precision() -> None:
    ours, plain = copies(2, torch.float64)
    (
        ours[3].float(),
        plain[3].float(),
    )  # of two dtypes the norm is of the wider one, also where a rank has no share of it
    zero: Any = shoal.ZeroRedundancyOptimizer(ours.parameters(), torch.optim.SGD, reduce_scatter=True, lr=0.1)
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        gradient = torch.randn(one.shape, generator=torch.Generator().manual_seed(one.numel())).to(one.dtype) * (
            1 + 1e-9
        )
        one.grad, other.grad = gradient.clone(), gradient
    norm = zero.clip_grad_norm_(1.0)
    reference = torch.nn.utils.clip_grad_norm_(list(plain.parameters())[:4], 1e30) ** 2
    reference = reference + torch.nn.utils.clip_grad_norm_(list(plain.parameters())[4:], 1e30).double() ** 2
    assert norm.dtype == torch.float64
    torch.testing.assert_close(norm, reference.sqrt(), rtol=1e-6, atol=0)
    everyone = [torch.empty_like(norm) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, norm)
    assert all(torch.equal(norm, other) for other in everyone)

    alone = copies(1, torch.float64)[0]
    zero = shoal.ZeroRedundancyOptimizer(alone.parameters(), torch.optim.SGD, reduce_scatter=True, lr=0.1)
    before = [param.detach().clone() for param in alone.parameters()]
    gradients = [torch.full_like(param, 1.0 / 3.0) for param in alone.parameters()]
    for param, gradient in zip(alone.parameters(), gradients, strict=True):
        param.grad = gradient.clone()
    norm = zero.clip_grad_norm_(0.5)
    zero.step()
    exact = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    torch.testing.assert_close(norm, exact, rtol=1e-12, atol=0)
    for param, old, gradient in zip(alone.parameters(), before, gradients, strict=True):
        torch.testing.assert_close(
            param.detach(), old - 0.1 * gradient * (0.5 / (exact + 1e-6)), rtol=1e-12, atol=1e-15
        )


def check_gradients_set_by_hand_and_dropped_ones() -> None:
    ours, plain = copies(2)
    zero: Any = shoal.ZeroRedundancyOptimizer(ours.parameters(), torch.optim.SGD, reduce_scatter=True, lr=0.1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    loss_of(ours, batches(1)[0]).backward()
    zero.zero_grad()
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        one.grad, other.grad = torch.ones_like(one), torch.ones_like(other)
    zero.step()
    optimizer.step()
    assert_near(ours.parameters(), plain.parameters())


def check_uneven_inputs_in_join() -> None:
    """The mean over initial and over live ranks, clipping and the scheduler of the live ranks, in Shoal's Join."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for by_initial in (True, False):
        ours, plain = copies(2)
        zero: Any = shoal.ZeroRedundancyOptimizer(
            ours.parameters(), torch.optim.SGD, reduce_scatter=True, lr=0.1, momentum=0.9
        )
        optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        data = [torch.full((2, 1, 7), float(r + 1) / 4) for r in range(ranks)]
        with Join([zero], divide_by_initial_world_size=by_initial):
            for _ in range(rank + 1):
                zero.zero_grad()
                loss_of(ours, data[rank]).backward()
                zero.clip_grad_norm_(0.5)
                zero.step()
                zero.param_groups[0]["lr"] *= 0.5
        # The same on one process: after step s, ranks below s have joined.
        for step in range(ranks):
            optimizer.zero_grad()
            count = ranks if by_initial else ranks - step
            for live in range(step, ranks):
                (loss_of(plain, data[live]) / count).backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.5
        assert_near(ours.parameters(), plain.parameters())
        assert_same_on_all_ranks(ours.parameters())


def check_join_of_ddp_and_zero() -> None:
    """A joined rank steps its share with the gradients and the learning rate of the live ones, in both Joins."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for join in (Join, torch.distributed.algorithms.Join):
        ours, plain = copies(2)
        model, reference = DDP(ours), DDP(plain)
        zero: Any = shoal.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
        optimizer = torch.optim.Adam(reference.parameters(), lr=0.1)
        inputs = batches(ranks + 2 - rank)  # the last rank joins first
        with join([model, zero]):
            for batch in inputs:
                zero.param_groups[0]["lr"] *= 0.5
                zero.zero_grad()
                loss_of(model, batch).backward()
                zero.step()
        with torch.distributed.algorithms.Join([reference]):
            for batch in inputs:
                optimizer.param_groups[0]["lr"] *= 0.5
                optimizer.zero_grad()
                loss_of(reference, batch).backward()
                optimizer.step()
        if rank == 0:
            assert_equal(ours.parameters(), plain.parameters(), join.__module__)
        assert_same_on_all_ranks(ours.parameters())


def check_join_of_ddp_that_steps_in_backward() -> None:
    """Joined ranks step with the gradients and the learning rate of the live ones; `step` may be called, or not."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    hooks, joins = (hook_with_zero_step, hook_with_zero_step_interleaved), (Join, torch.distributed.algorithms.Join)
    cases: list[tuple[Any, Any, bool]] = list(product(hooks, joins, (False, True)))
    for number, (make, join, static) in enumerate(cases):
        ours, plain = copies(2)
        model, reference = (DDP(network, bucket_cap_mb=0.002, static_graph=static) for network in (ours, plain))
        zero: Any = shoal.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, overlap_with_ddp=True, lr=0.1)
        model.register_comm_hook(None, make(allreduce_hook, model, zero))  # type: ignore[arg-type]
        reference.register_comm_hook(None, allreduce_hook)
        optimizer = torch.optim.Adam(reference.parameters(), lr=0.1)
        inputs = batches(ranks + 2 - rank)  # the last rank joins first
        with join([model, zero] if number % 3 else [model]):
            for batch in inputs:
                zero.param_groups[0]["lr"] *= 0.5
                zero.zero_grad()
                loss_of(model, batch).backward()
                if number % 2:
                    zero.step()
        with torch.distributed.algorithms.Join([reference]):
            for batch in inputs:
                optimizer.param_groups[0]["lr"] *= 0.5
                optimizer.zero_grad()
                loss_of(reference, batch).backward()
                optimizer.step()
        if rank == 0:
            assert_equal(ours.parameters(), plain.parameters(), (make.__name__, join.__module__, static))
        assert_same_on_all_ranks(ours.parameters())


def check_gradient_memory_is_one_share() -> None:
    ranks = dist.get_world_size()
    network = nn.Sequential(*(nn.Linear(300, 300) for _ in range(20)))
    zero: Any = shoal.ZeroRedundancyOptimizer(network.parameters(), torch.optim.SGD, reduce_scatter=True)
    network(torch.randn(2, 300)).sum().backward()
    gradients, _ = zero.gradient_source.reduction.take()
    held = {
        gradient.untyped_storage().data_ptr(): gradient.untyped_storage().nbytes() for gradient in gradients.values()
    }
    whole = sum(param.nbytes for param in network.parameters())
    assert sum(held.values()) <= whole / ranks + 300 * 300 * 4  # what is cut is a copy
    assert all(param.grad is None for param in network.parameters())
    zero.step()

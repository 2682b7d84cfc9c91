"""Checks of `reduce_scatter=True`: gradients that go to their owners only."""

from __future__ import annotations

from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import shoal
from shoal.sharding import Join, hook_with_zero_step, hook_with_zero_step_interleaved
from tests.sharding.zero_models import assert_equal, assert_same_on_all_ranks, batches, copies, loss_of


def close(ours: nn.Module, plain: nn.Module) -> None:
    """To the bit on 2 ranks; from 3 ranks on sums are in another order."""
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        if dist.get_world_size() <= 2:
            assert torch.equal(one, other)
        else:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def check_parity_with_ddp() -> None:
    for optimizer_class, options in (
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
        (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
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
            close(ours, plain)
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
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)
    assert_same_on_all_ranks(ours.parameters())


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
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other)


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
        for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(one, other)
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
    gradients, _ = zero._gradients.reduction.take()
    held = {
        gradient.untyped_storage().data_ptr(): gradient.untyped_storage().nbytes() for gradient in gradients.values()
    }
    whole = sum(param.nbytes for param in network.parameters())
    assert sum(held.values()) <= whole / ranks + 300 * 300 * 4  # what is cut is a copy
    assert all(param.grad is None for param in network.parameters())
    zero.step()

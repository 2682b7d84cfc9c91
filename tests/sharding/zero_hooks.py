"""Checks of who takes gradients with `reduce_scatter=True`, and of how few hooks that takes."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import shoal
from shoal.sharding import arrivals, partition
from tests.sharding.zero_models import assert_near, assert_same_on_all_ranks, batches, copies, loss_of

Zero: Any = shoal.ZeroRedundancyOptimizer


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def hooks_called() -> Iterator[list[int]]:
    """The parameters whose hooks are called."""
    called: list[int] = []
    original = arrivals._called

    def counting(tell: Any, number: int, param: Tensor) -> None:
        called.append(number)
        original(tell, number, param)

    with mock.patch.object(arrivals, "_called", counting):
        yield called


def mean_gradients(network: nn.Module, batch: Tensor) -> None:
    """The plain optimizer's gradients: of this rank's loss, then the mean over ranks."""
    loss_of(network, batch).backward()
    for param in network.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def check_a_second_optimizer_of_a_model_trains() -> None:
    """The newest has the gradients, whether the first is garbage or still in use."""
    with no_garbage_collection():
        for kept in (False, True):
            ours, plain = copies(2)
            first = Zero(ours.parameters(), torch.optim.SGD, reduce_scatter=True, lr=0.5)
            loss_of(ours, batches(1)[0]).backward()  # on its way when the optimizer goes
            if not kept:
                del first
            second = Zero(ours.parameters(), torch.optim.SGD, reduce_scatter=True, lr=0.1)
            optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
            for batch in batches(3):
                second.zero_grad()
                loss_of(ours, batch).backward()
                second.step()
                optimizer.zero_grad()
                mean_gradients(plain, batch)
                optimizer.step()
                assert_near(ours.parameters(), plain.parameters())
                assert_same_on_all_ranks(ours.parameters())
            if kept:
                for use in (first.step, lambda first=first: first.clip_grad_norm_(1.0)):
                    with pytest.raises(
                        RuntimeError, match=r"a newer ZeroRedundancyOptimizer has taken over parameter 0, "
                    ):
                        use()


def check_other_optimizers_after_it_find_their_gradients() -> None:
    """Its hooks go with it, or with the next `ZeroRedundancyOptimizer` of one of its parameters."""
    with no_garbage_collection():
        (ours,) = copies(1)
        first = Zero(ours.parameters(), torch.optim.SGD, reduce_scatter=True)
        gone = weakref.ref(first)
        del first
        assert gone() is None
        with hooks_called() as called:
            loss_of(ours, batches(1)[0]).backward()
        assert not called
        assert all(param.grad is not None for param in ours.parameters())
        kept = Zero(ours.parameters(), torch.optim.SGD, reduce_scatter=True)
        head = Zero(ours[3].parameters(), torch.optim.SGD)
        ours.zero_grad()
        loss_of(ours, batches(1)[0]).backward()
        assert all(param.grad is not None for param in ours.parameters())
        head.step()
        with pytest.raises(RuntimeError, match=r"taken over parameter 4, of shape \(5, 298\)"):
            kept.step()


class Branches(nn.Module):
    """A trunk and two heads, of which a pass uses one or both, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, batch: Tensor, heads: str) -> Tensor:
        hidden = self.trunk(batch).tanh() if "t" in heads else batch
        return torch.stack([getattr(self, {"l": "left", "r": "right"}[one])(hidden) for one in heads if one != "t"])


def check_one_hook_for_each_bucket() -> None:
    network = nn.Sequential(*(nn.Linear(20, 20) for _ in range(10)))
    with hooks_called() as called:
        with mock.patch.object(partition, "BUCKET_BYTES", 5100):
            zero = Zero(network.parameters(), torch.optim.SGD, reduce_scatter=True, lr=0.1)
        buckets = len(zero.sharded_step.parameters.buckets)
        assert buckets == 4
        counts = []
        for _ in range(4):
            with zero.no_sync():
                network(torch.randn(3, 20)).sum().backward()
            network(torch.randn(3, 20)).sum().backward()
            counts.append(len(called))
            called.clear()
            zero.step()
            zero.zero_grad()
    assert counts[0] == 40
    assert counts[1:] == [2 * buckets] * 3


def check_gradients_that_come_in_another_order_or_not_at_all() -> None:
    torch.manual_seed(0)
    ours, plain = Branches(), Branches()
    plain.load_state_dict(ours.state_dict())
    with mock.patch.object(partition, "BUCKET_BYTES", 150):
        zero = Zero(ours.parameters(), torch.optim.SGD, reduce_scatter=True, lr=0.1, momentum=0.5)
    for param, other in zip(ours.parameters(), plain.parameters(), strict=True):
        other.data.copy_(param.data)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.5)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # By step: what the passes use; "/" separates passes that are reduced, "+" those that are summed up in no_sync.
    plans = [
        "tlr",
        "tlr",
        "trl",
        "tl",
        "tl",
        "tr",
        "l",
        "r",
        "tlr+trl",
        "tlr+l",
        "l+tr",
        "tlr/trl",
        "r/tl/l",
        "tlr",
        "lr",
    ]
    for number, plan in enumerate([*plans, *reversed(plans)]):
        data = [torch.randn(2, 6, generator=torch.Generator().manual_seed(100 * number + r)) for r in range(ranks)]
        zero.zero_grad()
        for reduced in plan.split("/"):
            *summed, last = reduced.split("+")
            with zero.no_sync():
                for heads in summed:
                    ours(data[rank], heads).pow(2).sum().backward()
            ours(data[rank], last).pow(2).sum().backward()
        zero.step()
        optimizer.zero_grad()
        for batch in data:
            for heads in plan.replace("/", "+").split("+"):
                (plain(batch, heads).pow(2).sum() / ranks).backward()
        optimizer.step()
        assert_near(ours.parameters(), plain.parameters())
        assert_same_on_all_ranks(ours.parameters())


def check_ranks_that_use_other_parameters() -> None:
    """Each rank another head, and a pass of the one has no parameter in common with a pass of the other."""
    torch.manual_seed(0)
    ours, plain = Branches(), Branches()
    plain.load_state_dict(ours.state_dict())
    zero = Zero(ours.parameters(), torch.optim.SGD, reduce_scatter=True, lr=0.1)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    for step in range(6):
        data = [torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(ranks)]
        zero.zero_grad()
        for turn in range(2):
            ours(data[rank], "lr"[(rank + step + turn) % 2]).pow(2).sum().backward()
        zero.step()
        optimizer.zero_grad()
        for batch in data:
            for heads in "lr":
                (plain(batch, heads).pow(2).sum() / ranks).backward()
        optimizer.step()
        assert_near(ours.parameters(), plain.parameters())
        assert_same_on_all_ranks(ours.parameters())


def check_a_gradient_that_comes_too_late_is_named() -> None:
    network = Branches()
    zero = Zero(network.parameters(), torch.optim.SGD, reduce_scatter=True, lr=0.1)
    network(torch.ones(2, 6), "tlr").sum().backward()
    network.left.bias.grad = torch.ones(3)
    with pytest.raises(RuntimeError, match=r"parameter 3, of shape \(3,\), has a gradient that came when"):
        zero.step()


def check_optimizers_side_by_side_reduce_in_one_backward_pass() -> None:
    """Each in a thread of its own: their messages do not mix."""
    ours, plain = copies(2)
    halves = [list(network.parameters()) for network in (ours, plain)]
    cut = len(halves[0]) // 2
    sharded = [Zero(part, torch.optim.SGD, reduce_scatter=True, lr=0.1) for part in (halves[0][:cut], halves[0][cut:])]
    optimizer = torch.optim.SGD(halves[1], lr=0.1)
    for batch in batches(6):
        for one in sharded:
            one.zero_grad()
        loss_of(ours, batch).backward()
        for one in sharded:
            one.step()
        optimizer.zero_grad()
        mean_gradients(plain, batch)
        optimizer.step()
        assert_near(ours.parameters(), plain.parameters())
        assert_same_on_all_ranks(ours.parameters())


class Raises(torch.autograd.Function):
    """Does nothing, and raises in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Returns a copy."""
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        """Raises."""
        raise ArithmeticError("in the middle")


def check_a_backward_pass_that_raised_is_tried_again() -> None:
    """It raised on all ranks: dropped gradients count for nothing, and nothing steps twice."""
    with mock.patch.object(partition, "BUCKET_BYTES", 256):
        torch.manual_seed(0)
        ours = nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)))
        plain = copy.deepcopy(ours)
        zero = Zero(ours.parameters(), torch.optim.Adam, reduce_scatter=True, lr=0.1)
        optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
        for step in range(4):
            x = torch.full((3, 6), 1.0 + step + dist.get_rank())
            if step != 1:
                middle = ours[:3](x)
                with pytest.raises(ArithmeticError):
                    ours[3:](Raises.apply(middle)).square().mean().backward()
            zero.zero_grad()
            ours(x).square().mean().backward()
            zero.step()
            optimizer.zero_grad()
            plain(x).square().mean().backward()
            for param in plain.parameters():
                assert param.grad is not None
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
            optimizer.step()
            assert_near(ours.parameters(), plain.parameters())
            assert_same_on_all_ranks(ours.parameters())


def check_names_that_code_around_torchs_optimizer_reads() -> None:
    """torch's test of Join with ZeRO reads the one, its `hook_with_zero_step` the other."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    first, second = (list(layer.parameters()) for layer in model)
    zero = Zero(first, torch.optim.SGD, lr=0.1, overlap_with_ddp=True)
    zero.add_param_group({"params": second})
    assert all(ours is param for ours, param in zip(zero._all_params, [*first, *second], strict=True))
    assert zero._overlap_with_ddp

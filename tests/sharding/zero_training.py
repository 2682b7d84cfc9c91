"""Checks of `reduce_scatter=True`: what DDP does beside reducing gradients, and what users do around a step."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import shoal
from shoal.sharding import GradScaler, Join, partition
from tests.sharding.zero_models import (
    SMOOTH,
    assert_equal,
    assert_near,
    assert_same_on_all_ranks,
    batches,
    copies,
    loss_of,
)
from tests.sharding.zero_reduction import assert_as_with_ddp
from tests.writes import WRITES


def check_loss_scaling() -> None:
    """An infinity on one rank skips the step on all, and halves the scale, as with DDP; explicitly unscaled or not.

    Scales are powers of two, so scaling and unscaling round nothing. Clipping does: the norm is added up from shares
    here, and from whole parameters there.
    """
    ours, plain = copies(2)
    zero: Any = shoal.ZeroRedundancyOptimizer(ours.parameters(), torch.optim.Adam, reduce_scatter=True, **SMOOTH)
    wrapped = DDP(plain)
    optimizer = torch.optim.Adam(wrapped.parameters(), **SMOOTH)
    scalers: list[Any] = [
        kind("cpu", init_scale=1024.0, growth_interval=2) for kind in (GradScaler, torch.amp.GradScaler)
    ]
    for number, batch in enumerate(batches(7)):
        skipped = number in (1, 4)
        if skipped and dist.get_rank() == dist.get_world_size() - 1:
            batch[0, 0, 0] = torch.inf
        before = [param.detach().clone() for param in ours.parameters()]
        for network, stepped, scaler, clip in (
            (ours, zero, scalers[0], zero.clip_grad_norm_),
            (wrapped, optimizer, scalers[1], lambda bound: nn.utils.clip_grad_norm_(plain.parameters(), bound)),
        ):
            stepped.zero_grad()
            scaler.scale(loss_of(network, batch)).backward()
            if number % 2:
                scaler.unscale_(stepped)
            if number == 3:
                clip(0.05)
            scaler.step(stepped)
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert all(map(torch.equal, before, ours.parameters())) == skipped
        if number < 3:
            assert_as_with_ddp(ours, plain)
        else:
            assert_near(ours.parameters(), plain.parameters())
        assert_same_on_all_ranks(ours.parameters())


def check_loss_scaling_in_join() -> None:
    """Ranks that have joined unscale, and skip, with the others."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    ours, plain = copies(2)
    zero: Any = shoal.ZeroRedundancyOptimizer(ours.parameters(), torch.optim.Adam, reduce_scatter=True, **SMOOTH)
    optimizer = torch.optim.Adam(plain.parameters(), **SMOOTH)
    data = [torch.full((2, 1, 7), float(r + 1) / 4) for r in range(ranks)]
    scaler = GradScaler("cpu", init_scale=1024.0)
    with Join([zero]):
        for step in range(rank + 1):
            zero.zero_grad()
            factor = torch.inf if step == 1 and rank == ranks - 1 else 1.0
            scaler.scale(loss_of(ours, data[rank]) * factor).backward()
            scaler.step(zero)
            scaler.update()
    for step in range(ranks):
        if step != 1:
            optimizer.zero_grad()
            for live in range(step, ranks):
                (loss_of(plain, data[live]) / ranks).backward()
            optimizer.step()
    assert_near(ours.parameters(), plain.parameters())
    assert_same_on_all_ranks(ours.parameters())


class WithStatistics(nn.Module):
    """Output depends on a buffer that every forward pass changes by its input."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network, self.norm = network, nn.BatchNorm1d(5)
        self.mean: Tensor
        self.register_buffer("mean", torch.full((3,), float(dist.get_rank())))

    def forward(self, batch: Tensor) -> Tensor:
        self.mean = self.mean * 0.5 + batch.mean()  # another tensor in every pass
        normed: Tensor = self.norm(self.network(batch).transpose(1, 2))
        return normed + self.mean.mean()


def check_buffers_are_those_of_rank_0() -> None:
    ours, plain = (WithStatistics(network) for network in copies(2))
    zero: Any = shoal.ZeroRedundancyOptimizer(
        ours.parameters(), torch.optim.SGD, reduce_scatter=True, buffers_of=ours, lr=0.1
    )
    wrapped = DDP(plain)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for batch in batches(4):
        for network, stepped in ((ours, zero), (wrapped, optimizer)):
            stepped.zero_grad()
            loss_of(network, batch).backward()
            stepped.step()
        assert_same_on_all_ranks(ours.buffers())
        if dist.get_rank() == 0:
            assert_near(ours.buffers(), plain.buffers())
    assert_as_with_ddp(ours, plain)  # every pass began with the same buffers on all ranks, as the losses tell


def check_buffers_in_join_are_those_of_a_live_rank() -> None:
    rank = dist.get_rank()
    (network,) = copies(1)
    ours = WithStatistics(network)
    zero: Any = shoal.ZeroRedundancyOptimizer(
        ours.parameters(), torch.optim.SGD, reduce_scatter=True, buffers_of=ours, lr=0.1
    )
    with Join([zero]):
        for batch in batches(rank + 1):
            zero.zero_grad()
            loss_of(ours, batch).backward()
            zero.step()
    assert_same_on_all_ranks(ours.buffers())
    assert int(ours.norm.num_batches_tracked) == dist.get_world_size()


def check_closures_and_parameters_that_begin_to_train() -> None:
    ours, plain = copies(2)
    ours[0].weight.requires_grad = plain[0].weight.requires_grad = False
    zero: Any = shoal.ZeroRedundancyOptimizer(ours.parameters(), torch.optim.AdamW, reduce_scatter=True, **SMOOTH)
    optimizer = torch.optim.AdamW(plain.parameters(), **SMOOTH)
    wrapped = DDP(plain)
    for step, batch in enumerate(batches(6)):
        if step in (2, 4):
            ours[0].weight.requires_grad = plain[0].weight.requires_grad = step == 2
            zero.zero_grad()
            optimizer.zero_grad()
            wrapped = DDP(plain)
        for network, stepped in ((ours, zero), (wrapped, optimizer)):

            def closure(network: nn.Module = network, stepped: Any = stepped, batch: Tensor = batch) -> Tensor:
                stepped.zero_grad()
                loss = loss_of(network, batch)
                loss.backward()
                return loss

            if step % 2:
                closure()
                stepped.step()
            else:
                assert stepped.step(closure) is not None
        assert_as_with_ddp(ours, plain)
    assert_same_on_all_ranks(ours.parameters())


def check_what_does_not_fit_is_refused() -> None:
    (ours,) = copies(1)
    for options, words in (
        ({"buffers_of": ours}, "leave out buffers_of"),
        ({"reduce_scatter": True, "overlap_with_ddp": True}, "leave out overlap_with_ddp"),
        ({"partition": "rows"}, "'auto', 'elements' or 'parameters'"),
    ):
        with pytest.raises(ValueError, match=words):
            shoal.ZeroRedundancyOptimizer(ours.parameters(), torch.optim.SGD, **options)  # type: ignore[arg-type]


def check_copies_on_the_cpu_and_master_weights_in_many_buckets() -> None:
    low, exact = copies(2, torch.bfloat16)
    exact = exact.float()
    with mock.patch.object(partition, "BUCKET_BYTES", 1000):
        zero: Any = shoal.ZeroRedundancyOptimizer(
            low.parameters(), torch.optim.AdamW, reduce_scatter=True, offload=True, master_weights=True, lr=1e-4
        )
    assert len(zero.sharded_step.parameters.buckets) > 2
    optimizer = torch.optim.AdamW(exact.parameters(), lr=1e-4)
    for number in range(4):
        generator = torch.Generator().manual_seed(number)
        for param, other in zip(low.parameters(), exact.parameters(), strict=True):
            # Halves and quarters, so that means of any number of ranks are exact.
            other.grad = torch.randint(-2, 3, param.shape, generator=generator) / 4
            param.grad = other.grad.bfloat16()
        zero.step()
        optimizer.step()
    assert_equal(low.parameters(), [param.bfloat16() for param in exact.parameters()])
    assert_same_on_all_ranks(low.parameters())
    zero.consolidate_state_dict()
    if dist.get_rank() == 0:
        state = zero.state_dict()["state"]
        assert_equal([state[n]["master_weights"] for n in range(6)], [param.detach() for param in exact.parameters()])


def check_values_that_are_written_between_steps() -> None:
    """Copies follow the parameters, whatever wrote into them. Elements that nobody wrote keep their precision."""
    for options in ({"master_weights": True}, {"master_weights": True, "parameters_as_bucket_view": True}):
        low, plain = copies(2, torch.bfloat16)
        exact = plain.float()
        zero: Any = shoal.ZeroRedundancyOptimizer(low.parameters(), torch.optim.AdamW, lr=1e-3, **options)
        optimizer = torch.optim.AdamW(exact.parameters(), lr=1e-3)
        for number, write in enumerate(WRITES.values()):
            for index, (param, other) in enumerate(zip(low.parameters(), exact.parameters(), strict=True)):
                generator = torch.Generator().manual_seed(number)
                other.grad = torch.randint(-2, 3, param.shape, generator=generator) / 4
                param.grad = other.grad.bfloat16()
                if (number + index) % 2:
                    values = param.detach().clone()
                    values.view(-1)[::2] = other.data.view(-1)[::2] = 2.0 + number
                    write(param, values)
            zero.step()
            optimizer.step()
            assert_equal(low.parameters(), [param.bfloat16() for param in exact.parameters()], number)
        assert_same_on_all_ranks(low.parameters())


def check_a_saved_copy_that_does_not_fit_the_model() -> None:
    """The model counts for more, in whatever order the two are loaded."""
    for model_first in (True, False):
        low, other = copies(2, torch.bfloat16)
        zero: Any = shoal.ZeroRedundancyOptimizer(low.parameters(), torch.optim.SGD, lr=0.0, master_weights=True)
        for param in low.parameters():
            param.grad = torch.zeros_like(param)
        zero.step()
        saved = zero.state_dict()
        loads = [lambda: low.load_state_dict({k: v + 1 for k, v in other.state_dict().items()})]  # noqa: B023
        loads.insert(model_first, lambda: zero.load_state_dict(saved))  # type: ignore[arg-type]  # noqa: B023
        for load in loads:
            load()
        zero.step()
        assert_equal(low.parameters(), [param + 1 for param in other.parameters()])

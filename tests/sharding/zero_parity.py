"""Checks: `ZeroRedundancyOptimizer` with DDP gives what the plain optimizer with DDP gives."""

from __future__ import annotations

import copy
import warnings
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.lr_scheduler import StepLR

import shoal
from shoal.sharding import hook_with_zero_step, hook_with_zero_step_interleaved
from tests.sharding.zero_models import (
    assert_equal,
    assert_same_on_all_ranks,
    assert_states_equal,
    batches,
    copies,
    loss_of,
)

OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [
    (torch.optim.SGD, {"lr": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True}),
    (torch.optim.Adam, {"lr": 0.01}),
    (torch.optim.Adam, {"lr": 0.01, "fused": True}),
    (torch.optim.AdamW, {"lr": 0.01, "foreach": True, "amsgrad": True}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5}),
    (torch.optim.Rprop, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.Adafactor, {}),
    (shoal.QHM, {"lr": 0.1, "momentum": 0.9, "nu": 0.7}),
]


def _together(groups: Any) -> torch.optim.Optimizer:
    return shoal.Together(torch.optim.Muon(groups[:1], lr=0.02), torch.optim.AdamW(groups[1:], lr=0.01, fused=True))


def check_several_optimizers_with_matrices_whole_and_the_rest_in_spans() -> None:
    def groups(network: nn.Module) -> list[dict[str, Any]]:
        params = list(network.parameters())
        return [{"params": [p for p in params if p.ndim == 2]}, {"params": [p for p in params if p.ndim != 2]}]

    plain, ours, later = copies(3)
    optimizer: Any = _together(groups(plain))
    _train(DDP(plain), optimizer)
    zero: Any = shoal.ZeroRedundancyOptimizer(groups(ours), _together, partition=["parameters", "elements"])
    _train(DDP(ours), zero)
    assert_equal(ours.parameters(), plain.parameters())
    assert [group["lr"] for group in zero.param_groups] == [0.02, 0.01]
    pieces = zero.sharded_step.shard.pieces
    assert all(piece.whole for piece in pieces[0])
    owned = torch.tensor([sum(len(piece.part.span) for piece in group) for group in pieces])
    load = torch.tensor(zero.sharded_step.parameters.loads)
    dist.all_reduce(owned)
    assert owned.tolist() == [sum(p.numel() for p in group["params"]) for group in groups(plain)]
    assert load.max() - load.min() <= 64 or load.max() == 300 * 7 * 4  # even, as far as whole matrices let it be
    with pytest.raises(ValueError, match="give all groups when making the ZeroRedundancyOptimizer"):
        zero.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    zero.consolidate_state_dict()
    box = [zero.state_dict() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(box)
    assert_states_equal(box[0], optimizer.state_dict())
    again: Any = shoal.ZeroRedundancyOptimizer(groups(later), _together, partition=["parameters", "elements"])
    later.load_state_dict(ours.state_dict())
    again.load_state_dict(box[0])
    _train(DDP(later), again)
    _train(DDP(plain), optimizer)
    assert_equal(later.parameters(), plain.parameters())
    with pytest.raises(ValueError, match="partition has 1 entries, and there are 2 parameter groups"):
        shoal.ZeroRedundancyOptimizer(groups(copies(1)[0]), _together, partition=["elements"])
    for partition in (None, 3):
        with pytest.raises(ValueError, match="partition is 'auto', 'elements' or 'parameters', got"):
            shoal.ZeroRedundancyOptimizer(groups(copies(1)[0]), _together, partition=partition)  # type: ignore[arg-type]
    for make in (lambda g: shoal.Together(torch.optim.SGD(g[1:], 0.1), torch.optim.SGD(g[:1], 0.1)),
                 lambda g: torch.optim.SGD(g[:1], 0.1)):  # fmt: skip
        with pytest.raises(ValueError, match="has not the parameters of group"):
            shoal.ZeroRedundancyOptimizer(groups(copies(1)[0]), make)


class _Third(torch.optim.SGD):
    """Computes its options from its arguments, as GrokFastAdamW does."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr / 3)


def check_options_are_those_that_the_constructor_computes() -> None:
    (ours,) = copies(1)
    params = list(ours.parameters())
    zero: Any = shoal.ZeroRedundancyOptimizer(
        [{"params": params[:1]}, {"params": params[1:2], "lr": 0.5}], _Third, lr=0.3
    )
    zero.add_param_group({"params": params[2:]})
    for optimizer in (zero, zero.optim):
        assert [group["lr"] for group in optimizer.param_groups] == [0.3 / 3, 0.5, 0.3 / 3]


def check_one_step_size_for_all_parameters_is_told() -> None:
    prodigy = type("Prodigy", (torch.optim.SGD,), {})
    (ours,) = copies(1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            shoal.ZeroRedundancyOptimizer(ours.parameters(), prodigy, lr=0.1)
    said = [str(one.message) for one in told if "Prodigy needs all parameters" in str(one.message)]
    assert len(said) == (dist.get_world_size() > 1)


def check_parity_to_the_bit() -> None:
    for number, (optimizer_class, options) in enumerate(OPTIMIZERS):
        cases = list(product((False, True), ("auto", "parameters")))
        plain, *networks = copies(1 + len(cases))
        optimizer = optimizer_class(plain.parameters(), **options)
        _train(DDP(plain), optimizer)
        for (flat, partition), ours in zip(cases, networks, strict=True):
            wrapped = DDP(ours)
            zero: Any = shoal.ZeroRedundancyOptimizer(
                wrapped.parameters(), optimizer_class, parameters_as_bucket_view=flat, partition=partition, **options
            )
            _train(wrapped, zero)
            assert_equal(ours.parameters(), plain.parameters(), (number, flat, partition))
            assert_same_on_all_ranks(ours.parameters())
            zero.consolidate_state_dict(to=dist.get_world_size() - 1)
            if dist.get_rank() == dist.get_world_size() - 1:
                assert_states_equal(zero.state_dict(), optimizer.state_dict())


def _train(network: nn.Module, optimizer: Any) -> None:
    for batch in batches(3):
        optimizer.zero_grad()
        loss_of(network, batch).backward()
        optimizer.step()


def check_groups_schedulers_frozen_parameters_and_closures() -> None:
    ours, plain = copies(2)
    ours[0].weight.requires_grad = plain[0].weight.requires_grad = False
    made: list[Any] = []
    for network, optimizer_class in ((ours, shoal.ZeroRedundancyOptimizer), (plain, None)):
        groups = [{"params": [network[3].weight], "weight_decay": 0.1}, {"params": [network[0].weight], "lr": 0.2}]
        made.append(
            torch.optim.AdamW(groups, lr=0.01)
            if optimizer_class is None
            else optimizer_class(groups, torch.optim.AdamW, lr=0.01)
        )
        made[-1].add_param_group({"params": [network[0].bias, network[2].weight, network[2].bias, network[3].bias]})
    schedulers = [StepLR(optimizer, 1, 0.5) for optimizer in made]
    wrapped = [DDP(ours, find_unused_parameters=True), DDP(plain, find_unused_parameters=True)]
    for step, batch in enumerate(batches(6)):
        if step == 3:
            for network in (ours, plain):
                network[0].weight.requires_grad = True
            wrapped = [DDP(ours), DDP(plain)]
        for network, optimizer, scheduler in zip(wrapped, made, schedulers, strict=True):

            def closure(network: nn.Module = network, optimizer: Any = optimizer, batch: Tensor = batch) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(network, batch)
                loss.backward()
                return loss

            assert optimizer.step(closure) is not None
            scheduler.step()
    assert_equal(ours.parameters(), plain.parameters())
    assert_same_on_all_ranks(ours.parameters())
    assert [group["lr"] for group in made[0].param_groups] == [group["lr"] for group in made[1].param_groups]


def check_parity_to_the_bit_in_bfloat16() -> None:
    """In one thread, whatever the kernel; `tests/flat/test_rounding.py` says why cuts change nothing."""
    for optimizer_class, options in (
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": 0.01}),
        (torch.optim.Adam, {"lr": 0.01, "fused": True}),
        (torch.optim.RMSprop, {"lr": 0.01, "foreach": True}),
    ):
        plain, ours = copies(2, torch.bfloat16)
        optimizer: Any = optimizer_class(plain.parameters(), **options)  # type: ignore[operator]
        wrapped = DDP(ours)
        zero: Any = shoal.ZeroRedundancyOptimizer(wrapped.parameters(), optimizer_class, **options)
        for network, stepped in ((DDP(plain), optimizer), (wrapped, zero)):
            for batch in batches(3, torch.bfloat16):
                stepped.zero_grad()
                loss_of(network, batch).backward()
                stepped.step()
        assert_equal(ours.parameters(), plain.parameters(), (optimizer_class.__name__, options))


def check_mixed_dtypes_and_memory_formats() -> None:
    for flat in (False, True):
        torch.manual_seed(1)
        tensors = [
            torch.randn(40, 30),
            torch.randn(3, 5, 7, 7).to(memory_format=torch.channels_last),
            torch.randn(100, dtype=torch.float64),
            torch.randn(33, 9).bfloat16(),
            torch.randn(()),
            torch.randn(50, 20).t(),
            torch.empty(0),
        ]
        ours = [nn.Parameter(tensor.clone(memory_format=torch.preserve_format)) for tensor in tensors]
        plain = [nn.Parameter(tensor.clone(memory_format=torch.preserve_format)) for tensor in tensors]
        zero: Any = shoal.ZeroRedundancyOptimizer(ours, torch.optim.Adam, parameters_as_bucket_view=flat, lr=0.1)
        optimizer = torch.optim.Adam(plain, lr=0.1)
        assert [one.stride() for one in ours] == [other.stride() for other in plain], "channels_last is kept"
        assert_equal(ours, plain)
        for step in range(3):
            for one, other in zip(ours, plain, strict=True):
                gradient = torch.full_like(one, 0.1 * step) + one.detach()
                one.grad, other.grad = gradient.clone(memory_format=torch.preserve_format), gradient
            zero.step()
            optimizer.step()
        assert_equal(ours, plain)
        assert_same_on_all_ranks(ours)
        zero.consolidate_state_dict()
        if dist.get_rank() == 0:
            state = zero.state_dict()["state"]
            assert_equal([state[n]["exp_avg"] for n in range(6)], [optimizer.state[p]["exp_avg"] for p in plain[:6]])


def check_a_users_own_optimizer_and_its_keys() -> None:
    class Mine(torch.optim.SGD):
        def step(self, closure: Any = None, factor: float = 1.0) -> Any:
            for group in self.param_groups:
                group["steps"] = group.get("steps", 0) + 1
                for param in group["params"]:
                    if param.grad is not None:
                        self.state[param]["seen"] = {"norms": [float(param.grad.norm())], "shape": tuple(param.shape)}
                        param.data.sub_(factor * group["lr"] * param.grad / (1 + param.grad.norm()))

    ours, plain = copies(2)
    zero: Any = shoal.ZeroRedundancyOptimizer(DDP(ours).parameters(), Mine, lr=0.1)
    optimizer = Mine(plain.parameters(), lr=0.1)
    batch = torch.ones(2, 1, 7)
    for _ in range(2):
        for network, stepped in ((ours, zero), (plain, optimizer)):
            stepped.zero_grad()
            loss_of(network, batch).backward()
            stepped.step(factor=2.0)
    assert_equal(ours.parameters(), plain.parameters())
    assert zero.param_groups[0]["steps"] == 2
    zero.consolidate_state_dict()
    if dist.get_rank() == 0:
        assert zero.state_dict()["state"] == optimizer.state_dict()["state"]


def check_parameters_that_are_given_other_memory_are_followed() -> None:
    for flat in (False, True):
        ours, plain = copies(2)
        zero: Any = shoal.ZeroRedundancyOptimizer(ours.parameters(), torch.optim.SGD, parameters_as_bucket_view=flat)
        optimizer = torch.optim.SGD(plain.parameters())
        for param, other in zip(ours.parameters(), plain.parameters(), strict=True):
            param.data = param.detach() * 2
            other.data = other.detach() * 2
            param.grad, other.grad = torch.ones_like(param), torch.ones_like(other)
        zero.step()
        optimizer.step()
        assert_equal(ours.parameters(), plain.parameters())


def check_overlap_skips_nothing_and_follows_the_scheduler() -> None:
    for make in (hook_with_zero_step, hook_with_zero_step_interleaved):
        for view in (False, True):
            for hook in (allreduce_hook, fp16_compress_hook):
                first = nn.Sequential(nn.Linear(7, 300), nn.Tanh(), nn.Linear(300, 200), nn.Linear(200, 100))
                second = copy.deepcopy(first)
                ours, plain = (
                    DDP(net, bucket_cap_mb=0.1, gradient_as_bucket_view=view)  # type: ignore[arg-type]
                    for net in (first, second)
                )
                zero: Any = shoal.ZeroRedundancyOptimizer(
                    ours.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=0.01
                )
                optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)
                ours.register_comm_hook(None, make(hook, ours, zero))  # type: ignore[arg-type]
                plain.register_comm_hook(None, hook)
                schedulers = [StepLR(stepped, 1, 0.5) for stepped in (zero, optimizer)]
                for batch in batches(4):
                    for network, stepped in ((ours, zero), (plain, optimizer)):
                        stepped.zero_grad()
                        loss_of(network, batch).backward()
                        stepped.step()
                    for scheduler in schedulers:
                        scheduler.step()
                    assert_equal(first.parameters(), second.parameters(), make.__name__)
                assert_same_on_all_ranks(first.parameters())


def check_sub_groups() -> None:
    ranks = dist.get_world_size()
    group = dist.new_group([rank for rank in range(ranks) if rank != 1])
    if dist.get_rank() == 1:
        return
    (ours,) = copies(1)
    zero: Any = shoal.ZeroRedundancyOptimizer(ours.parameters(), torch.optim.Adam, process_group=group)
    for param in ours.parameters():
        param.grad = torch.ones_like(param)
    zero.step()
    members = [torch.empty_like(ours[0].weight) for _ in range(dist.get_world_size(group))]
    dist.all_gather(members, ours[0].weight.detach(), group=group)
    assert all(torch.equal(members[0], member) for member in members)
    zero.consolidate_state_dict(to=dist.get_world_size(group) - 1)
    if zero.rank == dist.get_world_size(group) - 1:
        assert len(zero.state_dict()["state"]) == len(list(ours.parameters()))


def check_what_the_buckets_of_ddp_do_not_hold_is_refused_by_name() -> None:
    wave = nn.Linear(3, 2, dtype=torch.complex64)
    table = nn.Sequential(nn.Embedding(5, 2, sparse=True))
    for network, words in ((wave, "'weight' is complex, and the buckets"), (table, "'0' makes sparse gradients")):
        zero: Any = shoal.ZeroRedundancyOptimizer(network.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
        for made in (hook_with_zero_step, hook_with_zero_step_interleaved):
            with pytest.raises(ValueError, match=words):
                made(allreduce_hook, DDP(network), zero)

"""Options are kept by the trainer: schedulers, groups."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed import rpc
from torch.optim import lr_scheduler

from shoal import DistributedOptimizer
from shoal.remote import RemoteOptimizerError
from tests.remote.process import TRAINER
from tests.remote.tables import assert_close, local_params, local_step, make_tables, params, step, values


def schedule(name: str, optimizer: torch.optim.Optimizer) -> lr_scheduler.LRScheduler:
    if name == "step":
        return lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    return lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=8)  # changes momentum or betas as well


def takes_a_scheduler(name: str, optimizer_name: str) -> None:
    optimizer_class = getattr(torch.optim, optimizer_name)
    options = {"momentum": 0.9} if optimizer_name == "SGD" else {}
    tables = make_tables()
    rrefs, ours = params(tables), local_params()
    optimizer, local = (
        optimizer_class_(given, lr=0.1, **options)
        for optimizer_class_, given in (
            (lambda given, **kwargs: DistributedOptimizer(optimizer_class, given, **kwargs), rrefs),
            (optimizer_class, ours),
        )
    )
    schedulers = schedule(name, optimizer), schedule(name, local)
    for _ in range(5):
        step(optimizer, tables)
        local_step(local, ours)
        for scheduler in schedulers:
            scheduler.step()
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
    assert_close(values(rrefs), ours)


@pytest.mark.parametrize("name", ["step", "one cycle"])
@pytest.mark.parametrize("optimizer_name", ["SGD", "Adam"])
def test_torch_schedulers_take_it(trainer, name, optimizer_name) -> None:
    trainer(takes_a_scheduler, name, optimizer_name)


def grouped(optimizer: torch.optim.Optimizer, some: list[Tensor], others: list[Tensor]) -> torch.optim.Optimizer:
    optimizer.add_param_group({"params": some, "weight_decay": 0.5})
    optimizer.add_param_group({"params": others[0], "momentum": 0.0})
    return optimizer


def adds_groups() -> None:
    """The first group is on one worker, the second on both, the third on one that had none."""
    tables = make_tables(("first", "second", TRAINER))
    rrefs, ours = params(tables), local_params(3)
    options = {"lr": 0.1, "momentum": 0.9}

    def parts(given: list[Tensor]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        return given[0:1] + given[3:4], given[1:2] + given[6:8], given[2:3]

    optimizer = DistributedOptimizer(torch.optim.SGD, parts(rrefs)[0], **options)
    assert len(optimizer.remote_optimizers) == 1
    grouped(optimizer, *parts(rrefs)[1:])
    assert len(optimizer.remote_optimizers) == 3
    local = grouped(torch.optim.SGD(parts(ours)[0], **options), *parts(ours)[1:])
    for _ in range(3):
        step(optimizer, tables)
        local_step(local, ours)
        for group, other in zip(optimizer.param_groups, local.param_groups, strict=True):
            group["lr"], other["lr"] = group["lr"] * 0.5, other["lr"] * 0.5
    assert_close(values(rrefs), ours)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 3, 1]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0, 0.5, 0]


def test_parameter_groups_are_added_with_their_own_options(trainer) -> None:
    trainer(adds_groups)


def takes_groups_at_once() -> None:
    tables = make_tables()
    rrefs, ours = params(tables), local_params()
    groups = [[{"params": given[:2]}, {"params": given[2:], "lr": 0.5}] for given in (rrefs, ours)]
    optimizer = DistributedOptimizer(torch.optim.SGD, groups[0], lr=0.1)
    local = torch.optim.SGD(groups[1], lr=0.1)
    step(optimizer, tables)
    local_step(local, ours)
    assert_close(values(rrefs), ours)
    assert optimizer.defaults["lr"] == 0.1


def test_parameter_groups_can_be_given_at_once(trainer) -> None:
    trainer(takes_groups_at_once)


def refuses_a_parameter_twice() -> None:
    table = torch.zeros(2, requires_grad=True)
    optimizer = DistributedOptimizer(torch.optim.SGD, [rpc.RRef(table)], lr=0.1)
    with pytest.raises(RemoteOptimizerError, match="given before"):
        optimizer.add_param_group({"params": [rpc.RRef(table)]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [rpc.RRef(torch.zeros(2, requires_grad=True))]})


def test_a_parameter_is_not_taken_twice(trainer) -> None:
    trainer(refuses_a_parameter_twice)


def changes_options_that_are_tensors() -> None:
    tables = make_tables()
    rrefs, ours = params(tables), local_params()
    rate, other_rate = torch.tensor(0.1), torch.tensor(0.1)
    optimizer = DistributedOptimizer(torch.optim.Adam, rrefs, lr=rate)
    local = torch.optim.Adam(ours, lr=other_rate)
    for _ in range(3):
        step(optimizer, tables)
        local_step(local, ours)
        optimizer.param_groups[0]["lr"].mul_(0.5)
        other_rate.mul_(0.5)
    assert_close(values(rrefs), ours)


def test_a_learning_rate_that_is_a_tensor_may_change_in_place(trainer) -> None:
    trainer(changes_options_that_are_tensors)


def takes_groups_that_users_set() -> None:
    tables = make_tables()
    rrefs, ours = params(tables), local_params()
    optimizer, local = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1), torch.optim.SGD(ours, lr=0.1)
    for each in (optimizer, local):
        each.param_groups = [{**group, "lr": 0.3} for group in each.param_groups]
    step(optimizer, tables)
    local_step(local, ours)
    assert_close(values(rrefs), ours)
    with pytest.raises(ValueError, match="has 0 groups, and had 1"):
        optimizer.param_groups = []
    with pytest.raises(ValueError, match="the workers have it"):
        optimizer.state = {}
    removed = optimizer.param_groups[0]["params"].pop()
    with pytest.raises(ValueError, match="the parameters of this optimizer are fixed"):
        step(optimizer, tables)
    optimizer.param_groups[0]["params"].append(removed)
    step(optimizer, tables)


def test_groups_may_be_set_and_their_parameters_may_not(trainer) -> None:
    trainer(takes_groups_that_users_set)

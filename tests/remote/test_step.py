"""A step is that of torch.optim in one process, with the gradients of the context and nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from shoal import DistributedOptimizer
from tests.remote.process import FIRST, SECOND, TRAINER
from tests.remote.tables import Table, assert_close, local_params, local_step, make_tables, params, step, values

OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "Adam": {"lr": 0.05, "amsgrad": True},
    "AdamW": {"lr": 0.05, "maximize": True},
    "Adamax": {"lr": 0.05},
    "Adagrad": {"lr": 0.05, "lr_decay": 0.01},
    "Adadelta": {"rho": 0.95},
    "RMSprop": {"lr": 0.01, "centered": True, "momentum": 0.5},
    "Rprop": {"lr": 0.05},
    "NAdam": {"lr": 0.05},
    "RAdam": {"lr": 0.05},
}


class Plain(torch.optim.SGD):
    """A class that has no functional form."""


def is_that_of_one_process(name: str) -> None:
    optimizer_class = Plain if name == "Plain" else getattr(torch.optim, name)
    options = OPTIONS.get(name, {"lr": 0.05, "momentum": 0.9})
    tables = make_tables((TRAINER, FIRST, SECOND))
    rrefs, ours = params(tables), local_params(3)
    optimizer = DistributedOptimizer(optimizer_class, rrefs, **options)
    local = optimizer_class(ours, **options)
    assert_close(values(rrefs), ours)
    for factor in (1.0, 0.3, 2.0, 1.0):
        step(optimizer, tables, factor)
        local_step(local, ours, factor)
    assert_close(values(rrefs), ours)


@pytest.mark.parametrize("name", [*OPTIONS, "Plain"])
def test_a_step_is_that_of_one_process(trainer, name) -> None:
    trainer(is_that_of_one_process, name)


def leaves_alone_what_has_no_gradient(optimizer_class: type[torch.optim.Optimizer]) -> None:
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
    tables = make_tables()
    rrefs, ours = params(tables), local_params()
    optimizer = DistributedOptimizer(optimizer_class, rrefs, **options)
    local = torch.optim.SGD(ours, **options)
    for used in ((0, 1, 2), (0, 2), (0,), (1,)):
        step(optimizer, tables, used=used)
        local_step(local, ours, used=used)
        assert_close(values(rrefs), ours)


def leaves_alone_what_has_no_gradient_functional() -> None:
    leaves_alone_what_has_no_gradient(torch.optim.SGD)


def leaves_alone_what_has_no_gradient_fallback() -> None:
    leaves_alone_what_has_no_gradient(Plain)


def test_what_has_no_gradient_is_left_alone_with_its_state(trainer) -> None:
    trainer(leaves_alone_what_has_no_gradient_functional)
    trainer(leaves_alone_what_has_no_gradient_fallback)


def leaves_alone_a_worker_outside_of_the_context() -> None:
    tables = make_tables()
    rrefs = params(tables)
    optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1, weight_decay=0.1)
    before = values(rrefs)
    step(optimizer, tables[:1])
    after = values(rrefs)
    assert all(not torch.equal(a, b) for a, b in zip(before[::2], after[::2], strict=True))
    assert all(torch.equal(a, b) for a, b in zip(before[1::2], after[1::2], strict=True))


def test_a_worker_that_took_no_part_in_the_context_is_left_alone(trainer) -> None:
    trainer(leaves_alone_a_worker_outside_of_the_context)


def set_grads(table: rpc.RRef[Table]) -> None:
    for param in table.local_value().params[:2]:
        param.grad = torch.full_like(param, 7.0)


def where(table: rpc.RRef[Table]) -> list[tuple[int, int | None]]:
    """Where the parameters and their gradients lie, the latter if they are whole."""
    return [
        (param.data_ptr(), None if param.grad is None else id(param.grad) if bool((param.grad == 7).all()) else -1)
        for param in table.local_value().params
    ]


def uses_no_grad_and_moves_nothing() -> None:
    for optimizer_class in (torch.optim.Adam, Plain):
        tables = make_tables()
        rrefs = params(tables)
        for table in tables:
            rpc.rpc_sync(table.owner(), set_grads, (table,))
        before = [rpc.rpc_sync(table.owner(), where, (table,)) for table in tables]
        optimizer = DistributedOptimizer(optimizer_class, rrefs, lr=0.1)
        step(optimizer, tables)
        assert [rpc.rpc_sync(table.owner(), where, (table,)) for table in tables] == before


def test_grad_is_not_used_and_parameters_stay_where_they_are(trainer) -> None:
    trainer(uses_no_grad_and_moves_nothing)


def sparse_gradients_of(table: Tensor, rows: Tensor) -> Tensor:
    return torch.nn.functional.embedding(rows, table, sparse=True).square().sum()


def takes_sparse_gradients() -> None:
    for optimizer_class, options in (
        (torch.optim.Adagrad, {"lr": 0.1}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.SparseAdam, {"lr": 0.1}),
    ):
        weight = torch.randn(6, 2).requires_grad_()
        local = copy.deepcopy(weight)
        optimizer = DistributedOptimizer(optimizer_class, [rpc.RRef(weight)], **options)
        of_one_process = optimizer_class([local], **options)
        for rows in ([1, 3, 3], [0, 3, 5]):
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [sparse_gradients_of(weight, torch.tensor(rows))])
                optimizer.step(context_id)
            local.grad = None
            sparse_gradients_of(local, torch.tensor(rows)).backward()
            of_one_process.step()
        assert_close([weight.detach()], [local.detach()])


def test_sparse_gradients_are_taken_where_torch_takes_them(trainer) -> None:
    trainer(takes_sparse_gradients)


def takes_complex_parameters() -> None:
    for optimizer_class in (torch.optim.Adam, torch.optim.Adagrad, Plain):
        weight = torch.randn(6, 2, dtype=torch.complex64).requires_grad_()
        local = copy.deepcopy(weight)
        optimizer = DistributedOptimizer(optimizer_class, [rpc.RRef(weight)], lr=0.1)
        of_one_process = optimizer_class([local], lr=0.1)
        for _ in range(3):
            with dist_autograd.context() as context_id:
                dist_autograd.backward(context_id, [weight.abs().square().sum()])
                optimizer.step(context_id)
            local.grad = None
            local.abs().square().sum().backward()
            of_one_process.step()
        assert_close([torch.view_as_real(weight.detach())], [torch.view_as_real(local.detach())])


def test_complex_parameters_are_stepped_as_torch_steps_them(trainer) -> None:
    trainer(takes_complex_parameters)

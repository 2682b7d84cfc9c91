"""State dicts are torch.optim's, over the same parameters in one process."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from shoal import DistributedOptimizer
from shoal.remote import RemoteOptimizerError
from tests.counting import Counting
from tests.old_checkpoints import NEW_OPTIONS
from tests.remote.process import FIRST, SECOND, TRAINER
from tests.remote.tables import Table, assert_close, local_params, local_step, make_tables, params, step, values
from tests.state_dict_hooks import register_hooks

OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9},
    "Adam": {"lr": 0.05, "amsgrad": True},
    "AdamW": {"lr": 0.05},
    "RMSprop": {"lr": 0.01},
    "Plain": {"lr": 0.05, "momentum": 0.9},
    "Counting": {"lr": 0.05},
}


class Plain(torch.optim.SGD):
    """A class that has no functional form."""


def optimizer_class(name: str) -> Any:
    return {"Plain": Plain, "Counting": Counting}.get(name) or getattr(torch.optim, name)


def grouped(given: list[Any]) -> list[dict[str, Any]]:
    """Two groups whose parameters are not in the order of their owners."""
    return [{"params": given[3:]}, {"params": given[:3], "lr": 0.02}]


def copies(rrefs: list[Any]) -> list[Tensor]:
    return [value.clone().requires_grad_() for value in values(rrefs)]


def goes_to_torch(name: str) -> None:
    tables = make_tables((FIRST, SECOND, TRAINER))
    rrefs = params(tables)
    optimizer = DistributedOptimizer(optimizer_class(name), grouped(rrefs), **OPTIONS[name])
    for _ in range(2):
        step(optimizer, tables)
    state = optimizer.state_dict()
    ours = copies(rrefs)
    local = optimizer_class(name)(grouped(ours), **OPTIONS[name])
    local_step(local, copies(rrefs))  # so that it has a state to compare the form with
    assert state.keys() == local.state_dict().keys()
    for group, other in zip(state["param_groups"], local.state_dict()["param_groups"], strict=True):
        assert group["params"] == other["params"]
        assert group["lr"] == other["lr"]
    local.load_state_dict(state)
    for _ in range(2):
        step(optimizer, tables)
        local_step(local, ours)
    assert_close(values(rrefs), ours)


def comes_from_torch(name: str) -> None:
    ours = local_params(3)
    local = optimizer_class(name)(grouped(ours), **OPTIONS[name])
    for _ in range(2):
        local_step(local, ours)
    local.param_groups[1]["lr"] = 0.03
    tables = make_tables((FIRST, SECOND, TRAINER))
    rrefs = params(tables)
    optimizer = DistributedOptimizer(optimizer_class(name), grouped(rrefs), **OPTIONS[name])
    for _ in range(2):
        step(optimizer, tables)
    fresh = DistributedOptimizer(optimizer_class(name), grouped(rrefs), **OPTIONS[name] | {"lr": 7.0})
    fresh.load_state_dict(copy.deepcopy(local.state_dict()))
    assert fresh.param_groups[1]["lr"] == 0.03
    for _ in range(2):
        step(fresh, tables)
        local_step(local, ours)
    assert_close(values(rrefs), ours)
    again = fresh.state_dict()
    fresh.load_state_dict(again)
    torch.testing.assert_close(fresh.state_dict()["state"], again["state"])


@pytest.mark.parametrize("name", OPTIONS)
def test_its_state_goes_on_in_torch(trainer, name) -> None:
    trainer(goes_to_torch, name)


@pytest.mark.parametrize("name", OPTIONS)
def test_it_goes_on_from_a_state_of_torch(trainer, name) -> None:
    trainer(comes_from_torch, name)


class PlainAdamW(torch.optim.AdamW):
    """As Plain, of a class whose older state dicts do not say that its decay is decoupled."""


OLDER: dict[str, tuple[Any, dict[str, Any]]] = {
    "Adam": (torch.optim.Adam, {"lr": 0.05, "maximize": True}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.05, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.05, "t0": 2, "maximize": True}),
    "AdamW without a functional form": (PlainAdamW, {"lr": 0.05, "weight_decay": 0.1}),
}


def comes_from_an_older_torch(name: str) -> None:
    """Its numbers are ints and floats, and it lacks options: torch steps without them, though they were given."""
    kind, options = OLDER[name]
    ours = local_params(2)
    local = kind(ours, **options)
    for _ in range(3):
        local_step(local, ours)
    older = copy.deepcopy(local.state_dict())
    for held in older["state"].values():
        held.update({key: value.item() for key, value in held.items() if value.dim() == 0})
    for group in older["param_groups"]:
        for option in NEW_OPTIONS:
            group.pop(option, None)
    tables = make_tables()
    rrefs = params(tables)
    optimizer = DistributedOptimizer(kind, rrefs, **options)
    optimizer.load_state_dict(older)
    ours = copies(rrefs)
    local = kind(ours, **options)
    local.load_state_dict(copy.deepcopy(older))
    for lr in (0.05, 0.01):  # setting an option sends all of them to the workers
        for each in (optimizer, local):
            each.param_groups[0]["lr"] = lr
        step(optimizer, tables)
        local_step(local, ours)
    assert_close(values(rrefs), ours)
    for option in NEW_OPTIONS:
        assert optimizer.param_groups[0].get(option) == local.param_groups[0].get(option)


@pytest.mark.parametrize("name", OLDER)
def test_it_goes_on_from_a_state_of_an_older_torch(trainer, name) -> None:
    trainer(comes_from_an_older_torch, name)


def refuses_counts_that_differ() -> None:
    tables = make_tables()
    optimizer = DistributedOptimizer(Counting, params(tables), lr=0.1)
    step(optimizer, tables)
    step(optimizer, tables[:1])  # the other worker has no gradient, and makes no step
    with pytest.raises(ValueError, match=r"Counting\) keeps 'k', which is of no parameter, and it is tensor\(2\) for"):
        optimizer.state_dict()


def test_state_of_no_parameter_that_differs_is_refused_by_its_name(trainer) -> None:
    trainer(refuses_counts_that_differ)


def refuses_what_does_not_fit() -> None:
    tables = make_tables()
    rrefs = params(tables)
    optimizer = DistributedOptimizer(torch.optim.SGD, rrefs, lr=0.1, momentum=0.9)
    step(optimizer, tables)
    state = optimizer.state_dict()
    smaller = DistributedOptimizer(torch.optim.SGD, rrefs[:5], lr=0.1).state_dict()
    with pytest.raises(ValueError, match=r"\[5\].*\[6\]"):
        optimizer.load_state_dict(smaller)
    wrong = copy.deepcopy(state)
    wrong["state"][1]["momentum_buffer"] = torch.zeros(2)
    with pytest.raises(RemoteOptimizerError, match=r"second: ValueError.*shape"):
        optimizer.load_state_dict(wrong)
    torch.testing.assert_close(optimizer.state_dict()["state"], state["state"])


def test_a_state_that_does_not_fit_is_refused(trainer) -> None:
    trainer(refuses_what_does_not_fit)


def gives_copies() -> None:
    tables = make_tables((TRAINER,))
    table: Table = tables[0].local_value()
    optimizer = DistributedOptimizer(torch.optim.SGD, params(tables), lr=0.1, momentum=0.9)
    step(optimizer, tables)
    before = table.params[0].detach().clone()
    state = optimizer.state_dict()["state"][0]["momentum_buffer"]
    kept = state.clone()
    step(optimizer, tables)
    assert torch.equal(state, kept), "a step changed a state dict"
    state.zero_()
    assert not torch.equal(optimizer.state_dict()["state"][0]["momentum_buffer"], state)
    assert not torch.equal(table.params[0].detach(), before)


def test_a_state_dict_is_a_copy_even_of_this_process(trainer) -> None:
    trainer(gives_copies)


class Noting(torch.optim.SGD):
    """Has no functional form, and hooks of its own, which workers call."""

    called: ClassVar[list[str]] = []

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__(*args, **given)
        self.register_state_dict_pre_hook(lambda _: self.called.append("saving"))
        self.register_load_state_dict_post_hook(lambda _: self.called.append("loaded"))


def calls_hooks() -> None:
    tables = make_tables((FIRST, TRAINER))
    for kind in (torch.optim.SGD, Noting):
        optimizer = DistributedOptimizer(kind, params(tables), lr=0.5, momentum=0.9)
        called: list[str] = []
        register_hooks(optimizer, called)
        step(optimizer, tables)
        saved = optimizer.state_dict()
        assert saved.pop("note") == "saved"
        before = copy.deepcopy(saved)
        optimizer.load_state_dict(saved)
        step(optimizer, tables)
        assert called == ["saving", "saved first", "saved", "loading", "loaded 0.25"]
        torch.testing.assert_close(saved, before)
    assert Noting.called == ["saving", "loaded"], "of the part of this worker"


def test_hooks_of_the_trainer_are_called_as_torch_calls_them(trainer) -> None:
    trainer(calls_hooks)

"""Errors say what happened on which worker, and come when every worker has answered."""

from __future__ import annotations

import copy
import logging
import pickle
from typing import Any

import pytest
import torch
from torch.distributed import rpc

from shoal import DistributedOptimizer
from shoal.remote import RemoteOptimizerError
from tests.remote.process import FIRST, SECOND
from tests.remote.tables import make_tables, params, step, values


class Failing(torch.optim.SGD):
    """Fails on the workers that `failing` names."""

    failing: tuple[str, ...] = ()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if rpc.get_worker_info().name in type(self).failing:
            raise ValueError("no step today")
        super().step()


def set_failing(*names: str) -> None:
    Failing.failing = names


def names_the_workers_that_failed() -> None:
    tables = make_tables()
    rrefs = params(tables)
    optimizer = DistributedOptimizer(Failing, rrefs, lr=0.1)
    for failing in ((FIRST,), (FIRST, SECOND)):
        for name in (FIRST, SECOND):
            rpc.rpc_sync(name, set_failing, failing)
        before = values(rrefs)
        with pytest.raises(RemoteOptimizerError) as caught:
            step(optimizer, tables)
        error = caught.value
        assert str(error).splitlines() == [
            f"the step of DistributedOptimizer(Failing) failed on {', '.join(failing)}",
            *(f"{name}: ValueError('no step today')" for name in failing),
        ]
        assert set(error.errors) == set(failing)
        assert all(type(each) is ValueError for each in error.errors.values())
        causes = error.__cause__.exceptions if isinstance(error.__cause__, ExceptionGroup) else [error.__cause__]
        assert ["test_errors.py" in str(cause) for cause in causes] == [True] * len(failing), "the traceback is lost"
        stepped = [not torch.equal(a, b) for a, b in zip(before, values(rrefs), strict=True)]
        assert stepped[1::2] == [SECOND not in failing] * 3, "the worker that did not fail makes its step"
        assert not any(stepped[::2])


def test_the_workers_that_failed_are_named_and_the_others_made_the_step(trainer) -> None:
    trainer(names_the_workers_that_failed)


class Refusing(torch.optim.SGD):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise KeyError("not made")


def says_why_it_cannot_be_made() -> None:
    rrefs = params(make_tables())
    for optimizer_class, options, message in (
        (Refusing, {}, r"first: KeyError.*not made"),
        (torch.optim.SGD, {"lr": -1.0}, "first: ValueError.*lr"),
        (torch.optim.Adam, {"speed": 1.0}, "second: TypeError.*speed"),
    ):
        with pytest.raises(RemoteOptimizerError, match=message):
            DistributedOptimizer(optimizer_class, rrefs, **options)
    module = rpc.remote(FIRST, torch.nn.Linear, (2, 2))
    with pytest.raises(RemoteOptimizerError, match=r"first: TypeError.*parameter 0 .* is a Linear"):
        DistributedOptimizer(torch.optim.SGD, [module], lr=0.1)
    with pytest.raises(TypeError, match="parameter 0 is a Parameter: RRefs are needed"):
        DistributedOptimizer(torch.optim.SGD, torch.nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="empty"):
        DistributedOptimizer(torch.optim.SGD, [], lr=0.1)


def test_an_optimizer_that_cannot_be_made_says_why(trainer) -> None:
    trainer(says_why_it_cannot_be_made)


def refuses_a_context_that_is_not_there() -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, params(make_tables()), lr=0.1)
    with pytest.raises(RuntimeError, match="context"):
        optimizer.step(12345)


def test_a_context_that_is_not_there_is_refused(trainer) -> None:
    trainer(refuses_a_context_that_is_not_there)


def fails_elsewhere() -> None:
    raise RemoteOptimizerError("a worker that trains failed", {FIRST: ValueError()})


def comes_through_rpc() -> None:
    with pytest.raises(RuntimeError, match=r"RemoteOptimizerError\('a worker that trains failed'\)") as caught:
        rpc.rpc_sync(FIRST, fails_elsewhere)
    assert "Failed to create original exception" not in str(caught.value)


def test_the_error_comes_through_rpc_itself(trainer) -> None:
    trainer(comes_through_rpc)


class Unknown(torch.optim.SGD):
    """A class that has no functional form."""


def warns_once() -> None:
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("shoal.remote.optimizer")
    logger.addHandler(handler)
    rrefs = params(make_tables())
    for optimizer_class in (Unknown, torch.optim.SGD, Unknown):
        DistributedOptimizer(optimizer_class, rrefs, lr=0.1)
    logger.removeHandler(handler)
    assert len(messages) == 1
    assert "Unknown has no functional form" in messages[0]


def test_a_class_without_functional_form_is_warned_of_once(trainer) -> None:
    trainer(warns_once)


def is_not_copied() -> None:
    optimizer = DistributedOptimizer(torch.optim.SGD, [rpc.RRef(torch.ones(2, requires_grad=True))], lr=0.1)
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"a DistributedOptimizer is neither copied nor pickled.* state_dict\(\)"):
            way(optimizer)


def test_it_is_not_copied(trainer) -> None:
    trainer(is_not_copied)

"""What users write into the model between steps is the model, in whatever way they write it; or it is told of."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.optim.host_copy import HostCopy
from shoal.optim.state import Rewritten
from shoal.swarm.protocol.tip import Tip
from tests.optim.models import flat
from tests.optim.written import LOADS, WRITES, Write, each

Alone = Callable[..., shoal.Optimizer]

DELAYS: dict[str, dict[str, Any]] = {
    "delayed step": {"delay_optimizer_step": True},
    "delayed average": {"delay_grad_averaging": True},
}
clamp = each(lambda parameter, value: parameter.data.clamp_(-0.1, 0.1))


def values_of(model: nn.Module, number: int) -> list[torch.Tensor]:
    return [torch.full_like(parameter, float(number)) for parameter in model.parameters()]


def make(alone: Alone, model: nn.Module, **options: Any) -> shoal.Optimizer:
    given = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1), "batch_size_per_step": 4, **options}
    return alone(model, **given) if "outer" in given else alone(model, target_batch_size=4, **given)


def go(model: nn.Module, optimizer: shoal.Optimizer, steps: int, by: float = 0.0) -> None:
    """Steps with gradients of `by`."""
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, by) if parameter.requires_grad else None
        optimizer.step()


def assert_all(model: nn.Module, number: float) -> None:
    torch.testing.assert_close(flat(model), torch.full_like(flat(model), float(number)), rtol=1e-6, atol=1e-6)


# -- with a copy


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_what_is_written_before_a_step_in_the_background_is_the_model(alone: Alone, write: Write) -> None:
    model = nn.Linear(3, 2)
    optimizer = make(alone, model, **DELAYS["delayed step"])
    for number in (3, 5):  # before the first step, and in the midst
        write(model, values_of(model, number))
        go(model, optimizer, 1, by=1.0)
        optimizer.state_dict()
        assert_all(model, number - 0.1)


@pytest.mark.parametrize("mode", DELAYS)
@pytest.mark.parametrize("write", [*WRITES.values(), *LOADS.values()], ids=[*WRITES, *LOADS])
def test_what_is_written_during_a_step_in_the_background_is_overwritten_with_one_warning(
    alone: Alone, caplog: pytest.LogCaptureFixture, mode: str, write: Write
) -> None:
    model = nn.Linear(3, 2)
    optimizer = make(alone, model, **DELAYS[mode])
    WRITES["p.copy_"](model, values_of(model, 1))
    with caplog.at_level(logging.WARNING, "shoal"):
        for number in range(2):
            go(model, optimizer, 1, by=1.0)
            assert not caplog.records or number
            write(model, values_of(model, 7))
            optimizer.state_dict()
            assert_all(model, 0.9 - 0.1 * number)
    assert [record.getMessage().startswith("what was written into the model") for record in caplog.records] == [True]


def test_nothing_is_told_where_nothing_was_written(alone: Alone, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(300, 300), nn.Linear(300, 300))  # more than is compared in full
    optimizer = make(alone, model, **DELAYS["delayed step"])
    with caplog.at_level(logging.WARNING, "shoal"):
        for _ in range(3):
            clamp(model, values_of(model, 0))
            go(model, optimizer, 1, by=0.1)
            optimizer.state_dict()
        assert not caplog.records
        go(model, optimizer, 1, by=0.1)
        model[1].weight.data[3:5].zero_()
        optimizer.state_dict()
    assert len(caplog.records) == 1


def test_an_optimizer_that_is_loaded_during_a_step_in_the_background_keeps_the_loaded_model(
    alone: Alone, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(3, 2)
    optimizer = make(alone, model, **DELAYS["delayed step"])
    saved = optimizer.state_dict()
    go(model, optimizer, 1, by=1.0)
    LOADS["load_state_dict"](model, values_of(model, 5))
    with caplog.at_level(logging.WARNING, "shoal"):
        optimizer.load_state_dict(saved)
    assert_all(model, 5)
    go(model, optimizer, 1, by=1.0)
    optimizer.state_dict()
    assert_all(model, 4.9)
    assert not caplog.records


class Elsewhere(HostCopy):
    """Takes the model for one on a device, so that it is compared and not copied."""

    _is_elsewhere = True


@pytest.mark.parametrize("mode", ["offload", "diloco"])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writes_on_a_device_are_seen(alone: Alone, monkeypatch: pytest.MonkeyPatch, mode: str, write: Write) -> None:
    monkeypatch.setattr("shoal.optim.settings.HostCopy", Elsewhere)
    monkeypatch.setattr("shoal.optim.settings.is_on_host", lambda params: False)
    outer = {"outer": shoal.DiLoCo(inner_steps=100)} if mode == "diloco" else {}
    model = nn.Linear(3, 2)
    optimizer = make(alone, model, offload_optimizer=True, **outer)
    assert optimizer.param_groups[0]["params"][0] is not optimizer.optimizer.param_groups[0]["params"][0]
    for number in (3, 5):
        write(model, values_of(model, number))
        go(model, optimizer, 1, by=1.0)
        assert_all(model, number - 0.1)
        go(model, optimizer, 1, by=1.0)
        assert_all(model, number - 0.2)


# -- frozen parameters


@pytest.mark.parametrize("mode", ["offload", *DELAYS, "diloco"])
def test_what_is_written_into_frozen_parameters_stays(alone: Alone, mode: str) -> None:
    options = {**DELAYS, "offload": {"offload_optimizer": True}, "diloco": {"outer": shoal.DiLoCo(inner_steps=2)}}
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    optimizer = make(alone, model, frozen_parameters="send", **options[mode])
    for number in range(3):
        model[0].weight.data.fill_(number)
        go(model, optimizer, 3, by=1.0)
        optimizer.state_dict()
        assert_all(nn.ParameterList([model[0].weight]), number)
    assert mode != "diloco" or torch.equal(optimizer._state._not_stepped[0], model[0].weight)


# -- an outer optimizer


@pytest.mark.parametrize("write", [*WRITES.values(), *LOADS.values()], ids=[*WRITES, *LOADS])
def test_before_the_first_inner_step_a_write_moves_the_anchor(alone: Alone, write: Write) -> None:
    model = nn.Linear(3, 2)
    optimizer = make(alone, model, outer=shoal.DiLoCo(inner_steps=2))
    write(model, values_of(model, 3))
    optimizer.step(batch_size=0)
    write(model, values_of(model, 5))
    go(model, optimizer, 6)
    assert optimizer.local_epoch == 3
    assert_all(model, 5)


@pytest.mark.parametrize("outer", [{}, {"fragments": 2}, {"overlap": 1, "mix": "keep"}], ids=str)
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_between_inner_steps_a_write_is_drift(alone: Alone, write: Write, outer: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = make(alone, model, outer=shoal.DiLoCo(inner_steps=4, optimizer=shoal.outer.SGD(lr=1.0), **outer))
    write(model, values_of(model, 3))
    go(model, optimizer, 1)
    write(model, values_of(model, 4))
    go(model, optimizer, 1, by=1.0)
    assert_all(model, 3.9)
    go(model, optimizer, 12)
    optimizer.state_dict()
    assert optimizer.local_epoch >= 3
    assert_all(model, 3.9)  # an outer step of 1.0 sets the anchor to the mean of the models


def test_a_clamp_after_each_inner_step_is_allowed(alone: Alone) -> None:
    model = nn.Linear(3, 2)
    optimizer = make(alone, model, outer=shoal.DiLoCo(inner_steps=2))
    for _ in range(9):
        go(model, optimizer, 1, by=-1.0)
        clamp(model, values_of(model, 0))
    assert_all(model, 0.1)


OUTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "fragments": {"fragments": 2},
    "overlap": {"overlap": 1},
    "keep": {"overlap": "free", "mix": "keep"},
}


def trained(alone: Alone, outer: dict[str, Any]) -> tuple[nn.Module, shoal.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = make(alone, model, outer=shoal.DiLoCo(inner_steps=4, **outer), error_feedback=1.0)
    go(model, optimizer, 9, by=1.0)
    return model, optimizer


@pytest.mark.parametrize(("load", "outer"), [
    *[(load, "plain") for load in LOADS], *[("load_state_dict", outer) for outer in OUTERS]
])  # fmt: skip
def test_a_model_that_is_loaded_in_the_midst_is_refused_until_a_call_says_what_it_means(
    alone: Alone, load: str, outer: str
) -> None:
    model, optimizer = trained(alone, OUTERS[outer])
    tip = optimizer.tip
    LOADS[load](model, values_of(model, 5))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"optimizer\.load_state_dict\(saved"):
            go(model, optimizer, 1)
        assert_all(model, 5)
    optimizer.load_state_dict(optimizer.optimizer.state_dict())  # named in the message
    assert_all(model, 5)
    assert optimizer.tip.split(":")[:2] == tip.split(":")[:2] or outer in ("overlap", "keep")
    assert optimizer.tip != tip
    go(model, optimizer, 16)
    optimizer.state_dict()
    assert_all(model, 5)


@pytest.mark.parametrize("outer", OUTERS)
def test_a_checkpoint_of_both_continues_from_it(alone: Alone, outer: str) -> None:
    model, optimizer = trained(alone, OUTERS[outer])
    saved, kept, tip = optimizer.state_dict(), copy.deepcopy(model.state_dict()), optimizer.tip
    go(model, optimizer, 7, by=-2.0)
    model.load_state_dict(kept)
    optimizer.load_state_dict(saved)
    assert optimizer.tip == tip
    again = optimizer.state_dict()["shoal"]["drift"]
    torch.testing.assert_close(again["anchor"], saved["shoal"]["drift"]["anchor"], rtol=0, atol=0)
    assert all(map(torch.equal, again["residuals"], saved["shoal"]["drift"]["residuals"]))
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    go(model, optimizer, 1)


def test_weights_that_are_loaded_for_an_evaluation_and_loaded_back_are_not_refused(alone: Alone) -> None:
    model, optimizer = trained(alone, {})
    for _ in range(2):
        backup = copy.deepcopy(model.state_dict())
        LOADS["load_state_dict"](model, values_of(model, 5))
        model.load_state_dict(backup)
        go(model, optimizer, 1)
    twin = copy.deepcopy(model)  # with torch's hooks, which must not speak for this model
    LOADS["load_state_dict"](pickle.loads(pickle.dumps(twin)), values_of(model, 5))
    LOADS["load_state_dict"](twin, values_of(model, 5))
    go(model, optimizer, 1)


# -- what peers are told


def test_the_digest_is_of_what_the_step_made_in_every_mode(alone: Alone) -> None:
    told = []
    for options in ({}, {"offload_optimizer": True}, {"reuse_grad_buffers": True}, DELAYS["delayed step"]):
        model = nn.Linear(3, 2)
        WRITES["p.copy_"](model, values_of(model, 1))
        optimizer, digests = make(alone, model, **options), []
        for _ in range(4):
            go(model, optimizer, 1, by=1.0)
            optimizer.state_dict()
            clamp(model, values_of(model, 0))
            if optimizer.reuse_grad_buffers:
                for parameter in model.parameters():
                    parameter.grad = None
            optimizer._state.take_over()
            digests.append(optimizer._state.state_digest)
        told.append(digests)
    assert told.count(told[0]) == len(told)


def test_the_first_round_tells_of_what_was_written_before_it(alone: Alone) -> None:
    model = nn.Linear(3, 2)
    optimizer = make(alone, model)
    before = optimizer._state.state_digest
    WRITES["numpy"](model, values_of(model, 3))
    optimizer.step(batch_size=0)
    assert optimizer._state.state_digest != before
    assert optimizer._state.state_digest == optimizer._state.digest()


@pytest.mark.parametrize("options", [{}, DELAYS["delayed step"]], ids=["default", "delayed"])
def test_newcomers_get_what_the_step_made_and_nothing_that_was_written_since(
    alone: Alone, options: dict[str, Any]
) -> None:
    model = nn.Linear(3, 2)
    optimizer = make(alone, model, **options)
    replica = optimizer._state
    go(model, optimizer, 1, by=1.0)
    optimizer.state_dict()
    assert replica.copy_for_newcomer().tip == replica.tip
    WRITES["numpy"](model, values_of(model, 5))
    replica.take_over()  # as at the end of an epoch
    with pytest.raises(Rewritten):
        replica.copy_for_newcomer()
    go(model, optimizer, 1, by=1.0)
    optimizer.state_dict()
    WRITES["numpy"](model, values_of(model, 7))
    replica.take_over()
    copied = replica.copy_for_newcomer()
    assert copied.tip == replica.tip
    assert replica._digest_of(copied) == replica.state_digest


def test_an_optimizer_alone_that_is_loaded_makes_another_state_which_the_runs_own_outranks(alone: Alone) -> None:
    model = nn.Linear(3, 2)
    optimizer = make(alone, model)
    local = optimizer.optimizer.state_dict()
    optimizer.load_state_dict(local)
    assert optimizer._state.tip == Tip.genesis(optimizer.run_id)
    go(model, optimizer, 2, by=1.0)
    tip = optimizer._state.tip
    optimizer.load_state_dict(local)
    assert optimizer._state.tip == tip, "the parameters are those of the tip"
    LOADS["load_state_dict"](model, values_of(model, 5))
    optimizer.load_state_dict(local)
    other = optimizer._state.tip
    assert (other.epoch, other.samples) == (tip.epoch, tip.samples)
    assert tip.outranks(other)
    go(model, optimizer, 1, by=1.0)
    assert_all(model, 4.9)
    assert other == tip.rewritten(replica_digest(model)), "peers that load the same have the same state"


def replica_digest(model: nn.Module) -> bytes:
    """The digest of a Linear(3, 2) whose parameters are 5."""
    from shoal.flat import FlatBuffer
    from shoal.optim.loads import hash_of

    twin = nn.Linear(3, 2)
    WRITES["p.copy_"](twin, values_of(twin, 5))
    return hash_of(FlatBuffer.adopt(list(twin.parameters())).flat)


def test_what_is_saved_before_the_first_inner_step_has_the_written_values_as_its_anchor(alone: Alone) -> None:
    model = nn.Linear(3, 2)
    optimizer = make(alone, model, outer=shoal.DiLoCo(inner_steps=2))
    WRITES["numpy"](model, values_of(model, 5))
    optimizer.load_state_dict(optimizer.state_dict())
    go(model, optimizer, 6)
    assert_all(model, 5)


# -- a cluster whose ranks carry strands


@pytest.mark.parametrize("write", [*WRITES.values(), *LOADS.values()], ids=[*WRITES, *LOADS])
def test_what_is_written_into_the_model_of_a_cluster_is_the_model(alone: Alone, write: Write) -> None:
    model = nn.Linear(3, 2)
    optimizer = make(alone, model, cluster=shoal.Cluster(strands=2))
    for number in (3, 5):
        write(model, values_of(model, number))
        go(model, optimizer, 2, by=1.0)
        assert_all(model, number - 0.2)


@pytest.mark.parametrize("way", ["p.data.copy_", "p.data =", "numpy"])
def test_what_is_written_into_the_model_of_a_cluster_is_drift_with_an_outer_optimizer(alone: Alone, way: str) -> None:
    model = nn.Linear(3, 2)
    outer = shoal.DiLoCo(inner_steps=4, optimizer=shoal.outer.SGD(lr=1.0))
    optimizer = make(alone, model, cluster=shoal.Cluster(strands=2), outer=outer)
    WRITES[way](model, values_of(model, 3))
    optimizer.step(batch_size=0)
    WRITES[way](model, values_of(model, 5))
    go(model, optimizer, 4)
    assert_all(model, 5)
    WRITES[way](model, values_of(model, 4))
    go(model, optimizer, 2, by=1.0)
    assert_all(model, 3.8)
    LOADS["load_state_dict"](model, values_of(model, 7))
    with pytest.raises(RuntimeError, match="a checkpoint was loaded into the model"):
        go(model, optimizer, 1)
    optimizer.load_state_dict(optimizer.optimizer.state_dict())
    go(model, optimizer, 8)
    assert_all(model, 7)


def test_a_default_and_an_offload_peer_that_change_the_model_alike_agree(
    dht: shoal.DHT, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.optim.settings.HostCopy", Elsewhere)
    monkeypatch.setattr("shoal.optim.settings.is_on_host", lambda params: False)
    with shoal.DHT(dht.get_visible_maddrs(), start=True) as other:
        models, heard, peers = [nn.Linear(3, 2), nn.Linear(3, 2)], list[Any](), list[shoal.Optimizer]()
        for place, model, offload in zip((dht, other), models, (False, True), strict=True):
            WRITES["p.copy_"](model, values_of(model, 0))
            sgd = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1), "params": model.parameters()}
            counts = {"target_batch_size": 8, "batch_size_per_step": 4}
            peers.append(shoal.Optimizer(dht=place, run_id="alike", offload_optimizer=offload, **sgd, **counts))
            peers[-1].on_event = heard.append

        def train(model: nn.Module, optimizer: shoal.Optimizer) -> None:
            while optimizer.local_epoch < 8:
                go(model, optimizer, 1, by=3.0)
                clamp(model, values_of(model, 0))

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(train, models, peers))
        for optimizer in peers:
            optimizer.shutdown()
    assert {type(event) for event in heard} == {shoal.EpochReport}, heard

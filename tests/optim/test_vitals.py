"""What an optimizer says of itself to whoever watches: in its health record, and in the log."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.dht.records import get_dht_time
from shoal.health import record
from shoal.health.board import HealthBoard, Posted
from shoal.health.record import FaultKind, Health
from shoal.optim import vitals
from shoal.optim.vitals import NOT_COMPARED
from shoal.swarm.loading import refusal
from shoal.swarm.losses import PutOut
from shoal.swarm.protocol.messages import Pause
from shoal.swarm.protocol.tip import Tip
from tests.optim.conftest import Alone
from tests.optim.models import backward, fixed_batch, make_model
from tests.waiting import wait_until

GIVEN: dict[str, Any] = {"target_batch_size": 16, "batch_size_per_step": 8}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01)


def train(optimizer: shoal.Optimizer, model: nn.Module, epochs: int) -> None:
    while optimizer.local_epoch < epochs:
        inputs, outputs = fixed_batch(0)
        backward(model, inputs[:8], outputs[:8])
        optimizer.step()


def health(optimizer: shoal.Optimizer) -> Health:
    return optimizer._run.call(optimizer._vitals.health)


def posts(dht: shoal.DHT, run_id: str) -> list[Posted]:
    return dht.run_coroutine(lambda _, node: HealthBoard(node, run_id).read(1))


def test_with_an_outer_optimizer_it_counts_inner_steps(alone: Alone) -> None:
    model = make_model()
    optimizer = alone(model, optimizer=sgd, batch_size_per_step=8, outer=shoal.DiLoCo(inner_steps=4))
    for _ in range(3):
        inputs, outputs = fixed_batch(0)
        backward(model, inputs[:8], outputs[:8])
        optimizer.step()
    told = health(optimizer)
    assert (told.counts_steps, told.epoch, told.samples, told.target) == (True, 0, 3.0, 4.0)
    assert not health(alone(make_model(), optimizer=sgd, **GIVEN)).counts_steps


def test_it_tells_what_it_has_done(alone: Alone) -> None:
    model = make_model()
    optimizer = alone(model, optimizer=sgd, **GIVEN)
    first = health(optimizer)
    assert (first.epoch, first.last, first.loss, first.marks, first.totals.steps) == (0, None, None, (), 0)
    train(optimizer, model, 5)
    inputs, outputs = fixed_batch(0)
    backward(model, inputs[:8], outputs[:8])
    optimizer.step()
    told = health(optimizer)
    assert (told.epoch, told.newest, told.samples, told.target, told.members) == (5, 5, 8.0, 16.0, 1)
    assert (told.totals.steps, told.totals.samples, told.totals.rounds, told.samples_behind) == (11, 88.0, 5, 80.0)
    assert told.last is not None
    assert (told.last.epoch, told.last.samples, told.last.members) == (5, 16.0, 1)
    assert told.totals.step >= told.last.step > 0
    assert told.last.waiting >= 0
    assert told.epoch_seconds > 0
    assert told.cpu_seconds > 0
    assert told.memory > 1e7
    assert [(mark.epoch, mark.digest == NOT_COMPARED) for mark in told.marks] == [(5, False), (4, False)]
    assert told.marks[0].lineage.hex() == optimizer.tip.rpartition(":")[2][:16]


def test_peers_of_one_state_tell_one_mark_and_terms_are_what_is_compared(alone: Alone, dht: shoal.DHT) -> None:
    told = []
    for port in (None, 0):
        model = make_model()
        optimizer = alone(model, optimizer=sgd, run_id=f"run {port}", metrics_port=port, **GIVEN)
        train(optimizer, model, 2)
        told.append(health(optimizer))
    assert [mark.digest for mark in told[0].marks] == [mark.digest for mark in told[1].marks]
    assert told[0].machine == told[1].machine
    assert told[0].terms == told[1].terms  # each peer chooses its port for itself
    other = alone(make_model(), optimizer=sgd, run_id="other", target_batch_size=32, batch_size_per_step=8)
    assert health(other).terms != told[0].terms


def test_local_updates_are_not_to_be_compared(alone: Alone) -> None:
    model = make_model()
    optimizer = alone(model, optimizer=sgd, use_local_updates=True, **GIVEN)
    train(optimizer, model, 2)
    assert {mark.digest for mark in health(optimizer).marks} == {NOT_COMPARED}


def test_the_loss_is_the_mean_of_what_was_reported(alone: Alone, dht: shoal.DHT) -> None:
    optimizer = alone(make_model(), optimizer=sgd, **GIVEN)
    optimizer.report(loss=1.0)
    optimizer.report(loss=torch.tensor(3.0, requires_grad=True))
    assert health(optimizer).loss == 2.0
    board = HealthBoard(dht.dht_node, optimizer.run_id)
    dht.run_coroutine(lambda *_: optimizer._vitals._publish(board))
    assert health(optimizer).loss == 2.0  # until there is another one
    optimizer.report(loss=0.5)
    assert health(optimizer).loss == 0.5


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_none_is_a_fault_and_shows_nowhere(alone: Alone, loss: float) -> None:
    optimizer = alone(make_model(), optimizer=sgd, **GIVEN)
    optimizer.report(loss=loss)
    told = health(optimizer)
    assert told.loss is None
    assert told.faults == {FaultKind.NOT_FINITE: 1}
    assert told.fault is not None
    assert told.fault.reason == f"the loss is {loss}"
    assert told.fault.at <= get_dht_time()


def test_it_is_published_from_the_start_and_said_when_it_leaves(alone: Alone) -> None:
    model = make_model()
    optimizer = alone(model, optimizer=sgd, **GIVEN)
    with shoal.DHT(optimizer.dht.get_visible_maddrs(), client_mode=True, start=True) as other:
        optimizer._run.call(lambda: None)
        while not (found := posts(other, optimizer.run_id)):
            pass
        assert found[0].peer == optimizer.dht.peer_id
        assert not found[0].health.left
        optimizer.shutdown()
        (last,) = posts(other, optimizer.run_id)
        assert last.health.left
        assert last.health.order > found[0].health.order


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_an_unexpected_error_is_one_warning_and_the_next_record_is_published(
    alone: Alone, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, failing = HealthBoard.publish, [ZeroDivisionError("first"), KeyError("second")]
    published = threading.Event()

    async def breaks_twice(self: HealthBoard, health: Health, members: int) -> bool:
        if failing:
            raise failing.pop(0)
        kept = await publish(self, health, members)
        published.set()
        return kept

    monkeypatch.setattr(HealthBoard, "publish", breaks_twice)
    monkeypatch.setattr(vitals, "PERIOD_SECONDS", 0.05)
    optimizer = alone(make_model(), optimizer=sgd, **GIVEN)
    assert published.wait(30.0)
    assert failing == []
    assert warnings(caplog) == ["this peer's health record may be missing or incomplete: ZeroDivisionError('first')"]
    assert posts(optimizer.dht, optimizer.run_id)


def test_no_training_ends_for_an_error_in_what_it_says_of_itself(
    alone: Alone, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(event: object) -> None:
        raise ZeroDivisionError("nobody expects it")

    monkeypatch.setattr(vitals, "_round_of", breaks)
    model = make_model()
    optimizer = alone(model, optimizer=sgd, **GIVEN)
    train(optimizer, model, 2)
    assert len(warnings(caplog)) == 1
    assert health(optimizer).epoch == 2


def test_a_lost_member_is_told_of_at_once(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vitals, "PERIOD_SECONDS", 1e6)
    monkeypatch.setattr(vitals, "AT_ONCE_SECONDS", 0.0)
    optimizer = alone(make_model(), optimizer=sgd, **GIVEN)
    losses = optimizer._run.swarm.contacts.losses
    key = bytes(range(32))

    def lose() -> None:
        now = asyncio.get_running_loop().time()
        losses.add(key, coordinated=True, connected=1, epoch=0, now=now)
        losses.last_out = PutOut(key, 0, "it owes\na chunk")

    wait_until(lambda: bool(posts(optimizer.dht, optimizer.run_id)))
    optimizer._run.call(lose)
    wait_until(lambda: bool(posts(optimizer.dht, optimizer.run_id)[0].health.lost))
    (told,) = posts(optimizer.dht, optimizer.run_id)
    assert told.health.lost == (record.Lost(key[:8], 0, True),)
    assert told.health.put_out == record.PutOut(key[:8], 0, "it owes a chunk")


def test_a_peer_that_loads_the_state_says_so_at_once(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trainer is inside of `step` meanwhile."""
    monkeypatch.setattr(vitals, "PERIOD_SECONDS", 1e6)
    monkeypatch.setattr(vitals, "AT_ONCE_SECONDS", 0.0)
    optimizer = alone(make_model(), optimizer=sgd, **GIVEN)
    swarm = optimizer._run.swarm

    def told() -> list[record.Joining | None]:
        return [posted.health.joining for posted in posts(optimizer.dht, optimizer.run_id)]

    async def reserve() -> None:
        assert swarm.loading is not None
        await swarm.loading.reserve(Tip(7, bytes(32), 56.0), [], 57_000_000)

    wait_until(lambda: told() == [None])
    with optimizer._run.loading():
        assert health(optimizer).joining == record.Joining()
        optimizer._run._wait(reserve())
        wait_until(lambda: told() == [record.Joining(0, 57_000_000, 0.0)])
        assert swarm.loading is not None
        monkeypatch.setattr(swarm.loading, "_count", lambda: 12_000_000)
        optimizer._run._wait(swarm.loading._tell())
        assert health(optimizer).joining == record.Joining(12_000_000, 57_000_000, 0.0)
    wait_until(lambda: told() == [None])


def test_a_peer_whose_round_waits_for_newcomers_says_how_long(alone: Alone) -> None:
    optimizer = alone(make_model(), optimizer=sgd, **GIVEN)
    newcomers = optimizer._run.swarm.peer.newcomers
    assert health(optimizer).waits == 0.0
    optimizer._run.call(lambda: newcomers.told(20.0, asyncio.get_running_loop().time()))
    assert 0.0 < health(optimizer).waits <= 20.0
    optimizer._run.call(lambda: newcomers.is_over(asyncio.get_running_loop().time()))
    assert health(optimizer).waits == 0.0


def test_the_reason_why_a_peer_does_not_fit_says_what_to_do_within_a_record() -> None:
    reason = record.printable(str(refusal(1234.0, Pause(0.0, 600.0, 12345.0, 1234.5678))), record.MAX_REASON)
    for what in ("1234 s", "600 s", "wait_for_newcomers", "target_batch_size", "DiLoCo", "load_state_compression"):
        assert what in reason


def test_epochs_and_faults_are_log_records_with_fields(alone: Alone, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "shoal")
    model = make_model()
    optimizer = alone(model, optimizer=sgd, **GIVEN)
    events: list[Any] = []
    optimizer.on_event = events.append
    train(optimizer, model, 1)
    inputs, outputs = fixed_batch(0)
    backward(model, inputs[:8], outputs[:8])
    next(model.parameters()).grad.fill_(math.nan)  # type: ignore[union-attr]
    while optimizer.local_epoch < 2:
        optimizer.step()
    fields = [record.shoal for record in caplog.records if hasattr(record, "shoal")]
    epoch = next(each for each in fields if each["event"] == "epoch")
    assert (epoch["epoch"], epoch["samples"], epoch["num_peers"]) == (1, 16.0, 1)
    assert epoch["round_seconds"] == events[0].round_seconds
    assert epoch["step_seconds"] == events[0].step_seconds > 0
    fault = next(each for each in fields if each["event"] == "fault")
    assert fault == {"event": "fault", "kind": "not finite", "reason": "this peer's gradients have NaN or infinity"}
    assert health(optimizer).faults[FaultKind.NOT_FINITE] >= 1

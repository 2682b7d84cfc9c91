"""Local updates: every peer steps by itself, and the states are averaged at the end of an epoch."""

from __future__ import annotations

import pytest
import torch

from shoal.compression import NoCompression, TensorRole
from shoal.flat import Layout
from shoal.optim.state import SharedTensors
from tests.optim.models import OPTIMIZERS, SCHEDULERS, backward, fixed_batch, flat, make_model
from tests.optim.processes import Pool, Training, ask_all, by_epoch, events, fixed, stopped, training
from tests.waiting import wait_until

SHARES = [(0, 24), (24, 64)]
EPOCHS = 6


def simulate(every: int, parts: int) -> torch.Tensor:
    """Two peers in one process, with plain torch; the first one's parameters."""
    models = [make_model() for _ in SHARES]
    locals_ = [OPTIMIZERS["sgd"](model.parameters()) for model in models]
    schedules = [SCHEDULERS["steps"](local) for local in locals_]  # type: ignore[misc]
    for epoch in range(EPOCHS):
        inputs, outputs = fixed_batch(epoch)
        for model, local, (start, stop) in zip(models, locals_, SHARES, strict=True):
            size = (stop - start) // parts
            for first in range(start, stop, size):
                backward(model, inputs[first : first + size], outputs[first : first + size])
                local.step()
        for schedule in schedules:
            schedule.step()  # type: ignore[union-attr]
        if (epoch + 1) % every == 0:
            for mine, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
                mine.data = (24 * mine.data + 40 * theirs.data) / 64
                theirs.data = mine.data.clone()
    return flat(models[0])


@pytest.mark.parametrize(("every", "parts"), [(1, 4), (3, 1)])
def test_peers_step_alone_and_average_their_parameters(pool: Pool, every: int, parts: int) -> None:
    with training(
        pool,
        2,
        optimizer="sgd",
        scheduler="steps",
        use_local_updates=True,
        delay_state_averaging=False,
        average_state_every=every,
    ) as peers:
        answers = fixed(peers.all, SHARES, EPOCHS, [parts] * 2)
        histories = [events(peer) for peer in peers.all]
    assert answers[0]["parameters_digest"] == answers[1]["parameters_digest"]
    assert answers[0]["statistics"] != answers[1]["statistics"], "the momentum is each peer's own"
    assert answers[0]["rate"] == answers[1]["rate"] == repr(0.05 / 4), "the scheduler is stepped once per epoch"
    expected = simulate(every, parts)
    torch.testing.assert_close(torch.tensor(answers[0]["parameters"]), expected, rtol=1e-4, atol=1e-5)
    digests = [[event["digest"] for event in history] for history in histories]
    alike = [mine == theirs for mine, theirs in zip(*digests, strict=True)]
    assert alike == [epoch % every == 0 for epoch in range(1, EPOCHS + 1)]
    assert all(event["kind"] == "epoch" and event["samples"] == 64 for history in histories for event in history)


@pytest.mark.long
def test_the_trainer_goes_on_while_states_are_averaged(pool: Pool) -> None:
    """In the background; all get the same averages, and a newcomer joins in."""
    with training(pool, 2, optimizer="adamw", scheduler="steps", use_local_updates=True, target=128) as peers:
        ask_all(peers.all, Training.train, batch=8, pause=0.01)
        wait_until(lambda: len(events(peers.all[0])) >= 4)
        [late] = peers.add(1, seed=5)
        late.ask(Training.train, batch=8, pause=0.01)
        wait_until(lambda: sum(event.get("peers") == 3 for event in events(late)) >= 4)
        states = stopped(peers.all)
        histories = [events(peer) for peer in peers.all]
        logs = ask_all(peers.all, Training.report)
    by_epoch([[event for event in history if event["kind"] == "epoch"] for history in histories])
    kinds = [event["kind"] for event in histories[2]]
    assert kinds[0] == "download"
    assert "download" not in kinds[kinds.index("epoch") :], kinds  # before, one may have taken longer than an epoch
    assert all(report["errors"] == [] for report in logs)
    assert len({state["rate"] for state in states}) == 1


def test_what_changed_meanwhile_is_kept() -> None:
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor(3.0, dtype=torch.float64)]
    shared = SharedTensors(lambda: tensors, Layout.of(tensors), NoCompression(), [TensorRole.PARAMETER] * 2)
    shared.take()
    for average, mine in zip(shared.outputs.flat, shared.inputs.flat, strict=True):
        average.copy_(mine + 10.0)
    tensors[0] += torch.tensor([0.5, float("nan")])
    shared.put(keep_changes=True)
    assert tensors[0].tolist() == [11.5, 12.0], "a change that is not finite is not kept"
    assert tensors[1].item() == 13.0
    shared.put(keep_changes=False)
    assert tensors[0].tolist() == [11.0, 12.0]

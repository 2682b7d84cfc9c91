"""`shoal.integrations.accelerate`: what the calls of a loop mean in a run, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.integrations.accelerate import swarm
from shoal.integrations.member import Joiner
from tests.integrations.tiny import inputs

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks


class Loop:
    """An ordinary loop with Accelerate."""

    def __init__(self, dht: shoal.DHT, run_id: str) -> None:
        self.dht, self.run_id, self.events = dht, run_id, list[Any]()
        self.clipped: list[float] = []

    def prepare(self, *more: Any, target: int = 32, data: int = 50, accumulate: int = 1, **given: Any) -> None:
        self.accelerator: Any = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        if given.pop("scaler", False):
            self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        torch.manual_seed(0)
        model = nn.Linear(8, 1)
        plain = torch.optim.SGD(model.parameters(), lr=0.01)
        plain.register_step_pre_hook(self.look)
        make = given.pop("schedule", lambda optimizer: ExponentialLR(optimizer, gamma=0.5))
        args = model, plain, DataLoader(TensorDataset(inputs(data)), batch_size=4), make(plain), *more
        run = {"dht": self.dht, "run_id": self.run_id, "target_batch_size": target, "on_event": self.events.append}
        self.model, self.optimizer, self.data, self.schedule, *_ = swarm(self.accelerator, *args, **run, **given)

    def look(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"]]
        self.clipped.append(torch.nn.utils.get_total_norm(grads).item())

    def run(self, epochs: int = 5, clip: float | None = None, data: Any = None) -> None:
        while True:
            for (batch,) in data or self.data:
                with self.accelerator.accumulate(self.model):
                    loss = (self.model(batch) - batch.sum(1, keepdim=True)).square().mean()
                    self.accelerator.backward(loss)
                    if clip is not None:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                    self.optimizer.step()
                    self.schedule.step()
                    self.optimizer.zero_grad()
                if self.optimizer.optimizer.local_epoch >= epochs:
                    return

    @property
    def samples(self) -> list[float]:
        return [event.samples for event in self.events if isinstance(event, shoal.EpochReport)]


@pytest.fixture
def loop(dht: shoal.DHT, tmp_path: Path) -> Iterator[Loop]:
    loop = Loop(dht, tmp_path.name)
    yield loop
    if hasattr(loop, "optimizer"):
        loop.accelerator.end_training()
        assert not loop.optimizer.optimizer.is_alive()


def test_the_samples_of_each_batch_count(loop: Loop) -> None:
    loop.prepare()
    loop.run()
    assert loop.samples == [32, 34, 32, 34, 34]  # each pass over the 50 samples ends with a batch of 2
    assert loop.schedule.get_last_lr() == [0.01 * 0.5**5]


def test_an_incomplete_accumulation_counts_what_it_has(loop: Loop) -> None:
    loop.prepare(accumulate=3, data=26, target=26)
    loop.run()
    assert loop.samples == [26] * 5  # 12, 12 and 2


def test_a_batch_has_text_and_numbers_as_well(loop: Loop) -> None:
    rows = [{"name": "a row", "weight": 1.0, "scale": torch.tensor(1.0), "x": row} for row in inputs(10)]
    model = nn.Linear(8, 1)
    loop.accelerator = Accelerator(cpu=True)
    data: Any = DataLoader(rows, batch_size=4, collate_fn=collate)  # type: ignore[arg-type]
    given = model, torch.optim.SGD(model.parameters(), lr=0.01), data
    run = {"dht": loop.dht, "run_id": loop.run_id, "target_batch_size": 10, "on_event": loop.events.append}
    loop.model, loop.optimizer, loop.data = swarm(loop.accelerator, *given, **run)
    for batch in loop.data:
        loop.accelerator.backward(loop.model(batch["x"]).square().mean())
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    assert loop.samples == [10]


def collate(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is one for all rows, first."""
    return {**rows[0], "names": [row["name"] for row in rows], "x": torch.stack([row["x"] for row in rows])}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_who_watches_is_told_the_loss(loop: Loop, reported: list[float], accumulate: int) -> None:
    loop.prepare(data=32, accumulate=accumulate)
    with torch.no_grad():
        expected = (loop.model(inputs(32)) - inputs(32).sum(1, keepdim=True)).square().mean().item()
    loop.run()
    assert len(reported) == 5
    assert reported[0] == pytest.approx(expected, rel=1e-4)


def test_batches_that_are_skipped_do_not_count(loop: Loop) -> None:
    loop.prepare(target=18)
    loop.run(epochs=1, data=loop.accelerator.skip_first_batches(loop.data, 8))
    assert loop.samples == [18]


def test_the_average_is_clipped(loop: Loop) -> None:
    loop.prepare(max_grad_norm=0.25)
    loop.run(clip=0.25)
    assert loop.clipped == pytest.approx([0.25] * 5, rel=1e-3)
    with pytest.raises(ValueError, match=r"give max_grad_norm=1\.0 to shoal"):
        loop.run(epochs=6, clip=1.0)


def test_a_cycle_ends_with_its_last_step(loop: Loop) -> None:
    loop.prepare(schedule=lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=6))
    loop.run()
    assert loop.schedule.get_last_lr() == pytest.approx([0.1 / 25 / 1e4])


def test_an_overflow_costs_that_batch_only(loop: Loop) -> None:
    loop.prepare(scaler=True, data=64, target=8)
    calls = []

    def poison(gradient: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return torch.full_like(gradient, torch.inf) if len(calls) == 3 else gradient

    loop.model.weight.register_hook(poison)
    loop.run()
    assert loop.accelerator.scaler.get_scale() == 512
    assert loop.samples == [8] * 5
    assert len(calls) == 11  # 2 for each epoch, and the one that was lost


def test_logs_have_the_epoch_and_the_number_of_peers(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(Accelerator, "log", lambda _, values, **__: told.append(values))
    loop.prepare()
    loop.run()
    loop.accelerator.log({"loss": 1.0}, step=3)
    assert told == [{"loss": 1.0, "run_epoch": 5, "run_peers": 1}]


def test_a_data_loader_that_was_not_given_is_refused(loop: Loop) -> None:
    loop.prepare()
    loop.run(epochs=1)
    with pytest.raises(ValueError, match="nobody knows how many samples are behind this backward"):
        loop.run(epochs=2, data=DataLoader(TensorDataset(inputs(8)), batch_size=4))


def test_what_does_not_fit_is_refused(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    other = torch.optim.Adam(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match=r"a run has one optimizer, and the script gives 2 \(SGD, Adam\)"):
        loop.prepare(other)
    with pytest.raises(ValueError, match="offload_optimizer=True does not work"):
        loop.prepare(offload_optimizer=True)
    monkeypatch.setattr(Accelerator, "num_processes", 2)
    with pytest.raises(ValueError, match="one process on one device, and `accelerate launch`"):
        loop.prepare()


def by_hand(loop: Loop, accumulate: int) -> None:
    """A loop that accumulates without `accelerator.accumulate`."""
    for number, (batch,) in enumerate(loop.data, 1):
        loop.accelerator.backward((loop.model(batch) - batch.sum(1, keepdim=True)).square().mean())
        if number % accumulate == 0:
            loop.optimizer.step()
            loop.optimizer.zero_grad()


def test_a_batch_whose_gradients_were_cleared_does_not_count(loop: Loop) -> None:
    loop.prepare(target=8, data=16)
    for number, (batch,) in enumerate(loop.data):
        loop.accelerator.backward((loop.model(batch) - batch.sum(1, keepdim=True)).square().mean())
        if number % 2:
            loop.optimizer.step()
        loop.optimizer.zero_grad()
    assert loop.samples == [8]


def test_accumulation_by_hand_is_that_of_the_accelerator_or_refused(loop: Loop) -> None:
    loop.prepare(target=16, data=16, accumulate=2)
    by_hand(loop, 2)
    assert loop.samples == [16]
    with pytest.raises(ValueError, match=r"4 batches are behind this step, and the Accelerator divides by 2: give it"):
        by_hand(loop, 4)


def test_clipping_that_the_run_does_not_do_is_refused(loop: Loop) -> None:
    loop.prepare(max_grad_norm=1.0)
    with pytest.raises(ValueError, match="a run clips the norm of type 2, and not inf"):
        loop.accelerator.clip_grad_norm_(loop.model.parameters(), 1.0, norm_type=float("inf"))
    with pytest.raises(ValueError, match="clips each batch of this peer, and a run clips the norm of the average"):
        loop.accelerator.clip_grad_value_(loop.model.parameters(), 1.0)


def test_a_schedule_of_a_metric_is_refused_before_the_run_is_joined(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    monkeypatch.setattr(shoal.Optimizer, "__init__", lambda self, **_: made.append(self))
    with pytest.raises(ValueError, match="ReduceLROnPlateau follows a metric that each peer measures by itself"):
        loop.prepare(schedule=ReduceLROnPlateau)
    assert made == []
    assert type(loop.accelerator) is Accelerator
    assert loop.accelerator.step_scheduler_with_optimizer


@pytest.mark.parametrize("cluster", [None, shoal.Cluster(strands=3)])
def test_a_state_is_loaded_after_the_training(loop: Loop, tmp_path: Path, cluster: Any) -> None:
    loop.prepare(cluster=cluster)
    loop.run(epochs=2)
    best, rate = loop.model.weight.detach().clone(), loop.schedule.get_last_lr()
    loop.accelerator.save_state(str(tmp_path))
    loop.run(epochs=4)
    loop.accelerator.end_training()
    assert not torch.equal(loop.model.weight, best)
    loop.accelerator.load_state(str(tmp_path))
    assert torch.equal(loop.model.weight, best)
    assert loop.schedule.get_last_lr() == rate
    assert loop.optimizer.optimizer.local_epoch == 2
    with pytest.raises(RuntimeError, match="this optimizer was shut down"):
        loop.run(epochs=3)


def test_a_peer_whose_script_can_not_go_on_leaves_the_run(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[Joiner] = []
    monkeypatch.setattr(Joiner, "leave", lambda member: left.append(member))
    another = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ValueError, match="the scheduler is of a SGD that no shoal"):
        loop.prepare(schedule=lambda _: ExponentialLR(another, gamma=0.5))
    [member] = left
    member.optimizer.shutdown()

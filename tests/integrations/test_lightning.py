"""`shoal.integrations.lightning`: what the settings of a script mean in a run, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import LearningRateFinder, StochasticWeightAveraging
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.integrations.lightning import SwarmStrategy
from tests.integrations.tiny import inputs
from tests.optim.closing import Sam

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks

Make = Callable[..., tuple[L.Trainer, Any]]


class Module(L.LightningModule):
    """A tiny network."""

    def __init__(self, interval: str = "step", optimizers: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(8, 1)
        self.interval, self.count = interval, optimizers
        self.clipped: list[float] = []

    def training_step(self, batch: Any, number: int) -> Tensor:
        return (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> Any:
        made = [torch.optim.SGD(self.parameters(), lr=0.01) for _ in range(self.count)]
        made[0].register_step_pre_hook(self.look)
        schedules = [{"scheduler": ExponentialLR(made[0], gamma=0.5), "interval": self.interval}]
        return made, schedules

    def look(self, *_: Any) -> None:
        grads = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
        self.clipped.append(torch.nn.utils.get_total_norm(grads).item())


@pytest.fixture
def fit(dht: shoal.DHT, tmp_path: Path) -> Make:
    """Trains, and gives the Trainer and the events."""

    def done(module: Any = None, target: int = 32, data: int = 50, **given: Any) -> tuple[L.Trainer, Any]:
        events: list[Any] = []
        local = {"use_local_updates": given.pop("use_local_updates", False)}
        strategy = SwarmStrategy(
            dht=dht, run_id=tmp_path.name, target_batch_size=target, device="cpu", on_event=events.append, **local
        )
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        settings = {"max_steps": 5, "accelerator": "cpu", "devices": 1, "default_root_dir": tmp_path, **quiet, **given}
        trainer = L.Trainer(strategy=strategy, **settings)
        loader = DataLoader(TensorDataset(inputs(data)), batch_size=4)
        trainer.fit(module or Module(), loader)
        return trainer, events

    return done


class Evaluates(Module):
    """Trained with an optimizer that calls its closure several times."""

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer]) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


@pytest.mark.parametrize("make", [Sam, lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=3)])
def test_each_own_step_evaluates_the_loss_as_lightning_alone(
    fit: Make, make: Callable[[Any], torch.optim.Optimizer], tmp_path: Path
) -> None:
    ours, plain = Evaluates(make), Evaluates(make)
    fit(ours, target=16, data=16, max_steps=-1, max_epochs=1, use_local_updates=True)
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", devices=1, default_root_dir=tmp_path, **quiet)
    trainer.fit(plain, DataLoader(TensorDataset(inputs(16)), batch_size=4))
    # The same operations; a sum over a gradient at another address may round otherwise.
    for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def samples(events: list[Any]) -> list[float]:
    return [event.samples for event in events if isinstance(event, shoal.EpochReport)]


def test_a_step_is_an_epoch_of_the_run(fit: Make) -> None:
    module = Module()
    trainer, events = fit(module)
    assert trainer.global_step == 5
    assert samples(events) == [32, 34, 32, 34, 34]  # each pass over the 50 samples ends with a batch of 2
    assert trainer.callback_metrics["run_epoch"] == 5
    assert trainer.callback_metrics["run_peers"] == 1
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.01 * 0.5**5
    assert not trainer.optimizers[0].is_alive()


def test_an_incomplete_accumulation_counts_what_it_has(fit: Make) -> None:
    assert samples(fit(accumulate_grad_batches=3, data=26, target=26)[1]) == [26] * 5  # 12, 12 and 2


@pytest.mark.parametrize("accumulate", [1, 2])
def test_who_watches_is_told_the_loss(fit: Make, reported: list[float], accumulate: int) -> None:
    seen: list[float] = []

    class Watched(Module):
        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            seen.append(outputs["loss"].item() * accumulate)  # which Lightning has divided

    fit(Watched(), data=32, accumulate_grad_batches=accumulate)
    assert reported == pytest.approx([sum(seen[at : at + 8]) / 8 for at in range(0, 40, 8)], rel=1e-4)


def test_the_average_is_clipped(fit: Make) -> None:
    module = Module()
    trainer, _ = fit(module, gradient_clip_val=0.25)
    assert module.clipped == pytest.approx([0.25] * 5, rel=1e-3)
    assert trainer.gradient_clip_val == 0.25


def test_bf16_needs_nothing(fit: Make) -> None:
    assert fit(precision="bf16-mixed")[0].global_step == 5


def test_an_overflow_costs_that_batch_only(fit: Make) -> None:
    class Overflows(Module):
        def on_after_backward(self) -> None:
            self.steps = getattr(self, "steps", 0) + 1
            if self.steps == 3:
                next(self.parameters()).grad.fill_(torch.inf)

    module, scaler = Overflows(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    _, events = fit(module, data=64, target=8, plugins=[plugin])
    assert isinstance(plugin.scaler, shoal.GradScaler)
    assert plugin.scaler.get_scale() == 512
    assert samples(events) == [8] * 5
    assert module.steps == 11  # 2 for each epoch, and the one that was lost


def test_it_validates_stops_early_and_loads_a_checkpoint_afterwards(fit: Make, tmp_path: Path) -> None:
    class Validated(Module):
        def validation_step(self, *_: Any) -> None:
            self.log("quality", 1.0)

        def val_dataloader(self) -> Any:
            return DataLoader(TensorDataset(inputs(8)), batch_size=4)

    stop = L.pytorch.callbacks.EarlyStopping("quality", patience=1)
    module = Validated()
    trainer, _ = fit(module, max_steps=100, callbacks=[stop], val_check_interval=9, enable_checkpointing=True)
    assert trainer.global_step == 2  # after 9 batches of the second pass: 86 samples
    assert not trainer.optimizers[0].is_alive()
    saved = trainer.checkpoint_callback.best_model_path
    assert trainer.validate(module, ckpt_path=saved, verbose=False) == [{"quality": 1.0}]


def test_it_leaves_the_run_when_training_raises(fit: Make, dht: shoal.DHT) -> None:
    left = []

    class Raises(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            left.append(self.optimizers().optimizer)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fit(Raises())
    assert not left[0].is_alive()
    assert dht.is_alive()


@pytest.mark.parametrize(
    ("module", "given", "says"),
    [
        (Module("epoch"), {}, 'interval="epoch" and frequency=1, which follow this peer\'s own batches'),
        (Module(), {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, "clips the norm of the average"),
        (
            Module(),
            {"devices": 2},
            r"one process on one device, and the Trainer \(devices= and num_nodes=\) asks for 2",
        ),
        (
            Module(),
            {"callbacks": [StochasticWeightAveraging(0.1)]},
            "StochasticWeightAveraging replaces the schedule by one that follows this peer's own passes",
        ),
        (Module(), {"callbacks": [LearningRateFinder()]}, "LearningRateFinder trains by itself, in the midst of the"),
        (Module(), {"num_nodes": 3}, r"the Trainer \(devices= and num_nodes=\) asks for 3"),
    ],
)
def test_what_does_not_fit_is_refused(fit: Make, module: Module, given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        fit(module, **given)


def test_several_processes_of_torchrun_are_refused(fit: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"one device, and `torchrun` \(--nproc-per-node\) asks for 2"):
        fit()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert fit()[0].global_step == 5


def test_manual_optimization_and_several_optimizers_are_refused(fit: Make) -> None:
    class Manual(Module):
        automatic_optimization = False

    with pytest.raises(ValueError, match="manual optimization steps the optimizer in ways"):
        fit(Manual())
    with pytest.raises(ValueError, match=r"a run has one optimizer, and the script gives 2 \(SGD, SGD\)"):
        fit(Manual(optimizers=2))


def test_options_of_the_script_are_refused(dht: shoal.DHT) -> None:
    with pytest.raises(ValueError, match="set the Trainer's gradient_clip_val"):
        SwarmStrategy(dht=dht, run_id="x", target_batch_size=8, max_grad_norm=1.0)
    with pytest.raises(ValueError, match="delay_grad_averaging=True does not work in a framework's training loop"):
        SwarmStrategy(dht=dht, run_id="x", target_batch_size=8, delay_grad_averaging=True)


def test_a_schedule_of_a_metric_is_refused_before_the_run_is_joined(fit: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    class Plateau(Module):
        def configure_optimizers(self) -> Any:
            made = torch.optim.SGD(self.parameters(), lr=0.01)
            schedule = {"scheduler": ReduceLROnPlateau(made), "interval": "step", "monitor": "loss"}
            return {"optimizer": made, "lr_scheduler": schedule}

    made: list[Any] = []
    monkeypatch.setattr(shoal.Optimizer, "__init__", lambda self, **_: made.append(self))
    with pytest.raises(ValueError, match="ReduceLROnPlateau follows a metric that each peer measures by itself"):
        fit(Plateau())
    assert made == []


def test_a_second_fit_needs_a_checkpoint(fit: Make, tmp_path: Path) -> None:
    module = Module()
    saved = L.pytorch.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=5)
    trainer, events = fit(module, callbacks=[saved])
    trained, loader = module.net.weight.detach().clone(), DataLoader(TensorDataset(inputs(50)), batch_size=4)
    trainer.fit_loop.epoch_loop.max_steps = 8
    with pytest.raises(
        ValueError, match=r"this Trainer has trained in the run .* before.*ckpt_path=…\) goes on from a"
    ):
        trainer.fit(module, loader)
    assert torch.equal(module.net.weight, trained)
    assert len(samples(events)) == 5
    trainer.fit(module, loader, ckpt_path=saved.best_model_path)
    with pytest.raises(ValueError, match="this Trainer has trained"):
        trainer.fit(module, loader)
    assert trainer.global_step == 8
    assert len(samples(events)) == 8
    assert trainer.optimizers[0].param_groups[0]["lr"] == 0.01 * 0.5**8

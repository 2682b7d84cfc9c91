"""`shoal.integrations.transformers`: what a Trainer's settings mean in a run, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

import shoal
from shoal.integrations.transformers import swarm
from tests.integrations.tiny import language_model, texts

pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks

Make = Callable[..., Any]


class Stream(IterableDataset[Any]):
    """As many texts as asked for, without a length."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return iter(texts(self.count))


@pytest.fixture
def make(dht: shoal.DHT, tmp_path: Path) -> Make:
    """A Trainer that is a peer, with the events that it hears in `.events`."""

    def made(data: Any = 50, target: int = 32, kind: type[Trainer] = Trainer, prepare: Any = None, **given: Any) -> Any:
        names = {"callbacks", "optimizers", "model_init", "eval_dataset"}
        own = {name: given.pop(name) for name in names & given.keys()}
        names = {"use_local_updates", "reuse_grad_buffers", "dht", "cluster"}
        run = {"dht": dht} | {name: given.pop(name) for name in names & given.keys()}
        settings = {
            "output_dir": str(tmp_path), "per_device_train_batch_size": 4, "max_steps": 5, "report_to": [],
            "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "learning_rate": 0.01,
            **given,
        }  # fmt: skip
        own |= {} if "model_init" in own else {"model": language_model()}
        train = texts(data) if isinstance(data, int) else data
        trainer: Any = kind(args=TrainingArguments(**settings), train_dataset=train, **own)
        if prepare is not None:
            prepare(trainer)
        trainer.events = []
        run_id = tmp_path.name
        return swarm(trainer, run_id=run_id, target_batch_size=target, on_event=trainer.events.append, **run)

    return made


alone_or_with_strands = pytest.mark.parametrize("cluster", [None, lambda: shoal.Cluster(strands=3)])


def samples(trainer: Any) -> list[float]:
    return [event.samples for event in trainer.events if isinstance(event, shoal.EpochReport)]


def test_a_step_is_an_epoch_of_the_run(make: Make) -> None:
    trainer = make(eval_strategy="no", save_strategy="steps", save_steps=2)
    assert trainer.train().global_step == 5
    assert samples(trainer) == [32, 34, 32, 34, 34]  # each pass over the 50 samples ends with a batch of 2
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert [log["step"] for log in logs] == [1, 2, 3, 4, 5] == [log["run_epoch"] for log in logs]
    assert all(log["run_peers"] == 1 for log in logs)
    assert sorted(path.name for path in Path(trainer.args.output_dir).iterdir()) == [
        "checkpoint-2", "checkpoint-4", "checkpoint-5"
    ]  # fmt: skip


def test_the_loss_of_a_step_is_the_mean_over_the_epoch(make: Make, tmp_path: Path) -> None:
    plain = TrainingArguments(str(tmp_path), per_device_train_batch_size=32, max_steps=1, use_cpu=True, report_to=[])
    expected = Trainer(language_model(), plain, train_dataset=texts(32)).train().training_loss
    trainer = make(learning_rate=0.0, data=32)
    result = trainer.train()
    logs = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert logs == pytest.approx([expected] * 5, abs=1e-4)
    assert result.training_loss == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_who_watches_is_told_the_loss(make: Make, reported: list[float], accumulate: int) -> None:
    trainer = make(gradient_accumulation_steps=accumulate)
    trainer.train()
    logs = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    assert reported == pytest.approx(logs, abs=1e-3)


def test_without_max_steps_it_makes_the_passes_of_one_process_with_that_batch(make: Make) -> None:
    trainer = make(max_steps=-1, num_train_epochs=3)
    assert trainer.train().global_step == 6  # 3 passes of ceil(50 / 32) steps
    assert trainer.state.max_steps == 6


def test_an_incomplete_accumulation_counts_what_it_has(make: Make) -> None:
    trainer = make(gradient_accumulation_steps=3, max_steps=10, data=26, target=26)
    trainer.train()
    assert samples(trainer) == [26] * 10  # 12, 12 and 2


@pytest.mark.parametrize("count", [10, 1000])
def test_a_stream_ends_no_step(make: Make, count: int) -> None:
    trainer = make(data=Stream(count), max_steps=3, target=16)
    assert trainer.train().global_step == 3
    assert sum(samples(trainer)) >= 3 * 16


def test_the_last_batches_of_a_stream_wait_for_a_whole_step(make: Make) -> None:
    norms = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())

    class Same(Stream):
        def __iter__(self) -> Iterator[Any]:
            return iter(texts(1) * self.count)

    # 5 batches in a pass, of which 3 make a step
    trainer = make(data=Same(20), target=12, gradient_accumulation_steps=3, learning_rate=0.0, callbacks=[Watch()])
    trainer.train()
    assert samples(trainer) == [12] * 5
    assert norms == pytest.approx([norms[0]] * 5, rel=1e-3)


def test_the_trainers_schedule_is_that_of_the_run(make: Make) -> None:
    trainer = make(max_steps=10, warmup_steps=2)
    trainer.train()
    rates = [log["learning_rate"] for log in trainer.state.log_history if "loss" in log]
    assert rates == pytest.approx([0, 0.005, *(0.01 * left / 8 for left in range(8, 0, -1))])


def test_peers_shuffle_differently(make: Make, dht: shoal.DHT) -> None:
    with shoal.DHT(start=True) as other:
        trainers = [make(), make(), make(dht=other)]
        mine, again, theirs = (torch.cat([b["input_ids"] for b in one.get_train_dataloader()]) for one in trainers)
    assert torch.equal(mine, again)
    assert not torch.equal(mine, theirs)
    assert torch.equal(mine.sum(0), theirs.sum(0))


@pytest.mark.parametrize(
    "given",
    [{}, {"train_sampling_strategy": "group_by_length"}, {"accelerator_config": {"use_seedable_sampler": False}}],
)
def test_peers_see_the_data_in_unlike_orders(make: Make, dht: shoal.DHT, given: dict[str, Any]) -> None:
    seen: list[Any] = []

    class Watched(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append(inputs["input_ids"].tolist())
            return super().compute_loss(model, inputs, *args, **kwargs)

    with shoal.DHT(start=True) as other:
        for one in (dht, other):
            make(kind=Watched, data=64, target=64, max_steps=1, dht=one, **given).train()
    assert len(seen) == 32
    assert seen[:16] != seen[16:]


def test_a_callback_that_comes_late_does_not_evaluate_within_an_epoch(make: Make) -> None:
    evaluated = []

    class Asks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_evaluate = True

        def on_evaluate(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            evaluated.append(state.global_step)

    trainer = make(eval_dataset=texts(4))
    trainer.add_callback(Asks())
    trainer.train()
    assert evaluated == [1, 2, 3, 4, 5]


def test_a_script_may_make_the_optimizer_before(make: Make) -> None:
    trainer = make()
    trainer.create_optimizer()
    assert trainer.train().global_step == 5
    assert len(samples(trainer)) == 5


def test_a_training_that_had_ended_is_not_continued(make: Make, tmp_path: Path) -> None:
    make(target=4, save_strategy="steps", save_steps=5).train()
    trainer = make(target=4)
    assert trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5")).global_step == 5
    assert samples(trainer) == []


def test_the_run_is_left_before_the_best_model_is_loaded(make: Make) -> None:
    class Watched(Trainer):
        was_alive = True

        def _load_best_model(self) -> None:
            self.was_alive = trainer._member.optimizer.is_alive()
            super()._load_best_model()

    saved = {"save_strategy": "steps", "save_steps": 2, "eval_strategy": "steps", "eval_steps": 2}
    trainer = make(kind=Watched, load_best_model_at_end=True, eval_dataset=texts(4), **saved)
    trainer.train()
    assert not trainer.was_alive


@pytest.mark.long
@alone_or_with_strands
def test_an_optimizer_and_a_scheduler_of_the_user_are_kept(make: Make, cluster: Any) -> None:
    model = language_model()
    plain = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    halving = torch.optim.lr_scheduler.ExponentialLR(plain, gamma=0.5)
    saved = {"save_strategy": "steps", "save_steps": 5}
    trainer = make(
        optimizers=(plain, halving), prepare=lambda made: setattr(made, "model", model), cluster=cluster, **saved
    )
    trainer.model_wrapped = model
    trainer.train()
    assert trainer._member.optimizer.optimizer is plain
    assert plain.param_groups[0]["lr"] == 0.5**6
    trainer.args.max_steps = 7
    trained = model.lm_head.weight.detach().clone()
    assert trainer.train(resume_from_checkpoint=True).global_step == 7
    assert trainer._member.optimizer.optimizer is plain
    assert plain.param_groups[0]["lr"] == 0.5**8
    assert not torch.equal(model.lm_head.weight, trained)
    assert torch.isfinite(model.lm_head.weight).all()


def test_the_average_is_clipped_and_no_batch(make: Make) -> None:
    norms = []

    class Watch(TrainerCallback):
        def on_pre_optimizer_step(self, *_: Any, model: Any, **__: Any) -> None:
            norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())

    trainer = make(max_grad_norm=0.01, callbacks=[Watch()])
    clipped = []

    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        clipped.append(torch.nn.utils.get_total_norm(grads).item())

    class Hook(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            trainer._member.optimizer.optimizer.register_step_pre_hook(look)

    trainer.add_callback(Hook())
    trainer.train()
    assert min(norms) > 0.1
    assert clipped == pytest.approx([0.01] * 5, rel=1e-3)
    assert trainer.args.max_grad_norm == 0.01


def test_local_updates_are_clipped_by_the_trainer(make: Make) -> None:
    trainer = make(max_grad_norm=0.01, use_local_updates=True)
    assert trainer.train().global_step == 5


def test_it_trains_again_and_from_a_new_model(make: Make) -> None:
    trainer = make(model_init=lambda: language_model())
    for _ in range(2):
        assert trainer.train().global_step == 5
        assert not trainer._member.optimizer.is_alive()
    assert trainer.evaluate(eval_dataset=texts(4))["run_epoch"] == 5


def test_a_second_training_needs_a_checkpoint_or_a_new_model(make: Make) -> None:
    trainer = make(save_strategy="steps", save_steps=5)
    trainer.train()
    trained = [parameter.detach().clone() for parameter in trainer.model.parameters()]
    trainer.args.max_steps = 8
    with pytest.raises(
        ValueError, match=r"this Trainer has trained in the run .* before.*=True\) goes on from a checkpoi"
    ):
        trainer.train()
    assert all(map(torch.equal, trained, trainer.model.parameters()))
    assert trainer.train(resume_from_checkpoint=True).global_step == 8
    assert len(samples(trainer)) == 8


SAVED = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6, "warmup_steps": 2}


def rates(trainer: Any) -> list[float]:
    return [log["learning_rate"] for log in trainer.state.log_history if "loss" in log]


def test_a_checkpoint_without_the_optimizer_goes_on_at_its_epoch(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make(save_only_model=True, **SAVED).train()
    trainer = make(save_only_model=True, **SAVED)
    assert trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3")).global_step == 6
    assert [event.epoch for event in trainer.events] == [4, 5, 6]
    assert rates(trainer) == pytest.approx([0, 0.005, 0.01, 0.0075, 0.005, 0.0025])
    [told] = [record.getMessage() for record in caplog.records if "checkpoint-3" in record.getMessage()]
    assert "has no optimizer (save_only_model=True): this peer goes on from its model at epoch 3" in told


@pytest.mark.long
@alone_or_with_strands
def test_a_checkpoint_from_outside_of_a_run_goes_on_as_its_state(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture, cluster: Any
) -> None:
    settings = {
        "output_dir": str(tmp_path), "per_device_train_batch_size": 4, "report_to": [], "use_cpu": True,
        "disable_tqdm": True, "logging_steps": 1, "learning_rate": 0.01, **SAVED,
    }  # fmt: skip
    Trainer(language_model(), TrainingArguments(**settings), train_dataset=texts(50)).train()
    trainer = make(cluster=cluster, **SAVED)
    seen: list[Any] = []

    class Watch(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            state = trainer._member.optimizer.state_dict()["state"]
            seen.append((trainer._member.epoch, state[0]["step"].item(), state[0]["exp_avg"].abs().sum().item() > 0))

    trainer.add_callback(Watch())
    assert trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3")).global_step == 6
    assert seen == [(3, 3, True)]
    assert [event.epoch for event in trainer.events] == [4, 5, 6]
    assert rates(trainer) == pytest.approx([0, 0.005, 0.01, 0.0075, 0.005, 0.0025])
    [told] = [record.getMessage() for record in caplog.records if "checkpoint-3" in record.getMessage()]
    assert "is from outside of a run: this peer goes on from its model, optimizer and schedule at epoch 3" in told


def test_it_leaves_the_run_when_training_raises(make: Make, dht: shoal.DHT) -> None:
    class Raises(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise KeyError("mine")

    trainer = make(callbacks=[Raises()])
    with pytest.raises(KeyError, match="mine"):
        trainer.train()
    assert not trainer._member.optimizer.is_alive()
    assert dht.is_alive()


def test_bf16_needs_nothing(make: Make) -> None:
    assert make(bf16=True).train().global_step == 5


def test_an_overflow_costs_that_batch_only(make: Make) -> None:
    class Overflows(Trainer):
        steps = 0

        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            self.steps += 1
            if self.steps == 3:
                next(self.model.parameters()).grad.fill_(torch.inf)
            return loss

    def emulate(trainer: Any) -> None:
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    trainer = make(kind=Overflows, data=64, target=8, prepare=emulate)
    trainer.train()
    assert isinstance(trainer.accelerator.scaler, shoal.GradScaler)
    assert trainer.accelerator.scaler.get_scale() == 512
    assert samples(trainer) == [8] * 5
    assert trainer.steps == 11  # 2 for each epoch, and the one that was lost
    assert all(torch.isfinite(parameter).all() for parameter in trainer.model.parameters())


def test_what_does_not_fit_a_trainer_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch, dht: shoal.DHT) -> None:
    with pytest.raises(ValueError, match="reuse_grad_buffers=True does not work in a framework's training loop"):
        make(reuse_grad_buffers=True)
    trainer = make()
    with pytest.raises(ValueError, match="max_grad_norm= comes from the training script: set it in the Training"):
        swarm(trainer, dht=dht, run_id="x", target_batch_size=8, max_grad_norm=1.0)
    with pytest.raises(ValueError, match="optimizer= comes from the training script"):
        swarm(trainer, dht=dht, run_id="x", target_batch_size=8, optimizer=torch.optim.SGD)
    with pytest.raises(ValueError, match=r"this Trainer was given to swarm\(\) before: make a new one"):
        swarm(trainer, dht=dht, run_id="x", target_batch_size=8)
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    with pytest.raises(ValueError, match=r"one process on one device, and the launcher of this Trainer \(world_size\)"):
        make()


def test_a_shoal_optimizer_of_the_user_is_refused(make: Make, dht: shoal.DHT) -> None:
    model = language_model()
    own = shoal.Optimizer(
        dht=dht, run_id="own", target_batch_size=8, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    )
    with pytest.raises(ValueError, match="the script makes a shoal"):
        make(optimizers=(own, None)).train()
    own.shutdown()


def test_what_does_not_fit_is_refused_before_anything_is_changed(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def two_gpus(trainer: Any) -> None:
        trainer.args._n_gpu = 2
        given.append(trainer)

    with pytest.raises(ValueError, match=r"one device, and this Trainer .*set CUDA_VISIBLE_DEVICES\) asks for 2"):
        make(prepare=two_gpus)
    with pytest.raises(ValueError, match="ReduceLROnPlateau follows a metric that each peer measures by itself"):
        make(
            prepare=given.append, lr_scheduler_type="reduce_lr_on_plateau", eval_strategy="steps", eval_dataset=texts(4)
        )
    assert [type(trainer) for trainer in given] == [Trainer, Trainer]
    assert all(trainer.accelerator.dataloader_config.data_seed is None for trainer in given)

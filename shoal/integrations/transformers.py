"""The `Trainer` of Transformers as a peer of a run."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch

import shoal
from shoal.integrations._frameworks import add_loss
from shoal.integrations.member import Joiner, own_scaler
from shoal.integrations.mixing import mix, refuse_mixed
from shoal.integrations.ranks import Clusters, LaunchedRanks, several
from shoal.integrations.terms import JoinTerms, refuse_plateau, refuse_scaler, trained_before

try:
    from transformers import Trainer, TrainerCallback, TrainerState
    from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINER_STATE_NAME
    from transformers.trainer_pt_utils import find_batch_size
    from transformers.trainer_utils import has_length
except ImportError as error:
    raise ImportError("Transformers is missing, or too old: pip install 'shoal[transformers]'") from error


log = logging.getLogger(__name__)


def swarm(
    trainer: Trainer,
    *,
    dht: shoal.DHT | None,
    run_id: str,
    target_batch_size: int,
    cluster: Clusters | None = None,
    **options: Any,
) -> Trainer:
    """Make a `Trainer` a peer of a run, from the beginning of each `train` to its end.

    >>> with shoal.DHT(initial_peers=[...], start=True) as dht:
    ...     trainer = swarm(Trainer(model, args, train_dataset=data), dht=dht, run_id="my run", target_batch_size=4096)
    ...     trainer.train()

    A step of the Trainer is an epoch of the run: `max_steps`, `warmup_steps`, `logging_steps`, `eval_steps` and
    `save_steps` count epochs, and so does `state.global_step`. Without `max_steps`, the run ends when all peers
    together have seen as many samples as `num_train_epochs` passes over this peer's data have; give `max_steps` where
    peers have data of unlike length. The optimizer, the schedule and `max_grad_norm` are the Trainer's own.

    Args:
        trainer: a `Trainer` or one of a subclass, as the script makes it.
        dht: this peer's place in the DHT, started. It stays when training ends. With `cluster`, each process has one;
            with `strands=1`, process 0.
        run_id: names the run.
        target_batch_size: samples of all peers per epoch.
        cluster: a function that makes a `shoal.Cluster`, or one: the processes of the launcher are one peer. A process
            that is alone gives it, too, where other peers of the run have strands.
        options: arguments of `shoal.Optimizer`, and `on_event`, a function that is called with each event.

    Returns:
        `trainer`, whose class is one that inherits from its class now.

    Raises:
        ValueError: if the Trainer is set up for several processes without `cluster`, or for several GPUs in one, has a
            `shoal.Optimizer`, or was given before; for ReduceLROnPlateau; for options that the Trainer gives, or that
            need a loop of the user's own; with `cluster`, for fp16. In `train`, if it has trained before, and gets
            neither a checkpoint nor a new model (`model_init`).
        ClusterError: in `train`, if another process of the cluster is lost, or has raised an error.
    """
    terms = JoinTerms(dht, run_id, target_batch_size, options)
    if "max_grad_norm" in options:
        raise ValueError("max_grad_norm= comes from the training script: set it in the TrainingArguments")
    refuse_mixed(trainer, InSwarm)
    accelerator = trainer.accelerator
    if trainer.args.n_gpu > 1:
        asks = "this Trainer (it trains on all GPUs that it sees; set CUDA_VISIBLE_DEVICES)"
        raise ValueError(several(asks, trainer.args.n_gpu))
    ranks = LaunchedRanks.of(cluster, accelerator.num_processes, "the launcher of this Trainer (world_size)")
    refuse_plateau(trainer.lr_scheduler, trainer.args.lr_scheduler_type)
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise ValueError("DeepSpeed and FSDP own the optimizer, and a run needs it: leave them out")
    if ranks.cluster is not None:
        refuse_scaler(accelerator.scaler)
    seed = ranks.seed(dht)
    mix(trainer, InSwarm)
    trainer._terms, trainer._ranks, trainer._member = terms, ranks, None
    trainer._given = trainer.optimizer, trainer.lr_scheduler
    trainer._losses, trainer._steps, trainer._kept, trainer._has_trained = 0.0, 0, [], False
    trainer._of_step = 0.0
    accelerator.dataloader_config.data_seed = seed
    if accelerator.scaler is not None:
        accelerator.scaler = own_scaler(accelerator.scaler, accelerator.device.type)
    trainer.add_callback(Ends(trainer))
    trainer.add_callback(Epochs(trainer))
    return trainer


class InSwarm(Trainer):
    """The methods of a Trainer that is a peer. `swarm` adds it to the class of a Trainer."""

    _terms: JoinTerms
    _ranks: LaunchedRanks
    _member: Joiner | None
    _given: tuple[torch.optim.Optimizer | None, Any]
    _losses: torch.Tensor | float  # the sum of this epoch's losses
    _steps: int  # how many they are
    _of_step: torch.Tensor | float  # the loss of this step: the sum of its batches', each of which has its share
    _kept: list[Any]  # the last batches of a stream, where they are too few for a step
    _has_trained: bool

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; the peer leaves the run at the end, also by an error."""
        if self._has_trained and self.model_init is None and not resume_from_checkpoint:
            raise ValueError(trained_before("Trainer", self._terms.run_id, "train(resume_from_checkpoint=True)"))
        if self._member is not None:  # of a training before, or of a script that has called `create_optimizer`
            self._member.give_back()
        self.optimizer, self.lr_scheduler = self._given
        try:
            output = super().train(resume_from_checkpoint, *args, **kwargs)
            self._finish()
            return output
        finally:
            self._leave()

    def _finish(self) -> None:
        if self._member is not None:
            self._member.finish()

    def _leave(self) -> None:
        if self._member is not None:
            self._member.leave()

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Join the run with the optimizer that the Trainer makes."""
        if self._member is None or not self._member.optimizer.is_alive():
            made = super().create_optimizer(*args, **kwargs)
            self._member = Joiner(self._terms, made, self.args.max_grad_norm, self._ranks)
            self.optimizer = self._member.optimizer
        return self.optimizer

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's schedule, which follows the epochs of the run."""
        made = super().create_scheduler(*args, **kwargs)
        if not isinstance(made, shoal.EpochScheduler):
            made = self.lr_scheduler = shoal.EpochScheduler(made)
        # Before and after all others, also those of the script and of a checkpoint.
        self.callback_handler.callbacks.sort(key=lambda each: isinstance(each, Epochs) - isinstance(each, Ends))
        return made

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """As the Trainer's, which asks the process that saves alone for the state. All processes of a cluster give it
        at once, where they carry strands, or where a step is in the background."""
        if self._member is not None and not self.args.should_save:
            self._member.optimizer.state_dict()
        super()._save_optimizer_and_scheduler(output_dir)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """As the Trainer's. A checkpoint that does not name a state of a run, since it has no optimizer or is from
        outside, is the state after as many epochs as it has steps."""
        if checkpoint is None:
            return
        schedule = self.lr_scheduler
        paths = [os.path.join(checkpoint, name) for name in (SCHEDULER_NAME, OPTIMIZER_NAME)]
        # Plain data only, as the Trainer itself loads it: a file of somebody else's runs nothing.
        saved = torch.load(paths[0], weights_only=True) if all(map(os.path.isfile, paths)) else {}
        if saved.keys() == schedule.state_dict().keys():
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        epoch = TrainerState.load_from_json(os.path.join(checkpoint, TRAINER_STATE_NAME)).global_step
        if saved:
            self.lr_scheduler = schedule.scheduler
            super()._load_optimizer_and_scheduler(checkpoint)
            self.lr_scheduler, schedule.epoch = schedule, schedule.last_epoch
            log.warning(
                "%s is from outside of a run: this peer goes on from its model, optimizer and schedule at epoch %d, as "
                "if each of its steps had had %d samples. Peers that have fewer behind them take over this state",
                checkpoint, epoch, self._terms.target_batch_size,
            )  # fmt: skip
        else:
            log.warning(
                "%s has no optimizer (save_only_model=True): this peer goes on from its model at epoch %d of the "
                "schedule, and what the optimizer keeps (momentum, Adam's averages) begins anew",
                checkpoint, epoch,
            )  # fmt: skip
        assert self._member is not None
        self._member.begin_at(epoch)
        schedule.step()

    def set_initial_training_values(self, args: Any, dataloader: Any, *rest: Any) -> Any:
        """A step is an epoch of the run, and the run decides how many passes over the data that takes."""
        _, steps, examples, _, *middle, epochs = super().set_initial_training_values(args, dataloader, *rest)
        if args.max_steps <= 0:
            epochs = math.ceil(args.num_train_epochs * math.ceil(examples / self._terms.target_batch_size))
        if not has_length(dataloader):
            steps = sys.maxsize  # in one pass: `get_batch_samples` finds the end of a stream
        return (sys.maxsize, steps, examples, epochs * self._terms.target_batch_size, *middle, epochs)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, *args: Any, **kwargs: Any) -> Any:
        """The batches of the next step, whose samples count. Those that a stream ends with wait for its next pass, if
        they are too few: the Trainer would add their gradients to those of another step."""
        if self.state.global_step >= self.state.max_steps:  # a checkpoint of the end was resumed
            self.control.should_epoch_stop = self.control.should_training_stop = True
            return [], None
        found = super().get_batch_samples(chain(self._kept, epoch_iterator), num_batches, *args, **kwargs)
        self._kept = []
        if len(found[0]) < num_batches:
            self._kept, found = found[0], ([], None)
            self.control.should_epoch_stop = True
        assert self._member is not None
        self._member.optimizer.batch_size_per_step = sum(map(find_batch_size, found[0]))
        return found

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """The Trainer divides the sum of the losses by the number of its steps, which are epochs: it gets the mean of
        an epoch when that ends."""
        loss = super().training_step(*args, **kwargs)
        self._of_step = self._of_step + loss
        if torch.isfinite(loss) or not self.args.logging_nan_inf_filter:
            self._losses += loss
        return torch.zeros_like(loss)

    def _clip_grad_norm(self, model: Any) -> Any:
        """Only measure, unless each step of this peer is a step: the run clips the average."""
        if self._terms.clips_locally:
            return super()._clip_grad_norm(model)
        return self.accelerator.clip_grad_norm_(model.parameters(), math.inf)

    def _load_best_model(self) -> None:
        """Leave the run first: these weights are not its state."""
        self._finish()
        super()._load_best_model()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """With the run's epoch and number of peers."""
        if self._member is not None:
            logs.update(self._member.logs())
        super().log(logs, *args, **kwargs)


class Ends(TrainerCallback):
    """Leaves the run when training ends, before a callback of the script puts other weights into the model: peers that
    are behind would download those.

    Args:
        trainer: that is `InSwarm`.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Comes first."""
        self._trainer._finish()


class Epochs(TrainerCallback):
    """Makes a step of the Trainer an epoch of the run. It has the last word on logging and saving.

    Args:
        trainer: that is `InSwarm`.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._moved = 0  # epochs in the present step

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin to count losses, and seed the samplers that draw from torch's own generator."""
        self._trainer._losses, self._trainer._steps, self._trainer._kept = 0.0, 0, []
        self._trainer._of_step = 0.0
        self._trainer._has_trained = True
        torch.manual_seed(self._trainer._ranks.seed(self._trainer._terms.dht))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """All batches of the step are done."""
        self._trainer._member.saw(torch.as_tensor(self._trainer._of_step))
        self._trainer._of_step = 0.0

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Between the optimizer's step and the schedule's. The Trainer adds 1 to `global_step` next."""
        trainer = self._trainer
        member = trainer._member
        if trainer.accelerator.optimizer_step_was_skipped:  # by the gradient scaler; a round may be due all the same
            member.optimizer.step(batch_size=0)
        self._moved = max(0, member.epoch - state.global_step)
        trainer._steps += 1
        if self._moved:
            add_loss(trainer, trainer._losses / trainer._steps * self._moved)
            trainer._losses, trainer._steps = 0.0, 0
        state.global_step = member.epoch - 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log, evaluate and save at the end of an epoch only."""
        self._trainer.lr_scheduler.step()  # the Trainer leaves that out where the scaler has skipped a step
        if not self._moved:
            control.should_log = control.should_evaluate = control.should_save = False

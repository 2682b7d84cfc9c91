"""What makes a Lightning `Trainer` a peer of a run. `lightning.py` and `pytorch_lightning.py` mix it into the
strategies of the two packages, which do not know each other's classes."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.distributed import is_torchelastic_launched

import shoal
from shoal.flat import version_of
from shoal.integrations._frameworks import devices_of
from shoal.integrations.member import Joiner, own_scaler
from shoal.integrations.ranks import Clusters, LaunchedRanks
from shoal.integrations.samples import Samples
from shoal.integrations.terms import JoinTerms, refuse_many, refuse_plateau, refuse_scaler, trained_before

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy
else:
    Strategy = object  # the classes are mixed into a Strategy of either package

_SEARCHES = "trains by itself, in the midst of the run: search with an ordinary Trainer first"
CALLBACKS = {
    "LearningRateFinder": _SEARCHES,
    "BatchSizeFinder": _SEARCHES,
    "StochasticWeightAveraging": "replaces the schedule by one that follows this peer's own passes over its data: "
    "leave it out",
}
"""The callbacks that are refused, by their names, each with the reason."""

OTHERS = {"lightning": "pytorch_lightning", "pytorch_lightning": "lightning"}


class Ends:
    """A callback that leaves the run when training ends, before a callback of the script puts other weights into the
    model: peers that are behind would download those.

    Args:
        member: of the run.
    """

    def __init__(self, member: Joiner) -> None:
        self._member = member

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Comes first."""
        self._member.finish()


@dataclass(frozen=True)
class Package:
    """One of the two packages.

    Attributes:
        name: its name.
        callbacks: its module with the callbacks.
        ends: its `Ends`.
        size_of: its function that returns the number of samples in a batch.
    """

    name: str
    callbacks: Any
    ends: type[Ends]
    size_of: Callable[[Any], int]

    @property
    def other(self) -> str:
        """The name of the other package."""
        return OTHERS[self.name]

    def refuse(self, callback: object) -> None:
        """Refuse a callback that does not fit a run, or that is of the other package alone.

        Raises:
            ValueError: with the reason.
        """
        for kind in () if isinstance(callback, self.callbacks.Callback) else type(callback).__mro__:
            if kind.__module__.partition(".")[0] == self.other:
                raise ValueError(
                    f"the callback {type(callback).__name__} is of the package {self.other}, and the Trainer of "
                    f"{self.name}, which do not know each other's classes: import it from {self.callbacks.__name__}"
                )
        for name, why in CALLBACKS.items():
            if isinstance(callback, getattr(self.callbacks, name)):
                raise ValueError(f"{name} {why}")


class InSwarm(Strategy):
    """What strategies do that make a Trainer a peer: the methods that both kinds share."""

    package: ClassVar[Package]
    optimizers: list[torch.optim.Optimizer]

    def __repr__(self) -> str:
        """Names both packages: the Trainer of the other one shows this text when it refuses the strategy."""
        mine, other = self.package.name, self.package.other
        return (
            f"<a {type(self).__name__} for a Trainer of the package {mine}; for one of {other}, write "
            f"shoal.integrations.{other}.SwarmStrategy in place of shoal.integrations.{mine}.SwarmStrategy>"
        )

    def _set_terms(self, terms: JoinTerms) -> None:
        """Raises ValueError for options that the script gives."""
        if "max_grad_norm" in terms.options:
            raise ValueError("max_grad_norm= comes from the training script: set the Trainer's gradient_clip_val")
        self._terms, self._ranks = terms, LaunchedRanks()
        self._member: Joiner | None = None
        self._samples = Samples(self._ranks)
        self._seed = 0  # of this peer's shuffle
        self._clip_val: float | None = None  # the Trainer's, while this peer is in the run
        self._has_trained = False

    def _count(self, trainer: Any) -> LaunchedRanks:
        """The processes that are this peer. Raises ValueError if they can not be one."""
        raise NotImplementedError

    def setup(self, trainer: Any) -> None:
        """As any strategy's, for a `fit` that begins as a run does, or from a checkpoint."""
        if trainer.state.fn == "fit" and self._has_trained and not trainer.ckpt_path:
            raise ValueError(trained_before("Trainer", self._terms.run_id, "fit(…, ckpt_path=…)"))
        super().setup(trainer)

    def on_train_start(self) -> None:
        """Note that the model is about to change."""
        super().on_train_start()
        self._has_trained = True

    def setup_optimizers(self, trainer: Any) -> None:
        """Join the run with the optimizer and the schedulers that the script makes."""
        self._ranks = ranks = self._count(trainer)
        super().setup_optimizers(trainer)
        refuse_many(self.optimizers)
        if not self.lightning_module.automatic_optimization:
            raise ValueError(
                "manual optimization steps the optimizer in ways that the strategy does not see: let Lightning "
                "optimize (automatic_optimization=True), or write the loop yourself with a shoal.Optimizer"
            )
        refuse_plateau(*(config.scheduler for config in self.lr_scheduler_configs))
        for callback in trainer.callbacks:
            self.package.refuse(callback)
        if not self._terms.clips_locally:
            self._take_clipping(trainer)
        for config in self.lr_scheduler_configs:
            if config.interval != "step" or config.frequency != 1:
                raise ValueError(
                    f'a scheduler has interval="{config.interval}" and frequency={config.frequency}, which follow this '
                    'peer\'s own batches: give it interval="step" and frequency=1, which follow the epochs of the run'
                )
        plugin = self.precision_plugin
        if ranks.cluster is not None:
            refuse_scaler(getattr(plugin, "scaler", None))
        if getattr(plugin, "scaler", None) is not None:
            plugin.scaler = own_scaler(plugin.scaler, plugin.device)
        self._seed, self._samples = ranks.seed(self._terms.dht), Samples(ranks)
        self._member = Joiner(self._terms, self.optimizers[0], self._clip_val, ranks)
        self.optimizers = [self._member.optimizer]
        for config in self.lr_scheduler_configs:
            config.scheduler = shoal.EpochScheduler(config.scheduler)
        torch.manual_seed(self._seed)
        others = [callback for callback in trainer.callbacks if not isinstance(callback, Ends)]
        trainer.callbacks = [self.package.ends(self._member), *others]

    def _take_clipping(self, trainer: Any) -> None:
        """The run clips the average in place of this peer's gradients."""
        if trainer.gradient_clip_val and trainer.gradient_clip_algorithm == "value":
            raise ValueError(
                'gradient_clip_algorithm="value" clips each batch of this peer, and a run clips the norm of the '
                'average: give gradient_clip_algorithm="norm"'
            )
        self._clip_val, trainer.gradient_clip_val = trainer.gradient_clip_val, None

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Note the size of the batch."""
        self._samples.size = self.package.size_of(args[0])
        return super().training_step(*args, **kwargs)

    def backward(self, closure_loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Count the batch."""
        assert self._member is not None
        self._member.saw(closure_loss * self.lightning_module.trainer.accumulate_grad_batches)  # which divides it
        return super().backward(closure_loss * self._samples.weight(), *args, **kwargs)

    def optimizer_step(
        self, optimizer: shoal.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """The optimizer's step, with the number of samples behind it."""
        member = self._member
        assert member is not None
        trainer = self.lightning_module.trainer
        loss = closure()  # first: it decides how many samples there are
        optimizer.batch_size_per_step = self._samples.finish(self.model.parameters(), trainer.accumulate_grad_batches)
        done = super().optimizer_step(optimizer, self._returning(loss, closure, optimizer), model, **kwargs)
        if getattr(self.precision_plugin, "scaler", None) is not None:
            optimizer.step(batch_size=0)  # the scaler may have skipped the step, and a round may be due all the same
        # Lightning adds 1 to the number of steps next.
        trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.total.completed = (
            member.epoch - 1
        )
        self.lightning_module.log_dict(member.logs(), batch_size=1)
        return done

    def _returning(self, loss: Any, closure: Callable[[], Any], optimizer: Any) -> Callable[[], Any]:
        """What the optimizer gets in place of a closure that was called. If each step is this peer's own, the wrapped
        optimizer may call it again (LBFGS), or where it has moved the parameters (SAM): then the loss is evaluated
        anew."""
        if self._ranks.size > 1 or not (optimizer.use_local_updates or optimizer.outer_optimizer):
            return lambda: loss
        parameters = list(self.model.parameters())
        batches = self.lightning_module.trainer.accumulate_grad_batches
        seen, losses = list(map(version_of, parameters)), [loss]

        def evaluated() -> Any:
            if losses and list(map(version_of, parameters)) == seen and any(p.grad is not None for p in parameters):
                return losses.pop()
            losses.clear()
            again = closure()
            self._samples.finish(parameters, batches)
            return again

        return evaluated

    def teardown(self) -> None:
        """Leave the run, if training has raised an error."""
        if self._member is not None:
            self._member.leave()
        if self._clip_val is not None:
            self.lightning_module.trainer.gradient_clip_val, self._clip_val = self._clip_val, None
        super().teardown()


class OfOneProcess(InSwarm):
    """What a `SwarmStrategy` is.

    Attributes:
        with_cluster: makes the strategy with `cluster=`. A subclass of the user's has none.
    """

    strategy_name = "swarm"
    with_cluster: ClassVar[Callable[..., Any]]

    def __new__(cls, *, cluster: Clusters | None = None, **given: Any) -> Any:
        """With `cluster`, a `ClusterStrategy`: Lightning has a class for each way to use devices."""
        if cluster is None:
            return super().__new__(cls)
        if "with_cluster" not in vars(cls):
            raise ValueError(f"cluster= makes a ClusterStrategy: let {cls.__name__} inherit from that")
        return cls.with_cluster(cluster=cluster, **given)

    def __init__(
        self,
        *,
        dht: shoal.DHT | None,
        run_id: str,
        target_batch_size: int,
        device: torch.device | str | None = None,
        cluster: Clusters | None = None,
        **options: Any,
    ) -> None:
        super().__init__(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
        self._set_terms(JoinTerms(dht, run_id, target_batch_size, options))

    def _count(self, trainer: Any) -> LaunchedRanks:
        ranks = LaunchedRanks.of(None, devices_of(trainer), "the Trainer (devices= and num_nodes=)")
        if is_torchelastic_launched():  # Lightning itself does not look at that, where a strategy has one device
            LaunchedRanks.of(None, int(os.environ.get("WORLD_SIZE", "1")), "`torchrun` (--nproc-per-node)")
        return ranks


class OfCluster(InSwarm):
    """What a `ClusterStrategy` is."""

    def __init__(
        self,
        *,
        cluster: Clusters,
        dht: shoal.DHT | None,
        run_id: str,
        target_batch_size: int,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if device is not None:
            raise ValueError(f"device={device!r} is of one process: with cluster=, the Trainer chooses (devices=…)")
        self._set_terms(JoinTerms(dht, run_id, target_batch_size, options))
        self._given = cluster

    def _count(self, trainer: Any) -> LaunchedRanks:
        return LaunchedRanks.of(self._given, self.world_size, "the Trainer (devices= and num_nodes=)")

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """With this peer's own shuffle, which its ranks share out."""
        return {**super().distributed_sampler_kwargs, "seed": self._seed}

"""What provokes the errors that the guide to frameworks promises, in the order of its table."""

from __future__ import annotations

import warnings
from typing import Any

import lightning
import pytorch_lightning
import torch
from accelerate import Accelerator
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder, StochasticWeightAveraging
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.integrations.accelerate import swarm
from shoal.integrations.lightning import SwarmStrategy
from shoal.p2p.identity import Identity
from tests.integrations.ranks import Ranks
from tests.optim.models import make_model
from tests.repository.error_tables import Scene, provokes, raised


class Module(lightning.LightningModule):
    """A network whose scheduler is stepped after each pass over the data."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_model()

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [ExponentialLR(optimizer, 0.5)]


class ByHand(Module):
    automatic_optimization = False


class Plain(Module):
    """Without the scheduler."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(scene: Scene, module: Module, data: Any = ..., **given: Any) -> lightning.Trainer:
    """With Lightning, as a peer."""
    strategy = SwarmStrategy(dht=scene.dht, run_id=scene.run_id, target_batch_size=8, device="cpu")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings = {"max_steps": 1, "accelerator": "cpu", "devices": 1, "enable_checkpointing": False, **quiet, **given}
    trainer = lightning.Trainer(strategy=strategy, **settings)
    trainer.fit(module, batches() if data is ... else data)
    return trainer


def batches() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.randn(8, 10)), batch_size=4)


def join(scene: Scene, *args: Any, **options: Any) -> tuple[Any, ...]:
    """With Accelerate, as a peer."""
    accelerator: Any = Accelerator(cpu=True)
    joined = swarm(accelerator, *args, dht=scene.dht, run_id=scene.run_id, target_batch_size=8, **options)
    scene.ends.callback(accelerator.end_training)
    return accelerator, *joined


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@provokes("a peer of a run is one process on one device, and … asks for N")
def trains_on_two_devices(scene: Scene) -> str:
    return raised(lambda: fit(scene, Module(), devices=2))


@provokes("cluster= made a …")
def makes_no_cluster(scene: Scene) -> str:
    return raised(lambda: join(scene, sgd(make_model()), cluster=lambda: 8))


@provokes("… has N of the N processes of …")
def makes_a_cluster_of_others(scene: Scene) -> str:
    half = shoal.Cluster()
    half.size = 2
    return raised(lambda: join(scene, sgd(make_model()), cluster=half))


@provokes("dht=None, and this process is in the run")
def has_no_dht(scene: Scene) -> str:
    run: dict[str, Any] = {"dht": None, "run_id": scene.run_id, "target_batch_size": 8}
    return raised(lambda: swarm(Accelerator(cpu=True), sgd(make_model()), **run))


def of_two_ranks(scene: Scene, **options: Any) -> str:
    """What rank 1 has printed."""
    with Ranks(scene.folder, 2, framework="accelerate", steps=1, strands=8, **options) as two:
        assert 0 not in two.wait()
        return two.log(1)


@provokes("dht=None at rank N of …, where each rank is in the run with its own strands")
def has_a_dht_at_rank_0_alone(scene: Scene) -> str:
    return of_two_ranks(scene, with_dht=[0])


@provokes("ranks N and N of this cluster have one identity")
def shares_an_identity(scene: Scene) -> str:
    identity = scene.folder / "identity"
    Identity.from_file(identity)
    return of_two_ranks(scene, identity=str(identity))


@provokes("it is not known of … that it treats each element alike")
def steps_in_its_own_way(scene: Scene) -> str:
    class Odd(torch.optim.SGD):
        pass

    return raised(lambda: join(scene, Odd(make_model().parameters(), lr=0.1), cluster=shoal.Cluster))


@provokes("a run has one optimizer, and the script gives N (…)")
def has_two_optimizers(scene: Scene) -> str:
    return raised(lambda: join(scene, sgd(make_model()), sgd(make_model())))


@provokes("… for a Trainer of the package …; for one of …, write …")
def has_a_strategy_of_the_other_package(scene: Scene) -> str:
    strategy = SwarmStrategy(dht=scene.dht, run_id=scene.run_id, target_batch_size=8, device="cpu")
    return raised(lambda: pytorch_lightning.Trainer(strategy=strategy, logger=False))


@provokes("the callback … is of the package …")
def has_a_callback_of_the_other_package(scene: Scene) -> str:
    return raised(lambda: fit(scene, Plain(), callbacks=[pytorch_lightning.callbacks.EarlyStopping("loss")]))


@provokes("this … was given to swarm() before")
def joins_twice(scene: Scene) -> str:
    accelerator, *_ = join(scene, sgd(make_model()))
    return raised(
        lambda: swarm(accelerator, sgd(make_model()), dht=scene.dht, run_id=scene.run_id, target_batch_size=8)
    )


@provokes("this Trainer has trained in the run … before")
def trains_twice(scene: Scene) -> str:
    module = Plain()
    with warnings.catch_warnings(action="ignore"):  # of Lightning itself
        trainer = fit(scene, module)
    return raised(lambda: trainer.fit(module, batches()))


@provokes("the script makes a shoal.Optimizer itself")
def gives_a_shoal_optimizer(scene: Scene) -> str:
    return raised(lambda: join(scene, scene.optimizer(batch_size_per_step=4)))


@provokes("…= comes from the training script: leave it out here")
def gives_a_scheduler(scene: Scene) -> str:
    return raised(lambda: join(scene, sgd(make_model()), scheduler=None))


@provokes("max_grad_norm= comes from the training script")
def gives_a_norm(scene: Scene) -> str:
    return raised(lambda: SwarmStrategy(dht=scene.dht, run_id="x", target_batch_size=8, max_grad_norm=1.0))


@provokes("…=True does not work in a framework's training loop")
def delays_steps(scene: Scene) -> str:
    return raised(lambda: join(scene, sgd(make_model()), delay_optimizer_step=True))


@provokes("clip_grad_norm_(…, N) would clip each batch of this peer")
def clips_batches(scene: Scene) -> str:
    model = make_model()
    accelerator, *_ = join(scene, sgd(model))
    return raised(lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0))


@provokes("clip_grad_value_(…) clips each batch of this peer")
def clips_values_of_batches(scene: Scene) -> str:
    model = make_model()
    accelerator, *_ = join(scene, sgd(model))
    return raised(lambda: accelerator.clip_grad_value_(model.parameters(), 1.0))


@provokes("a run clips the norm of type 2")
def clips_another_norm(scene: Scene) -> str:
    model = make_model()
    accelerator, *_ = join(scene, sgd(model), max_grad_norm=1.0)
    return raised(lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0, norm_type=1))


@provokes("nobody knows how many samples are behind this backward()")
def trains_with_another_data_loader(scene: Scene) -> str:
    model = make_model()
    accelerator, *_ = join(scene, sgd(model))
    return raised(lambda: accelerator.backward(model(torch.randn(4, 10)).sum()))


@provokes("N batches are behind this step, and the Accelerator divides by N")
def accumulates_by_hand(scene: Scene) -> str:
    model = make_model()
    accelerator, optimizer, data = join(scene, sgd(model), batches())
    for (batch,) in data:
        accelerator.backward(model(batch).square().mean())
    return raised(optimizer.step)


@provokes('a scheduler has interval="epoch" and frequency=N')
def steps_a_scheduler_after_each_pass(scene: Scene) -> str:
    return raised(lambda: fit(scene, Module()))


@provokes("ReduceLROnPlateau follows a metric that each peer measures by itself")
def schedules_by_a_metric(scene: Scene) -> str:
    optimizer = sgd(make_model())
    return raised(lambda: join(scene, optimizer, ReduceLROnPlateau(optimizer)))


@provokes("LearningRateFinder trains by itself, in the midst of the run")
def searches_for_a_rate(scene: Scene) -> str:
    return raised(lambda: fit(scene, Module(), callbacks=[LearningRateFinder()]))


@provokes("BatchSizeFinder …")
def searches_for_a_batch_size(scene: Scene) -> str:
    class Sized(Module):
        batch_size = 4  # which it changes

        def train_dataloader(self) -> DataLoader[Any]:
            return batches()

    return raised(lambda: fit(scene, Sized(), None, callbacks=[BatchSizeFinder()]))


@provokes("StochasticWeightAveraging replaces the schedule")
def averages_weights(scene: Scene) -> str:
    return raised(lambda: fit(scene, Module(), callbacks=[StochasticWeightAveraging(0.1)]))


@provokes('gradient_clip_algorithm="value" clips each batch of this peer')
def clips_values(scene: Scene) -> str:
    return raised(lambda: fit(scene, Module(), gradient_clip_val=1.0, gradient_clip_algorithm="value"))


@provokes("manual optimization steps the optimizer in ways that the strategy does not see")
def optimizes_by_hand(scene: Scene) -> str:
    return raised(lambda: fit(scene, ByHand()))

"""The package pytorch_lightning: its Trainer is a peer as lightning's is. What is of the other package is refused."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset

import shoal
from tests.integrations.tiny import inputs

pytest.importorskip("pytorch_lightning", reason="lightning installs it")
pytestmark = pytest.mark.filterwarnings("ignore")  # of the frameworks

PACKAGES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}
OTHERS = {"lightning": "pytorch_lightning", "pytorch_lightning": "lightning"}
both = pytest.mark.parametrize("package", PACKAGES)


def module_of(package: str, interval: str = "step", schedule: Callable[..., Any] = ExponentialLR) -> Any:
    class Module(import_module(PACKAGES[package]).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Linear(8, 1)

        def training_step(self, batch: Any, number: int) -> Tensor:
            return (self.net(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

        def configure_optimizers(self) -> Any:
            made = torch.optim.SGD(self.parameters(), lr=0.01)
            return [made], [{"scheduler": schedule(made, gamma=0.5), "interval": interval}]

    return Module()


Fit = Callable[..., tuple[Any, list[Any]]]


@pytest.fixture
def fit(dht: shoal.DHT, tmp_path: Path) -> Fit:
    """Trains with the Trainer of one package, and a strategy and a module which may be of the other one."""

    def done(
        trainer: str, *, strategy: str = "", module: Any = None, options: dict[str, Any] | None = None, **given: Any
    ) -> tuple[Any, list[Any]]:
        events: list[Any] = []
        run = {"dht": dht, "run_id": tmp_path.name, "target_batch_size": 32, "on_event": events.append}
        integration = getattr(shoal.integrations, strategy or trainer)
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        usual = {"max_steps": 3, "accelerator": "cpu", "devices": 1, "default_root_dir": tmp_path}
        own = {"device": "cpu"} if options is None else options
        made = import_module(PACKAGES[trainer]).Trainer(
            strategy=integration.SwarmStrategy(**run, **own), **{**usual, **quiet, **given}
        )
        loader = DataLoader(TensorDataset(inputs(50)), batch_size=4)
        made.fit(module_of(trainer) if module is None else module, loader)
        return made, events

    return done


def samples(events: list[Any]) -> list[float]:
    return [event.samples for event in events if isinstance(event, shoal.EpochReport)]


def test_both_packages_train_alike(fit: Fit) -> None:
    weights = []
    for package in PACKAGES:
        module = module_of(package)
        trainer, events = fit(package, module=module, gradient_clip_val=0.25)
        assert trainer.global_step == 3
        assert samples(events) == [32, 34, 32]
        assert trainer.callback_metrics["run_epoch"] == 3
        assert trainer.optimizers[0].param_groups[0]["lr"] == 0.01 * 0.5**3
        assert trainer.gradient_clip_val == 0.25
        assert not trainer.optimizers[0].is_alive()
        weights.append(module.net.weight.detach().clone())
    assert torch.equal(*weights)


def test_a_checkpoint_resumes(fit: Fit, tmp_path: Path) -> None:
    kept = import_module("pytorch_lightning.callbacks").ModelCheckpoint(tmp_path, every_n_train_steps=3)
    trainer, events = fit("pytorch_lightning", callbacks=[kept])
    trainer.fit_loop.epoch_loop.max_steps = 5
    loader = DataLoader(TensorDataset(inputs(50)), batch_size=4)
    with pytest.raises(ValueError, match="this Trainer has trained in the run"):
        trainer.fit(trainer.lightning_module, loader)
    trainer.fit(module_of("pytorch_lightning"), loader, ckpt_path=kept.best_model_path)
    assert trainer.global_step == 5
    assert len(samples(events)) == 5


def test_with_cluster_it_is_that_packages_ddp(dht: shoal.DHT) -> None:
    run = {"dht": dht, "run_id": "x", "target_batch_size": 8, "cluster": shoal.Cluster}
    for package in PACKAGES:
        made = getattr(shoal.integrations, package).SwarmStrategy(**run)
        assert isinstance(made, import_module(f"{PACKAGES[package]}.strategies").DDPStrategy)


def test_a_process_that_is_alone_may_give_cluster(fit: Fit, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")  # Lightning sets them, and accelerate reads them in the tests after this one
        monkeypatch.delenv(name)
    monkeypatch.setenv("MASTER_PORT", "0")
    cluster = {"cluster": lambda: shoal.Cluster(strands=1)}
    try:
        trainer, events = fit("pytorch_lightning", options=cluster)
    finally:
        dist.destroy_process_group()  # Lightning leaves it to the end of the process
    assert trainer.global_step == 3
    assert len(samples(events)) == 3


@both
def test_the_strategy_of_the_other_package_is_refused_with_the_line_to_change(fit: Fit, package: str) -> None:
    other = OTHERS[package]
    with pytest.raises(ValueError, match=f"for a Trainer of the package {other}; for one of {package}, write") as said:
        fit(package, strategy=other)
    assert f"shoal.integrations.{package}.SwarmStrategy in place of shoal.integrations.{other}.Swarm" in str(said.value)
    with pytest.raises(ValueError, match=f"a ClusterStrategy for a Trainer of the package {other}"):
        fit(package, strategy=other, options={"cluster": shoal.Cluster})


@both
@pytest.mark.parametrize("kind", ["EarlyStopping", "StochasticWeightAveraging", "own"])
def test_a_callback_of_the_other_package_is_refused(fit: Fit, package: str, kind: str) -> None:
    callbacks = import_module(f"{PACKAGES[OTHERS[package]]}.callbacks")
    kinds = {
        "EarlyStopping": lambda: callbacks.EarlyStopping("loss"),
        "StochasticWeightAveraging": lambda: callbacks.StochasticWeightAveraging(0.1),
        "own": type("Own", (callbacks.Callback,), {}),
    }
    # Lightning 2.4 refuses it by itself, before there is a strategy.
    of_lightning = "Expected a parent|Please switch to a single import style"
    own = f"is of the package {OTHERS[package]}, and .* {package}, .*: import it from {PACKAGES[package]}.callbacks"
    with pytest.raises((ValueError, TypeError), match=f"{own}|{of_lightning}"):
        fit(package, callbacks=[kinds[kind]()])


@both
def test_a_callback_for_both_packages_is_a_callback(fit: Fit, package: str) -> None:
    kinds = [import_module(f"{name}.callbacks").Callback for name in PACKAGES.values()]
    for bases in (kinds, kinds[::-1]):
        getattr(shoal.integrations, package).SwarmStrategy.package.refuse(type("Both", tuple(bases), {})())


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"callbacks": lambda c: [c.StochasticWeightAveraging(0.1)]},
            "StochasticWeightAveraging replaces the schedule",
        ),
        ({"callbacks": lambda c: [c.LearningRateFinder()]}, "LearningRateFinder trains by itself"),
        ({"module": lambda _: module_of("pytorch_lightning", "epoch")}, 'interval="epoch" and frequency=1'),
        ({"devices": lambda _: 2}, r"the Trainer \(devices= and num_nodes=\) asks for 2"),
    ],
)
def test_what_does_not_fit_is_refused_as_with_lightning(fit: Fit, given: dict[str, Any], says: str) -> None:
    callbacks = import_module("pytorch_lightning.callbacks")
    with pytest.raises(ValueError, match=says):
        fit("pytorch_lightning", **{name: make(callbacks) for name, make in given.items()})


def test_a_schedule_of_a_metric_is_refused(fit: Fit) -> None:
    def plateau(optimizer: Any, gamma: float) -> Any:
        return ReduceLROnPlateau(optimizer)

    module = module_of("pytorch_lightning", schedule=plateau)
    configured = module.configure_optimizers

    def with_metric() -> Any:
        optimizers, (schedule,) = configured()
        return optimizers, [{**schedule, "monitor": "loss"}]

    module.configure_optimizers = with_metric
    with pytest.raises(ValueError, match="ReduceLROnPlateau follows a metric that each peer measures by itself"):
        fit("pytorch_lightning", module=module)

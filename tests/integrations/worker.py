"""One peer as a process of its own, which trains in a framework: says each event in a JSON line, and at the end what it
has trained.

Its argument is a JSON object: `framework` is a function below, `swarm` whether it joins a run, `samples` ([first, last]
of the data), `pause` (seconds that each forward pass takes longer), `lockstep` whether it waits for the end of the
epoch after each step, `spoils` whether a callback changes the weights when training ends, and the rest is for the
framework. It begins when it reads another one, with `initial_peers`.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

import shoal
from shoal.flat import bytes_of
from tests.integrations.tiny import inputs, language_model, texts

CLIP = 0.05
"""The norm to which gradients are clipped: less than they have."""


TO_TEST = sys.stdout


def say(**message: Any) -> None:
    print(json.dumps(message), file=TO_TEST, flush=True)


class Peer:
    """What is told of a training.

    Args:
        options: see above.
        has_dht: whether it is the process of its peer that is in the run.
    """

    def __init__(self, options: dict[str, Any], *, has_dht: bool = True) -> None:
        self.options = options
        self.digests: dict[int, str] = {}  # of the parameters with which each epoch began
        self.moments: dict[int, list[str]] = {}  # of the optimizer's state by then, what this process steps of it
        self.seen: list[list[float]] = []  # the first samples, in their order
        self.warnings: list[str] = []
        self.rates: list[float] = []  # with which each epoch's step was made
        self.optimizer: Callable[[], shoal.Optimizer] | None = None
        self.dht = None
        if has_dht:
            self.dht = shoal.DHT(options.get("initial_peers", []), start=True, identity_path=options.get("identity"))
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.warnings.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("shoal").addHandler(handler)

    def heard(self, event: Any) -> None:
        if not isinstance(event, shoal.EpochReport | shoal.DownloadReport):
            return
        kind = "epoch" if isinstance(event, shoal.EpochReport) else "download"
        line = {"kind": kind, "epoch": event.epoch, "digest": event.state_digest, "time": time.monotonic()}
        if isinstance(event, shoal.EpochReport):
            line |= {"samples": event.samples, "peers": event.num_peers}
            if self.optimizer is not None:
                self.rates.append(self.optimizer().param_groups[0]["lr"])
        say(**line)

    def run(self) -> dict[str, Any]:
        """How this peer joins the run."""
        run = {"dht": self.dht, "run_id": "test", "target_batch_size": self.options["target"], "on_event": self.heard}
        if "ranks" in self.options or "strands" in self.options:
            run["cluster"] = lambda: shoal.Cluster(strands=self.options.get("strands", 1))
        return run | self.options.get("run", {})

    def note(self, model: nn.Module) -> None:
        """Note the state, if it is the first of its epoch."""
        optimizer = self.optimizer() if self.optimizer is not None else None
        if optimizer is None or (epoch := optimizer.local_epoch) in self.digests:
            return
        self.digests[epoch] = digest_of(model)
        steps = getattr(optimizer, "optimizer", None)  # which ranks other than 0 do not show
        kept = [] if steps is None else [value for state in steps.state.values() for value in state.values()]
        self.moments[epoch] = [blake3(bytes_of(value)).hexdigest() for value in kept if torch.is_tensor(value)]

    def noted(self) -> dict[str, Any]:
        """What is told at the end."""
        return {name: getattr(self, name) for name in ("warnings", "rates", "digests", "moments", "seen")}

    def slow_down(self, model: nn.Module) -> None:
        pause = self.options.get("pause", 0.0)
        model.register_forward_hook(lambda *_: time.sleep(pause))
        model.register_forward_hook(lambda *_: self.note(model))
        model.register_forward_pre_hook(self.see, with_kwargs=True)
        if (number := self.options.get("poison")) is not None:
            calls = iter(range(sys.maxsize))

            def poison(gradient: Tensor) -> Tensor:
                is_meant = next(calls) == number or number == "all"
                return torch.full_like(gradient, torch.inf) if is_meant else gradient

            next(model.parameters()).register_hook(poison)

    def see(self, _: nn.Module, args: Any, given: Any) -> None:
        if len(self.seen) < 32:
            self.seen += (args[0] if args else given["input_ids"]).tolist()

    def part(self, data: Any) -> Any:
        first, last = self.options.get("samples", [0, len(data)])
        return data[first:last]


def digest_of(model: nn.Module) -> str:
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    return blake3(bytes_of(flat)).hexdigest()


def transformers(peer: Peer) -> dict[str, Any]:
    """A Trainer, with the Trainer's own schedule and clipping."""
    from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments

    from shoal.integrations.transformers import swarm

    options = peer.options

    class InOrder(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return SequentialSampler(self.train_dataset)

    def scripted(_: Any) -> dict[str, float]:
        """Epoch 4 is the best."""
        return {"quality": -abs(trainer.state.global_step - 4)}

    model = language_model()
    peer.slow_down(model)
    arguments = TrainingArguments(
        output_dir=options["folder"],
        per_device_train_batch_size=options["batch"],
        gradient_accumulation_steps=options.get("accumulate", 1),
        learning_rate=0.01,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **{"max_grad_norm": CLIP, "max_steps": options["steps"], "save_strategy": "no", **options.get("args", {})},
    )
    data = peer.part(texts(options.get("data", 64)))
    early: dict[str, Any] = {}
    if options.get("early"):
        early = {"callbacks": [EarlyStoppingCallback(2)], "eval_dataset": texts(4), "compute_metrics": scripted}
    if options.get("spoils"):
        early["callbacks"] = [type("Spoils", (TrainerCallback,), {"on_train_end": lambda *_, **__: spoil(model)})()]
    trainer: Any = (InOrder if options.get("in_order") else Trainer)(model, arguments, train_dataset=data, **early)
    if options.get("scaler"):
        trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    if options.get("swarm", True):
        swarm(trainer, **peer.run())
        peer.optimizer = lambda: trainer._member and trainer._member.optimizer
    trainer.train(resume_from_checkpoint=options.get("resume"))
    peer.note(model)
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return {
        "steps": trainer.state.global_step,
        "losses": [log["loss"] for log in logs],
        "epochs": [log.get("run_epoch") for log in logs],
        "peers": [log.get("run_peers") for log in logs],
        "digest": digest_of(model),
        "parameters": flat(model),
        "scale": trainer.accelerator.scaler.get_scale() if options.get("scaler") else None,
    }


def spoil(model: nn.Module) -> None:
    """What callbacks that average weights do when training ends: they put others into the model."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()


def flat(model: nn.Module) -> list[float]:
    numbers: list[float] = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).tolist()
    return numbers


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch[:, :3].prod(1, keepdim=True)).square().mean()


def loader(peer: Peer) -> DataLoader[Any]:
    data = TensorDataset(peer.part(inputs(peer.options.get("data", 64))))
    return DataLoader(data, batch_size=peer.options["batch"], shuffle=not peer.options.get("in_order"))


def schedule(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)


def lightning(peer: Peer) -> dict[str, Any]:
    """A LightningModule."""
    import lightning as L
    from lightning.pytorch.callbacks import ModelCheckpoint

    from shoal.integrations.lightning import SwarmStrategy

    options = peer.options
    losses: list[tuple[int, float, int]] = []

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: Any, _: int) -> Tensor:
            loss = loss_of(self.net, batch[0])
            losses.append((self.trainer.global_step, loss.item(), len(batch[0])))
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule(optimizer), "interval": "step"}}

    strategy: Any = "auto"
    if options.get("swarm", True):
        strategy = SwarmStrategy(**peer.run())
        peer.optimizer = lambda: strategy._member and strategy._member.optimizer
    module = Module()
    peer.slow_down(module.net)
    spoils = type("Spoils", (L.Callback,), {"on_train_end": lambda *_: spoil(module)})
    saved = ModelCheckpoint(options["folder"], every_n_train_steps=2, save_top_k=-1, filename="{step}")
    trainer = L.Trainer(
        max_steps=options["steps"],
        strategy=strategy,
        accelerator="cpu",
        devices=options.get("ranks", 1),
        gradient_clip_val=CLIP,
        accumulate_grad_batches=options.get("accumulate", 1),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saved, *([spoils()] if options.get("spoils") else [])],
    )
    trainer.fit(module, loader(peer), ckpt_path=options.get("resume"))
    trainer.save_checkpoint(f"{options['folder']}/end.ckpt")
    peer.note(module)
    return {
        "steps": trainer.global_step,
        "losses": by_step(losses),
        "shuffle": getattr(getattr(trainer.train_dataloader, "sampler", None), "seed", None),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "digest": digest_of(module),
        "parameters": flat(module),
    }


def accelerate(peer: Peer) -> dict[str, Any]:
    """A loop of one's own with Accelerate."""
    from accelerate import Accelerator

    from shoal.integrations.accelerate import swarm

    options = peer.options
    losses: list[tuple[int, float, int]] = []
    accelerator: Any = Accelerator(cpu=True, gradient_accumulation_steps=options.get("accumulate", 1))
    model: Any = network()
    peer.slow_down(model)
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
    if options.get("scaler"):
        accelerator.scaler = torch.amp.GradScaler("cpu")
    given = model, optimizer, loader(peer), schedule(optimizer)
    if options.get("swarm", True):
        peer.optimizer = lambda: accelerator._member.optimizer
        model, optimizer, data, scheduler = swarm(accelerator, *given, max_grad_norm=CLIP, **peer.run())
    else:
        model, optimizer, data, scheduler = accelerator.prepare(*given)
    if options.get("resume"):
        accelerator.load_state(options["resume"])
    steps = 0
    while steps < options["steps"]:
        for (batch,) in data:
            with accelerator.accumulate(model):
                loss = loss_of(model, batch)
                losses.append((steps, loss.item(), len(batch)))
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            before = steps
            steps = peer.optimizer().local_epoch if peer.optimizer else steps + accelerator.sync_gradients
            if steps > before and steps % 2 == 0:
                accelerator.save_state(f"{options['folder']}/step={steps}")
            if steps >= options["steps"]:
                break
    accelerator.end_training()
    peer.note(model)
    return {
        "steps": steps,
        "losses": by_step(losses),
        "digest": digest_of(model),
        "parameters": flat(model),
        "scale": accelerator.scaler.get_scale() if options.get("scaler") else None,
    }


def by_step(losses: list[tuple[int, float, int]]) -> list[float]:
    """The mean loss over the samples of each step."""
    means = []
    for step in sorted({number for number, _, _ in losses}):
        of_step = [(loss, size) for number, loss, size in losses if number == step]
        means.append(sum(loss * size for loss, size in of_step) / sum(size for _, size in of_step))
    return means


def wait_in_each_step() -> None:
    """From now on, an optimizer's step that adds samples ends with the epoch."""
    original: Any = shoal.Optimizer.step

    def step(self: shoal.Optimizer, closure: Any = None, batch_size: int | None = None) -> Any:
        before = self.local_epoch
        loss = original(self, closure, batch_size)
        while self.local_epoch == before:
            original(self, batch_size=0)
            time.sleep(0.001)
        return loss

    shoal.Optimizer.step = step  # type: ignore[assignment, method-assign]


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    sys.stdout = sys.stderr  # frameworks print, too
    options = json.loads(sys.argv[1])
    importlib.import_module(f"shoal.integrations.{options['framework']}")
    say(addresses=[], peer="")
    peer = Peer(options | json.loads(sys.stdin.readline()))
    assert peer.dht is not None
    say(addresses=[str(address) for address in peer.dht.get_visible_maddrs()], peer=str(peer.dht.peer_id))
    if options.get("lockstep"):
        wait_in_each_step()
    trained = globals()[options["framework"]](peer)
    peer.dht.shutdown()
    say(kind="done", **peer.noted(), **trained)


if __name__ == "__main__":
    main()

"""A peer of a run with an outer optimizer, as a process: it trains when it is told to, and says what came of it."""

from __future__ import annotations

import json
import logging
import math
import random
import sys
import threading
import time
from typing import Any

import torch
from blake3 import blake3
from torch import nn

import shoal
from shoal.flat import bytes_of
from tests.telling import say

WIDTH, BATCH = 24, 4
GRADIENT, INNER_RATE, OUTER_RATE = 2.0, 1.0, 2.0  # of the scalars


def scalars() -> nn.Sequential:
    """Two layers of one number each, which begin at 1."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    return model


def numbers(draw: random.Random, *shape: int) -> torch.Tensor:
    """Uniform in -1 to 1; torch's own generator draws other numbers on other processors."""
    return torch.tensor([draw.uniform(-1, 1) for _ in range(math.prod(shape))]).reshape(shape)


def network() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
    draw = random.Random(0)
    for parameter in model.parameters():
        parameter.data = numbers(draw, *parameter.shape) / parameter.shape[-1] ** 0.5
    return model


def make_inner(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3)


def backward(model: nn.Module, draw: random.Random) -> None:
    inputs = numbers(draw, BATCH, 8)
    ((model(inputs) - inputs.sin().sum(1, keepdim=True)) ** 2).mean().backward()


def diloco_of(choice: dict[str, Any]) -> shoal.DiLoCo:
    """From JSON: `outer` is the name of a rule and its arguments."""
    given = dict(choice)
    name, arguments = given.pop("outer", ["Nesterov", {}])
    return shoal.DiLoCo(optimizer=getattr(shoal.outer, name)(**arguments), **given)


class Trainer:
    """One peer."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        client = options.get("client", False)
        self.dht = shoal.DHT(
            options["initial_peers"], start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], client_mode=client
        )
        self.is_scalar = options.get("scalars", False)
        self.model = scalars() if self.is_scalar else network()
        self.optimizer = shoal.Optimizer(
            dht=self.dht,
            run_id="outer",
            params=self.model.parameters(),
            optimizer=(lambda p: torch.optim.SGD(p, lr=INNER_RATE)) if self.is_scalar else make_inner,
            batch_size_per_step=BATCH,
            outer=diloco_of(options["diloco"]),
            **options.get("arguments", {}),
        )
        self.optimizer.on_event = self.heard
        self.steps, self.weights, self.last = 0, dict[str, float](), 1 << 31
        self.calls = 0  # of `step`, of which a newcomer's first one downloads
        self.optimizer.optimizer.register_step_post_hook(self.made)
        average = self.optimizer._epoch._average

        def remembered(samples: float) -> Any:
            averaged = average(samples)
            if averaged is not None and not averaged.is_alone:
                outcome = self.optimizer._epoch._pilot.averaged.outcome
                assert outcome is not None
                begin = outcome.begin
                self.weights = {str(m.peer): w for m, w in zip(begin.members, begin.weights, strict=True)}
            return averaged

        self.optimizer._epoch._average = remembered  # type: ignore[method-assign]

    def made(self, *_: Any) -> None:
        self.steps += 1

    def heard(self, event: Any) -> None:
        if isinstance(event, shoal.EpochReport):
            say(
                event="epoch", epoch=event.epoch, digest=event.state_digest, samples=event.samples,
                peers=event.num_peers, sent=event.bytes_sent, time=time.time(), steps=self.steps,
                weights=self.weights,
            )  # fmt: skip
        elif isinstance(event, shoal.DownloadReport):
            say(
                event="download", epoch=event.epoch, digest=event.state_digest, steps=self.steps, calls=self.calls,
                **self.state(),
            )  # fmt: skip

    def state(self) -> dict[str, Any]:
        """The anchor, the outer momentum, and how far the model is from the anchor."""
        replica = self.optimizer._state
        momentum = [t for t in replica.statistics("momentum_buffer") if t is not None]
        pairs = zip(replica.trained, replica.stepped, strict=True)
        return {
            "anchor": torch.cat([anchor.detach().reshape(-1) for anchor in replica.stepped]).tolist(),
            "momentum": blake3(b"".join(bytes(bytes_of(t)) for t in momentum)).hexdigest() if momentum else "",
            "drift": max(float((model.detach() - anchor.detach()).abs().max()) for model, anchor in pairs),
        }

    def step(self, draw: random.Random) -> None:
        if self.is_scalar:
            for parameter in self.model.parameters():
                parameter.grad = torch.full_like(parameter, GRADIENT)
        else:
            backward(self.model, draw)
        time.sleep(self.options.get("pause", 0.0))
        self.calls += 1
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, *, steps: int = 0, epochs: int = 0) -> None:
        """So many steps, or to that epoch."""
        draw = random.Random(self.options["seed"])
        history = []
        while self.steps < steps or self.optimizer.local_epoch < min(epochs, self.last):
            if self.is_scalar:
                history.append([float(parameter.detach()) for parameter in self.model.parameters()])
            self.step(draw)
        drift = self.optimizer._rounds.work
        say(event="end", history=history, steps=self.steps, calls=self.calls, pending=drift.samples, **self.state())


def main() -> None:
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR)
    trainer = Trainer(json.loads(sys.argv[1]))
    say(addresses=[str(a) for a in trainer.dht.get_visible_maddrs()], peer=str(trainer.dht.peer_id))
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "stop":  # while it trains
            trainer.last = command["epoch"]
        else:
            arguments = {"steps": command.get("steps", 0), "epochs": command.get("epochs", 0)}
            threading.Thread(target=trainer.train, kwargs=arguments, daemon=True).start()


if __name__ == "__main__":
    main()

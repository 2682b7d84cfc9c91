"""A peer of a run with an outer optimizer: it trains when it is told to, and says what came of each epoch."""

from __future__ import annotations

import math
import random
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypedDict

import torch
from torch import nn

import shoal
from tests.telling import say
from tests.workers.digests import digest_of

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


class State(TypedDict):
    """The anchor, the outer momentum, and how far the model is from the anchor."""

    anchor: list[float]
    momentum: str
    drift: float


class Trained(State):
    """And the scalars before each step, the steps made and called, and the samples that no round had."""

    history: list[list[float]]
    steps: int
    calls: int
    pending: float


class OuterTraining:
    """One peer.

    Args:
        seed: of its samples.
        diloco: arguments of DiLoCo, beside `outer`.
        outer: the name of a rule of shoal.outer, and its arguments.
        is_scalar: train two numbers, whose gradients are given.
        pause: at least so many seconds for each step.
    """

    def __init__(
        self,
        initial_peers: list[str],
        seed: int,
        *,
        diloco: dict[str, Any],
        outer: tuple[str, dict[str, float]] = ("Nesterov", {}),
        is_scalar: bool = False,
        pause: float = 0.0,
    ) -> None:
        self._seed, self._is_scalar, self._pause = seed, is_scalar, pause
        self.dht = shoal.DHT(initial_peers, start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
        self._model = scalars() if is_scalar else network()
        rule, given = outer
        self._optimizer = shoal.Optimizer(
            dht=self.dht,
            run_id="outer",
            params=self._model.parameters(),
            optimizer=(lambda p: torch.optim.SGD(p, lr=INNER_RATE)) if is_scalar else make_inner,
            batch_size_per_step=BATCH,
            outer=shoal.DiLoCo(optimizer=getattr(shoal.outer, rule)(**given), **diloco),
            matchmaking_time=10.0,
        )
        self._optimizer.on_event = self._heard
        self._steps, self._weights, self._last = 0, dict[str, float](), 1 << 31
        self._calls = 0  # of `step`, of which a newcomer's first one downloads
        self._training: Future[Trained] | None = None
        self._optimizer.optimizer.register_step_post_hook(self._made)
        average = self._optimizer._epoch._average

        def remembered(samples: float) -> Any:
            averaged = average(samples)
            if averaged is not None and not averaged.is_alone:
                outcome = self._optimizer._epoch._pilot.averaged.outcome
                assert outcome is not None
                begin = outcome.begin
                self._weights = {str(m.peer): w for m, w in zip(begin.members, begin.weights, strict=True)}
            return averaged

        self._optimizer._epoch._average = remembered  # type: ignore[method-assign]

    def train(self, *, steps: int = 0, epochs: int = 0) -> None:
        """Begin so many steps, or to train to that epoch."""
        self._training = ThreadPoolExecutor(1).submit(self._train, steps, epochs)

    def stop(self, epoch: int) -> None:
        """Train no further than to that epoch."""
        self._last = epoch

    def trained(self) -> Trained:
        """Wait until it has trained."""
        assert self._training is not None
        return self._training.result()

    def _train(self, steps: int, epochs: int) -> Trained:
        draw = random.Random(self._seed)
        history = []
        while self._steps < steps or self._optimizer.local_epoch < min(epochs, self._last):
            if self._is_scalar:
                history.append([float(parameter.detach()) for parameter in self._model.parameters()])
            self._step(draw)
        pending = self._optimizer._rounds.work.samples
        return Trained(history=history, steps=self._steps, calls=self._calls, pending=pending, **self._state())

    def _step(self, draw: random.Random) -> None:
        if self._is_scalar:
            for parameter in self._model.parameters():
                parameter.grad = torch.full_like(parameter, GRADIENT)
        else:
            backward(self._model, draw)
        time.sleep(self._pause)
        self._calls += 1
        self._optimizer.step()
        self._optimizer.zero_grad()

    def _made(self, *_: Any) -> None:
        self._steps += 1

    def _heard(self, event: Any) -> None:
        if isinstance(event, shoal.EpochReport):
            say(
                event="epoch", epoch=event.epoch, digest=event.state_digest, samples=event.samples,
                peers=event.num_peers, sent=event.bytes_sent, time=time.time(), steps=self._steps,
                weights=self._weights,
            )  # fmt: skip
        elif isinstance(event, shoal.DownloadReport):
            say(
                event="download", epoch=event.epoch, digest=event.state_digest, steps=self._steps, calls=self._calls,
                **self._state(),
            )  # fmt: skip

    def _state(self) -> State:
        replica = self._optimizer._state
        momentum = [t for t in replica.statistics("momentum_buffer") if t is not None]
        pairs = zip(replica.trained, replica.stepped, strict=True)
        return State(
            anchor=torch.cat([anchor.detach().reshape(-1) for anchor in replica.stepped]).tolist(),
            momentum=digest_of(momentum) if momentum else "",
            drift=max(float((model.detach() - anchor.detach()).abs().max()) for model, anchor in pairs),
        )

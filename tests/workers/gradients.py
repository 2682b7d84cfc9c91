"""An averager of gradients, which can be told to kill itself with SIGKILL at a given point of a step."""

from __future__ import annotations

from typing import Any, Literal, TypedDict

import torch
from torch import nn

import shoal
from shoal.averaging.control import StepControl
from shoal.optim.power_sgd_averager import _Step
from shoal.swarm.protocol import peer as protocol_peer
from tests.forked import SETTLE_SECONDS
from tests.telling import die
from tests.workers.digests import digest_of

SHAPES = [(300, 200), (50,), (16, 8, 3, 3)]


class Step(TypedDict):
    """What came of one."""

    digest: str
    members: int


class Gradients:
    """The averager; of PowerSGD, if `options` have a rank."""

    def __init__(self, initial_peers: list[str], options: dict[str, Any]) -> None:
        protocol_peer.SETTLE_SECONDS = SETTLE_SECONDS  # group bits make a run: its first round is of all
        self.dht = shoal.DHT(initial_peers, start=True)
        self._parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        make = shoal.PowerSGDGradientAverager if "averager_rank" in options else shoal.GradientAverager
        self._averager = make(self._parameters, dht=self.dht, prefix="test", start=True, **options)

    def die(self, where: Literal["between", "result"]) -> None:
        """Between the rounds of PowerSGD, or when the result is about to be written."""
        target, name = (_Step, "rights") if where == "between" else (StepControl, "claim")
        setattr(target, name, die)

    def step(self, seed: int, batch_size: int) -> Step:
        generator = torch.Generator().manual_seed(seed)
        for parameter in self._parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        self._averager.accumulate_grads_(batch_size)
        gathered = self._averager.step(timeout=60.0)
        with self._averager.use_averaged_gradients() as averaged:
            return Step(digest=digest_of(averaged), members=len(gathered))

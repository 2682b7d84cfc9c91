"""What provokes the messages that the guide to schedule-free optimizers explains."""

from __future__ import annotations

import contextlib

import torch

import shoal
from tests.optim.averaging_sgd import AveragingSGD
from tests.repository.error_tables import Scene, provokes, raised


@provokes("the optimizer is in eval(): call train() of it before the batches that it trains on")
def steps_in_eval_mode(scene: Scene) -> str:
    optimizer = scene.optimizer(optimizer=AveragingSGD)
    optimizer.eval()
    return raised(lambda: optimizer.step(batch_size=64))


class Swapping(AveragingSGD):
    """In eval mode, parameters and state have changed places."""

    @torch.no_grad()
    def eval(self) -> None:
        for parameter, values in self.state.items():
            was = parameter.clone()
            parameter.copy_(values["z"])
            values["z"].copy_(was)


@provokes(
    "a newcomer waits for this peer's state: eval() of this peer's optimizer has changed its state: ask after train()"
)
def a_newcomer_asks_in_eval_mode(scene: Scene) -> None:
    options = {"optimizer": Swapping, "load_state_timeout": 2.0}
    donor = scene.optimizer(**options)
    donor.train()
    donor.step(batch_size=64)
    donor.eval()
    newcomer = scene.optimizer(scene.another_dht(), **options)
    with contextlib.suppress(shoal.AveragingError):
        newcomer.load_state_from_peers()

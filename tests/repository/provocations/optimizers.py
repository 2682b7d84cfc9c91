"""What provokes the messages about optimizers of other people."""

from __future__ import annotations

from typing import Any

import torch

import shoal
from shoal.compression import NoCompression
from shoal.optim import own_form, tree
from shoal.optim.group_options import GroupOptions
from shoal.optim.state import TrainingState
from tests.optim.models import make_model
from tests.optim.test_own_form import Slow, Stubborn, pair, trained
from tests.optim.test_state import TIP, downloaded
from tests.repository.error_tables import Scene, provokes, raised


class Odd(torch.optim.SGD):
    """Keeps what nobody can send, from its first step on."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["history"] = {object()}
        return super().step(closure)


def odd(params: Any) -> torch.optim.Optimizer:
    return Odd(params, lr=0.1)


@provokes("…: peers that join the run could not have it")
def the_optimizer_keeps_an_object(scene: Scene) -> str:
    def make(params: Any) -> torch.optim.Optimizer:
        made = odd(params)
        made.state[made.param_groups[0]["params"][0]]["history"] = object()
        return made

    return raised(lambda: scene.optimizer(optimizer=make))


@provokes("parameter group N has …: newcomers get the options of parameter groups")
def has_an_option_that_nobody_can_send(scene: Scene) -> str:
    return raised(lambda: scene.optimizer(optimizer=lambda p: torch.optim.SGD([{"params": p, "note": print}], lr=0.1)))


@provokes("newcomers can't join this run: …, which they can't be sent", "a newcomer can't have this peer's state: …")
def the_optimizer_keeps_something_odd(scene: Scene) -> None:
    options = {"optimizer": odd, "load_state_timeout": 2.0}
    scene.optimizer(**options).step(batch_size=64)
    scene.optimizer(scene.another_dht(), **options).step(batch_size=8)


@provokes("the run's state does not fit this peer: the state dict of … has a form of its own, and … differs")
def the_newcomer_has_something_else_there(scene: Scene) -> str:
    scene.optimizer(optimizer=lambda params: Slow(params, 1.0)).step(batch_size=64)
    newcomer = scene.optimizer(scene.another_dht(), optimizer=lambda params: Slow(params, 2.0))
    return raised(lambda: newcomer.step(batch_size=8))


@provokes("… keeps something outside of its state_dict, or draws random numbers")
def a_newcomer_differs_again(scene: Scene) -> None:
    optimizer = scene.optimizer()
    hidden = optimizer._epoch._pilot.hidden
    hidden.has_loaded(whole=True)
    optimizer._epoch._pilot._tell_unlike()


@provokes("the optimizer does not hold what was loaded into it: … differs")
def a_class_changes_what_is_loaded(_: Scene) -> None:
    donor = trained(torch.optim.SGD(make_model().parameters(), lr=0.5))
    newcomer = TrainingState(torch.optim.SGD(make_model().parameters(), lr=0.1), None, [])
    newcomer.optimizer.param_groups[0] = Stubborn(newcomer.optimizer.param_groups[0])
    newcomer.load(downloaded(donor.snapshot(TIP, NoCompression())))


class Large(torch.optim.SGD):
    """Keeps 80 MB."""

    def step(self, closure: Any = None) -> Any:
        self.state[self.param_groups[0]["params"][0]]["matrix"] = torch.zeros(20 << 20)
        return super().step(closure)


@provokes("could not download …: offers a state of N bytes, more than the N allowed here: …")
def the_state_is_large(scene: Scene) -> None:
    options = {"optimizer": lambda params: Large(params, lr=0.1), "load_state_timeout": 2.0}
    scene.optimizer(**options).step(batch_size=64)
    scene.optimizer(scene.another_dht(), **options).step(batch_size=8)


@provokes("… could not take … of the state that was loaded")
def the_function_of_a_class_raises(_: Scene) -> None:
    def back(optimizer: Slow, value: Any) -> None:
        raise ValueError("not that")

    shoal.travels(Slow, "Slow", lambda optimizer: optimizer.slow, back)
    try:
        own_form.give_form(pair(Slow, 1.0, 2.0)[1].optimizer, 1.0)
    finally:
        del tree._pairs[Slow]


@provokes("at most peers of the run, … is an option of parameter groups …, and not here")
def another_group_has_the_option(_: Scene) -> None:
    groups = [[{"params": [torch.zeros(1, requires_grad=True)]} for _ in range(2)] for _ in range(2)]
    first, second = (torch.optim.SGD(each, lr=0.1) for each in groups)
    first.param_groups[0]["muon"] = second.param_groups[1]["muon"] = True
    with GroupOptions(first).of_run(GroupOptions(second).own(0)):
        pass

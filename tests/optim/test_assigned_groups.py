"""Users replace `param_groups` and `state`, or change them in place: as in torch, or refused by name."""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from tests.optim.conftest import Alone

MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "in place": {"reuse_grad_buffers": True},
    "on the host": {"offload_optimizer": True},
    "delayed step": {"delay_optimizer_step": True},
    "delayed": {"delay_grad_averaging": True},
    "local updates": {"use_local_updates": True},
    "own averager": {"grad_averager_factory": shoal.GradientAverager},
}
OUTER: dict[str, dict[str, Any]] = {
    "outer": {"outer": shoal.DiLoCo(inner_steps=4)},
    "outer on the host": {"outer": shoal.DiLoCo(inner_steps=4), "offload_optimizer": True},
}


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


class Pair:
    """A model that Shoal trains and one that torch trains, with the same data."""

    def __init__(self, alone: Alone, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(3, 2)
        self.plain = copy.deepcopy(self.model)
        self.torchs = sgd(self.groups(self.plain))
        if "outer" not in options:
            options = {"target_batch_size": 4, **options}
        self.ours = alone(self.model, params=self.groups(self.model), optimizer=sgd, batch_size_per_step=4, **options)
        self.keeps_grad = options.get("reuse_grad_buffers", False)

    @staticmethod
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        return [{"params": [parameter]} for parameter in model.parameters()]

    def step(self, scale: float = 1.0) -> None:
        for model, optimizer in ((self.model, self.ours), (self.plain, self.torchs)):
            (model(torch.ones(4, 3)).sum() * scale).backward()
            optimizer.step()
            if not (self.keeps_grad and optimizer is self.ours):
                optimizer.zero_grad()
        self.ours.settle()

    def both(self, change: Callable[[Any], object]) -> None:
        for optimizer in (self.ours, self.torchs):
            change(optimizer)

    def assert_alike(self) -> None:
        for mine, other in zip(self.model.parameters(), self.plain.parameters(), strict=True):
            torch.testing.assert_close(mine, other)


def no_rate(optimizer: Any) -> None:
    optimizer.param_groups = [{**group, "lr": 0.0} for group in optimizer.param_groups]


def other_rate_of_one(optimizer: Any) -> None:
    optimizer.param_groups = [dict(group, lr=0.1 + n) for n, group in enumerate(optimizer.param_groups)]


def rate_of_an_entry(optimizer: Any) -> None:
    optimizer.param_groups[1] = {**optimizer.param_groups[1], "lr": 0.5}


def fresh_state(optimizer: Any) -> None:
    optimizer.state = collections.defaultdict(dict)


def empty_mapping(optimizer: Any) -> None:
    optimizer.state = {} if isinstance(optimizer, shoal.Optimizer) else collections.defaultdict(dict)


def cleared(optimizer: Any) -> None:
    optimizer.state.clear()


def doubled_momentum(optimizer: Any) -> None:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.state = collections.defaultdict(
        dict, {p: {"momentum_buffer": optimizer.state[p]["momentum_buffer"] * 2} for p in parameters}
    )


def momentum_in_place(optimizer: Any) -> None:
    for held in optimizer.state.values():
        held["momentum_buffer"].mul_(3)


OF_GROUPS = [no_rate, other_rate_of_one, rate_of_an_entry]
OF_STATE = [fresh_state, empty_mapping, cleared, doubled_momentum, momentum_in_place]


@pytest.mark.parametrize("change", [*OF_GROUPS, *OF_STATE])
@pytest.mark.parametrize("mode", [*MODES, *OUTER])
def test_as_in_torch(alone: Alone, mode: str, change: Callable[[Any], object]) -> None:
    pair = Pair(alone, {**MODES, **OUTER}[mode])
    pair.step()
    pair.both(change)
    pair.step(0.5)
    if mode not in OUTER:
        pair.step(2.0)
    pair.assert_alike()
    assert set(pair.ours.state) == set(pair.model.parameters())


@pytest.mark.parametrize("mode", [*MODES, *OUTER])
def test_what_does_not_fit_is_refused(alone: Alone, mode: str) -> None:
    pair = Pair(alone, {**MODES, **OUTER}[mode])
    pair.step()
    ours: Any = pair.ours
    other = nn.Parameter(torch.zeros(1))
    groups = [dict(group) for group in ours.param_groups]
    for given, words in (
        (groups[:1], "has 1 groups, and had 2"),
        ([groups[1], groups[0]], r"param_groups\[0\]\[\"params\"\] has 1 parameters.*index 0"),
        ([{**groups[0], "params": [*groups[0]["params"], other]}, groups[1]], "has 2 parameters, and had 1"),
        ([groups[0], {key: value for key, value in groups[1].items() if key != "momentum"}], "has no 'momentum'"),
        ([1, 2], 'each with "params"'),
    ):
        with pytest.raises(ValueError, match=words):
            ours.param_groups = given
    with pytest.raises(TypeError, match="a list: give a mapping"):
        ours.state = []
    assert [group["lr"] for group in ours.param_groups] == [0.1, 0.1]
    pair.step()
    pair.assert_alike()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("change", ["appended", "exchanged", "taken out", "removed"])
def test_parameters_that_change_in_place_are_refused_by_the_next_epoch(alone: Alone, mode: str, change: str) -> None:
    pair = Pair(alone, MODES[mode])
    pair.step()
    ours: Any = pair.ours
    before = [parameter.detach().clone() for parameter in pair.model.parameters()]
    listed = ours.param_groups[0]["params"]
    kept = list(ours.param_groups), list(listed)
    if change == "removed":
        del ours.param_groups[0]
    elif change == "taken out":
        listed.clear()
    elif change == "appended":
        listed.append(nn.Parameter(torch.zeros(1)))
    else:
        listed[0] = nn.Parameter(torch.zeros(1))
    for _ in range(2):
        with pytest.raises(ValueError, match="the parameters of this optimizer are fixed"):
            pair.step()
    ours.settle()
    assert all(map(torch.equal, before, pair.model.parameters()))
    listed[:] = kept[1]
    if change == "removed":
        ours.param_groups.insert(0, kept[0][0])
    pair.model.zero_grad()
    if mode != "in place":  # where that is refused
        pair.step()
        pair.assert_alike()


@pytest.mark.parametrize("mode", ["synchronous", "delayed step"])
def test_schedulers_follow_assigned_groups(alone: Alone, mode: str) -> None:
    pair = Pair(alone, MODES[mode])
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in (pair.ours, pair.torchs)]
    for _ in range(3):
        pair.step()
        for scheduler in schedulers:
            scheduler.step()
        pair.both(lambda o: setattr(o, "param_groups", [dict(group) for group in o.param_groups]))
    assert [group["lr"] for group in pair.ours.param_groups] == [0.0125, 0.0125]
    pair.assert_alike()


def test_a_group_that_was_kept_stays_alive(alone: Alone) -> None:
    """A scheduler that keeps the groups of an optimizer on the host changes the rate also after a state was loaded."""
    pair = Pair(alone, MODES["delayed"])
    pair.step()
    kept = list(pair.ours.param_groups)
    pair.ours.load_state_dict(pair.ours.state_dict())
    kept[0]["lr"] = 0.7
    assert pair.ours.param_groups[0]["lr"] == 0.7
    assert pair.ours.optimizer.param_groups[0]["lr"] == 0.7


@pytest.mark.parametrize("mode", ["synchronous", "delayed step"])
def test_what_wrappers_and_copies_see(alone: Alone, mode: str) -> None:
    """Lightning's and Fabric's wrappers are of a subclass, and look in the optimizer for attributes."""
    pair = Pair(alone, MODES[mode])
    pair.step()
    ours: Any = pair.ours

    class Wrapper:
        def __init__(self) -> None:
            self.wrapped = ours
            self.__class__ = type("Wrapped", (Wrapper, shoal.Optimizer), {})  # type: ignore[assignment]

        def __getattr__(self, name: str) -> Any:
            return getattr(self.wrapped, name)

    wrapper: Any = Wrapper()
    assert wrapper.param_groups is ours.param_groups
    assert set(wrapper.state) == set(ours.state)
    torch.optim.lr_scheduler.StepLR(wrapper, 1, 0.5)
    groups = copy.deepcopy(ours.param_groups)
    assert [group["lr"] for group in groups] == [0.1, 0.1]
    assert groups[0]["params"][0] is not ours.param_groups[0]["params"][0]
    assert (ours.param_groups[0] | {"lr": 3.0})["lr"] == 3.0
    assert dict(ours.param_groups[0].copy()) == dict(ours.param_groups[0])
    other, before = nn.Parameter(torch.zeros(1)), len(ours.state)
    assert ours.state.get(other, "nothing") == "nothing"
    assert len(ours.state) == before
    assert len(copy.deepcopy(ours.state)) == before
    with pytest.raises(ValueError, match="param_groups was set to None"):
        ours.param_groups = None

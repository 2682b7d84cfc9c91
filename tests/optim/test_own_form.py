"""State dicts with a form of their own: what peers have sent is compared with this peer's, or goes through functions
that were given to `shoal.travels`, and reaches no method of the class."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch

import shoal
from shoal.compression import NoCompression
from shoal.optim import tree
from shoal.optim.state import TrainingState
from tests.optim.conftest import Alone
from tests.optim.models import flat, make_model
from tests.optim.test_kinds_of_options import step
from tests.optim.test_state import TIP, downloaded


class Slow(torch.optim.SGD):
    """Keeps something beside torch's two parts, as Lookahead does."""

    def __init__(self, params: Any, slow: Any = 1.0) -> None:
        super().__init__(params, lr=0.1, momentum=0.9, foreach=False)
        self.slow = slow

    def state_dict(self) -> Any:
        return {"inner": super().state_dict(), "slow": [self.slow]}

    def load_state_dict(self, state_dict: Any) -> None:
        raise AssertionError("what peers have sent has reached the class")


class Unpickles(torch.optim.SGD):
    """As heavyball does: a hook saves pickled bytes, and another one unpickles them and sets what they hold."""

    def __init__(self, params: Any, schedule: Any = None) -> None:
        super().__init__(params, lr=0.1, foreach=False)
        self.schedule = schedule
        self.param_groups[0]["_workspace"] = object()
        self.register_state_dict_post_hook(save)  # type: ignore[arg-type]
        self.register_load_state_dict_pre_hook(unpickle)  # type: ignore[arg-type]

    def state_dict(self) -> Any:
        saved = super().state_dict()
        for group in saved["param_groups"]:
            group.pop("_workspace", None)
        return saved


def save(optimizer: Unpickles, state_dict: Any) -> None:
    state_dict["own"] = {"schedule": pickle.dumps(optimizer.schedule)}


def unpickle(optimizer: Unpickles, state_dict: Any) -> None:
    optimizer.schedule = pickle.loads(state_dict["own"]["schedule"])  # that it is not called is the test


class Evil:
    """Unpickling it writes down that it was unpickled."""

    told: ClassVar[list[str]] = []

    def __reduce__(self) -> Any:
        return Evil.told.append, ("unpickled",)


def trained(optimizer: torch.optim.Optimizer) -> TrainingState:
    state = TrainingState(optimizer, None, [])
    for parameter in state.parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state.adopt_statistics()
    return state


def pair(kind: Any, *values: Any) -> list[TrainingState]:
    """A donor that has stepped, and a newcomer that has not."""
    donor, newcomer = (kind(make_model(seed).parameters(), value) for seed, value in enumerate(values))
    return [trained(donor), TrainingState(newcomer, None, [])]


@pytest.mark.parametrize("kind", [Slow, Unpickles])
def test_what_is_equal_here_is_taken(kind: Any) -> None:
    donor, newcomer = pair(kind, 1.0, 1.0)
    newcomer.load(downloaded(donor.snapshot(TIP, NoCompression())))
    assert torch.equal(newcomer.memory.flat[0], donor.memory.flat[0])
    assert newcomer.was_taken_whole
    assert "_workspace" not in newcomer.optimizer.param_groups[0] or kind is Unpickles


@pytest.mark.parametrize("kind", [Slow, Unpickles])
def test_what_differs_is_refused_by_name(kind: Any) -> None:
    donor, newcomer = pair(kind, Evil() if kind is Unpickles else 2.0, None if kind is Unpickles else 1.0)
    before = [parameter.detach().clone() for parameter in newcomer.parameters]
    where = r"'own'\['schedule'\]" if kind is Unpickles else r"'slow'\[0\]"
    with pytest.raises(ValueError, match=rf"{kind.__name__} has a form of its own, and {where} differs"):
        newcomer.load(downloaded(donor.snapshot(TIP, NoCompression())))
    assert not Evil.told
    assert not newcomer.optimizer.state
    assert all(torch.equal(a, b) for a, b in zip(before, newcomer.parameters, strict=True))


@pytest.fixture
def registered() -> Iterator[list[Any]]:
    got: list[Any] = []

    def back(optimizer: Slow, value: Any) -> None:
        got.append(value)
        optimizer.slow = float(value)

    shoal.travels(Slow, "Slow", lambda optimizer: optimizer.slow, back)
    yield got
    del tree._pairs[Slow]


def test_a_class_that_was_registered_travels(registered: list[Any], caplog: pytest.LogCaptureFixture) -> None:
    donor, newcomer = pair(Slow, 2.0, 1.0)
    newcomer.load(downloaded(donor.snapshot(TIP, NoCompression())))
    assert registered == [2.0]
    assert newcomer.optimizer.slow == 2.0  # type: ignore[attr-defined]
    assert newcomer.was_taken_whole
    donor.optimizer.slow = "nonsense"  # type: ignore[attr-defined]
    newcomer.load(downloaded(donor.snapshot(TIP, NoCompression())))
    assert "Slow could not take 'Slow' of the state that was loaded: ValueError" in caplog.text
    assert not newcomer.was_taken_whole


class Stubborn(dict[str, Any]):
    """Options that can't be set."""

    def update(self, *args: Any, **options: Any) -> None:
        super().update({k: v for k, v in dict(*args, **options).items() if k != "lr"})


def test_an_optimizer_that_changes_what_is_loaded_is_told(caplog: pytest.LogCaptureFixture) -> None:
    donor = trained(torch.optim.SGD(make_model().parameters(), lr=0.5))
    newcomer = TrainingState(torch.optim.SGD(make_model().parameters(), lr=0.1), None, [])
    newcomer.optimizer.param_groups[0] = Stubborn(newcomer.optimizer.param_groups[0])
    newcomer.load(downloaded(donor.snapshot(TIP, NoCompression())))
    (message,) = caplog.messages
    assert "parameter group 0: 'lr' differs. SGD changes what is put into" in message


class Projector:
    """An object of a class of its own, as GaLore keeps."""


class Projecting(torch.optim.SGD):
    """Makes such an object in its second step."""

    def __init__(self, params: Any, first: int = 2) -> None:
        super().__init__(params, lr=0.1, momentum=0.9, foreach=False)
        self.left = first
        if not first:
            self.state[self.param_groups[0]["params"][0]]["projector"] = Projector()

    def step(self, closure: Any = None) -> Any:
        self.left -= 1
        if self.left == 0:
            self.state[self.param_groups[0]["params"][0]]["projector"] = Projector()
        return super().step(closure)


PROJECTOR = "state of parameter '0.weight': 'projector' is a tests.optim.test_own_form.Projector"


def test_what_can_not_travel_is_refused_when_the_optimizer_is_made(alone: Alone) -> None:
    model = make_model()
    with pytest.raises(ValueError, match=rf"{PROJECTOR}: peers that join the run could not have it. shoal.travels\(\)"):
        alone(model, params=model.named_parameters(), optimizer=lambda p: Projecting(p, 0), target_batch_size=8)


def test_what_can_not_travel_later_is_told_once(alone: Alone, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    optimizer = alone(model, params=model.named_parameters(), optimizer=Projecting, target_batch_size=8)
    for epoch in range(4):
        step(model, optimizer)
        told = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert len(told) == (epoch >= 1), caplog.text
    assert f"newcomers can't join this run: {PROJECTOR}, which they can't be sent" in caplog.text
    assert optimizer.local_epoch == 4
    assert flat(model).isfinite().all()

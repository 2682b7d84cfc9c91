"""Numbers of numpy, members of enumerations and other kinds of options come in by every way, get a vote, reach a
newcomer, and stay what they are in the groups. What has no plain value is refused by name. And a round that this peer
can't use is not tried for ever."""

from __future__ import annotations

import contextlib
import enum
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import shoal
from shoal.optim.group_options import GroupOptions
from shoal.swarm.protocol.errors import AveragingError
from tests.optim.conftest import Alone
from tests.optim.models import flat, make_model
from tests.waiting import wait_until

Peers = list[tuple[torch.nn.Module, shoal.Optimizer]]
Make = Callable[[Any], torch.optim.Optimizer]


class Mode(str, enum.Enum):  # noqa: UP042 - what most people write
    PLAIN, DOUBLE = "plain", "double"


class Level(enum.IntEnum):
    ONE, TWO = 1, 2


class Moded(torch.optim.Optimizer):
    """SGD with an option that says how far it goes."""

    def __init__(self, params: Any, mode: Any, lr: Any = 0.1) -> None:
        super().__init__(params, {"lr": lr, "mode": mode})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            factor = {"plain": 1, "double": 2, 1: 1, 2: 2}[group["mode"]]
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-factor * group["lr"])


@contextlib.contextmanager
def one_peer(dht: shoal.DHT, make: Make, **options: Any) -> Iterator[tuple[torch.nn.Module, shoal.Optimizer]]:
    model = make_model()
    given = {"target_batch_size": 8, "matchmaking_time": 20.0, "averaging_timeout": 30.0, **options}
    optimizer = shoal.Optimizer(dht=dht, run_id="kinds", params=model.parameters(), optimizer=make, **given)
    try:
        yield model, optimizer
    finally:
        optimizer.shutdown()


@contextlib.contextmanager
def peers(makes: list[Make], **options: Any) -> Iterator[Peers]:
    """Peers of one run, in this process; each epoch takes a batch of all."""
    given = {"target_batch_size": 8 * len(makes), **options}
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(shoal.DHT(start=True))
        dhts = [first, *(stack.enter_context(shoal.DHT(first.get_visible_maddrs(), start=True)) for _ in makes[1:])]
        yield [stack.enter_context(one_peer(d, make, **given)) for d, make in zip(dhts, makes, strict=True)]


def step(model: torch.nn.Module, optimizer: shoal.Optimizer, batch_size: int = 8) -> None:
    model(torch.ones(4, 10)).square().mean().backward()
    optimizer.step(batch_size=batch_size)
    optimizer.zero_grad()


def epoch(peer: tuple[torch.nn.Module, shoal.Optimizer]) -> None:
    model, optimizer = peer
    before = optimizer.local_epoch
    step(model, optimizer)
    wait_until(lambda: (optimizer.step(batch_size=0), optimizer.local_epoch > before)[1])


def epochs(made: Peers, count: int) -> None:
    with ThreadPoolExecutor(len(made)) as pool:
        for _ in range(count):
            list(pool.map(epoch, made))
            assert len({flat(model).numpy().tobytes() for model, _ in made}) == 1


KINDS: dict[str, tuple[Make, str, type]] = {
    "lr float64": (lambda params: torch.optim.SGD(params, lr=np.float64(0.1)), "lr", np.float64),
    "lr float32": (lambda params: torch.optim.SGD(params, lr=np.float32(0.5)), "lr", np.float32),
    "lr int64": (lambda params: torch.optim.SGD(params, lr=np.int64(1)), "lr", np.int64),
    "lr array": (lambda params: torch.optim.SGD(params, lr=np.array(0.1)), "lr", np.ndarray),
    "betas": (lambda params: torch.optim.AdamW(params, betas=(np.float64(0.9), np.float64(0.5))), "betas", tuple),
    "weight decay": (lambda params: torch.optim.SGD(params, 0.1, dampening=np.float64(0.0)), "dampening", np.float64),
    "bool": (lambda params: torch.optim.SGD(params, lr=0.1, maximize=np.bool_(False)), "maximize", np.bool_),
    "text": (lambda params: Moded(params, np.str_("plain")), "mode", np.str_),
    "text enum": (lambda params: Moded(params, Mode.PLAIN), "mode", Mode),
    "int enum": (lambda params: Moded(params, Level.ONE), "mode", Level),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_a_newcomer_gets_the_state_and_both_step_alike(kind: str) -> None:
    make, name, type_ = KINDS[kind]
    with peers([make]) as [(model, first)]:
        step(model, first)
        with shoal.DHT(first.dht.get_visible_maddrs(), start=True) as dht, one_peer(dht, make) as late:
            assert late[1].load_state_from_peers(timeout=20)
            assert late[1].local_epoch == 1
            epochs([(model, first), late], 2)
            for optimizer in (first, late[1]):
                assert type(optimizer.param_groups[0][name]) is type_


MODES = [{}, {"offload_optimizer": True}, {"use_local_updates": True, "delay_state_averaging": False}]


@pytest.mark.parametrize("mode", MODES, ids=["default", "offload", "local"])
def test_numbers_of_numpy_by_every_way(alone: Alone, mode: dict[str, Any]) -> None:
    """From the constructor, between steps, from a scheduler and from a state dict, with the numbers of plain torch."""
    model, plain_model = make_model(), make_model()
    cosine = lambda made: torch.optim.lr_scheduler.CosineAnnealingLR(made, 10, eta_min=np.float64(1e-3))  # noqa: E731
    sgd = lambda params: torch.optim.SGD(params, lr=np.float64(0.1), momentum=np.float32(0.5))  # noqa: E731
    optimizer = alone(model, target_batch_size=8, optimizer=sgd, scheduler=cosine, **mode)
    plain_one = sgd(plain_model.parameters())
    scheduler = cosine(plain_one)

    def both() -> None:
        step(model, optimizer)
        plain_model(torch.ones(4, 10)).square().mean().backward()
        plain_one.step()
        plain_one.zero_grad()
        scheduler.step()
        # Fused kernels on flat memory round otherwise than foreach ones: a few units in the last place a step.
        torch.testing.assert_close(flat(model), flat(plain_model), rtol=1e-5, atol=1e-7)

    both()
    for group in (optimizer.param_groups[0], plain_one.param_groups[0]):
        group["weight_decay"] = np.float64(0.01)
        group["nesterov"] = np.bool_(True)
    both()
    assert type(optimizer.param_groups[0]["weight_decay"]) is np.float64
    state = optimizer.state_dict()
    state["param_groups"][0]["dampening"] = np.float64(0.0)
    optimizer.load_state_dict(state)
    both()
    assert optimizer.local_epoch == 3


def test_numbers_of_numpy_get_votes() -> None:
    """np.bool_ had none, in silence."""
    makes: list[Make] = [
        lambda params: torch.optim.SGD(params, lr=np.float64(0.2), maximize=np.bool_(True)),
        lambda params: torch.optim.SGD(params, lr=0.2, maximize=True),
        lambda params: torch.optim.SGD(params, lr=np.float32(0.1), maximize=np.bool_(False)),
    ]
    with peers(makes) as made:
        start = flat(made[0][0])
        made[0][0](torch.ones(4, 10)).square().mean().backward()
        gradient = torch.cat([p.grad.flatten() for p in made[0][0].parameters() if p.grad is not None])
        made[0][1].zero_grad()
        epochs(made, 1)
        # The same gradient three times over: its mean rounds.
        torch.testing.assert_close(flat(made[2][0]), start + 0.2 * gradient, rtol=1e-5, atol=1e-7)
        assert type(made[2][1].param_groups[0]["maximize"]) is np.bool_


@pytest.mark.parametrize(
    "value", [object(), print, [print], torch.zeros(2).to_sparse()], ids=lambda value: type(value).__name__
)
def test_what_newcomers_can_not_get_is_refused_by_name(alone: Alone, value: Any) -> None:
    with pytest.raises(ValueError, match=r"(?s)parameter group 0 has 'mode' = .*, and 'mode'.* is a .*give a number"):
        alone(make_model(), target_batch_size=8, optimizer=lambda params: Moded(params, value))
    model = make_model()
    optimizer = alone(model, target_batch_size=8, optimizer=lambda params: Moded(params, "plain"))
    state = optimizer.state_dict()
    state["param_groups"][0]["mode"] = value
    with pytest.raises(ValueError, match="parameter group 0 has 'mode' = "):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["mode"] == "plain"
    before = flat(model)
    optimizer.param_groups[0]["mode"] = value
    with pytest.raises(ValueError, match="parameter group 0 has 'mode' = "):
        step(model, optimizer)
    assert torch.equal(flat(model), before)
    optimizer.param_groups[0]["mode"] = "double"
    optimizer.step(batch_size=0)  # nothing was lost: the batch is in this epoch
    assert optimizer.local_epoch == 1
    assert not torch.equal(flat(model), before)


@pytest.mark.parametrize("value", [1j, torch.ones(2), torch.float32], ids=lambda value: type(value).__name__)
def test_what_has_no_plain_value_is_not_compared(alone: Alone, value: Any) -> None:
    model = make_model()
    optimizer = alone(model, target_batch_size=8, optimizer=lambda params: Moded(params, "plain"))
    optimizer.param_groups[0]["kept"] = value
    step(model, optimizer)
    assert optimizer.local_epoch == 1
    assert optimizer.param_groups[0]["kept"] is value


def test_options_of_another_kind_end_their_own_peer_only(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever coordinates: the two that agree make their rounds, and the third one hears the option's name."""
    makes: list[Make] = [lambda params, mode=mode: Moded(params, mode) for mode in ("plain", "plain", 1)]  # type: ignore[misc]
    with peers(makes, matchmaking_time=3.0) as made:
        for peer in made[:2]:
            step(*peer)
        # Now the first round waits for both.
        wait_until(lambda: all(one.tracker.global_progress.samples_accumulated == 16 for _, one in made))

        def train(peer: tuple[torch.nn.Module, shoal.Optimizer]) -> BaseException | None:
            try:
                while peer[1].local_epoch < 6:
                    step(*peer)
            except AveragingError as error:
                return error
            return None

        with ThreadPoolExecutor(3) as pool:
            errors = list(pool.map(train, made))
        assert errors[:2] == [None, None]
        assert "mode is 'plain', and 1 at this peer" in str(errors[2])
        assert torch.equal(flat(made[0][0]), flat(made[1][0])) or made[0][1].local_epoch != made[1][1].local_epoch


def test_a_round_that_this_peer_itself_cannot_use_is_not_tried_for_ever(
    alone: Alone, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tries = []

    def misfit(options: GroupOptions, given: bytes) -> str:
        tries.append(given)
        return "lr is 7, and 'seven' at this peer"

    monkeypatch.setattr(GroupOptions, "misfit", misfit)
    model = make_model()
    optimizer = alone(model, target_batch_size=8, optimizer=lambda params: torch.optim.SGD(params, lr=0.1))
    with caplog.at_level(logging.WARNING, "shoal"):
        for _ in range(3):
            step(model, optimizer)
    assert optimizer.local_epoch == 3
    assert len(tries) <= 3 * 4, "each BEGIN was asked about by the rules and by the round"
    errors = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert "lr is 7, and 'seven' at this peer" in errors[0]


@pytest.mark.parametrize(("own", "wins"), [(torch.tensor(0.3), 0.1), (torch.tensor(1), 0.5)], ids=["float", "whole"])
def test_a_tensor_that_loses_the_vote_keeps_its_value(own: torch.Tensor, wins: float) -> None:
    """float32 holds 0.1 inexactly, which was taken for a change by the step; a whole number became 0."""
    makes: list[Make] = [lambda params, lr=lr: Moded(params, "plain", lr=lr) for lr in (own.clone(), wins, wins)]  # type: ignore[misc]
    with peers(makes) as made:
        before = flat(made[1][0])
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(epoch, made))
        mine = made[0][1].param_groups[0]["lr"]
        assert isinstance(mine, torch.Tensor)
        assert torch.equal(mine, own)
        torch.testing.assert_close(flat(made[0][0]), flat(made[1][0]))
        assert not torch.equal(flat(made[0][0]), before)


def test_nan_is_equal_to_itself(alone: Alone, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    nan = np.float64("nan")
    optimizer = alone(
        model, target_batch_size=8, optimizer=lambda params: Moded([{"params": params, "note": nan}], "plain")
    )
    with caplog.at_level(logging.WARNING, "shoal"):
        step(model, optimizer)
    assert "note is" not in caplog.text
    assert optimizer.param_groups[0]["note"] is nan


def test_numbers_of_numpy_in_an_outer_optimizer(alone: Alone) -> None:
    rule: Any = shoal.outer.Nesterov(lr=np.float32(0.5), momentum=np.float64(0.5))
    steps, mix = np.int64(2), np.float32(0.5)
    outer = shoal.DiLoCo(optimizer=rule, inner_steps=steps, mix=mix)  # type: ignore[arg-type]
    rule = shoal.outer.Nesterov(lr=0.5, momentum=0.5)
    assert outer == shoal.DiLoCo(optimizer=rule, inner_steps=2, mix=0.5)
    assert "np." not in outer.term()
    model = make_model()
    optimizer = alone(model, outer=outer, optimizer=lambda params: torch.optim.SGD(params, lr=np.float32(0.1)))
    for _ in range(4):
        step(model, optimizer)
    assert optimizer.local_epoch == 2


@pytest.mark.parametrize(
    "mode", [{}, {"outer": shoal.DiLoCo(inner_steps=1), "target_batch_size": None}], ids=["", "outer"]
)
def test_the_epoch_of_a_checkpoint_is_a_whole_number(alone: Alone, mode: dict[str, Any]) -> None:
    model = make_model()
    given = {"target_batch_size": 8, "optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), **mode}
    optimizer = alone(model, **given)
    step(model, optimizer)
    state = optimizer.state_dict()
    for value in (-1, 1.5, "3", True, 1 << 70, float("inf"), None if mode else object()):
        if value is None:
            continue
        with pytest.raises(ValueError, match=r"local_epoch|does not name a state"):
            optimizer.load_state_dict(state | {"state": state["state"] | {"local_epoch": value}})
    for value in (3.0, np.int64(3), np.float32(3), torch.tensor(3)):
        optimizer.load_state_dict(state | {"state": state["state"] | {"local_epoch": value}})
        assert optimizer.local_epoch == 3
        assert type(optimizer.local_epoch) is int
    step(model, optimizer)
    assert optimizer.local_epoch == 4

"""`shoal.Together` in a run: in every mode it is the plain optimizers side by side, and a newcomer gets its state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.swarm.protocol.messages import Terms
from tests.optim.conftest import Alone
from tests.optim.models import BATCH, backward, fixed_batch, flat, make_model
from tests.optim.test_kinds_of_options import epochs, one_peer, peers, step


class Counting(torch.optim.SGD):
    """SGD with state without a parameter, on which its step depends."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.state["k"] = self.state.get("k", torch.tensor(0)) + 1  # type: ignore[index, call-overload]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad, alpha=group["lr"] / float(self.state["k"]))  # type: ignore[index]


def is_matrix(name: str, parameter: torch.Tensor) -> bool:
    return parameter.ndim == 2 and name != "4.weight"


def muon_and_adamw(params: Any) -> list[torch.optim.Optimizer]:
    matrices, rest = shoal.Together.divide(params, is_matrix)
    adamw = torch.optim.AdamW(rest, lr=0.02, foreach=False, fused=False)
    return [torch.optim.Muon(matrices, lr=0.05), adamw]


def together(params: Any) -> torch.optim.Optimizer:
    return shoal.Together(*muon_and_adamw(params))


def counting(params: Any) -> torch.optim.Optimizer:
    matrices, rest = shoal.Together.divide(params, is_matrix)
    return shoal.Together(torch.optim.Muon(matrices, lr=0.05), Counting(rest, lr=0.05))


def plain(steps: int, model: nn.Module | None = None, scale: float = 1.0) -> torch.Tensor:
    """The parameters after so many steps of the two optimizers side by side."""
    model = make_model() if model is None else model
    members = muon_and_adamw(model.named_parameters())
    for number in range(steps):
        backward(model, *fixed_batch(number))
        for member in members:
            member.step()
    return flat(model)


MODES: dict[str, dict[str, Any]] = {
    "at once": {},
    "in place": {"reuse_grad_buffers": True},
    "on the host": {"offload_optimizer": True},
    "delayed step": {"delay_optimizer_step": True},
    "delayed": {"delay_grad_averaging": True},
    "local updates": {"use_local_updates": True, "delay_state_averaging": False},
    "own averager": {"grad_averager_factory": shoal.GradientAverager},
}
OUTER = shoal.DiLoCo(inner_steps=50)


@pytest.mark.parametrize("mode", [*MODES, "inner", "inner on the host"])
def test_it_is_the_two_side_by_side(alone: Alone, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shoal.optim.settings.is_on_host", lambda params: False)  # as on a device
    options = MODES.get(mode, {"outer": OUTER, "offload_optimizer": mode == "inner on the host"})
    model = make_model()
    names = model.named_parameters()
    given = {"batch_size_per_step": BATCH, **({} if "outer" in options else {"target_batch_size": BATCH}), **options}
    optimizer = alone(model, params=names, optimizer=together, **given)
    for number in range(6):
        backward(model, *fixed_batch(number), clear=mode != "in place")
        optimizer.step()
        optimizer.settle()
    assert torch.equal(flat(model), plain(6))  # the same kernels, on the same shapes
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]
    assert {*optimizer.state} == set(model.parameters())


@pytest.mark.long
def test_as_the_outer_optimizer_in_another_order(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    def outer(params: Any) -> torch.optim.Optimizer:
        def is_bias(name: str, parameter: torch.Tensor) -> bool:
            assert name.endswith("bias") == (parameter.ndim < 2)  # each anchor has the name of its parameter
            return parameter.ndim < 2

        rest, matrices = shoal.Together.divide(params, is_bias)
        return shoal.Together(torch.optim.SGD(rest, lr=1.0), torch.optim.SGD(matrices, lr=1.0))

    monkeypatch.setattr("shoal.optim.settings.is_on_host", lambda params: False)
    for offload in (False, True):
        model = make_model().double()
        choice = shoal.DiLoCo(inner_steps=3, optimizer=outer)
        more = {"batch_size_per_step": 8, "outer": choice, "offload_optimizer": offload}
        optimizer = alone(model, params=model.named_parameters(), optimizer=together, **more)
        expected = make_model().double()
        members = muon_and_adamw(expected.named_parameters())
        for number in range(7):
            inputs, outputs = (tensor.double() for tensor in fixed_batch(number))
            backward(model, inputs, outputs)
            optimizer.step()
            backward(expected, inputs, outputs)
            for member in members:
                member.step()
        assert optimizer.local_epoch == 2
        torch.testing.assert_close(flat(model), flat(expected))  # a step of 1.0 times the drift, to rounding


@pytest.mark.parametrize("outer", [None, shoal.DiLoCo(inner_steps=50)], ids=["offload", "outer"])
def test_any_function_may_order_the_parameters_as_it_likes(
    alone: Alone, outer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.optim.settings.is_on_host", lambda params: False)

    def regrouped(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for n in (1, 0) for p in params if (p.ndim > 1) == n], lr=0.1, momentum=0.9)

    model, expected = make_model(), make_model()
    more: dict[str, Any] = {"offload_optimizer": True} | ({"outer": outer} if outer else {"target_batch_size": BATCH})
    optimizer = alone(model, optimizer=regrouped, batch_size_per_step=BATCH, **more)
    reference = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9, foreach=False, fused=True)
    for number in range(4):
        backward(model, *fixed_batch(number))
        optimizer.step()
        backward(expected, *fixed_batch(number))
        reference.step()
    torch.testing.assert_close(flat(model), flat(expected))
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    backward(model, *fixed_batch(9))
    optimizer.step()
    backward(expected, *fixed_batch(9))
    reference.step()
    torch.testing.assert_close(flat(model), flat(expected))


def test_with_a_gradient_scaler_and_a_schedule(alone: Alone) -> None:
    model, expected = make_model(), make_model()
    scheduler = torch.optim.lr_scheduler.LambdaLR
    rates = [lambda step: 0.5**step, lambda step: 1 / (1 + step)]
    optimizer = alone(
        model,
        params=model.named_parameters(),
        optimizer=together,
        scheduler=lambda made: scheduler(made, rates),
        target_batch_size=BATCH,
        batch_size_per_step=BATCH,
    )
    scaler = shoal.GradScaler("cpu", init_scale=2.0**8)
    members = muon_and_adamw(expected.named_parameters())
    schedules = [scheduler(member, rate) for member, rate in zip(members, rates, strict=True)]
    for number in range(4):
        inputs, outputs = fixed_batch(number)
        model.zero_grad()
        scaler.scale(((model(inputs) - outputs) ** 2).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        backward(expected, inputs, outputs)
        for member, schedule in zip(members, schedules, strict=True):
            member.step()
            schedule.step()
    torch.testing.assert_close(flat(model), flat(expected))  # scales are powers of two, and tiny numbers round
    assert [group["lr"] for group in optimizer.param_groups] == [member.param_groups[0]["lr"] for member in members]
    made = optimizer.optimizer
    assert isinstance(made, shoal.Together)
    shoal.EpochScheduler(scheduler(made.members[0], rates[:1]))  # refused, if no shoal.Optimizer has it


def by_shape(rest: Any) -> Any:
    """The same of parameters without names."""

    def make(params: Any) -> torch.optim.Optimizer:
        muon = torch.optim.Muon([p for p in params if p.ndim == 2], lr=0.05)
        return shoal.Together(muon, rest([p for p in params if p.ndim < 2], lr=0.05))

    return make


@pytest.mark.long
@pytest.mark.parametrize("rest", [torch.optim.AdamW, Counting])
def test_a_newcomer_gets_the_state_and_both_step_alike(rest: Any) -> None:
    make = by_shape(rest)
    with peers([make]) as [(model, first)]:
        step(model, first)
        step(model, first)
        with shoal.DHT(first.dht.get_visible_maddrs(), start=True) as dht, one_peer(dht, make) as late:
            assert late[1].load_state_from_peers(timeout=20)
            epochs([(model, first), late], 3)
            for optimizer in (first, late[1]):
                keys = [key for key in optimizer.optimizer.state if not isinstance(key, torch.Tensor)]
                assert keys == ([(1, "k")] if rest is Counting else [])
                assert not keys or optimizer.optimizer.state[keys[0]] == 5
                optimizer.param_groups = [dict(group, lr=0.01) for group in optimizer.param_groups]
            epochs([(model, first), late], 1)
            assert [group["lr"] for group in late[1].optimizer.param_groups] == [0.01, 0.01]


def test_peers_compare_the_members(alone: Alone, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Any] = []

    def recorded(agreed: Any, schema: bytes) -> Terms:
        compared.append(agreed)
        return Terms(agreed, schema)

    monkeypatch.setattr("shoal.optim.terms.Terms", recorded)
    alone(make_model(), optimizer=by_shape(torch.optim.AdamW), target_batch_size=8)
    assert compared[0]["optimizer"] == "Together(Muon, AdamW)"


def test_a_checkpoint_continues(alone: Alone) -> None:
    given = {"target_batch_size": BATCH, "batch_size_per_step": BATCH, "optimizer": counting}
    model, other = make_model(), make_model(seed=1)
    first = alone(model, params=model.named_parameters(), **given)
    for number in range(3):
        backward(model, *fixed_batch(number))
        first.step()
    saved = {"model": copy.deepcopy(model.state_dict()), "optimizer": copy.deepcopy(first.state_dict())}
    backward(model, *fixed_batch(3))
    first.step()
    second = alone(other, params=other.named_parameters(), **given)
    other.load_state_dict(saved["model"])
    second.load_state_dict(saved["optimizer"])
    backward(other, *fixed_batch(3))
    second.step()
    assert torch.equal(flat(model), flat(other))
    assert second.local_epoch == 4
    assert sorted(map(str, saved["optimizer"]["state"])) == sorted([*map(str, range(2)), "(1, 'k')", "local_epoch"])


def test_parameters_that_are_left_out_are_refused_by_name(alone: Alone) -> None:
    model = make_model()
    model[0].bias.requires_grad_(False)

    def without_bias(params: Any) -> torch.optim.Optimizer:
        return shoal.Together(torch.optim.SGD([one for one in params if one[1].ndim == 2], lr=0.1))

    for options in ({}, {"delay_optimizer_step": True}):
        before = [parameter.data_ptr() for parameter in model.parameters()]
        said = (
            r"made a Together\(SGD\) that does not have all parameters of params=: it leaves out .*'2.bias', '4.bias'"
        )
        with pytest.raises(ValueError, match=said):
            alone(model, params=model.named_parameters(), optimizer=without_bias, target_batch_size=8, **options)
        assert before == [parameter.data_ptr() for parameter in model.parameters()]


def test_statistics_of_one_member_are_averaged() -> None:
    options = {"use_local_updates": True, "delay_state_averaging": False, "average_opt_statistics": ("exp_avg",)}
    with peers([by_shape(torch.optim.AdamW)] * 2, **options) as made:
        epochs(made, 2)
        state = made[0][1].optimizer.state
        kept = ["exp_avg" if "exp_avg" in state[parameter] else "momentum_buffer" for parameter in state]
        assert kept == ["momentum_buffer"] * 3 + ["exp_avg"] * 3

"""A user may call Shoal within torch's modes: what it makes there can be trained afterwards, as if made outside."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shoal
from shoal.flat import neutral_modes, users_modes
from tests.optim.conftest import Alone


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "device": lambda: torch.device("meta"),
    "default device": lambda: default_device("meta"),
    "default device cpu": lambda: default_device("cpu"),
    "dtype": default_dtype,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "fake": lambda: FakeTensorMode(allow_non_fake_inputs=False),
}

CLASSES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "in place": {"reuse_grad_buffers": True},
    "clipped": {"max_grad_norm": 1e-3},
    "compressed": {"grad_compression": shoal.compression.Float16Compression(), "error_feedback": 1.0},
    "on the host": {"offload_optimizer": True},
    "delayed": {"delay_grad_averaging": True},
    "local updates": {"use_local_updates": True},
    "outer": {"outer": shoal.DiLoCo()},
    "outer on the host": {"outer": shoal.DiLoCo(), "offload_optimizer": True},
    "own averager": {"grad_averager_factory": shoal.GradientAverager},
    "PowerSGD": {"grad_averager_factory": functools.partial(shoal.PowerSGDGradientAverager, averager_rank=1)},
}


def made_in_inference(mode: str) -> set[int]:
    """The ids of all such tensors of this process; none if `mode` makes none, as it takes a while."""
    if mode != "inference":
        return set()
    return {id(each) for each in gc.get_objects() if issubclass(type(each), torch.Tensor) and each.is_inference()}


def backward(model: nn.Module) -> None:
    model(torch.arange(12, dtype=torch.float32).view(4, 3) / 12).square().mean().backward()


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.05)


def trained(alone: Alone, given: dict[str, Any], mode: Callable[[], AbstractContextManager[Any]] | None) -> Any:
    """The parameters and the state after some epochs. All calls but the backward passes are made within `mode`."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    extra = torch.zeros(2, dtype=torch.float32)
    here = mode or torch.no_grad
    with here():
        optimizer = alone(
            model, target_batch_size=8, batch_size_per_step=4, optimizer=adam, extra_tensors=[extra], **given
        )
        optimizer.step(batch_size=0)
    for _ in range(2):
        for _ in range(4):
            backward(model)
            with here():
                optimizer.step()
                optimizer.state_dict()  # waits for what is in the background
                if not optimizer.reuse_grad_buffers:
                    optimizer.zero_grad()
        with here():
            saved = optimizer.state_dict()
        saved = copy.deepcopy(saved)
        with here():
            optimizer.load_state_dict(saved)
    for _ in range(4):  # and with none of these modes
        backward(model)
        optimizer.step()
        optimizer.state_dict()
        if not optimizer.reuse_grad_buffers:
            optimizer.zero_grad()
    with here():
        optimizer.finish()
        state = optimizer.state_dict()
    assert optimizer.local_epoch >= 5
    return [p.detach() for p in model.parameters()], state["state"]


@pytest.fixture(scope="module")
def plainly() -> dict[str, Any]:
    return {}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", CLASSES)
def test_an_optimizer_trains_in_each_mode_as_in_none(
    alone: Alone, plainly: dict[str, Any], kind: str, mode: str
) -> None:
    before = made_in_inference(mode)
    if kind not in plainly:
        plainly[kind] = trained(alone, CLASSES[kind], None)
    parameters, state = trained(alone, CLASSES[kind], MODES[mode])
    torch.testing.assert_close(parameters, plainly[kind][0], rtol=0, atol=0)
    assert len(state) == len(plainly[kind][1])
    for each in (value for held in state.values() if isinstance(held, dict) for value in held.values()):
        assert not isinstance(each, torch.Tensor) or (type(each) is torch.Tensor and each.device.type == "cpu")
    assert made_in_inference(mode) <= before


THREADS = ["inference", "device", "autocast", "fake"]
"""The modes of a thread that the following tests try."""


@pytest.mark.parametrize("mode", [*THREADS, "dtype"])
@pytest.mark.parametrize("kind", ["synchronous", "on the host", "outer", "local updates"])
def test_a_newcomer_that_evaluates_downloads_and_trains(alone: Alone, dht: shoal.DHT, kind: str, mode: str) -> None:
    before = made_in_inference(mode)
    models = [nn.Linear(3, 2), nn.Linear(3, 2)]
    given: dict[str, Any] = {"run_id": f"newcomer {mode}", "optimizer": adam, "batch_size_per_step": 4, **CLASSES[kind]}
    given |= {
        "target_batch_size": 4,
        "delay_state_averaging": False,
        "average_opt_statistics": ["exp_avg"] if kind == "local updates" else [],
    }
    donor = alone(models[0], **given)
    for _ in range(3):
        backward(models[0])
        donor.step()
        donor.zero_grad()
    with shoal.DHT(initial_peers=dht.get_visible_maddrs(), start=True) as other:
        with MODES[mode]():
            newcomer = shoal.Optimizer(dht=other, params=models[1].parameters(), **given)
            newcomer.step(batch_size=0)
            assert newcomer.local_epoch == donor.local_epoch > 0
        if kind != "local updates":
            torch.testing.assert_close(list(models[1].parameters()), list(models[0].parameters()), rtol=0, atol=0)
        donor.shutdown()
        goal = newcomer.local_epoch + 2
        while newcomer.local_epoch < goal:
            newcomer.zero_grad()
            backward(models[1])
            newcomer.step()
        newcomer.shutdown()
    assert made_in_inference(mode) <= before


@pytest.mark.parametrize("mode", MODES)
def test_what_belongs_to_the_user_runs_in_the_users_modes(alone: Alone, mode: str) -> None:
    """The closure with gradients enabled, as torch runs it; `on_event` and hooks of state dicts as well."""
    seen: list[str] = []

    def look(*_: Any) -> None:
        made = torch.zeros(2)
        ones = torch.ones(2, 2, dtype=torch.float32, device="cpu")
        product = ones @ ones
        seen.append(f"{made.device} {made.dtype} {made.is_inference()} {type(made).__name__} {product.dtype}")

    model = nn.Linear(3, 2)
    optimizer = alone(model, target_batch_size=4, batch_size_per_step=4, optimizer=adam)
    optimizer.on_event = look
    optimizer.register_state_dict_post_hook(look)
    optimizer.register_load_state_dict_pre_hook(look)

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        look()
        if mode != "inference":  # in which torch itself refuses a backward pass
            with neutral_modes():
                backward(model)
        return torch.ones(())

    with MODES[mode]():
        look()
        optimizer.step(closure)
        look()  # the modes are the user's again
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        assert torch.is_grad_enabled() == (mode not in ("inference", "no grad"))
    assert len(set(seen)) == 1
    assert len(seen) == 5 + (mode != "inference")
    assert torch.is_grad_enabled()
    assert torch.zeros(1).device.type == "cpu"


def test_modes_end_as_they_began_if_a_closure_changes_them_or_raises(alone: Alone) -> None:
    model = nn.Linear(3, 2)
    optimizer = alone(model, target_batch_size=4, batch_size_per_step=4, optimizer=adam)

    def closure() -> torch.Tensor:
        torch.set_default_device("cpu")
        raise KeyError("the user's")

    try:
        with default_device("meta"), torch.autocast("cpu"):
            with pytest.raises(KeyError, match="the user's"):
                optimizer.step(closure)
            assert torch.is_autocast_enabled("cpu")
            assert torch.zeros(1).device.type == "cpu"  # as the closure has set it
    finally:
        torch.set_default_device(None)
    with torch.inference_mode():
        with neutral_modes():
            assert not torch.is_inference_mode_enabled()
            assert not torch.is_grad_enabled()
            with users_modes(), neutral_modes(), users_modes():
                assert torch.is_inference_mode_enabled()
            assert not torch.is_inference_mode_enabled()
        assert torch.is_inference_mode_enabled()


def test_a_state_dict_of_inference_tensors_is_copied(alone: Alone) -> None:
    model = nn.Linear(3, 2)
    given = {"target_batch_size": 4, "batch_size_per_step": 4, "optimizer": adam}
    first = alone(model, **given)
    backward(model)
    first.step()
    with torch.inference_mode():
        saved = copy.deepcopy(first.state_dict())
    other = nn.Linear(3, 2)
    other.load_state_dict(model.state_dict())
    second = alone(other, **given)
    second.load_state_dict(saved)
    for optimizer, net in ((first, model), (second, other)):
        optimizer.zero_grad()
        backward(net)
        optimizer.step()
    torch.testing.assert_close(list(other.parameters()), list(model.parameters()), rtol=0, atol=0)


AVERAGERS: dict[str, Callable[..., Any]] = {
    "tensors": lambda model, **given: shoal.DecentralizedAverager(list(model.parameters()), **given),
    "gradients": lambda model, **given: shoal.GradientAverager(model.parameters(), **given),
    "gradients in place": lambda model, **given: shoal.GradientAverager(
        model.parameters(), reuse_grad_buffers=True, **given
    ),
    "PowerSGD": lambda model, **given: shoal.PowerSGDGradientAverager(model.parameters(), 1, **given),
    "state": lambda model, **given: shoal.TrainingStateAverager(params=model.parameters(), optimizer=adam, **given),
    "state on the host": lambda model, **given: shoal.TrainingStateAverager(
        params=model.parameters(), optimizer=adam, offload_optimizer=True, **given
    ),
}


@pytest.mark.parametrize("mode", THREADS)
@pytest.mark.parametrize("kind", AVERAGERS)
def test_averagers_work_in_each_mode(dht: shoal.DHT, kind: str, mode: str) -> None:
    before, model = made_in_inference(mode), nn.Linear(3, 2)
    given = {"min_group_size": 1, "min_matchmaking_time": 0.0, "prefix": f"averager {mode}", "start": True}
    with MODES[mode]():
        averager = AVERAGERS[kind](model, dht=dht, **given)
    try:
        for _ in range(2):
            backward(model)
            with MODES[mode]():
                if isinstance(averager, shoal.GradientAverager):
                    averager.accumulate_grads_(1)
                    averager.step()
                    with averager.use_averaged_gradients():
                        held = [parameter.grad for parameter in model.parameters()]
                    assert all(grad is not None and not grad.is_inference() for grad in held)
                elif isinstance(averager, shoal.TrainingStateAverager):
                    averager.step(optimizer_step=True, zero_grad=True, averaging_round=True, increment_epoch=True)
                    averager.get_current_state()
                else:
                    averager.step()
                    averager.get_current_state()
        adam(model.parameters()).step()
    finally:
        averager.shutdown()
    del averager
    assert made_in_inference(mode) <= before


@pytest.mark.parametrize("kind", [kind for kind in CLASSES if kind not in ("compressed", "clipped")])
def test_a_model_made_in_inference_mode_is_refused_by_name(dht: shoal.DHT, kind: str) -> None:
    with torch.inference_mode():
        model = nn.BatchNorm1d(2)
    given: dict[str, Any] = {"dht": dht, "run_id": "i", "target_batch_size": 4, "optimizer": adam, **CLASSES[kind]}
    for inside in (torch.inference_mode, torch.no_grad):
        with (
            inside(),
            pytest.raises(ValueError, match=r"parameter 0 \('weight' of a BatchNorm1d\), parameter 1 .* untrainable"),
        ):
            shoal.Optimizer(params=model.parameters(), **given)
    plain = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"extra tensor 0 \('running_mean' of a BatchNorm1d\).* untrainable"):
        shoal.Optimizer(params=plain.parameters(), extra_tensors=list(model.buffers()), **given)
    with _made(model, given) as made:
        assert made.local_epoch == 0


@contextmanager
def _made(model: nn.Module, given: dict[str, Any]) -> Iterator[shoal.Optimizer]:
    """The optimizer of the copy that the refusal advises."""
    optimizer = shoal.Optimizer(params=copy.deepcopy(model).parameters(), **given)
    try:
        yield optimizer
    finally:
        optimizer.shutdown()


@pytest.mark.parametrize("kind", AVERAGERS)
def test_averagers_refuse_it_by_name(dht: shoal.DHT, kind: str) -> None:
    with torch.inference_mode():
        model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"(parameter 0 \('weight' of a Linear\)|averaged_tensors\[0\]).* untrainable"):
        AVERAGERS[kind](model, dht=dht, prefix="i", start=True)

"""Peers average real numbers: what is complex is refused by name, in every mode, before anything has changed."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.compression import NoCompression
from shoal.optim.state import TrainingState
from tests.optim.conftest import Alone
from tests.optim.test_state import TIP, downloaded


@pytest.fixture(scope="module")
def started() -> Iterator[shoal.DHT]:
    with shoal.DHT(start=True) as dht:
        yield dht


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


class Waves(nn.Module):
    """A complex parameter that is trained, one that is frozen, and a complex constant."""

    turns: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.real = nn.Linear(2, 2)
        self.wave = nn.Parameter(torch.ones(3, dtype=torch.complex64))
        self.fixed = nn.Parameter(torch.ones(3, dtype=torch.complex128), requires_grad=False)
        self.register_buffer("turns", torch.tensor([1j, 2 + 1j]))


MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "in place": {"reuse_grad_buffers": True},
    "clipped": {"max_grad_norm": 1.0},
    "compressed": {"grad_compression": shoal.compression.Float16Compression(), "error_feedback": 1.0},
    "on the host": {"offload_optimizer": True},
    "delayed step": {"delay_optimizer_step": True, "offload_optimizer": True},
    "delayed round": {"delay_grad_averaging": True},
    "local updates": {"use_local_updates": True},
    "outer": {"outer": shoal.DiLoCo()},
    "outer on the host": {"outer": shoal.DiLoCo(), "offload_optimizer": True},
    "own averager": {"grad_averager_factory": shoal.GradientAverager},
    "PowerSGD": {"grad_averager_factory": functools.partial(shoal.PowerSGDGradientAverager, averager_rank=1)},
    "statistics": {"average_opt_statistics": ["momentum_buffer"]},
    "auxiliary": {"auxiliary": True, "batch_size_per_step": None},
    "client": {"client_mode": True},
}


def refusal(make: Callable[[], object], model: nn.Module) -> str:
    """The error of making it, which has changed nothing."""
    before = [(p.data_ptr(), p.stride(), p.grad) for p in model.parameters()], threading.enumerate()
    with pytest.raises(ValueError, match=r"complex, and peers average real numbers: keep .* as pairs") as caught:
        make()
    assert ([(p.data_ptr(), p.stride(), p.grad) for p in model.parameters()], threading.enumerate()) == before
    return str(caught.value)


@pytest.mark.parametrize("mode", MODES)
def test_it_is_refused_by_name_in_every_mode(started: shoal.DHT, mode: str) -> None:
    model = Waves()
    given = {"target_batch_size": 4, "batch_size_per_step": 2, "optimizer": sgd, **MODES[mode]}
    said = refusal(
        lambda: shoal.Optimizer(dht=started, run_id="c", params=model.named_parameters(), **given),
        model,
    )
    assert said.startswith("parameter 0 ('wave'), parameter 1 ('fixed') are complex")


@pytest.mark.parametrize("frozen", [False, True])
def test_the_name_is_of_the_module_where_none_was_given(started: shoal.DHT, frozen: bool) -> None:
    model = Waves()
    one = model.fixed if frozen else model.wave
    groups = [{"params": model.real.parameters()}, {"params": [one], "lr": 0.2}]
    given: dict[str, Any] = {"dht": started, "run_id": "c", "target_batch_size": 4}
    said = refusal(lambda: shoal.Optimizer(params=groups, optimizer=sgd, **given), model)
    assert said.startswith(f"parameter 2 ('{'fixed' if frozen else 'wave'}' of a Waves) is complex")
    ready = sgd([*model.real.parameters(), one])
    assert refusal(lambda: shoal.Optimizer(optimizer=ready, **given), model) == said
    many = [nn.Parameter(torch.ones(1, dtype=torch.complex64)) for _ in range(9)]
    said = refusal(lambda: shoal.Optimizer(params=many, optimizer=sgd, **given), model)
    assert said.startswith("parameter 0, parameter 1, parameter 2, parameter 3, 5 more are complex")


AVERAGERS: dict[str, Callable[..., object]] = {
    "gradients": lambda model, **given: shoal.GradientAverager(model.parameters(), **given),
    "gradients in memory of the user": lambda model, **given: shoal.GradientAverager(
        model.parameters(), averaged_grads=[torch.zeros(p.shape) for p in model.parameters()], **given
    ),
    "PowerSGD": lambda model, **given: shoal.PowerSGDGradientAverager(model.parameters(), 1, **given),
    "state": lambda model, **given: shoal.TrainingStateAverager(params=model.parameters(), optimizer=sgd, **given),
    "state on the host": lambda model, **given: shoal.TrainingStateAverager(
        params=model.parameters(), optimizer=sgd, offload_optimizer=True, **given
    ),
}


@pytest.mark.parametrize("kind", AVERAGERS)
def test_averagers_refuse_it_by_name(started: shoal.DHT, kind: str) -> None:
    model = Waves()
    said = refusal(lambda: AVERAGERS[kind](model, dht=started, prefix="c", start=True), model)
    assert said.startswith("parameter 0 ('wave' of a Waves), parameter 1 ('fixed' of a Waves) are complex")


def test_averagers_refuse_complex_tensors_that_are_no_parameters(started: shoal.DHT) -> None:
    model, given = Waves(), {"dht": started, "prefix": "c", "start": True}
    made = {"params": model.real.parameters(), "optimizer": sgd, "extra_tensors": list(model.buffers())}
    said = refusal(lambda: shoal.TrainingStateAverager(**made, **given), model)
    assert said.startswith("extra tensor 0 ('turns' of a Waves) is complex")
    with pytest.raises(ValueError, match=r"averaged_tensors\[1\] is of torch.complex64: .* pairs \(torch.view_as_real"):
        shoal.DecentralizedAverager([torch.ones(2), model.turns], **given)


def test_a_complex_statistic_is_not_averaged(alone: Alone) -> None:
    class Spectral(torch.optim.SGD):
        """Real parameters, with a complex statistic."""

        def step(self, closure: Any = None) -> Any:
            for parameter in self.param_groups[0]["params"]:
                self.state[parameter].setdefault("spectrum", torch.zeros(parameter.shape, dtype=torch.complex64))
            return super().step(closure)

    model = nn.Linear(2, 2)
    given = {"target_batch_size": 1, "batch_size_per_step": 1, "optimizer": lambda p: Spectral(p, lr=0.1)}
    optimizer = alone(model, average_opt_statistics=["spectrum"], **given)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(ValueError, match="'spectrum', and Spectral keeps no such tensor of real numbers"):
        optimizer.step()


class Paired(nn.Module):
    """What the refusal says to do: real pairs, complex where it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs = nn.Parameter(torch.view_as_real(torch.tensor([1 + 1j, 0.5 - 2j])).clone())

    def forward(self) -> torch.Tensor:
        return (torch.view_as_complex(self.pairs).abs() ** 2).sum()


@pytest.mark.parametrize("mode", ["synchronous", "in place", "clipped", "on the host", "local updates", "own averager"])
def test_pairs_have_the_numbers_that_torch_has_with_complex_parameters(alone: Alone, mode: str) -> None:
    """To rounding, as torch steps complex numbers as such pairs."""
    model, plain = Paired(), nn.Parameter(torch.tensor([1 + 1j, 0.5 - 2j]))
    given = {"target_batch_size": 1, "batch_size_per_step": 1, "optimizer": lambda p: torch.optim.Adam(p, lr=0.1)}
    optimizer = alone(model, **given, **MODES[mode])
    local = torch.optim.Adam([plain], lr=0.1)
    for _ in range(3):
        if mode != "in place":
            optimizer.zero_grad()
        local.zero_grad()
        model().backward()
        (plain.abs() ** 2).sum().backward()
        if mode == "clipped":
            nn.utils.clip_grad_norm_([plain], 1.0)
        optimizer.step()
        local.step()
    torch.testing.assert_close(torch.view_as_complex(model.pairs.detach()), plain.detach(), rtol=1e-5, atol=1e-6)


def test_complex_buffers_go_to_newcomers_as_they_are(alone: Alone) -> None:
    model = Waves()
    given = {"target_batch_size": 1, "batch_size_per_step": 1, "optimizer": sgd, "params": model.real.parameters()}
    optimizer = alone(model, extra_tensors=list(model.buffers()), **given)
    for _ in range(2):
        optimizer.zero_grad()
        model.real(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert model.turns.tolist() == [1j, 2 + 1j]
    donor, newcomer = (
        TrainingState(sgd(nn.Linear(1, 1).parameters()), None, [t]) for t in (model.turns, torch.zeros(2) + 0j)
    )
    newcomer.load(downloaded(donor.snapshot(TIP, NoCompression())))
    assert newcomer.extra_tensors[0].tolist() == [1j, 2 + 1j]

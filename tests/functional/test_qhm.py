"""QHM against the paper's equations in float64, as a functional and as a torch optimizer."""

from __future__ import annotations

import copy
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.functional import QHM


def paper(
    theta: list[float],
    grads: list[list[float] | None],
    lr: float,
    beta: float,
    nu: float,
    decay: float,
    kind: str,
) -> list[float]:
    """Equations 3 and 4 of arXiv 1810.06801, element by element in Python's float64."""
    buffer = [0.0] * len(theta)
    theta = list(theta)
    for grad in grads:
        for index in range(len(theta) if grad is not None else 0):
            gradient = grad[index]
            if kind == "grad":
                gradient += decay * theta[index]
            else:
                theta[index] -= lr * decay * theta[index]
            buffer[index] = beta * buffer[index] + (1 - beta) * gradient
            theta[index] -= lr * ((1 - nu) * gradient + nu * buffer[index])
    return theta


fraction = st.floats(0, 0.999)
kinds = st.sampled_from(["grad", "direct"])


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**31),
    lr=st.floats(0, 0.5),
    beta=fraction,
    nu=st.floats(0, 1),
    decay=st.sampled_from([0.0, 0.1]),
    kind=kinds,
    maximize=st.booleans(),
    foreach=st.sampled_from([None, True, False]),
)
def test_the_equations_of_the_paper(seed, lr, beta, nu, decay, kind, maximize, foreach) -> None:
    torch.manual_seed(seed)
    start = torch.randn(5, dtype=torch.float64)
    grads = [None if step % 7 == 3 else torch.randn(5, dtype=torch.float64) for step in range(50)]
    sign = -1 if maximize else 1
    expected = paper(
        start.tolist(), [None if g is None else (sign * g).tolist() for g in grads], lr, beta, nu, decay, kind
    )
    optimizer = QHM(lr, beta, nu, decay, kind, maximize=maximize, foreach=foreach)
    param = start.clone()
    state = optimizer.init([param])
    for grad in grads:
        optimizer.step([param], [grad], state)
    torch.testing.assert_close(param, torch.tensor(expected, dtype=torch.float64), rtol=1e-11, atol=1e-11)


def test_the_limits_that_the_paper_names() -> None:
    """nu = 0 is SGD, nu = 1 SGD with momentum and as much dampening (but for the first step, as torch counts it)."""
    torch.manual_seed(0)
    start, grads = torch.randn(9, dtype=torch.float64), torch.randn(20, 9, dtype=torch.float64)

    def end(optimizer: torch.optim.Optimizer, param: torch.nn.Parameter) -> torch.Tensor:
        for grad in grads:
            param.grad = grad.clone()
            optimizer.step()
        return param.detach()

    def fresh() -> torch.nn.Parameter:
        return torch.nn.Parameter(start.clone())

    ours, plain = fresh(), fresh()
    expected = end(torch.optim.SGD([plain], 0.1, weight_decay=0.01), plain)
    assert torch.allclose(end(shoal.QHM([ours], 0.1, 0.9, 0.0, 0.01), ours), expected, rtol=1e-12)
    ours, heavy = fresh(), fresh()
    sgd = torch.optim.SGD([heavy], 0.1, momentum=0.9, dampening=0.9)
    sgd.state[heavy]["momentum_buffer"] = torch.zeros_like(heavy)
    assert torch.allclose(end(shoal.QHM([ours], 0.1, 0.9, 1.0), ours), end(sgd, heavy), rtol=1e-12)


def _model() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)), torch.randn(16, 4)


def _train(model: torch.nn.Module, data: torch.Tensor, optimizer: torch.optim.Optimizer, steps: int) -> float:
    def closure() -> float:
        optimizer.zero_grad()
        loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
        loss.backward()
        return loss.item()

    return [optimizer.step(closure) for _ in range(steps)][-1]


@pytest.mark.parametrize("kind", ["grad", "direct"])
def test_the_torch_optimizer_trains_with_groups_closures_and_a_scheduler(kind: Literal["grad", "direct"]) -> None:
    model, data = _model()
    groups: list[dict[str, Any]] = [
        {"params": model[0].parameters(), "lr": 0.02},
        {"params": model[2].parameters(), "nu": 0.5, "weight_decay_type": kind},
    ]
    optimizer = shoal.QHM(groups, 0.05, 0.9, 0.7, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    first = _train(model, data, optimizer, 1)
    assert _train(model, data, optimizer, 200) < 0.2 * first
    scheduler.step()
    assert [group["lr"] for group in optimizer.param_groups] == [0.01, 0.025]
    assert [group["nu"] for group in optimizer.param_groups] == [0.7, 0.5]


def test_the_torch_optimizer_goes_on_from_its_state_dict() -> None:
    model, data = _model()
    optimizer = shoal.QHM(model.parameters(), 0.05, 0.9, 0.7)
    _train(model, data, optimizer, 5)
    twin = copy.deepcopy(model)
    resumed = shoal.QHM(twin.parameters(), 1.0, 0.0, 0.0)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert _train(model, data, optimizer, 5) == _train(twin, data, resumed, 5)
    # The same kernels on copies, forward, backward and step.
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_the_torch_optimizer_steps_the_functional_one_and_leaves_alone_what_has_no_gradient() -> None:
    first, second = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(3))
    optimizer = shoal.QHM([first, second], 0.1, 0.9, 0.7, maximize=True)
    first.grad = torch.ones(3)
    optimizer.step()
    alone = torch.ones(3)
    functional = QHM(0.1, 0.9, 0.7, maximize=True)
    functional.step([alone], [torch.ones(3)], functional.init([alone]))
    assert torch.equal(first, alone)  # the same kernel on a tensor of the same shape
    assert torch.equal(second, torch.ones(3))
    assert second not in optimizer.state or not optimizer.state[second]
    assert shoal.functional_optim_map[shoal.QHM] is QHM


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1}, "lr is at least 0"),
        ({"momentum": 1.0}, "momentum is at least 0 and below 1, got 1.0"),
        ({"nu": float("nan")}, "nu is a finite number, got nan"),
        ({"weight_decay": -1}, "weight_decay is at least 0"),
        ({"weight_decay_type": "decoupled"}, 'weight_decay_type is "grad" or "direct", got \'decoupled\''),
    ],
)
def test_options_out_of_range(options: dict[str, Any], message: str) -> None:
    options = {"lr": 0.1, "momentum": 0.9, "nu": 0.7, **options}
    with pytest.raises(ValueError, match=message):
        QHM(**options)
    with pytest.raises(ValueError, match=message):
        shoal.QHM([torch.nn.Parameter(torch.ones(1))], **options)

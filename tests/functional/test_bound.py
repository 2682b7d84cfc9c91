"""A bound step that has little left to check: what it is, and that whatever is unusual is still found or done right.

A bound step and the functional one are equal to the bit: they call the same kernel with tensors of the same shapes.
"""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.functional import SGD, Adagrad, Adam, AdamW, FunctionalOptimizer, bind

SHAPES: list[tuple[int, ...]] = [(2, 3), (5,), (), (0, 4), (1, 7, 1)]
OPTIMIZERS = [
    pytest.param(SGD, {}, id="SGD"),
    pytest.param(SGD, {"momentum": 0.9, "dampening": 0.5}, id="SGD with dampening"),
    pytest.param(Adam, {}, id="Adam"),
    pytest.param(AdamW, {"amsgrad": True}, id="AdamW"),
    pytest.param(Adagrad, {}, id="Adagrad"),
]


def _random(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
def test_the_usual_step_is_not_checked_anew_in_any_thread(
    optimizer: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = _random(0), _random(0)
    plain: FunctionalOptimizer = optimizer(0.1, **options, fused=True)
    state = plain.init(theirs)
    for step in range(1, 4):
        plain.step(theirs, _random(step), state)
    bound: Any = bind(optimizer, [nn.Parameter(param) for param in ours], 0.1, **options)
    monkeypatch.setattr(FunctionalOptimizer, "step", None)  # checks everything

    def run() -> None:
        for step in range(1, 4):
            bound.step(_random(step))
        done.append(True)

    done: list[bool] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert done
    assert all(torch.equal(our, their) for our, their in zip(ours, theirs, strict=True))
    assert all(
        torch.equal(our, their) for name in state for our, their in zip(bound.state[name], state[name], strict=True)
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (torch.ones(3, 2), r"the gradient of a parameter of shape \[2, 3\] has shape \[3, 2\]"),
        (torch.ones(6), r"has shape \[6\]"),
        (torch.ones(1, 1), r"has shape \[1, 1\]"),
        (torch.ones(2, 3, dtype=torch.float64), "a gradient is of torch.float64 on cpu"),
        (torch.ones(2, 3, device="meta"), "a gradient is of torch.float32 on meta"),
        (torch.ones(2, 3).to_sparse(), "Adam does not support sparse gradients"),
    ],
    ids=["transposed", "flat", "small", "dtype", "device", "sparse"],
)
def test_a_gradient_that_does_not_fit_changes_nothing(wrong: Tensor, message: str) -> None:
    params = _random(0)
    bound = bind(Adam, params, 0.1)
    bound.step(_random(1))
    before = [param.clone() for param in params]
    with pytest.raises((ValueError, RuntimeError), match=message):
        bound.step([wrong, *_random(2)[1:]])
    assert all(torch.equal(param, old) for param, old in zip(params, before, strict=True))
    assert [entry["step"].item() for entry in bound.state_dict()["state"].values()] == [1.0] * len(params)


def test_a_tensor_is_no_list_of_gradients() -> None:
    bound = bind(Adam, [torch.zeros(3), torch.zeros(3)])
    gradients: Any = torch.ones(2, 3)
    with pytest.raises(TypeError, match="are lists of tensors"):
        bound.step(gradients)
    assert bound.state_dict()["state"][0]["step"] == 0


def test_gradients_that_are_unusual_but_fit_are_used() -> None:
    some = torch.randn(3, 2, generator=torch.Generator().manual_seed(1))
    unusual: list[Tensor | None] = [some.t(), None, nn.Parameter(torch.ones(6)), some[0, :1].expand(6), some[1, 0]]
    params, same = ([torch.zeros(2, 3), torch.zeros(4), torch.zeros(6), torch.zeros(6), torch.zeros(())] for _ in "ab")
    bound, plain = bind(Adam, params, 0.1), Adam(0.1)
    state = plain.init(same)
    for _ in range(3):
        bound.step(unusual)
        plain.step(same, [None if grad is None else grad.detach().contiguous() for grad in unusual], state)
    assert all(torch.equal(param, other) for param, other in zip(params, same, strict=True))
    assert params[0].min() < params[0].max()
    assert [entry["step"].item() for entry in bound.state_dict()["state"].values()] == [3, 0, 3, 3, 3]


def test_parameters_may_move_but_not_shrink() -> None:
    param = nn.Parameter(torch.zeros(3))
    bound = bind(SGD, [param], 0.5, momentum=0.9)
    param.data = torch.ones(3)
    bound.step([torch.ones(3)])
    assert param.tolist() == [0.5, 0.5, 0.5]
    param.data = torch.ones(5)
    with pytest.raises(ValueError, match=r"momentum_buffer of a parameter of shape \[5\] has shape \[3\]"):
        bound.step([torch.ones(5)])
    assert param.tolist() == [1.0] * 5

"""A statistic whose elements lie in another order than flat memory has stays where the optimizer has made it, because
computing with it in another order rounds otherwise."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shoal.compression import NoCompression
from shoal.optim.state import TrainingState
from tests.optim.models import backward, fixed_batch, make_model
from tests.optim.test_state import TIP, downloaded


class Transposed(torch.optim.Optimizer):
    """It keeps a matrix as torch.linalg returns some: column by column."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.dim() == 2:
                self.state[parameter]["basis"] = parameter.grad.t().contiguous().t()
                self.state[parameter]["mean"] = parameter.grad.clone()


def made(seed: int) -> tuple[nn.Module, TrainingState]:
    model = make_model(seed)
    return model, TrainingState(Transposed(model.parameters()), None, [])


def test_it_stays_and_reaches_a_newcomer() -> None:
    model, state = made(0)
    backward(model, *fixed_batch(0))
    state.optimizer.step()
    parameter = next(p for p in state.parameters if p.dim() == 2)
    before = {name: (value.data_ptr(), value.stride()) for name, value in state.optimizer.state[parameter].items()}
    state.adopt_statistics()
    kept = state.optimizer.state[parameter]
    assert (kept["basis"].data_ptr(), kept["basis"].stride()) == before["basis"]
    assert kept["mean"].data_ptr() != before["mean"][0]  # it moved to flat memory
    _, newcomer = made(1)
    newcomer.load(downloaded(state.snapshot(TIP, NoCompression())))
    theirs = newcomer.optimizer.state[next(p for p in newcomer.parameters if p.dim() == 2)]
    assert torch.equal(theirs["basis"], kept["basis"])
    assert theirs["basis"].stride() == kept["basis"].stride()


def test_channels_last_moves() -> None:
    weight = nn.Parameter(torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    before = optimizer.state[weight]["exp_avg"].data_ptr()
    TrainingState(optimizer, None, [])
    assert optimizer.state[weight]["exp_avg"].data_ptr() != before
    assert optimizer.state[weight]["exp_avg"].stride() == weight.stride()

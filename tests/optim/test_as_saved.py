"""A checkpoint gives an optimizer of any class what it has saved, type by type."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict, deque
from typing import Any

import pytest
import torch

import shoal
from shoal.optim import tree
from tests.optim.conftest import Alone
from tests.optim.models import backward, fixed_batch, make_model
from tests.optim.test_kinds_of_options import step


class Keeping(torch.optim.Optimizer):
    """Keeps one of each kind that torch's `load_state_dict` changes."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.table = torch.arange(4, dtype=torch.uint8)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state.update(
                    wide=torch.zeros_like(parameter, dtype=torch.float64),
                    codes=torch.zeros(parameter.shape, dtype=torch.int8),
                    table=self.table,
                    name="momentum",
                    last=deque([1.0], maxlen=3),
                    ordered=OrderedDict(b=1, a=torch.ones(2, dtype=torch.int32)),
                    counted=Counter("aab"),
                    dtype=torch.bfloat16,
                    steps=0,
                )
            state["wide"].add_(parameter.grad)
            state["steps"] += 1
            parameter.add_(parameter.grad, alpha=-0.1)


def test_all_of_it_comes_back(alone: Alone) -> None:
    model, other = make_model(), make_model()
    optimizer, resumed = (alone(each, optimizer=Keeping, target_batch_size=8) for each in (model, other))
    for _ in range(2):
        step(model, optimizer)
    written = io.BytesIO()
    torch.save(optimizer.state_dict(), written)
    written.seek(0)
    resumed.load_state_dict(torch.load(written, weights_only=False))
    own, theirs = (
        [made.optimizer.state[parameter] for parameter in made.optimizer.param_groups[0]["params"]]
        for made in (resumed, optimizer)
    )
    assert tree.difference(own, theirs) is None
    assert own[0]["last"].maxlen == 3
    assert own[0]["table"] is own[1]["table"]


class LeavesOut(torch.optim.SGD):
    """Its state dicts have no option whose name begins with an underscore."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        for group in self.param_groups:
            group["_notes"] = object

    def state_dict(self) -> dict[str, Any]:
        found = super().state_dict()
        for group in found["param_groups"]:
            del group["_notes"]
        return found


@pytest.mark.parametrize("options", [{}, {"outer": shoal.DiLoCo(inner_steps=1), "target_batch_size": None}], ids=str)
def test_an_option_that_state_dicts_leave_out_stays(options: dict[str, Any], alone: Alone) -> None:
    model = make_model()
    given = {"target_batch_size": 64, "optimizer": LeavesOut, **options}
    optimizer = alone(model, **given)
    backward(model, *fixed_batch(0))
    optimizer.step(batch_size=64)
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.optimizer.param_groups[0]["_notes"] is object
    optimizer.step(batch_size=64)

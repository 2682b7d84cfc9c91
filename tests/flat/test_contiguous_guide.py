"""The table of `docs/guides/contiguous.md`, of what makes flat memory invalid: every row does what it says."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_, parametrizations

from shoal.flat import ContiguousParams
from tests.flat.twins import small_model

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "contiguous.md"
TABLE = GUIDE.read_text().split("## What makes it invalid")[1].split("\n## ")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.splitlines() if line.startswith("|")][
    2:
]

MOVE_BACK = r"make_params_contiguous\(\)"
A_NEW_ONE = "a new ContiguousParams and a new optimizer"
NEWER = "was given to another ContiguousParams"

Damage = Callable[[Any], object]


def data(model: Any) -> None:
    model[2].weight.data = torch.zeros(3, 7)


def grad_data(model: Any) -> None:
    model[2].weight.grad.data = torch.zeros(3, 7)


def replaced(model: Any) -> None:
    model[2].weight = nn.Parameter(torch.zeros(3, 7))


def deleted(model: Any) -> None:
    del model[2].weight
    replaced(model)


def assigned(model: nn.Module) -> None:
    model.load_state_dict({name: value.double() for name, value in model.state_dict().items()}, assign=True)


def module(model: Any) -> None:
    model[2] = nn.Linear(7, 3)


def weight_norm(model: Any) -> None:
    parametrizations.weight_norm(model[2])


DAMAGES: dict[str, tuple[list[Damage], str | None]] = {
    "`p.data = …`, `p.grad.data = …`": ([data, grad_data], MOVE_BACK),
    "`model.half()`, `model.to(other device)`": ([nn.Module.half, lambda model: model.to("meta")], A_NEW_ONE),
    "`module.weight = nn.Parameter(…)`, also after `del module.weight`": ([replaced, deleted], A_NEW_ONE),
    "`load_state_dict(assign=True)` with another dtype": ([assigned], A_NEW_ONE),
    "another `ContiguousParams` of the same parameters": ([ContiguousParams], NEWER),
    "a whole module put in the place of another; `weight_norm` added later": ([module, weight_norm], None),
}
"""By the first cell of its row: ways to do it, and what the error says of the way out; None where there is no error."""


def test_every_row_has_a_damage_and_is_in_the_table() -> None:
    assert [row[0] for row in ROWS] == list(DAMAGES)


@pytest.mark.long
@pytest.mark.parametrize(("what", "found", "_way_out"), ROWS, ids=lambda cell: cell)
def test_it_is_found_or_not_as_the_table_says(what: str, found: str, _way_out: str) -> None:
    damages, message = DAMAGES[what]
    assert found.startswith("yes") == (message is not None)
    for damage in damages:
        model = small_model()
        parameters = ContiguousParams(model)
        model(torch.ones(2, 5)).sum().backward()
        kept = [parameters, damage(model)]
        assert parameters.buffer_is_valid() == (message is None)
        if message is None:
            parameters.assert_buffer_is_valid()
        else:
            with pytest.raises(ValueError, match=message):
                parameters.assert_buffer_is_valid()
        if message == MOVE_BACK:
            parameters.make_params_contiguous()
            parameters.assert_buffer_is_valid()
        del kept


@pytest.mark.long
def test_a_model_that_was_converted_is_refused_by_step_clipping_and_zero_grad_too() -> None:
    assert re.search(r"`step\(\)`, clipping and `zero_grad\(\)` refuse too", ROWS[1][1])
    model = small_model()
    runs = ContiguousParams(model).contiguous()
    optimizer = optim.SGD(runs, lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    model.half()
    for refused in (optimizer.step, lambda: clip_grad_norm_(runs, 1.0), optimizer.zero_grad):
        with pytest.raises(ValueError, match="has left the flat memory"):
            refused()

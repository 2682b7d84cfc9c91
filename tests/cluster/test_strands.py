"""A model's parameters as pieces: in process groups, whose cases are in strand_cases.py, and in a single process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shoal.cluster.cluster import Cluster
from shoal.cluster.strands import Strands
from tests.cluster.strand_cases import all_cases
from tests.groups import in_group
from tests.soaked import only_in_soak


@pytest.mark.processes
@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(4, marks=[pytest.mark.long, only_in_soak])])
def test_ranks_hold_and_carry_the_same_numbers(size: int, tmp_path: Path) -> None:
    found = in_group(size, tmp_path, all_cases)
    assert all(len(cases) > 3 and cases == found[0] for cases in found)


def test_a_single_process_carries_all_strands() -> None:
    assert not torch.distributed.is_initialized()
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1, dtype=torch.float64).requires_grad_(False))
    before = [p.detach().clone() for p in model.parameters()]
    strands = Strands(Cluster(), model.parameters())
    assert strands.mine == range(8)
    assert strands.carriers == [0] * 8
    assert len(strands.params) == len(strands.pieces) == 8 * 4
    for number, parameter in enumerate(before):
        pieces = [strands.pieces[places[number]] for places in strands.numbers]
        assert torch.equal(torch.cat(pieces), parameter.flatten())
    strands.spread([torch.zeros(1)])
    assert all(torch.equal(*each) for each in zip(model.parameters(), before, strict=True))
    wholes = strands.collect(dict(enumerate(strands.pieces)))
    assert all(torch.equal(*each) for each in zip(wholes.values(), before, strict=True))
    assert all(torch.equal(piece, strands.pieces[place]) for place, piece in strands.deal(wholes).items())


def test_a_step_takes_gradients_only() -> None:
    model = nn.Linear(3, 5)
    strands = Strands(Cluster(), model.parameters())
    before = [piece.detach().clone() for piece in strands.pieces]
    for parameter in model.parameters():
        nn.init.constant_(parameter, 3.0)
        parameter.grad = torch.full_like(parameter, 0.5)
    strands.gather_for_step()
    assert all(torch.equal(*each) for each in zip(strands.pieces, before, strict=True))
    assert all(piece.grad is not None and piece.grad.eq(0.5).all() for piece in strands.pieces)


def test_what_is_no_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match="params= has a str"):
        Strands(Cluster(), ["weight"])


def test_no_parameters_are_no_pieces() -> None:
    strands = Strands(Cluster(), [])
    assert strands.params == []
    assert strands.collect({}) == strands.deal({}) == {}
    assert strands.numbers == [[]] * 8


def test_groups_over_iterators_can_be_read_again() -> None:
    model = nn.Linear(3, 5)
    (group,) = Strands(Cluster(), [{"params": model.parameters(), "lr": 0.1}]).given
    assert group["lr"] == 0.1
    assert all(one is other for one, other in zip(group["params"], model.parameters(), strict=True))

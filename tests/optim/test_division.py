"""What a division tells the state: a contract that all members of the kind keep, on plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.cluster.strands import Strands
from shoal.flat import FlatBuffer
from shoal.optim.division import Division, Undivided
from shoal.optim.loads import hash_of
from shoal.optim.state import TrainingState


def model() -> list[tuple[str, nn.Parameter]]:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    made[1].bias.requires_grad_(False)
    return list(made.named_parameters())


def own() -> tuple[Division, list[dict[str, Any]]]:
    named = model()
    return Undivided([p for _, p in named]), [{"params": named[:1]}, {"params": named[1:]}]


def strands(count: int) -> tuple[Strands, list[dict[str, Any]]]:
    named = model()
    made = Strands(shoal.Cluster(strands=count), [{"params": named[:1]}, {"params": named[1:]}])
    return made, made.groups


MEMBERS: dict[str, Callable[[], tuple[Division, list[dict[str, Any]]]]] = {
    "own": own,
    "strands": lambda: strands(4),
}


@pytest.mark.parametrize("member", MEMBERS)
def test_every_member_keeps_the_contract(member: str) -> None:
    pieces, groups = MEMBERS[member]()
    optimizer = torch.optim.SGD(groups, lr=0.1)
    stepped = [p for group in optimizer.param_groups for p in group["params"]]
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    wanted = [(name, parameter.shape, parameter.requires_grad) for name, parameter in model()]

    # Each value is in one part, in the order of the model's parameters.
    parts = pieces.divided(list(range(len(stepped))))
    assert sorted(place for part in parts for place in part) == list(range(len(stepped)))
    assert len(parts) == len(pieces.mine)
    assert all(len(part) == len(pieces.model) for part in parts)
    assert list(pieces.carriers) == [0] * len(parts)

    # Peers see the model, however it is cut.
    described = pieces.described(stepped)
    assert [(n, d.shape, d.requires_grad) for n, d in zip(pieces.described_names(names), described, strict=True)] == [
        *wanted
    ]
    assert pieces.described_names([]) == []
    doubles = pieces.described([p.double() for p in stepped])
    assert {each.dtype for each in doubles} == {torch.float64}, "the dtype is that of what is stepped"
    told = pieces.described_groups(optimizer.param_groups)
    assert [len(group["params"]) for group in told] == [1, 3]
    assert [group["param_names"] for group in told] == [[wanted[0][0]], [name for name, *_ in wanted[1:]]]

    # There is a digest for each part, and a change is in that of its own.
    flat = FlatBuffer.adopt(stepped)
    before = list(map(hash_of, pieces.hashed(stepped, flat.flat)))
    assert len(before) == len(parts)
    with torch.no_grad():
        stepped[parts[-1][0]].add_(1.0)
    after = list(map(hash_of, pieces.hashed(stepped, flat.flat)))
    assert [a == b for a, b in zip(before, after, strict=True)] == [True] * (len(parts) - 1) + [False]


@pytest.mark.parametrize("count", [1, 4])
def test_a_state_has_a_part_for_each_strand_and_the_first_has_the_extra_tensors(count: int) -> None:
    pieces, groups = own() if count == 1 else strands(count)
    state = TrainingState(torch.optim.SGD(groups, lr=0.1), None, [torch.ones(2)], division=pieces)
    assert [len(part.parameters) for part in state.parts] == [4] * count
    assert [len(part.extras) for part in state.parts] == [1] + [0] * (count - 1)
    assert len(state.digest()) == 32 * count

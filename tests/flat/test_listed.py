"""The forms of an optimizer's `params=`, read once for all who put other tensors in place of the parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.flat import Listed

A, B = (nn.Parameter(torch.zeros(size)) for size in (2, 3))


@pytest.mark.parametrize(
    ("given", "names", "form"),
    [
        (lambda: iter([A, B]), ["", ""], lambda a, b: [a, b]),
        (lambda: iter([("a", A), ("b", B)]), ["a", "b"], lambda a, b: [("a", a), ("b", b)]),
        (
            lambda: [{"params": A, "lr": 0.1}, {"params": iter([("b", B)])}],
            ["", "b"],
            lambda a, b: [{"params": [a], "lr": 0.1}, {"params": [("b", b)]}],
        ),
        (lambda: [], [], lambda *_: []),
    ],
    ids=["tensors", "pairs", "groups", "nothing"],
)
def test_other_tensors_take_the_place_of_parameters(
    given: Callable[[], Any], names: list[str], form: Callable[[Tensor, Tensor], Any]
) -> None:
    listed = Listed(given())
    assert [name for name, _ in listed.named] == names
    found = [parameter for _, parameter in listed.named]
    assert all(one is other for one, other in zip(found, [A, B], strict=False))
    others = [torch.ones(2), torch.ones(3)]
    for _ in range(2):
        assert str(listed.params) == str(form(A, B))
        assert str(listed.like_given(others)) == str(form(*others))


def test_each_counts_as_often_as_it_was_given() -> None:
    assert Listed([A, B, A]).like_given([B, B, A])[2] is A


@pytest.mark.parametrize("given", [["weight"], [("a", 1)], [{"params": [A, None]}]])
def test_what_is_no_parameter_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"params= has a (str|int|NoneType): give tensors, or parameter groups"):
        _ = Listed(given).named

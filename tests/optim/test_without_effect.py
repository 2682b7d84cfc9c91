"""Options without effect are in one table, and what takes them says so."""

from __future__ import annotations

import inspect
import re

import pytest

import shoal
from shoal.optim.without_effect import WITHOUT_EFFECT

TAKEN_BY = {"tracker_opts": "ProgressTracker"}


@pytest.mark.parametrize("where", WITHOUT_EFFECT)
def test_the_docstring_says_so(where: str) -> None:
    if where == "averager_opts":
        text = inspect.getdoc(shoal.Optimizer) or ""
        text = text.partition("averager_opts:")[2].partition("Accepted without effect:")[2].partition("\n\n")[0]
        assert {name for name in WITHOUT_EFFECT[where] if f"`{name}`" in text} == set(WITHOUT_EFFECT[where])
        return
    kind = getattr(shoal, TAKEN_BY.get(where, where))
    said = re.findall(r"^ +(\w+):[^:]*(?:has no effect|accepted without effect)", inspect.getdoc(kind) or "", re.M)
    assert set(said) == set(WITHOUT_EFFECT[where])
    assert set(WITHOUT_EFFECT[where]) <= set(inspect.signature(kind).parameters)

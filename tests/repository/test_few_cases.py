"""The tests of which few cases are run exist."""

from __future__ import annotations

from tests.few_cases import FEW
from tests.forked import ROOT


def test_each_of_them_is_there() -> None:
    for test in FEW:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text(), test

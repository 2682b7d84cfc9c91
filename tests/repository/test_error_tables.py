"""Every row of the guides' error tables: something provokes it, and the message is as the table has it."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

import shoal
from tests.repository.error_tables import PROVOCATIONS, Promise, Scene, promises, promises_of
from tests.repository.provocations import (  # noqa: F401 (they register what they provoke)
    closed_runs,
    errors,
    frameworks,
    optimizers,
    schedule_free,
    warnings,
)


def test_nothing_is_provoked_that_no_table_has() -> None:
    assert not PROVOCATIONS.keys() - {promise.message for promise in promises()}, "leave it out, or name the row"


@pytest.mark.long
@pytest.mark.parametrize("promise", promises(), ids=lambda promise: promise.message)
def test_every_row_is_provoked(
    promise: Promise, dht: shoal.DHT, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert promise.message in PROVOCATIONS, (
        f"{promise.page} promises {promise.message!r}, and nothing provokes it: add a function to "
        "tests/repository/provocations"
    )
    caplog.set_level(logging.INFO, "shoal")
    scene = Scene(dht, tmp_path, caplog)
    with scene.ends:
        error = PROVOCATIONS[promise.message](scene)
    said = caplog.text if promise.logged else error
    assert re.search(promise.pattern, said), f"{promise.message!r} was promised, and this was said: {said}"


PAGE = """
| message | what to do |
|---|---|
| `A` or … `no B` (now) | leave `C` |

| other | table |
|---|---|
| `D` | |
"""


def test_what_is_found_in_a_page() -> None:
    assert promises_of("a.md", PAGE) == [Promise("a.md", False, "A"), Promise("a.md", False, "no B")]
    assert promises_of("a.md", PAGE.replace("what to do", "meaning"))[0].logged
    assert re.fullmatch(Promise("a.md", False, "… has N of (M)").pattern, " has 3 of (7)")

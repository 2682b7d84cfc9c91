"""What holds of the source as a whole: imports go one way, and constructors stay small."""

from __future__ import annotations

from pathlib import Path

import shoal
from benchmarks.structure import circles, constructors

PACKAGE = Path(shoal.__file__).parent
MOST_COLLABORATORS = 6


def test_no_modules_import_each_other() -> None:
    assert circles() == []


def test_no_constructor_but_public_ones_takes_many_collaborators() -> None:
    crowded = {
        constructor.name: constructor.collaborators
        for constructor in constructors(PACKAGE)
        if len(constructor.collaborators) > MOST_COLLABORATORS and not constructor.public
    }
    assert crowded == {}

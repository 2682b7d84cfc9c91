"""The counts of `benchmarks.branches`, and the table of them that stands in docs/architecture.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import branches, walk

OBJECTS = """
from dataclasses import dataclass
from enum import Enum

class Base: ...
class Kind(Enum):
    ONE = 1
@dataclass(frozen=True)
class Record:
    first: int
    second: int
    third: int
Either = Base | Record
"""

ASKING = """
from toy.room.objects import Base, Either as E, Kind
from toy.room import objects

class Large(Base):
    declared: int = 0
    def __init__(self, base: Base, number: int, kind: Kind) -> None:
        self._base, self.number = base, number
        self.kind = kind
        base.foreign = 1
    def ask(self, x, settings, other_settings):
        if isinstance(x, Base) or isinstance(x, int | objects.Record) or isinstance(x, E):  # three
            return type(x) is Base  # one
        if isinstance(x, int) or isinstance(x, (str, bytes)) or type(x) is int or hasattr(x, "y"):  # one hasattr
            return self._settings.outer or settings.use_local_updates or settings.run_id or self.outer  # two
        match x:
            case Base() | Record():  # the second is no name of this module
                return self._drift is None or x._speaker is not None or self.else_ is None or self.drift is x  # two
            case int():
                return self.kind is Kind.ONE or x.rank or x.is_first  # one and two
"""


@pytest.fixture
def rooms(tmp_path: Path) -> dict[str, dict[str, object]]:
    room = tmp_path / "toy" / "room"
    room.mkdir(parents=True)
    for name, text in {"objects": OBJECTS, "asking": ASKING, "settings": "def f(settings): settings.outer"}.items():
        (room / f"{name}.py").write_text(text)
    for folder in (room, room.parent):
        (folder / "__init__.py").write_text("")
    return branches.measure(tmp_path / "toy")


def test_questions_are_counted_by_what_names_stand_for(rooms: dict[str, dict[str, object]]) -> None:
    found = {key: rooms["room"][key] for key in branches.QUESTIONS}
    assert found == {
        "isinstance": 3, "case": 1, "type": 1, "hasattr": 1, "kind": 1, "rank": 2, "settings": 2, "none": 2
    }  # fmt: skip


def test_the_largest_class_is_no_record(rooms: dict[str, dict[str, object]]) -> None:
    of = rooms["room"]
    assert of["most collaborators"] == [1, "Large"]
    assert of["most arguments"] == [3, "Large"]
    assert of["most attributes"] == [4, "Large"]  # declared, _base, number, kind
    assert of["most methods"] == [2, "Large"]


def test_the_table_is_written_between_its_marks() -> None:
    page = f"before\n{walk.BEGIN}\nold\n{walk.END}\nafter\n"
    assert walk.rewrite(page, f"{walk.BEGIN}\nnew\n{walk.END}") == page.replace("old", "new")
    with pytest.raises(ValueError, match="has no lines"):
        walk.rewrite("before\nafter\n", "new")


def test_the_page_has_a_row_for_each_count() -> None:
    """Of the commits that are kept, too. `make lint` compares the figures."""
    text = walk.PAGE.read_text()
    _, _, rest = text.partition(walk.BEGIN)
    rows = [line for line in rest.partition(walk.END)[0].splitlines() if line.startswith("|")][2:]
    assert len(rows) >= 4 + 1 + len(branches.QUESTIONS) + 4
    for row in rows:
        assert all(cell.strip() for cell in row.strip("|").split("|")), f"a cell is empty: {row}"

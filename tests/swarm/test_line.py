"""The line of states behind a peer's: an ancestor is told from a fork, by what all who hold the state say."""

from __future__ import annotations

from shoal.swarm.protocol.line import MAX_LINE, MAX_OFFERED, Line, agreed, line_to, split
from shoal.swarm.protocol.tip import Tip


def tip(number: int) -> Tip:
    return Tip(number, number.to_bytes(32), float(number))


def line_of(*numbers: int) -> Line:
    line = Line()
    for number in numbers:
        line.went_to(tip(number))
    return line


def test_a_line_remembers_where_it_went() -> None:
    line = line_of(1, 2, 2, 3)
    assert line.lineages == tuple(tip(number).lineage for number in (1, 2, 3))
    assert tip(2).lineage in line
    assert tip(4).lineage not in line
    assert split(line.to_wire()) == line.lineages
    assert split(line.to_wire() + b"rest") == line.lineages


def test_a_line_is_bounded() -> None:
    line = line_of(*range(1, MAX_LINE + 10))
    assert len(line.lineages) == MAX_LINE
    assert len(split(line.to_wire())) == MAX_OFFERED
    assert line.reaches_back_to(10, MAX_LINE + 9)
    assert not line.reaches_back_to(9, MAX_LINE + 9)


def test_what_leads_to_a_state() -> None:
    wire = line_of(1, 2, 3, 4).to_wire()  # the donor has gone on to 4 since it took a copy of 3
    assert line_to(tip(3), wire) == tuple(tip(number).lineage for number in (1, 2, 3))
    assert line_to(tip(9), wire) == ()
    assert line_to(tip(9), b"") == ()


def test_another_line_is_taken_over_where_the_two_part() -> None:
    line = line_of(1, 2, 3, 10)
    line.take_over([tip(number).lineage for number in (2, 3, 4)], tip(4))
    assert line.lineages == tuple(tip(number).lineage for number in (1, 2, 3, 4))
    line.take_over([], tip(9))
    assert line.lineages == (tip(9).lineage,)


def test_only_that_counts_on_which_all_agree() -> None:
    long, short = (tuple(tip(number).lineage for number in numbers) for numbers in ((1, 2, 3), (2, 3)))
    liar = (tip(7).lineage, tip(3).lineage)
    assert agreed([long, short]) == short
    assert agreed([long, liar]) == ()
    assert agreed([long, ()]) == ()
    assert agreed([]) == ()

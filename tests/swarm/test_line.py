"""The line of states behind a peer's: an ancestor is told from a fork, by what all who hold the state say."""

from __future__ import annotations

from shoal.swarm.protocol.line import MAX_LINE, MAX_OFFERED, Line, agreed, line_to, split
from shoal.swarm.protocol.sides import MAX_SIDES, Sides
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
    mine, forgotten = tip(MAX_LINE + 9), Tip(9, b"x" * 32, 9.0)
    assert line.divides_from(Tip(10, b"x" * 32, 10.0), mine)
    assert not line.divides_from(forgotten, mine), "it may be an ancestor"


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


def test_a_state_of_another_side_is_found_once_this_peer_outranks_it() -> None:
    sides, line = Sides(), line_of(1)
    other = Tip(2, b"o" * 32, 2.5)
    sides.hear(b"peer", other)
    assert sides.find(line, tip(1)) == [], "this peer may yet leave its own state for that one"
    for number in (2, 3):
        line.went_to(tip(number))
    assert sides.find(line, tip(3)) == [(b"peer", other)]
    sides.hear(b"another", other)
    assert sides.find(line, tip(3)) == [], "it was told of"


def test_states_of_this_peers_line_are_no_other_side() -> None:
    sides, line = Sides(), line_of(1, 2, 3)
    for number in (1, 3, 4):
        sides.hear(b"peer", tip(number))
    assert sides.find(line, tip(3)) == []
    line.went_to(tip(4))
    assert sides.find(line, tip(4)) == []


def test_states_that_are_made_up_take_no_memory() -> None:
    sides, line = Sides(), line_of(1)
    for number in range(3 * MAX_SIDES):
        sides.hear(b"liar", Tip(9, number.to_bytes(32), 9.0))
    assert sides.find(line, tip(1)) == []
    assert len(sides._undecided) == MAX_SIDES

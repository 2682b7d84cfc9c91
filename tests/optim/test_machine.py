"""Who counts as a peer that computes alike, after downloads and averages of the state."""

from __future__ import annotations

from shoal.optim.machine import Machine
from shoal.optim.terms import this_machine

ME, OTHER = bytes(range(32)), bytes(range(1, 33))


def test_equal_machines_have_one_name() -> None:
    assert Machine(ME, this_machine()).name == Machine(OTHER, this_machine()).name
    assert 0 < len(Machine(ME, this_machine()).name) <= 256


def test_a_lossy_state_is_its_own_until_the_next_average() -> None:
    one, other = Machine(ME, this_machine()), Machine(OTHER, this_machine())
    plain = one.name
    one.has_lossy_state(4)
    other.has_lossy_state(4)
    assert len({plain, one.name, other.name}) == 3
    assert max(len(one.name), len(other.name)) <= 256
    one.has_averaged_state(5, whole=False)  # no step was made with what the average does not have
    assert one.name == plain
    other.has_averaged_state(6, whole=False)
    assert other.name != plain, "its statistics have gone their own way"
    other.has_averaged_state(7, whole=True)
    assert other.name == plain

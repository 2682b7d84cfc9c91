"""The names of states: no two states that may differ have the same one, and everybody orders them alike."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.protocol.tip import LAST_EPOCH, MOST_SAMPLES, Ballot, Tip
from tests.swarm.rounds import TIP, digest, key

digests = st.binary(min_size=32, max_size=32)
tips = st.builds(Tip, st.integers(0, 5), digests, st.sampled_from([0.0, 1.0, 64.0]))


def test_every_peer_of_a_run_begins_at_one_tip_of_its_own() -> None:
    assert Tip.genesis("run") == TIP
    assert Tip.genesis("other") != TIP
    assert (TIP.epoch, TIP.samples, len(TIP.lineage)) == (0, 0.0, 32)


def test_a_tip_follows_from_its_parent_and_what_was_committed() -> None:
    after = TIP.after(digest("a"), 32.0)
    assert after == TIP.after(digest("a"), 32.0)
    assert (after.epoch, after.samples) == (1, 32.0)
    assert after.lineage != TIP.after(digest("b"), 32.0).lineage
    other_parent = Tip.genesis("other").after(digest("a"), 32.0)
    assert after.lineage != other_parent.lineage, "the same result on another state is another state"
    again = after.after(digest("a"), 8.0)
    assert (again.epoch, again.samples) == (2, 40.0)
    assert again.lineage != after.lineage


@given(tips, tips, tips)
def test_of_two_tips_one_outranks_the_other(one: Tip, two: Tip, three: Tip) -> None:
    assert not one.outranks(one)
    assert (one == two) or (one.outranks(two) != two.outranks(one))
    if one.outranks(two) and two.outranks(three):
        assert one.outranks(three)


def test_samples_count_before_epochs() -> None:
    few, many = Tip(9, digest("z"), 10.0), Tip(2, digest("a"), 11.0)
    assert many.outranks(few)
    assert Tip(3, digest("a"), 11.0).outranks(many)
    assert Tip(2, digest("b"), 11.0).outranks(many)


def test_what_follows_from_the_most_that_can_be_claimed_can_still_be_said() -> None:
    after = Tip(LAST_EPOCH, digest("a"), MOST_SAMPLES).after(digest("b"), MOST_SAMPLES)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(after), type=Tip) == after


def test_ballots_are_ordered_by_number_and_no_two_peers_hold_the_same() -> None:
    assert Ballot(2, key(1)) > Ballot(1, key(9))
    assert Ballot(1, key(2)) > Ballot(1, key(1))
    assert Ballot(1, key(2)) != Ballot(1, key(1))


@pytest.mark.parametrize("samples", [math.nan, math.inf, -math.inf])
def test_a_state_with_no_finite_number_of_samples_is_none(samples: float) -> None:
    with pytest.raises(ValueError, match="samples behind it"):
        Tip(0, bytes(32), samples)


@pytest.mark.parametrize(
    "fields", [(-1, bytes(32), 0.0), (1 << 53, bytes(32), 0.0), (0, bytes(31), 0.0), (0, bytes(33), 0.0),
               (0, bytes(32), -1.0), (0, bytes(32), 2e300), (0, bytes(32), math.nan), (0, bytes(32), math.inf)]
)  # fmt: skip
def test_tips_from_the_network_are_bounded(fields: tuple[object, ...]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=Tip)


@pytest.mark.parametrize("fields", [(-1, bytes(32)), (1 << 53, bytes(32)), (1, b""), (1, bytes(33)), (1.5, bytes(32))])
def test_ballots_from_the_network_are_bounded(fields: tuple[object, ...]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=Ballot)

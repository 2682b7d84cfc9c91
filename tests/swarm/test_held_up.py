"""Members that hold rounds up, again and again: they are waited for less, and then for a while not taken."""

from __future__ import annotations

from dataclasses import replace

from shoal.swarm.protocol.actions import Send
from shoal.swarm.protocol.coordinator import Phase
from shoal.swarm.protocol.messages import Abort, Doubt, Survey
from shoal.swarm.protocol.patience import FORGIVEN_SECONDS, LONGEST_PAUSE, SHORTEST_SECONDS, Patience
from tests.swarm.rounds import RULES, key, keys
from tests.swarm.test_coordinator import ROOT, gathering, join, running, the
from tests.swarm.test_one_liar import peer_2


def test_each_time_halves_how_long_it_is_waited_for() -> None:
    patience = Patience()
    waits = []
    for _ in range(5):
        waits.append(patience.of(key(2), 15.0, 0.0))
        patience.held_up(key(2), 0.0)
        patience.held_up(key(2), 0.0)  # once at a tip counts
        patience.committed((), key(1), 0.0)
    assert waits == [15.0, 7.5, 3.75, SHORTEST_SECONDS, SHORTEST_SECONDS]
    assert patience.of(key(3), 15.0, 0.0) == 15.0


def test_who_keeps_up_is_waited_for_again() -> None:
    patience = Patience()
    patience.committed([key(2)], key(1), 0.0, led=True)
    assert patience.of(key(2), 16.0, 0.0) == 8.0
    assert 8.0 < patience.of(key(2), 16.0, FORGIVEN_SECONDS / 2) < 16.0
    assert patience.of(key(2), 16.0, FORGIVEN_SECONDS) == 16.0


def test_no_short_time_is_made_longer() -> None:
    patience = Patience()
    patience.held_up(key(2), 0.0)
    assert patience.of(key(2), 0.5, 0.0) == 0.5


def test_good_rounds_in_between_do_not_make_up_for_those_that_it_holds_up() -> None:
    """Eight good ones of a second, and one that it holds up for as long as it is waited for: it costs a small share."""
    patience, now, lost = Patience(), 0.0, 0.0
    while now < 3600.0:
        now += 8.0
        if not patience.is_over(key(2), now):
            lost += (wait := patience.of(key(2), 10.0, now))
            now += wait
            patience.committed([key(2)], key(1), now, led=True)
    assert lost < 0.1 * now
    assert not patience.is_over(key(2), now + LONGEST_PAUSE)


def test_a_round_begins_without_who_held_up_too_many_if_the_others_are_enough() -> None:
    patience = Patience()
    for _ in range(3):
        patience.committed([key(3)], key(1), 0.0, led=True)
    rules = replace(RULES, target_samples=1e9)
    coordinator = gathering(1, 2, 3, rules=rules, veterans=frozenset(keys(1, 2, 3)), patience=patience)
    for number in (1, 2, 3):
        join(coordinator, number, now=1.0)
    assert coordinator.begin is not None
    assert [member.key for member in coordinator.begin.members] == sorted(keys(1, 2))
    assert key(3) in coordinator.late, "it hears how the round ends"


def test_who_is_never_done_is_put_out_once_this_peer_is() -> None:
    coordinator = running(1, 2, 3)
    coordinator.got_on_at = 100.0
    assert coordinator.hurry(lambda _: 12.0, 200.0) == [], "this peer lacks something itself"
    for number in (1, 2):
        coordinator.done[key(number)] = ROOT
    assert coordinator.hurry(lambda _: 12.0, 111.0) == []
    actions = coordinator.hurry(lambda _: 12.0, 113.0)
    assert the(actions, Abort) is not None
    assert the(actions, Survey) is not None
    assert coordinator.live() == sorted(keys(1, 2))
    assert coordinator.phase is Phase.SURVEYING


def test_who_held_up_too_many_is_doubted_as_the_next_coordinator_at_once() -> None:
    peer = peer_2(replace(RULES, target_samples=30.0))  # this tip is 4's to coordinate
    patience = peer.participant.silence.patience
    for now in (0.0, 1.0):
        patience.committed([key(4)], key(2), now, led=True)
    peer.look(lambda key: 0, 2.0)
    assert [type(send.message) for send in peer.out if isinstance(send, Send)] == [Doubt]
    assert key(4) in peer.participant.doubted


def test_where_no_samples_are_counted_nobody_is_kept_out_or_doubted_for_that() -> None:
    peer = peer_2()
    for now in (0.0, 1.0):
        peer.participant.silence.patience.committed([key(4)], key(2), now, led=True)
    peer.look(lambda key: 0, 2.0)
    assert not peer.participant.doubted


def test_one_coordinator_alone_has_nobody_kept_out() -> None:
    patience = Patience()
    for epoch in range(10):
        patience.committed([key(2)], key(9), float(epoch))
    assert patience.of(key(2), 15.0, 10.0) == 15.0
    assert not patience.is_over(key(2), 10.0)
    for now in (10.0, 11.0):
        patience.committed([key(2)], key(8), now)
    assert patience.is_over(key(2), 11.0)

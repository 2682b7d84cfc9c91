"""With a share of the last round's members as the least number, a minority begins and commits nothing."""

from __future__ import annotations

from dataclasses import replace

from shoal.swarm.protocol.actions import Send
from shoal.swarm.protocol.gathering import Gathering
from shoal.swarm.protocol.leading import Phase
from shoal.swarm.protocol.messages import Abort, Begin
from tests.swarm.rounds import RULES, at_tip, begun, join_of, key, keys, member, members, signer

RULES_OF_SHARES = replace(RULES, min_share=0.6, target_samples=64.0)


def began(*numbers: int, last: int) -> Gathering:
    veterans = frozenset(keys(*numbers))
    coordinator = Gathering(key(1), at_tip(last), RULES_OF_SHARES, signer(1), veterans=veterans)
    coordinator.expect(members(*numbers), 0.0)
    for number in numbers:
        coordinator.join(key(number), join_of(member(number)), b"", 0.0)
    coordinator.tick(RULES.matchmaking_time + 1.0)
    return coordinator


def test_a_minority_begins_no_round() -> None:
    assert began(1, 2, last=4).begin is None
    assert isinstance(began(1, 2, 3, last=4).begin, Begin)
    assert isinstance(began(1, last=0).begin, Begin), "nobody knows of a last round"


def test_a_round_that_has_become_a_minoritys_ends() -> None:
    coordinator = begun(began(1, 2, 3, 4, last=4))
    coordinator.put_out(key(4), "lost", 2.0)
    assert not coordinator.over
    actions = coordinator.put_out(key(3), "lost", 2.0)
    assert coordinator.phase is Phase.ABORTED
    told = [action for action in actions if isinstance(action, Send) and isinstance(action.message, Abort)]
    assert {peer for action in told for peer in action.to} == {key(1), key(2), key(3)}

"""A member whose commit is on its way is not taken for one that is behind: for us alone it would lead no more."""

from __future__ import annotations

from typing import Any, cast

from shoal.swarm.neighbourhood import Neighbourhood
from shoal.swarm.protocol.membership import Membership
from shoal.swarm.protocol.messages import Commit
from shoal.swarm.protocol.participant import Participant
from tests.averaging.rounds import TERMS, TIP, key, keys, member, members


def test_who_was_in_the_last_round_follows() -> None:
    membership = Membership("run", member(1))
    membership.returned(member(2))
    left = TIP.after(bytes(32), 1.0)
    participant = Participant(key(1), left)
    participant.advance(Commit(left, b"r" * 16, bytes(32), 1.0, keys(1, 2), members(1, 2)))
    neighbourhood = Neighbourhood(
        cast(Any, None),
        participant,
        membership,
        cast(Any, None),
        TERMS,
        changed=lambda: None,
        heard=lambda peer, tip: None,
    )
    neighbourhood.told(member(2).peer, left)
    assert {one.key for one in membership.candidates(2)} == {key(1), key(2)}
    neighbourhood.told(member(2).peer, TIP)
    assert {one.key for one in membership.candidates(2)} == {key(1)}
    neighbourhood.told(member(2).peer, participant.tip)
    assert {one.key for one in membership.candidates(2)} == {key(1), key(2)}

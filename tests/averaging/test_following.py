"""A member whose commit is on its way is not taken for one that is behind: for us alone it would lead no more."""

from __future__ import annotations

from typing import Any, cast

from shoal.averaging.membership import Membership
from shoal.averaging.neighbourhood import Neighbourhood
from tests.averaging.rounds import TERMS, TIP, key, member


def test_who_was_in_the_last_round_follows() -> None:
    membership = Membership("run", member(1))
    membership.returned(member(2))
    now = TIP.after(bytes(32), 1.0).after(bytes(32), 1.0)
    left = TIP.after(bytes(32), 1.0)
    neighbourhood = Neighbourhood(
        cast(Any, None),
        cast(Any, None),
        membership,
        cast(Any, None),
        TERMS,
        tip=lambda: now,
        changed=lambda: None,
        heard=lambda peer, tip: None,
        follows=lambda peer, tip: tip == left,
    )
    neighbourhood.told(member(2).peer, left)
    assert {one.key for one in membership.candidates(2)} == {key(1), key(2)}
    neighbourhood.told(member(2).peer, TIP)
    assert {one.key for one in membership.candidates(2)} == {key(1)}
    neighbourhood.told(member(2).peer, now)
    assert {one.key for one in membership.candidates(2)} == {key(1), key(2)}

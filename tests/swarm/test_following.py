"""A member whose commit is on its way is not taken for one that is behind: for us alone it would lead no more."""

from __future__ import annotations

from shoal.swarm.protocol.messages import Commit
from shoal.swarm.protocol.peer import Peer
from shoal.swarm.protocol.silence import Silence
from shoal.swarm.protocol.view import View
from tests.swarm.rounds import RULES, TERMS, TIP, key, keys, member, members, signer


def test_who_was_in_the_last_round_follows() -> None:
    peer = Peer(
        View("run", member(1), lambda key: True), TERMS, RULES, Silence(15.0, 30.0), signer(1), keeps_state=False
    )
    peer.view.returned(member(2))
    left = TIP.after(bytes(32), 1.0)
    peer.participant.move(left)
    peer.participant.advance(Commit(left, b"r" * 16, bytes(32), 1.0, keys(1, 2), members(1, 2)))
    peer.told(key(2), left, 0.0)
    assert {one.key for one in peer.view.candidates(peer.tip)} == {key(1), key(2)}
    peer.told(key(2), TIP, 0.0)
    assert {one.key for one in peer.view.candidates(peer.tip)} == {key(1)}
    peer.told(key(2), peer.tip, 0.0)
    assert {one.key for one in peer.view.candidates(peer.tip)} == {key(1), key(2)}

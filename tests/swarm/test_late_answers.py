"""An answer is handled a moment later than the messages that follow it, and does not take back what they have said."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.swarm.contacts import Contacts
from shoal.swarm.protocol.messages import Hello
from shoal.swarm.protocol.peer import Peer
from shoal.swarm.protocol.silence import Silence
from shoal.swarm.protocol.view import View
from tests.swarm.rounds import RULES, TERMS, TIP, join_of, key, member, signer

BEFORE, HERE = TIP, TIP.after(bytes(32), 1.0)


class Channel:
    """To one member, which answers each HELLO from `tip`. When `meanwhile` is done, its answer is handled."""

    def __init__(self, answer: Hello, meanwhile: Callable[[], None]) -> None:
        self._answer, self._meanwhile = answer, meanwhile
        self.node = SimpleNamespace(spawn=lambda task: task.close(), closed=False)

    async def call(self, *_: Any) -> Hello:
        self._meanwhile()
        return self._answer

    def believes(self, *_: Any) -> bool:
        return True

    def learn(self, *_: Any) -> None:
        pass

    def is_connected(self, *_: Any) -> bool:
        return True


def peer_of(number: int) -> Peer:
    view = View("run", member(number), lambda key: True)
    return Peer(view, TERMS, RULES, Silence(15.0, 30.0), signer(number), keeps_state=True)


@pytest.mark.parametrize("joins", [True, False])
def test_a_join_that_followed_an_answer_stays(joins: bool) -> None:
    """A newcomer greets a member that is still at the tip before. The member answers, goes on, and joins at once."""

    async def greet() -> None:
        me, other = peer_of(1), peer_of(2)
        other.view.returned(member(1))
        me.participant.move(HERE)
        other.participant.move(BEFORE)
        answer, join = other.hello(), join_of(member(2), tip=HERE)

        def meanwhile() -> None:
            me.view.returned(member(2))
            me.expect_join(key(2), join)
            me.receive(key(2), join, [], 0.0)

        channel: Any = Channel(answer, meanwhile if joins else lambda: None)
        contacts = Contacts(channel, me, SimpleNamespace(), [], 15.0, lambda: None)  # type: ignore[arg-type]
        await contacts.meet_peer(member(2).peer)
        assert me.view.said(key(2)) == (HERE if joins else BEFORE)
        assert (key(2) in getattr(me.gathering, "joins", {})) is joins

    asyncio.run(greet())

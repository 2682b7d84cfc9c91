"""What drives a coordinator: what it refuses, how it judges complaints, and that it does nothing once stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, cast

import pytest

from shoal.p2p.errors import Refused
from shoal.p2p.node import Reply
from shoal.swarm import lead as lead_module
from shoal.swarm.lead import Lead
from shoal.swarm.neighbourhood import Neighbourhood
from shoal.swarm.protocol.coordinator import Coordinator, Phase
from shoal.swarm.protocol.member import Member
from shoal.swarm.protocol.messages import Abort, Broken, Have, Survey
from tests.averaging.rounds import RULES, TIP, have_of, join_of, key, keys, member, members


class Peers:
    """Stands for the channel and the neighbourhood: all are connected; notices are kept, and questions answered when
    the test says so."""

    def __init__(self, *numbers: int) -> None:
        self.channel, self.group = self, members(*numbers)
        self.sent: list[tuple[tuple[bytes, ...], Any]] = []
        self.answer: asyncio.Future[Have] = asyncio.get_running_loop().create_future()

    def connected(self) -> list[Member]:
        return list(self.group)

    def is_connected(self, key: bytes) -> bool:
        return True

    def notify(self, keys: Iterable[bytes], message: Any, buffers: Sequence[bytes] = ()) -> None:
        self.sent.append((tuple(keys), message))

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(coroutine)

    async def ask(self, key: bytes, message: Any, timeout: float, buffers: Sequence[bytes] = ()) -> Reply:
        if isinstance(message, Survey):
            self.sent.append(((key,), message))
        return Reply(await asyncio.shield(self.answer), [])

    def told(self, kind: type) -> list[bytes]:
        return [to for keys_, message in self.sent if isinstance(message, kind) for to in keys_]


def lead_of(peers: Peers) -> Lead:
    """Peer 1's, of all of them."""
    return Lead(Coordinator(key(1), TIP, RULES), cast(Neighbourhood, peers), survey_timeout=5.0)


def leading(*numbers: int) -> tuple[Lead, Peers]:
    """Peer 1 leads; all of these have joined, and the round has begun."""
    peers = Peers(*numbers)
    lead = lead_of(peers)
    lead.members_changed()
    for each in peers.group:
        lead.join(each.peer, join_of(each), b"")
    assert lead.coordinator.phase is Phase.RUNNING
    return lead, peers


def complaint(lead: Lead, of: bytes) -> Broken:
    assert lead.coordinator.begin is not None
    return Broken(lead.coordinator.begin.round, of, False, "the connection to it was lost")


@pytest.mark.parametrize("garbage", [b"\xc1", b"\xa1\xff", b"\x91" * 60_000, b"\x01\x02"])
def test_garbage_that_a_member_would_have_others_read_is_refused(garbage: bytes) -> None:
    async def scenario() -> None:
        lead = lead_of(Peers(1, 2))
        with pytest.raises(Refused, match="not plain data"):
            lead.join(member(2).peer, join_of(member(2)), garbage)
        assert not lead.coordinator.joins
        lead.stop()

    asyncio.run(scenario())


def test_two_that_do_not_reach_each_other_are_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lead_module, "NOTICE_SECONDS", 0.02)

    async def scenario() -> None:
        lead, peers = leading(1, 2, 3)
        for _ in range(100):
            lead.broken(member(2).peer, complaint(lead, key(3)))
            lead.broken(member(2).peer, complaint(lead, key(77)))  # a stranger
        await asyncio.sleep(0.1)
        assert set(lead.coordinator.out) == {key(3)}
        assert peers.told(Abort) == [key(3)]
        # One survey before the judgement, to all three, and one after it, to two.
        assert len(peers.told(Survey)) == 5
        lead.stop()

    asyncio.run(scenario())


def test_once_stopped_it_judges_nobody_and_takes_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lead_module, "NOTICE_SECONDS", 0.02)

    async def scenario() -> None:
        lead, peers = leading(1, 2, 3)
        lead.broken(member(2).peer, complaint(lead, key(3)))
        lead.take_over()
        await asyncio.sleep(0)
        lead.stop()
        before = list(peers.sent)
        ballot = lead.coordinator.ballot
        assert ballot is not None
        peers.answer.set_result(have_of(ballot, out=keys(3)))
        await asyncio.sleep(0.1)
        assert peers.sent == before
        assert lead.coordinator.phase is Phase.SURVEYING
        assert not lead.coordinator.out

    asyncio.run(scenario())


def test_it_may_be_stopped_by_what_it_sends_to_itself() -> None:
    async def scenario() -> None:
        lead, peers = leading(1, 2)

        def deliver(*args: Any) -> None:
            lead.stop()

        monkey = cast(Any, peers)
        monkey.notify = deliver
        lead.broken(member(2).peer, Broken(b"", key(2), True, "it gave up"))  # tells it, and surveys the other
        timers = [handle for handle in cast(Any, asyncio.get_running_loop())._scheduled if not handle.cancelled()]
        assert timers == []

    asyncio.run(scenario())

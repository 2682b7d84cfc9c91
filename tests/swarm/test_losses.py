"""What a peer tells of members that it has lost, and of those that it has put out of its rounds: in the log, and to who
watches."""

from __future__ import annotations

from typing import Any

import pytest

from shoal.p2p.identity import PeerID
from shoal.swarm.losses import TOLD_SECONDS, Losses
from shoal.swarm.protocol.gathering import Gathering
from shoal.swarm.protocol.leading import Leading
from tests.swarm.rounds import RULES, at_tip, begun, join_of, key, member, members, signer


def add(losses: Losses, number: int, now: float = 0.0, *, coordinated: bool = False) -> None:
    losses.add(key(number), coordinated=coordinated, connected=3, epoch=7, now=now)


def fields(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.shoal for record in caplog.records if hasattr(record, "shoal")]


@pytest.fixture(autouse=True)
def all_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "shoal")


def test_the_last_that_were_lost_are_told_until_they_are_back() -> None:
    losses = Losses()
    for number in range(6):
        add(losses, number)
    assert losses.news.is_set()
    assert [(loss.key, loss.number) for loss in losses.told(4, 1.0)] == [(key(n), n) for n in (2, 3, 4, 5)]
    losses.back(key(5))
    losses.back(key(100))
    add(losses, 2, 2.0)
    assert [(loss.key, loss.number) for loss in losses.told(2, 3.0)] == [(key(4), 4), (key(2), 6)]
    assert [loss.key for loss in losses.told(4, TOLD_SECONDS)] == [key(2)]
    assert losses.told(4, 2.0 + TOLD_SECONDS) == []


def test_the_loss_of_the_coordinator_is_an_event_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    losses, peers = Losses(), [str(PeerID(key(number))) for number in range(2)]
    add(losses, 0)
    add(losses, 1, coordinated=True)
    assert fields(caplog) == [
        {"event": "lost", "peer": peers[0], "members": 3},
        {"event": "lost", "peer": peers[1], "members": 3},
        {"event": "coordinator lost", "peer": peers[1], "epoch": 7},
    ]
    assert [loss.coordinated for loss in losses.told(4, 0.0)] == [False, True]


def coordinating(*numbers: int) -> Leading:
    """Peer 1 coordinates a round of these."""
    coordinator = Gathering(key(1), at_tip(), RULES, signer(1))
    coordinator.expect(members(*numbers), 0.0)
    for number in numbers:
        coordinator.join(key(number), join_of(member(number)), b"", 0.0)
    return begun(coordinator)


def test_who_is_put_out_of_a_round_is_told_once_with_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    losses, lead = Losses(), coordinating(1, 2, 3, 4)
    losses.look(lead)
    assert losses.last_out is None
    lead.put_out(key(3), "it owes a chunk", 1.0)
    losses.look(lead)
    losses.look(lead)
    lead.put_out(key(4), "no answer to a survey", 2.0)
    losses.look(lead)
    events = [(each["event"], each["peer"], each["reason"], each["epoch"]) for each in fields(caplog)]
    assert events == [
        ("put out", str(PeerID(key(3))), "it owes a chunk", 0),
        ("put out", str(PeerID(key(4))), "no answer to a survey", 0),
    ]
    assert losses.last_out is not None
    assert (losses.last_out.key, losses.last_out.number) == (key(4), 1)


def test_who_takes_a_round_over_tells_of_none_that_were_out_before(caplog: pytest.LogCaptureFixture) -> None:
    losses, lead = Losses(), coordinating(1, 2, 3, 4)
    lead.took_over, lead.out = True, {key(2): "lost"}
    losses.look(lead)
    lead.put_out(key(3), "it owes a chunk", 1.0)
    losses.look(lead)
    assert [each["peer"] for each in fields(caplog)] == [str(PeerID(key(3)))]

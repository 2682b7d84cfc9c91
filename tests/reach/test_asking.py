"""What a peer says of its reach as that changes: one line for each change that matters to its user."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import Any

from shoal.p2p.identity import Identity, PeerID
from shoal.p2p.multiaddr import Multiaddr
from shoal.reach.asking import Asker, Asking, no_relays
from shoal.reach.finding import Reached, WayIn

OWN = Multiaddr("/ip4/192.0.2.1/tcp/31337")
RELAY = Multiaddr(f"/ip4/203.0.113.7/tcp/31337/p2p/{Identity().peer_id}")


class Peer(Asker):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.found: list[WayIn] = []

    def contacts(self) -> Sequence[PeerID]:
        return []

    def own_addresses(self, latest: bool = False) -> Sequence[Multiaddr]:
        return [OWN]

    def mapped_address(self) -> Multiaddr | None:
        return None

    async def found_out(self, finding: WayIn) -> None:
        self.found.append(finding)


def said_of(caplog: Any, *findings: WayIn | list[Multiaddr]) -> list[tuple[str, str]]:
    """The levels and beginnings of what is said as answers, and addresses at relays, follow each other."""

    async def main() -> None:
        asking = Asking(Peer(), no_relays, insists=False, rng=random.Random(0))
        for finding in findings:
            if isinstance(finding, WayIn):
                await asking._take_in(finding)
            else:
                await asking.led(finding)

    with caplog.at_level(logging.INFO):
        asyncio.run(main())
    return [(record.levelname, record.getMessage()) for record in caplog.records if record.name.startswith("shoal")]


def test_who_warned_that_nobody_reaches_it_says_when_relays_do_again(caplog):
    circuits = [RELAY.by_relay(Identity().peer_id)]
    relayed = WayIn(Reached.RELAYED, tuple(circuits))
    first, lost, again = said_of(caplog, relayed, [], circuits)
    assert (first[0], lost[0], again[0]) == ("INFO", "WARNING", "WARNING")
    assert f"the relay through which others reach this peer was lost ({RELAY})" in lost[1]
    assert "all is well: others reach this peer through relays: /ip4/203.0.113.7" in again[1]


def test_a_client_whom_nobody_reaches_hears_what_it_is_and_when_others_reach_it_at_a_port(caplog):
    nobody, public = WayIn(Reached.NOBODY, (), frozenset([OWN]), "203.0.113.9"), WayIn(Reached.PUBLIC, (OWN,))
    lost, again = said_of(caplog, nobody, public)
    assert (lost[0], again[0]) == ("WARNING", "WARNING")
    assert "is a client of the DHT, and of the runs that it joins from now on" in lost[1]
    assert f"this peer is reached at {OWN.with_peer(None)}" in again[1]


def test_that_nobody_reaches_it_is_said_once(caplog):
    nobody = [WayIn(Reached.NOBODY, (), frozenset(at), seen) for at, seen in (([], ""), ([OWN], "203.0.113.9"))]
    [(level, _)] = said_of(caplog, *nobody, *nobody)
    assert level == "WARNING"


def test_other_addresses_are_said(caplog):
    found = [WayIn(Reached.PUBLIC, (Multiaddr(f"/ip4/203.0.113.{number}/tcp/1"),)) for number in (1, 2)]
    assert [level for level, _ in said_of(caplog, *found)] == ["INFO", "INFO"]

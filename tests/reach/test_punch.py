"""A direct connection takes the place of a circuit: through a hole, or dialled back (routers: `test_routers.py`)."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from typing import Any

import pytest

from shoal.p2p.errors import PeerUnreachable, Refused
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.quota import Rate
from shoal.p2p.sealing import NAME_BYTES
from shoal.p2p.transport import Observation
from shoal.reach import punch
from shoal.reach.messages import PUNCH, Back, Came, Meet
from shoal.reach.punch import Punch
from tests.p2p.recorder import LOOPBACK, eventually
from tests.reach.ends import CHAT, End, Said, ends, joined

MIB = 1 << 20


def equip(end: End, observer: Multiaddr, *direct: Multiaddr) -> None:
    """Let that peer punch; it can be dialled at `direct`."""
    end.circuits.on_dialled = Punch(end.node, end.transport, lambda: [observer], lambda: direct).begin


@pytest.fixture
def one_listens(monkeypatch) -> None:
    """On loopback, who dials a moment too early is refused at once, so two hardly ever meet: the one with the smaller
    port listens instead."""
    real = punch._open

    async def open_hole(mapped: Any, there: Meet) -> socket.socket:
        if mapped.port > there.port:
            return await real(mapped, there)
        with socket.create_server(("", mapped.port)) as server:
            server.setblocking(False)
            connection, _ = await asyncio.get_running_loop().sock_accept(server)
        return connection

    monkeypatch.setattr(punch, "_open", open_hole)


def name(number: int) -> bytes:
    return number.to_bytes(NAME_BYTES, "big")


def numbers(end: End) -> list[int]:
    """Of the messages that it has heard."""
    return [int(text) for text in end.texts if text.isdigit()]


async def send_until(one: End, other: End, condition: Any) -> int:
    """Send numbered messages, small and large, until the condition holds; returns how many."""
    number = 0
    async with asyncio.timeout(20):
        while not condition():
            buffer = os.urandom(MIB if number % 3 == 0 else 100)
            one.node.notify([other.peer_id], CHAT, Said(str(number)), [buffer], name(number))
            number += 1
            await one.ask(other, "are you there?")
            await asyncio.sleep(0.005)
    return number


@pytest.mark.usefixtures("one_listens")
def test_a_hole_takes_the_place_of_the_circuit_while_messages_pass():
    async def main() -> None:
        async with ends(2) as ([relay], [one, other]):
            equip(one, relay.address)
            equip(other, relay.address)
            await joined(one, other, relay)
            sent = await send_until(one, other, lambda: one.route(other) == "Hole" and relay.relay.numbers[2] == 0)
            await eventually(lambda: len(numbers(other)) == sent)
            assert sorted(numbers(other)) == list(range(sent))
            passed = relay.relay.splicer.passed
            sent += await send_until(one, other, lambda: len(numbers(other)) > sent + 20)
            assert relay.relay.splicer.passed == passed
            assert one.lost == other.lost == []
            await relay.close()  # and the two go on
            assert await one.ask(other, "still there") == "still there"
            assert await other.ask(one, "still there") == "still there"

    asyncio.run(main())


@pytest.mark.usefixtures("one_listens")
def test_the_lane_of_such_a_link_needs_no_relay_that_lives():
    async def main() -> None:
        async with ends(2, relays=2) as ([relay, observer], [one, other]):
            for end in (one, other):
                equip(end, observer.address)
            await joined(one, other, relay)
            await eventually(lambda: one.route(other) == "Hole")
            await eventually(lambda: relay.relay.numbers[2] == 0)
            await relay.close()
            one.node.notify([other.peer_id], CHAT, Said("large"), [bytes(MIB)], name(1))
            await eventually(lambda: other.texts == ["large"])

    asyncio.run(main())


def test_a_peer_that_is_reached_directly_is_dialled_back():
    async def main() -> None:
        async with ends(2) as ([relay], [one, other]):
            equip(one, relay.address, await one.node.listen(LOOPBACK))
            equip(other, relay.address)
            await joined(one, other, relay)
            sent = await send_until(one, other, lambda: other.route(one) == "Direct" and relay.relay.numbers[2] == 0)
            await eventually(lambda: len(numbers(other)) == sent)
            assert sorted(numbers(other)) == list(range(sent))
            assert one.lost == other.lost == []

    asyncio.run(main())


def test_where_a_router_gives_each_destination_another_port_the_circuit_stays(monkeypatch):
    async def main() -> None:
        async with ends(2, relays=2) as ([relay, observer], [one, other]):
            # On loopback both relays have one host, which would be asked once.
            elsewhere = Multiaddr(f"/ip4/127.0.0.2/tcp/9/p2p/{observer.peer_id}")
            for end in (one, other):
                equip(end, elsewhere)
            monkeypatch.setattr("shoal.reach.punch.AGAIN", 0.01)
            observed = []

            async def observe(address: Multiaddr, port: int) -> Observation:
                observed.append(address)
                return Observation("127.0.0.1", 20000 + len(observed), port)

            monkeypatch.setattr(one.transport, "observe", observe)
            dialled = []
            monkeypatch.setattr("shoal.reach.punch._open", lambda *a: dialled.append(a))
            await joined(one, other, relay)
            await eventually(lambda: len(observed) >= 2 * punch.TRIES)
            assert await one.ask(other, "through the relay") == "through the relay"
            assert dialled == []

    asyncio.run(main())


@pytest.mark.parametrize(
    ("host", "port"),
    [("127.0.0.1", 80), ("203.0.113.7", 20000), ("224.0.0.1", 20000), ("0.0.0.0", 20000), ("::1", 20000), ("x", 20000)],
)
def test_nobody_is_made_to_dial_what_is_no_router_of_the_asker(host, port):
    async def main() -> None:
        async with ends(2) as ([relay], [one, other]):
            equip(other, relay.address)
            await joined(one, other, relay)
            with pytest.raises(Refused):
                await one.node.call(other.peer_id, PUNCH, Meet(host, port, 0.0, relay.peer_id.key), Meet, timeout=10)

    asyncio.run(main())


def test_who_asks_too_often_is_refused(monkeypatch):
    monkeypatch.setattr("shoal.reach.punch.RATE", Rate(1e-9, 3))

    async def main() -> None:
        async with ends(2) as ([relay], [one, other]):
            equip(other, relay.address)
            await joined(one, other, relay)
            back = Back((str(LOOPBACK.with_port(9)),))
            for _ in range(3):
                with pytest.raises(Refused, match="could not be handled"):
                    await one.node.call(other.peer_id, PUNCH, back, Came, timeout=10)
            with pytest.raises(Refused, match="ask less often"):
                await one.node.call(other.peer_id, PUNCH, back, Came, timeout=10)
            assert await one.ask(other, "unharmed") == "unharmed"

    asyncio.run(main())


def test_dialling_somebody_who_does_not_dial_ends(monkeypatch):
    monkeypatch.setattr("shoal.reach.punch.DIAL_SECONDS", 0.3)

    async def main() -> None:
        async with ends(1) as ([relay], [one]):
            hole = Punch(one.node, one.transport, lambda: [relay.address], lambda: [])
            mapped = await hole._map([relay.address])
            with mapped.holder, pytest.raises(PeerUnreachable, match="lets the other side in"):
                await punch._open(mapped, Meet("127.0.0.1", 20001, 0.0, bytes(32)))

    asyncio.run(main())


def test_a_port_that_is_taken_meanwhile_is_no_defect(monkeypatch, caplog):
    async def taken(*_: object) -> socket.socket:
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))

    monkeypatch.setattr(punch, "_open", taken)

    async def main() -> None:
        async with ends(2) as ([relay], [one, other]):
            equip(other, relay.address)
            await joined(one, other, relay)
            meet = Meet("127.0.0.1", 20000, 0.0, relay.peer_id.key)
            assert isinstance(await one.node.call(other.peer_id, PUNCH, meet, Meet, timeout=10), Meet)
            await asyncio.sleep(0.05)

    asyncio.run(main())
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_two_peers_behind_one_router_meet_where_they_listen_inside():
    """No hole leads from a network into itself: few routers send back in what comes from inside."""

    async def main() -> None:
        async with ends(2) as ([relay], [one, other]):
            await one.node.listen(LOOPBACK)
            for end in (one, other):
                equip(end, relay.address)
            await joined(one, other, relay)
            await eventually(lambda: other.route(one) == "Direct" and relay.relay.numbers[2] == 0)
            assert await one.ask(other, "in one house") == "in one house"
            assert one.lost == other.lost == []

    asyncio.run(main())


def test_peers_that_name_one_host_together_have_it_dialled_no_more_often_than_one(monkeypatch):
    monkeypatch.setattr("shoal.reach.punch.RATE", Rate(1e-9, 3))
    monkeypatch.setattr("shoal.reach.punch.DIAL_SECONDS", 0.1)

    async def main() -> None:
        async with ends(3) as ([relay], [one, two, other]):
            equip(other, relay.address)
            victim = Meet("127.0.0.1", 20001, 0.0, relay.peer_id.key)
            for end in (one, two):
                await joined(end, other, relay)
            for end in (one, two, one):
                await end.node.call(other.peer_id, PUNCH, victim, Meet, timeout=10)
            with pytest.raises(Refused, match="dialled too often"):
                await two.node.call(other.peer_id, PUNCH, victim, Meet, timeout=10)

    asyncio.run(main())


@pytest.mark.parametrize(("seen", "told"), [("52.20.7.1", "192.168.1.1"), ("192.168.1.1", "52.20.7.1")])
def test_a_peer_elsewhere_has_nobody_dial_into_a_home_network(monkeypatch, seen, told):
    async def main() -> None:
        async with ends(2) as ([relay], [one, other]):
            equip(other, relay.address)
            await joined(one, other, relay)

            async def observe(_address: Multiaddr, port: int) -> Observation:
                return Observation(seen, 20001, port)

            monkeypatch.setattr(other.transport, "observe", observe)
            with pytest.raises(Refused, match="can't be dialled from here"):
                await one.node.call(other.peer_id, PUNCH, Meet(told, 20002, 0.0, relay.peer_id.key), Meet, timeout=10)

    asyncio.run(main())


def test_a_node_that_sees_the_peer_come_by_ipv6_says_nothing_of_its_ports_of_ipv4(monkeypatch):
    async def main() -> None:
        async with ends(1, relays=2) as ([relay, second], [one]):
            seen = {relay.peer_id: Observation("52.20.7.1", 20001, 0), second.peer_id: Observation("2a05::1", 20002, 0)}

            async def observe(address: Multiaddr, port: int) -> Observation:
                assert address.peer_id is not None
                return seen[address.peer_id]

            monkeypatch.setattr(one.transport, "observe", observe)
            hole = Punch(one.node, one.transport, lambda: [second.address], lambda: [])
            mapped = await hole._map([relay.address])
            mapped.holder.close()
            assert mapped.seen.host == "52.20.7.1"

    asyncio.run(main())

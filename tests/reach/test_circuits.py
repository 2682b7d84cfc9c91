"""Peers that nobody can dial reach each other through a relay: links and lanes, encrypted end to end."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from types import SimpleNamespace

import pytest

from shoal.p2p.errors import HandshakeFailed, PeerUnreachable
from shoal.p2p.identity import Identity
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.quota import Rate
from shoal.p2p.sealing import NAME_BYTES
from shoal.reach import circuits, ledger
from shoal.reach.messages import CIRCUIT, RELAY, Circuit, Incoming, Opened, Reserved
from tests.p2p.recorder import eventually
from tests.reach.ends import CHAT, End, Said, ends, joined

MIB = 1 << 20


def name(number: int) -> bytes:
    return number.to_bytes(NAME_BYTES, "big")


def test_two_peers_that_do_not_listen_talk_through_a_relay():
    async def main() -> None:
        async with ends(2) as ([relay], [one, other]):
            await joined(one, other, relay)
            assert [str(a) for a in other.circuits.addresses] == [f"{relay.address}/p2p-circuit/p2p/{other.peer_id}"]
            assert await one.ask(other, "hello") == "hello"
            assert await other.ask(one, "hello to you") == "hello to you"
            assert relay.relay.numbers == (1, 0, 1)
            assert one.lost == other.lost == []

    asyncio.run(main())


@pytest.mark.parametrize("back", [False, True])
def test_large_buffers_pass_over_a_lane_that_is_a_circuit_of_its_own(back):
    async def main() -> None:
        async with ends(2) as ([relay], [one, other]):
            await joined(one, other, relay)
            sender, receiver = (other, one) if back else (one, other)
            data = [os.urandom(MIB) for _ in range(8)]
            for number, chunk in enumerate(data):
                sender.node.notify([receiver.peer_id], CHAT, Said(str(number)), [chunk], name(number))
            await eventually(lambda: len(receiver.heard) == 8)
            assert sorted((int(text), bytes(buffer)) for _, text, [buffer] in receiver.heard) == list(enumerate(data))
            assert relay.relay.numbers[2] == 2
            assert relay.relay.splicer.passed > 8 * MIB

    asyncio.run(main())


def test_what_passes_the_relay_is_not_to_be_read_there(monkeypatch):
    async def main() -> None:
        async with ends(2) as ([relay], [one, other]):
            seen = []
            splice = os.splice

            def spy(source, sink, count, **options):
                moved = splice(source, sink, count, **options)
                if os.fstat(sink).st_mode & 0o170000 == 0o010000:  # a pipe: look at what is in it
                    copy = os.pipe2(os.O_NONBLOCK)
                    data = os.read(source_pipe[sink], moved) if moved else b""
                    seen.append(data)
                    os.write(sink, data)
                    for descriptor in copy:
                        os.close(descriptor)
                return moved

            source_pipe: dict[int, int] = {}
            pipe2 = os.pipe2

            def pipe(flags):
                made = pipe2(flags)
                source_pipe[made[1]] = made[0]
                return made

            monkeypatch.setattr("os.pipe2", pipe)
            monkeypatch.setattr("os.splice", spy)
            await joined(one, other, relay)
            secret = os.urandom(MIB)
            one.node.notify([other.peer_id], CHAT, Said("a secret word"), [secret], name(1))
            await one.ask(other, "another secret word")
            await eventually(lambda: len(other.heard) == 2)
            passed = b"".join(seen)
            assert len(passed) > MIB
            assert b"secret word" not in passed
            assert not any(secret[at : at + 16] in passed for at in range(0, MIB, 4096))

    asyncio.run(main())


def test_a_direct_address_is_tried_first():
    async def main() -> None:
        async with ends(2) as ([relay], [one, other]):
            await other.use(relay)
            direct = await other.node.listen(Multiaddr("/ip4/127.0.0.1/tcp/0"))
            one.node.learn(other.peer_id, [*other.circuits.addresses, direct])
            await one.node.connect(other.peer_id)
            assert one.route(other) == "NoneType"
            assert relay.relay.numbers[1:] == (0, 0)

    asyncio.run(main())


def test_a_relay_is_a_peer_as_others_are_and_needs_no_circuit():
    async def main() -> None:
        async with ends(1) as ([relay], [one]):
            await one.use(relay)
            assert await relay.ask(one, "hello") == "hello"
            relay.node.learn(one.peer_id, one.circuits.addresses)
            await relay.node.connect(one.peer_id)
            assert relay.relay.numbers[1:] == (0, 0)

    asyncio.run(main())


def test_who_has_no_reservation_is_not_led_to():
    async def main() -> None:
        async with ends(2) as ([relay], [one, other]):
            address = relay.address.by_relay(other.peer_id)
            one.node.learn(other.peer_id, [address])
            with pytest.raises(PeerUnreachable, match="that peer has no reservation here"):
                await one.node.connect(other.peer_id)
            await joined(one, other, relay)
            with pytest.raises(PeerUnreachable, match="that peer has no reservation here"):
                await other.transport.dial(relay.address.by_relay(other.peer_id))

    asyncio.run(main())


def test_a_node_that_does_not_relay_says_so_and_is_not_asked_again():
    async def main() -> None:
        async with ends(2) as ([relay], [one, other]):
            address = await other.node.listen(Multiaddr("/ip4/127.0.0.1/tcp/0"))
            one.node.learn(other.peer_id, [address])
            await one.node.connect(other.peer_id)
            one.relays = [other.peer_id]
            assert not await one.circuits.reserve()
            assert one.circuits.addresses == []
            with pytest.raises(PeerUnreachable, match="unknown service"):
                await relay.transport.dial(address.by_relay(one.peer_id))

    asyncio.run(main())


def test_a_process_without_descriptors_left_reaches_nobody_and_no_more(monkeypatch):
    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    async def main() -> None:
        async with ends(1) as ([relay], [peer]):
            without = SimpleNamespace(socket=none_left, AF_INET=socket.AF_INET, AF_INET6=socket.AF_INET6)
            monkeypatch.setattr(circuits, "socket", without)
            with pytest.raises(PeerUnreachable, match="Too many open files"):
                await circuits.connect(peer.transport, [relay.address], bytes(32))

    asyncio.run(main())


def test_a_relay_that_was_lost_as_it_answered_is_none(monkeypatch):
    async def main() -> None:
        async with ends(1) as ([relay], [peer]):

            async def call(*_: object, **__: object) -> Reserved:
                return Reserved(600.0)

            monkeypatch.setattr(peer.node, "call", call)
            peer.node.learn(relay.peer_id, [relay.address])
            await peer.circuits._ask(relay.peer_id)
            assert not peer.circuits._reserved

    asyncio.run(main())


def test_relays_that_do_not_answer_hold_up_no_start(monkeypatch):
    monkeypatch.setattr(circuits, "ASK_TIMEOUT", 1.0)

    async def main() -> None:
        async with ends(1, relays=circuits.MAX_RELAYS + 1) as (relays, [peer]):

            async def silent(*_: object) -> None:
                await asyncio.sleep(60)

            for relay in relays[:-1]:
                relay.node.stop_serving(RELAY)
                relay.node.serve(RELAY, silent)
            async with asyncio.timeout(2):
                await peer.use(*relays, *relays)
            assert {address.relay for address in peer.circuits.addresses} == {relays[-1].peer_id}

    asyncio.run(main())


def test_a_relay_that_leads_to_somebody_else_is_found_out(monkeypatch):
    async def main() -> None:
        async with ends(3) as ([relay], [one, other, impostor]):
            await impostor.use(relay)
            await other.use(relay)
            notify = relay.node.notify

            def lead_astray(peers, service, message, *rest):
                astray = service is CIRCUIT and peers == [other.peer_id]
                notify([impostor.peer_id] if astray else peers, service, message, *rest)

            monkeypatch.setattr(relay.node, "notify", lead_astray)
            one.node.learn(other.peer_id, other.circuits.addresses)
            with pytest.raises(HandshakeFailed, match="cannot prove to be that peer"):
                await one.node.connect(other.peer_id)

    asyncio.run(main())


def test_a_circuit_whose_other_end_never_comes_ends(monkeypatch):
    monkeypatch.setattr("shoal.reach.relay.TOKEN_SECONDS", 0.2)

    async def main() -> None:
        async with ends(2) as ([relay], [one, other]):
            await other.use(relay)
            other.node.stop_serving(CIRCUIT)
            one.node.learn(other.peer_id, other.circuits.addresses)
            with pytest.raises(PeerUnreachable):
                await one.node.connect(other.peer_id)
            assert relay.relay.numbers == (1, 0, 0)

    asyncio.run(main())


def test_a_flood_of_incoming_circuits_is_bounded_and_from_others_it_is_nothing(monkeypatch):
    monkeypatch.setattr(circuits, "MAX_COMING", 3)

    async def main() -> None:
        async with ends(2) as ([relay], [one, other]):
            came = []

            async def connect(transport, addresses, token):
                came.append(token)
                await asyncio.sleep(30)

            await other.use(relay)
            monkeypatch.setattr(circuits, "connect", connect)
            await relay.ask(one, "x") if relay.node.is_connected(one.peer_id) else None
            for number in range(10):
                token = bytes([1]) + bytes(30) + bytes([number])
                relay.node.notify([other.peer_id], CIRCUIT, Incoming(token, one.peer_id.key))
            await relay.ask(other, "after them")
            assert len(came) == 3

    asyncio.run(main())


def test_a_token_is_good_once():
    async def main() -> None:
        async with ends(2) as ([relay], [one, other]):
            await joined(one, other, relay)
            tokens = []
            came = relay.transport.on_circuit

            def on_circuit(connection, token):
                tokens.append(token)
                came(connection, token)

            relay.transport.on_circuit = on_circuit
            one.node.disconnect(other.peer_id, "to dial anew")
            await eventually(lambda: not other.node.is_connected(one.peer_id))
            await one.node.connect(other.peer_id)
            assert len(set(tokens)) == 1
            assert len(tokens) == 2
            reader, writer = await asyncio.open_connection(relay.address.host, relay.address.port)
            writer.write(tokens[0])
            async with asyncio.timeout(10):
                assert await reader.read() == b""
            writer.close()
            assert await one.ask(other, "unharmed") == "unharmed"

    asyncio.run(main())


def test_when_the_relay_is_lost_so_is_the_peer_and_another_relay_leads_there_at_once():
    async def main() -> None:
        async with ends(2, relays=2) as ([first, second], [one, other]):
            await joined(one, other, first)
            other.relays.append(second.peer_id)
            other.node.learn(second.peer_id, [second.address])
            await other.node.connect(second.peer_id)
            told: list[list[Multiaddr]] = []
            other.circuits.on_change = lambda: told.append(other.circuits.addresses)
            await first.close()
            async with asyncio.timeout(5):
                await eventually(lambda: other.peer_id in one.lost and one.peer_id in other.lost)
                await eventually(lambda: [a.relay for a in other.circuits.addresses] == [second.peer_id])
                assert told == [other.circuits.addresses], "not that nobody leads there, meanwhile"
                one.node.learn(other.peer_id, other.circuits.addresses)
                assert await one.ask(other, "again") == "again"

    asyncio.run(main())


def test_two_dials_at_once_use_one_link():
    async def main() -> None:
        async with ends(2) as ([relay], [one, other]):
            for end in (one, other):
                await end.use(relay)
            one.node.learn(other.peer_id, other.circuits.addresses)
            other.node.learn(one.peer_id, one.circuits.addresses)
            await asyncio.gather(one.node.connect(other.peer_id), other.node.connect(one.peer_id))
            assert list(await asyncio.gather(one.ask(other, "a"), other.ask(one, "b"))) == ["a", "b"]
            await eventually(lambda: relay.relay.numbers[2] == 1)
            assert one.lost == other.lost == []

    asyncio.run(main())


def test_upload_limits_hold_through_a_relay():
    async def main() -> None:
        async with ends(2) as ([relay], [_, other]):
            one = End(upload_limit=2 * MIB)
            try:
                await joined(one, other, relay)
                started = asyncio.get_running_loop().time()
                for number in range(3):
                    one.node.notify([other.peer_id], CHAT, Said(str(number)), [bytes(MIB)], name(number))
                await eventually(lambda: len(other.heard) == 3)
                assert asyncio.get_running_loop().time() - started > 1.0
                assert one.transport.moved(other.peer_id) > 2 * MIB
            finally:
                await one.close()

    asyncio.run(main())


def test_the_relays_bandwidth_is_shared_and_not_exceeded():
    async def main() -> None:
        async with ends(3, bandwidth=4 * MIB) as ([relay], [one, two, other]):
            await joined(one, other, relay)
            await joined(two, other, relay)
            started = asyncio.get_running_loop().time()
            for number in range(3):
                for end in (one, two):
                    end.node.notify([other.peer_id], CHAT, Said(str(number)), [bytes(MIB)], name(number))
            await eventually(lambda: len(other.heard) == 6)
            assert asyncio.get_running_loop().time() - started > 1.0
            last = {peer: at for at, (peer, *_) in enumerate(other.heard)}
            assert min(last.values()) >= 3  # both had their turns

    asyncio.run(main())


def test_many_circuits_of_one_peer_and_many_that_wait_are_refused_and_others_are_served(monkeypatch):
    monkeypatch.setattr(ledger, "CIRCUITS_PER_PAIR", 1000)

    async def main() -> None:
        async with ends(4) as ([relay], [one, two, other, hostile]):
            await other.use(relay)
            await hostile.node.connect(relay.peer_id) if hostile.node.known_addresses(relay.peer_id) else None
            hostile.node.learn(relay.peer_id, [relay.address])
            answers = await asyncio.gather(
                *(
                    hostile.node.call(relay.peer_id, RELAY, Circuit(other.peer_id.key), Opened, timeout=10)
                    for _ in range(100)
                ),
                return_exceptions=True,
            )
            assert sum(isinstance(answer, Opened) for answer in answers) == ledger.WAITING_PER_PEER
            for end in (one, two):
                end.node.learn(other.peer_id, other.circuits.addresses)
                assert await end.ask(other, "served") == "served"

    asyncio.run(main())


def test_addresses_through_a_relay():
    relay, peer = Identity().peer_id, Identity().peer_id
    address = Multiaddr(f"/ip4/203.0.113.7/tcp/31337/p2p/{relay}/p2p-circuit/p2p/{peer}")
    assert (address.host, address.port, address.relay, address.peer_id) == ("203.0.113.7", 31337, relay, peer)
    assert Multiaddr(str(address)) == address
    assert Multiaddr(str(address.with_peer(None))).with_peer(peer) == address
    assert address.of_relay() == Multiaddr(f"/ip4/203.0.113.7/tcp/31337/p2p/{relay}")
    assert address.of_relay().by_relay(peer) == address
    assert address.decapsulate(f"/p2p/{peer}") == address.with_peer(None)
    assert address.decapsulate(f"/p2p-circuit/p2p/{peer}") == address.of_relay()
    assert address.value_for_protocol("p2p") == str(peer)
    assert address.value_for_protocol("p2p-circuit") == ""
    for wrong in (
        "/p2p-circuit",
        f"/p2p-circuit/p2p/{peer}",
        f"/p2p/{relay}/p2p-circuit/p2p",
        f"/p2p/{relay}/p2p/{peer}",
    ):
        with pytest.raises(ValueError, match="is not an address"):
            Multiaddr(f"/ip4/203.0.113.7/tcp/31337{wrong}")
    for neither in (address, address.of_relay().with_peer(None)):
        with pytest.raises(ValueError, match="is not the address of a relay"):
            neither.by_relay(peer)
    with pytest.raises(ValueError, match="does not lead through a relay"):
        address.of_relay().of_relay()


def test_a_relay_that_grants_moments_is_not_asked_without_a_pause(monkeypatch):
    async def main() -> None:
        async with ends(1) as ([relay], [one]):
            asked: list[None] = []

            def reserve(*_: object) -> float:
                asked.append(None)
                return 1e-9

            monkeypatch.setattr(relay.relay._ledger, "reserve", reserve)
            await one.use(relay)
            await asyncio.sleep(0.3)
            assert len(asked) == 1

    asyncio.run(main())


def test_a_relay_has_a_peer_open_so_many_connections_and_no_more(monkeypatch):
    """A relay says itself where it listens, and may name anybody."""
    monkeypatch.setattr(circuits, "COMING", Rate(1e-9, 5))

    async def main() -> None:
        async with ends(2) as ([relay], [one, other]):
            came = []

            async def connect(transport, addresses, token):
                came.append(token)
                raise PeerUnreachable("nobody is there")

            await other.use(relay)
            monkeypatch.setattr(circuits, "connect", connect)
            for number in range(20):
                token = bytes([1]) + bytes(30) + bytes([number])
                relay.node.notify([other.peer_id], CIRCUIT, Incoming(token, one.peer_id.key))
                await relay.ask(other, "after it")
            assert len(came) == 5

    asyncio.run(main())

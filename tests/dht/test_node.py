"""One node of the DHT: what it stores and finds, how it joins, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec
import pytest

from shoal.dht.messages import SERVICE, Find, Found, KnownPeer, Ping, Pong, Sender, Store, Stored
from shoal.dht.node import DHTNode
from shoal.dht.records import DHTRecord, encode_key, encode_value, key_id
from shoal.dht.validation import SchemaValidator, owner_marker
from shoal.p2p.errors import PeerUnreachable, Refused
from shoal.p2p.identity import Identity, PeerID
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.node import Node
from shoal.simulation.clock import run
from shoal.simulation.world import World
from tests.dht.swarms import close, join, swarm, value_of

ME = Sender(False, ("/ip4/10.9.9.9/tcp/9",))
CLIENT = Sender(True, ())


def test_a_lone_node_finds_what_it_stored() -> None:
    async def scenario() -> None:
        world = World(0)
        dht = await join(world)
        assert await dht.get("key") is None
        assert await dht.store("key", {"a": [1, 2.5, b"x", None]}, world.wall_clock() + 10)
        found = await dht.get("key")
        assert found is not None
        assert found.value == {"a": [1, 2.5, b"x", None]}
        assert found.expiration_time == world.wall_clock() + 10
        await asyncio.sleep(10)
        assert await dht.get("key") is None
        await close([dht])

    run(scenario())


def test_the_newer_value_stays() -> None:
    async def scenario() -> None:
        world = World(1)
        one, other = await swarm(world, 2)
        now = world.wall_clock()
        assert await one.store("key", "new", now + 20)
        assert not await other.store("key", "old", now + 10)
        assert not await other.store("key", "expired", now - 1)
        assert await value_of(one, "key") == "new"
        assert await other.store("key", "newest", now + 30)
        assert await value_of(one, "key") == "newest"
        await close([one, other])

    run(scenario())


def test_many_at_once() -> None:
    async def scenario() -> None:
        world = World(2)
        nodes = await swarm(world, 5)
        now = world.wall_clock()
        keys, values = [f"key {index}" for index in range(100)], list(range(100))
        assert await nodes[0].store_many(keys, values, now + 60) == dict.fromkeys(keys, True)
        assert await nodes[1].store_many(
            ["d", "d", "v"], [1, 2, 3], [now + 1, now - 1, now + 3], ["a", b"b", None]
        ) == {
            ("d", "a"): True,
            ("d", b"b"): False,
            "v": True,
        }
        found = await nodes[2].get_many([*keys, "nothing"])
        assert [one and one.value for one in found.values()] == [*values, None]
        with pytest.raises(ValueError, match="equally many"):
            await nodes[0].store_many(["a"], [1, 2], now)
        await close(nodes)

    run(scenario())


def test_what_was_found_is_cached_until_the_latest_is_asked_for() -> None:
    async def scenario() -> None:
        world = World(3)
        nodes = await swarm(world, 12, num_replicas=3)
        now = world.wall_clock()
        assert await nodes[0].store("key", "old", now + 50)
        reader = next(dht for dht in nodes[1:] if not dht.storage.key_ids())
        assert await value_of(reader, "key", latest=False) == "old"
        assert await nodes[0].store("key", "new", now + 100)
        heard = len(world.trace)
        assert await value_of(reader, "key", latest=False) == "old"
        assert len(world.trace) == heard  # not a message
        assert await value_of(reader, "key") == "new"
        assert await value_of(reader, "key", latest=False) == "new"
        await close(nodes)

    run(scenario())


def test_what_was_found_is_copied_to_the_nearest_node_without_it() -> None:
    async def scenario() -> None:
        world = World(15)
        nodes = await swarm(world, 6, num_replicas=5)
        assert await nodes[0].store("key", 1, world.wall_clock() + 50)
        lacks = next(dht for dht in nodes if dht.storage.key_ids())
        lacks.storage.retain(lambda _record: False)
        lacks.cache.retain(lambda _record: False)
        reader = next(dht for dht in nodes if dht is not lacks)
        assert await value_of(reader, "key") == 1
        await asyncio.sleep(1)
        assert lacks.cache.key_ids()
        assert not lacks.storage.key_ids()
        await close(nodes)

    run(scenario())


# -- joining


def test_joining_by_addresses_where_nobody_answers_names_each_and_why() -> None:
    async def scenario() -> None:
        world = World(4)
        there = await join(world)
        wrong = there.visible_addresses()[0].with_peer(Identity().peer_id)
        nobody = Multiaddr("/ip4/10.1.1.1/tcp/1").with_peer(Identity().peer_id)
        dht = DHTNode(await world.spawn_node(), clock=world.wall_clock)
        with pytest.raises(PeerUnreachable) as error:
            await dht.bootstrap([wrong, nobody], timeout=5)
        for address, reason in ((wrong, "another peer answers"), (nobody, "nobody answers")):
            assert f"\n  {address}: " in str(error.value)
            assert reason in str(error.value)
        await close([there, dht])

    run(scenario())


def test_joining_through_one_of_several_does_not_wait_for_the_silent() -> None:
    async def scenario() -> None:
        world = World(5, lost_after=3600)
        nodes = await swarm(world, 3)
        dht = DHTNode(await world.spawn_node(), clock=world.wall_clock)
        silent = await world.spawn_node()
        silent.serve(SERVICE, lambda *_: asyncio.sleep(3600))
        start = asyncio.get_running_loop().time()
        await dht.bootstrap([*silent.addresses, *nodes[0].visible_addresses()], timeout=10)
        assert asyncio.get_running_loop().time() - start < 3
        assert all(dht.table.is_alive(other.peer_id) for other in nodes)
        await close([*nodes, dht])

    run(scenario())


def test_joining_ends_in_bounded_time() -> None:
    async def scenario() -> None:
        world = World(6)
        silent = await world.spawn_node()
        silent.serve(SERVICE, lambda *_: asyncio.sleep(3600))
        dht = DHTNode(await world.spawn_node(), clock=world.wall_clock)
        start = asyncio.get_running_loop().time()
        with pytest.raises(PeerUnreachable, match="no answer within 5 s"):
            await dht.bootstrap(silent.addresses, timeout=5)
        assert asyncio.get_running_loop().time() - start < 5.1
        await close([dht])

    run(scenario())


def test_own_address_among_the_initial_peers_is_passed_over_and_one_without_peer_refused() -> None:
    async def scenario() -> None:
        world = World(7)
        dht = DHTNode(await world.spawn_node(), clock=world.wall_clock)
        await dht.bootstrap(dht.visible_addresses())
        nobody = Multiaddr("/ip4/10.1.1.1/tcp/1").with_peer(Identity().peer_id)
        with pytest.raises(PeerUnreachable, match="nobody answers"):
            await dht.bootstrap([*dht.visible_addresses(), nobody])
        with pytest.raises(ValueError, match="/p2p/<peer id>"):
            await dht.bootstrap(["/ip4/10.1.1.1/tcp/1"])
        await close([dht])

    run(scenario())


# -- what it refuses


async def raw_peer(world: World, dht: DHTNode) -> Node:
    """A peer that says to `dht` whatever a test wants."""
    node = await world.spawn_node()
    node.learn(dht.peer_id, dht.visible_addresses())
    return node


def record(key: str, subkey: str | None, value: object, expiration: float) -> DHTRecord:
    return DHTRecord(encode_key(key), encode_key(subkey) if subkey else b"", encode_value(value), expiration)


def test_a_record_that_would_stay_for_more_than_a_day_is_not_kept() -> None:
    async def scenario() -> None:
        world = World(12)
        dht = await join(world)
        peer = await raw_peer(world, dht)
        now = world.wall_clock()
        records = [record("key", str(hours), 1, now + 3600 * hours) for hours in (1, 24, 25, 1000)]
        reply = await peer.call(dht.peer_id, SERVICE, Store(Sender(True, ()), records, False), Stored, timeout=5)
        assert reply.kept == [True, True, False, False]
        with pytest.raises(ValueError, match="at most one day"):
            await dht.store("key", 1, now + 90000)
        await close([dht])

    run(scenario())


def test_a_peer_that_comes_and_goes_does_not_have_all_keys_looked_at_each_time() -> None:
    """It needs to say no more than that it is a client, and that it is none."""

    async def scenario() -> None:
        world = World(13)
        dht = await join(world)
        peer = await raw_peer(world, dht)
        for number in range(1000):
            assert dht.storage.store(record(f"key {number}", None, 1, world.wall_clock() + 600), world.wall_clock())
        looks: list[PeerID] = []
        joined = dht._replication.joined

        def counted(peer: PeerID) -> list[int]:
            looks.append(peer)
            return joined(peer)

        dht._replication.joined = counted  # type: ignore[method-assign]
        here = tuple(str(address).partition("/p2p/")[0] for address in peer.addresses)
        await peer.connect(dht.peer_id)
        for _ in range(200):
            for sender in (Sender(True, ()), Sender(False, here)):
                peer.notify([dht.peer_id], SERVICE, Ping(sender))
        await asyncio.sleep(0.05)
        assert 1 <= len(looks) <= 10
        await close([dht])

    run(scenario())


def test_a_forged_subkey_is_refused_by_who_should_store_it() -> None:
    async def scenario() -> None:
        world = World(8)
        one, other = await swarm(world, 2)
        mine, expiration = owner_marker(one.peer_id), world.wall_clock() + 100
        assert await one.store("members", "true", expiration, subkey=mine)
        assert not await other.store("members", "false", expiration + 1, subkey=mine)
        forger = await raw_peer(world, one)
        forged = [record("members", mine, "false", expiration + 1), record("members", "free", "x", expiration)]
        reply = await forger.call(one.peer_id, SERVICE, Store(CLIENT, forged, False), Stored, timeout=5)
        assert reply.kept == [False, True]
        found = await value_of(other, "members")
        assert {subkey: member.value for subkey, member in found.items()} == {mine: "true", "free": "x"}
        await close([one, other])

    run(scenario())


def test_what_a_lying_node_serves_is_not_found() -> None:
    async def scenario() -> None:
        world = World(9)
        one = await join(world)
        mine, expiration = owner_marker(one.peer_id), world.wall_clock() + 100
        lies = [
            record("members", mine, "forged", expiration),
            record("another key", None, "not asked for", expiration + 100),
            record("members", "expired", "x", expiration - 200),
            DHTRecord(encode_key("members"), encode_key("garbage"), b"\xc1", expiration),
            DHTRecord(encode_key("members"), b"\xc1", encode_value("x"), expiration),
            DHTRecord(encode_key("members"), encode_key("deep"), b"\x91" * 60_000 + b"\xc0", expiration),
        ]
        liar = await raw_peer(world, one)

        def lie(_peer: PeerID, message: msgspec.Struct, _buffers: Sequence[memoryview]) -> msgspec.Struct:
            return (
                Found([KnownPeer(bytes(range(32)), ("not an address",))], lies)
                if isinstance(message, Find)
                else Pong(ME)
            )

        liar.serve(SERVICE, lie)
        await liar.call(one.peer_id, SERVICE, Ping(Sender(False, tuple(map(str, liar.addresses)))), Pong, timeout=5)
        assert one.table.is_alive(liar.peer_id)
        assert await one.get("members", latest=True) is None
        assert await one.get("not even told of") is None
        lies.append(record("members", "honest", 1, expiration))
        assert list(await value_of(one, "members", latest=False)) == ["honest"]
        await close([one])

    run(scenario())


@pytest.mark.parametrize(
    "message",
    [
        Find(CLIENT, bytes(31), True),
        Store(CLIENT, [DHTRecord(b"", b"", b"", 1.0)], False),
        Store(CLIENT, [DHTRecord(b"k", b"", bytes(70_000), 1.0)], False),
        Store(CLIENT, [DHTRecord(b"k", b"", b"", float("nan"))], False),
        Store(CLIENT, [DHTRecord(b"k", b"", b"", float("inf"))], False),
        Store(CLIENT, [DHTRecord(b"k", b"", b"", 1.0)] * 257, False),
        Ping(Sender(False, ("/ip4/1.1.1.1/tcp/1",) * 9)),
        Pong(CLIENT),
    ],
    ids=["short id", "empty key", "large value", "nan", "inf", "too many", "too many addresses", "reply"],
)
def test_messages_out_of_bounds_are_refused(message: msgspec.Struct) -> None:
    async def scenario() -> None:
        world = World(10)
        dht = await join(world)
        node = await raw_peer(world, dht)
        with pytest.raises(Refused, match=r"not a message|not a request"):
            await node.call(dht.peer_id, SERVICE, message, Pong, timeout=5)
        assert await node.call(dht.peer_id, SERVICE, Ping(CLIENT), Pong, timeout=5)
        assert not dht.storage.key_ids()
        await close([dht])

    run(scenario())


def test_clients_and_senders_without_an_address_of_their_own_are_not_passed_on() -> None:
    async def scenario() -> None:
        world = World(11)
        dht = await join(world)
        node = await raw_peer(world, dht)
        others = str(Multiaddr("/ip4/10.9.9.9/tcp/9").with_peer(Identity().peer_id))
        for addresses in ((), ("nonsense",), (others,), ("/ip4/10.9.9.9/tcp/0",)):
            await node.call(dht.peer_id, SERVICE, Ping(Sender(False, addresses)), Pong, timeout=5)
            assert dht.table.get(node.peer_id) is None
        await node.call(dht.peer_id, SERVICE, Ping(ME), Pong, timeout=5)
        assert dht.table.is_alive(node.peer_id)
        await node.call(dht.peer_id, SERVICE, Ping(Sender(True, ME.addresses)), Pong, timeout=5)
        assert dht.table.get(node.peer_id) is None
        await close([dht])

    run(scenario())


def test_an_address_that_others_name_does_not_replace_a_peers_own() -> None:
    async def scenario() -> None:
        world = World(12)
        one, other = await swarm(world, 2)
        one.node.transport.disconnect(other.peer_id)
        assert await one._protocol.ask(other.peer_id, ("/ip4/10.6.6.6/tcp/6",), Ping(CLIENT), Pong)
        await close([one, other])

    run(scenario())


def test_validators_that_are_added_hold_from_then_on() -> None:
    async def scenario() -> None:
        world = World(13)
        one, other = await swarm(world, 2)
        expiration = world.wall_clock() + 100
        assert await one.store("number", "not one", expiration)
        assert await one.store("free", "text", expiration)
        one.add_validators([SchemaValidator({"number": int})])
        assert one.storage.key_ids() == [key_id(encode_key("free"))]
        assert await one.get("number", latest=True) is None  # the other node has it, but it is not valid here
        assert not await one.store("number", "text", expiration + 1)
        assert await one.store("number", 5, expiration + 1)
        assert await value_of(other, "number") == 5
        await close([one, other])

    run(scenario())


def test_a_closed_node_serves_no_longer() -> None:
    async def scenario() -> None:
        world = World(14)
        dht = await join(world)
        node = await raw_peer(world, dht)
        await dht.close()
        with pytest.raises(Refused, match="unknown service"):
            await node.call(dht.peer_id, SERVICE, Ping(CLIENT), Pong, timeout=5)
        await close([dht])

    run(scenario())

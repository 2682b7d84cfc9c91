"""One identity can't have a node of the DHT do more than its share, and honest peers notice nothing of that."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from shoal.dht.messages import SERVICE, Sender, Store, Stored
from shoal.dht.node import DHTNode
from shoal.dht.records import DHTRecord, make_record
from shoal.dht.storage import MAX_OWNED_RECORDS, LocalStorage
from shoal.dht.validation import SignatureValidator, owner_marker
from shoal.p2p.errors import Refused
from shoal.p2p.identity import Identity
from shoal.p2p.node import Node
from shoal.p2p.quota import MAX_IDENTITIES, Quota, Rate
from shoal.simulation.clock import run
from shoal.simulation.world import World
from tests.dht.swarms import close, join, swarm, value_of

CLIENT = Sender(True, ())


def own(identity: Identity, number: int, until: float, value: str = "x") -> DHTRecord:
    """A record that `identity` has signed, under a key of its own."""
    signer = SignatureValidator(identity)
    record = make_record(f"key {number}", value, until, owner_marker(identity.peer_id), until)
    return msgspec.structs.replace(record, value=signer.sign_value(record))


async def send(world: World, to: DHTNode, records: list[DHTRecord], peer: Node | None = None) -> list[bool]:
    """What `to` keeps of records that a peer (a new one, if none is given) sends it, in one message."""
    peer = peer or await world.spawn_node()
    peer.learn(to.peer_id, to.node.addresses)
    stored = await peer.call(to.peer_id, SERVICE, Store(CLIENT, records, False), Stored, timeout=5)
    return stored.kept


def test_a_quota_is_used_up_and_comes_back() -> None:
    quota = Quota(Rate(per_second=2, at_once=10))
    assert all(quota.use("a", 5, 100.0) for _ in range(2))
    assert not quota.use("a", 1, 100.0)
    assert not quota.use("a", 1, 100.4)
    assert quota.use("a", 1, 100.5)
    assert quota.use("b", 10, 100.5), "others have their own"
    assert quota.allows("a", 10, 200.0)
    assert not quota.allows("a", 11, 200.0)


def test_a_quota_remembers_a_bounded_number_of_identities() -> None:
    quota = Quota(Rate(1, 1))
    for number in range(MAX_IDENTITIES + 1):
        assert quota.use(number, 1, 0.0)
    assert quota.use(0, 1, 0.0), "the quietest is forgotten"
    assert not quota.use(MAX_IDENTITIES, 1, 0.0)


def test_a_peer_that_stores_too_much_is_refused_and_others_are_not() -> None:
    async def scenario() -> None:
        world = World(1)
        one, other = await swarm(world, 2)
        greedy, until = await world.spawn_node(), world.wall_clock() + 1000
        batch = [make_record(f"key {number}", "x", until, None, until) for number in range(256)]
        one._protocol._stored_records = Quota(Rate(per_second=10, at_once=512))
        for _ in range(2):
            assert all(await send(world, one, batch, greedy))
        with pytest.raises(Refused, match="store less"):
            await send(world, one, batch, greedy)
        assert await other.store("honest", 1, until)
        assert await value_of(one, "honest") == 1
        await asyncio.sleep(25.6)
        assert all(await send(world, one, batch, greedy))
        await close([one, other])

    run(scenario())


def test_who_refuses_a_store_is_no_lost_node() -> None:
    async def scenario() -> None:
        world = World(2)
        one, other = await swarm(world, 2)
        one._protocol._stored_records = Quota(Rate(per_second=1, at_once=0))
        assert await other.store("key", "x", world.wall_clock() + 10), "it keeps it itself"
        assert other.table.is_alive(one.peer_id)
        assert not other._protocol.is_blocked(one.peer_id)
        await close([one, other])

    run(scenario())


def test_signatures_are_checked_for_each_peer_up_to_its_quota() -> None:
    async def scenario() -> None:
        world = World(3)
        one = await join(world)
        identity, until = Identity(), world.wall_clock() + 1000
        forged = msgspec.structs.replace(own(identity, 0, until), value=bytes(70))
        liar = await world.spawn_node()
        one._protocol._verified = Quota(Rate(per_second=0.01, at_once=2))
        assert await send(world, one, [forged, own(identity, 1, until), own(identity, 2, until)], liar) == [
            False, True, False,
        ]  # fmt: skip
        assert await send(world, one, [own(identity, 2, until)]) == [True]
        assert await send(world, one, [own(identity, 2, until)] * 256) == [True] * 256, "what is kept costs nothing"
        await close([one])

    run(scenario())


def test_an_owner_has_its_share_whoever_sends_its_records() -> None:
    async def scenario() -> None:
        world = World(4)
        one = await join(world)
        identity, until = Identity(), world.wall_clock() + 1000
        one._protocol._owned = Quota(Rate(per_second=0.01, at_once=2))
        older, newer = own(identity, 1, until), own(identity, 1, until + 1)
        assert await send(world, one, [newer]) == [True]
        assert await send(world, one, [older] * 100) == [False] * 100, "and that costs the owner nothing"
        assert await send(world, one, [own(identity, number, until) for number in (2, 3)]) == [True, False]
        assert await send(world, one, [own(Identity(), 3, until)]) == [True]
        await close([one])

    run(scenario())


def test_an_owner_has_a_bounded_number_of_places() -> None:
    storage, identity = LocalStorage(), Identity()
    marker = owner_marker(identity.peer_id)
    records = [make_record(f"key {n}", "x", 100.0, marker, 0.0) for n in range(MAX_OWNED_RECORDS + 1)]
    assert [storage.store(record, 0.0) for record in records] == [True] * MAX_OWNED_RECORDS + [False]
    assert storage.store(make_record("key 0", "y", 101.0, marker, 0.0), 0.0), "it may replace its own"
    assert storage.store(make_record("key", "z", 1.0, owner_marker(Identity().peer_id), 0.0), 0.0)
    assert storage.store(make_record("key 5", "z", 102.0, None, 0.0), 0.0) is False
    storage.remove_expired(100.5)
    assert storage.store(make_record("key 1", "y", 200.0, marker, 0.0), 100.5), "what has expired makes room"

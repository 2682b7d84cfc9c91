"""A simulated DHT finds what was stored, from every node, as nodes come, go and die."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from shoal.dht.node import DHTNode
from shoal.dht.records import encode_key, key_id, node_id
from shoal.dht.validation import owner_marker
from shoal.simulation.clock import run
from shoal.simulation.world import World
from tests.dht.swarms import close, holders, join, swarm, value_of

KEYS = [f"key {index}" for index in range(24)]


async def store_all(nodes: list[DHTNode], world: World, lifetime: float = 3000.0) -> None:
    for index, key in enumerate(KEYS):
        assert await nodes[index % len(nodes)].store(key, index, world.wall_clock() + lifetime)


async def assert_found_everywhere(nodes: list[DHTNode]) -> None:
    for dht in nodes:
        dht.cache.retain(lambda _record: False)
        for latest in (False, True):
            found = await dht.get_many(KEYS, latest=latest)
            assert [one.value for one in found.values() if one is not None] == list(range(len(KEYS)))


def nearest(nodes: list[DHTNode], key: str, count: int) -> list[DHTNode]:
    return sorted(nodes, key=lambda dht: node_id(dht.peer_id) ^ key_id(encode_key(key)))[:count]


def kill(world: World, nodes: list[DHTNode], count: int) -> None:
    for dht in world.rng.sample(nodes, count):
        world.kill(dht.peer_id)
        nodes.remove(dht)


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_every_key_is_found_from_every_node_also_after_a_third_is_killed_at_once(seed: int) -> None:
    async def scenario() -> None:
        world = World(seed)
        nodes = await swarm(world, 32)
        await store_all(nodes, world)
        await assert_found_everywhere(nodes)
        kill(world, nodes, 10)
        await assert_found_everywhere(nodes)
        await close(nodes)

    run(scenario())


@pytest.mark.long
def test_replicas_are_replaced_so_that_losses_do_not_add_up() -> None:
    async def scenario() -> None:
        world = World(3)
        nodes = await swarm(world, 40, num_replicas=6)
        await store_all(nodes, world)
        for _ in range(5):  # one after another, more than there are replicas of any key
            kill(world, nodes, 6)
            await asyncio.sleep(400)
        await assert_found_everywhere(nodes)
        for key in KEYS:
            assert set(nearest(nodes, key, 6)) <= set(holders(nodes, key))
        await close(nodes)

    run(scenario())


def test_a_lost_replica_is_replaced_within_seconds() -> None:
    async def scenario() -> None:
        world = World(4)
        nodes = await swarm(world, 16, num_replicas=4)
        await store_all(nodes, world)
        kill(world, nodes, 1)
        await asyncio.sleep(3)
        for key in KEYS:
            assert set(nearest(nodes, key, 4)) <= set(holders(nodes, key))
        await close(nodes)

    run(scenario())


def test_a_newcomer_gets_what_it_is_near_to() -> None:
    async def scenario() -> None:
        world = World(5)
        nodes = await swarm(world, 16, num_replicas=4)
        await store_all(nodes, world)
        newcomer = await join(world, initial=nodes[:1], num_replicas=4)
        await asyncio.sleep(3)
        nodes.append(newcomer)
        near = [key for key in KEYS if newcomer in nearest(nodes, key, 4)]
        assert near
        assert all(newcomer in holders(nodes, key) for key in near)
        await close(nodes)

    run(scenario())


@pytest.mark.long
def test_all_of_the_first_nodes_may_leave() -> None:
    async def scenario() -> None:
        world = World(6)
        nodes = await swarm(world, 8, num_replicas=4)
        await store_all(nodes, world)
        for _ in range(8):
            newcomer = await join(world, initial=nodes[-2:], num_replicas=4)
            nodes.append(newcomer)
            await asyncio.sleep(5)
            world.kill(nodes.pop(0).peer_id)
            await asyncio.sleep(60)
        await assert_found_everywhere(nodes)
        await close(nodes)

    run(scenario())


def test_both_sides_of_a_partition_find_back_together() -> None:
    async def scenario() -> None:
        world = World(7)
        nodes = await swarm(world, 12)
        sides = [nodes[:6], nodes[6:]]
        world.partition([[dht.peer_id for dht in side] for side in sides])
        await asyncio.sleep(60)
        for index, side in enumerate(sides):
            assert await side[0].store("side", index, world.wall_clock() + 1000 + index)
        assert await value_of(sides[0][1], "side") == 0
        world.heal()
        await asyncio.sleep(300)
        for dht in nodes:
            assert await value_of(dht, "side") == 1
        await close(nodes)

    run(scenario())


def test_a_node_that_was_alone_for_long_joins_again_through_its_initial_peers() -> None:
    async def scenario() -> None:
        world = World(11)
        nodes = await swarm(world, 5)
        alone = await join(world, initial=nodes[:1])
        world.partition([[alone.peer_id], [dht.peer_id for dht in nodes]])
        await asyncio.sleep(2000)
        assert len(alone.table) == 0
        world.heal()
        await asyncio.sleep(60)
        assert await nodes[1].store("key", 1, world.wall_clock() + 60)
        assert await value_of(alone, "key") == 1
        await close([*nodes, alone])

    run(scenario())


def test_an_initial_peer_that_was_away_for_long_is_dialled_again_although_others_are_there() -> None:
    async def scenario() -> None:
        world = World(12)
        nodes = await swarm(world, 3)
        late = await join(world, initial=nodes[:2])
        world.partition([[nodes[0].peer_id], [dht.peer_id for dht in (*nodes[1:], late)]])
        await asyncio.sleep(2000)
        assert late.table.get(nodes[0].peer_id) is None
        world.heal()
        await asyncio.sleep(61)
        assert late.node.is_connected(nodes[0].peer_id)
        assert await nodes[0].store("key", 1, world.wall_clock() + 60)
        assert await value_of(nodes[1], "key") == 1, "and by that the others found it, too"
        await close([*nodes, late])

    run(scenario())


def test_a_dictionary_is_written_by_many_and_read_by_all() -> None:
    async def scenario() -> None:
        world = World(8)
        nodes = await swarm(world, 20)
        expirations = {}
        for index, dht in enumerate(nodes):
            expirations[owner_marker(dht.peer_id)] = world.wall_clock() + 30 + index
        stores = [
            dht.store("members", [index], expirations[owner_marker(dht.peer_id)], subkey=owner_marker(dht.peer_id))
            for index, dht in enumerate(nodes)
        ]
        assert all(await asyncio.gather(*stores))
        for dht in nodes:
            found = await dht.get("members", latest=True)
            assert found is not None
            assert {subkey: member.expiration_time for subkey, member in found.value.items()} == expirations
            assert found.expiration_time == max(expirations.values())
        await asyncio.sleep(40)
        left = await value_of(nodes[0], "members")
        assert left.keys() == {subkey for subkey, expiration in expirations.items() if expiration > world.wall_clock()}
        assert 5 < len(left) < 15
        await asyncio.sleep(20)
        assert await nodes[0].get("members", latest=True) is None
        await close(nodes)

    run(scenario())


@pytest.mark.long
def test_the_same_seed_gives_the_same_run() -> None:
    async def scenario(seed: int) -> str:
        world = World(seed)
        nodes = await swarm(world, 12)
        await store_all(nodes, world)
        kill(world, nodes, 4)
        await asyncio.sleep(200)
        await nodes[0].get_many(KEYS, latest=True)
        await close(nodes)
        return world.digest()

    digests = [run(scenario(seed)) for seed in (1, 1, 2)]
    assert digests[0] == digests[1] != digests[2]


def test_clients_find_and_store_and_are_in_no_table() -> None:
    async def scenario() -> None:
        world = World(9)
        nodes = await swarm(world, 6)
        clients = [await join(world, initial=nodes[:1], client_mode=True) for _ in range(3)]
        for one, other in pairwise(clients):
            assert await one.store("from a client", str(one.peer_id), world.wall_clock() + 60)
            assert await value_of(other, "from a client") == str(one.peer_id)
        for client in clients:
            assert not client.storage.key_ids()
            assert all(dht.table.get(client.peer_id) is None for dht in nodes + clients)
        await close(nodes + clients)

    run(scenario())


def test_nodes_that_do_not_answer_hold_up_a_search_only_once() -> None:
    async def scenario() -> None:
        world = World(10, lost_after=3600.0)
        nodes = await swarm(world, 12)
        await store_all(nodes, world)
        asker, *others = nodes
        silent = others[:4]
        for dht in silent:
            world.cut(asker.peer_id, dht.peer_id)
        loop = asyncio.get_running_loop()
        times = []
        for _ in range(2):
            start = loop.time()
            assert await value_of(asker, KEYS[0]) == 0
            times.append(loop.time() - start)
        assert times[0] < 1.6
        assert times[1] < 0.5
        await close(nodes)

    run(scenario())

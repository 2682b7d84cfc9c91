"""The DHT with 64 nodes under delays, a massacre and a partition, in virtual time; and it replays."""

from __future__ import annotations

import asyncio
import random

import pytest

from shoal.dht.node import DHTNode
from shoal.simulation.clock import run
from shoal.simulation.world import World

NODES = 64
KEYS = [f"key {number}" for number in range(30)]


async def swarm(world: World) -> list[DHTNode]:
    """Nodes that joined one after another, each through three at most that were there before."""
    members: list[DHTNode] = []
    for number in range(NODES):
        member = DHTNode(await world.spawn_node(), clock=world.wall_clock, rng=random.Random(f"{world.seed}/{number}"))
        known = world.rng.sample(members, min(3, len(members)))
        await member.bootstrap([other.node.addresses[0] for other in known])
        members.append(member)
    return members


async def store(world: World, members: list[DHTNode], keys: list[str]) -> None:
    writers = [world.rng.choice(members) for _ in keys]
    expiration = world.wall_clock() + 3000
    stored = await asyncio.gather(
        *(writer.store(key, key.upper(), expiration) for writer, key in zip(writers, keys, strict=True))
    )
    assert all(stored)


async def missing(members: list[DHTNode], keys: list[str]) -> list[tuple[int, str]]:
    """What is not found: (number of the member, key)."""

    async def search(member: DHTNode) -> list[str]:
        found = await member.get_many(keys)
        return [key for key in keys if (value := found[key]) is None or value.value != key.upper()]

    results = await asyncio.gather(*map(search, members))
    return [(number, key) for number, lost in enumerate(results) for key in lost]


async def a_third_dies(seed: int) -> str:
    world = World(seed, latency=0.05, jitter=0.05)
    members = await swarm(world)
    await store(world, members, KEYS)
    assert await missing(members[::8], KEYS) == []
    doomed = world.rng.sample(members, NODES // 3)
    for member in doomed:
        world.kill(member.peer_id)
    survivors = [member for member in members if member not in doomed]
    assert await missing(survivors[::4], KEYS) == []  # at once,
    await asyncio.sleep(60)
    assert await missing(survivors, KEYS) == []  # and from everywhere when the dust has settled
    await store(world, survivors, ["after"])
    assert await missing(survivors, ["after"]) == []
    return world.digest()


async def a_partition(seed: int) -> None:
    world = World(seed, latency=0.05, jitter=0.05)
    members = await swarm(world)
    await store(world, members, KEYS)
    east, west = members[::2], members[1::2]
    world.partition([[member.peer_id for member in side] for side in (east, west)])
    await asyncio.sleep(60)
    await store(world, east, ["of the east"])
    await store(world, west, ["of the west"])
    assert await missing(east, [*KEYS, "of the east"]) == []
    assert await missing(west, [*KEYS, "of the west"]) == []
    assert await missing(east[:1], ["of the west"]) != []
    world.heal()
    await asyncio.sleep(200)
    assert await missing(members, [*KEYS, "of the east", "of the west"]) == []


@pytest.mark.long
def test_every_key_is_found_after_a_third_of_the_nodes_was_killed_and_the_run_replays():
    assert run(a_third_dies(1)) == run(a_third_dies(1))


@pytest.mark.long
def test_both_sides_of_a_partition_work_and_become_one_again():
    run(a_partition(2))

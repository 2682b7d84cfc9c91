"""Simulated DHTs: many nodes on virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from typing import Any

from shoal.dht.node import DHTNode
from shoal.dht.records import encode_key, key_id, node_id
from shoal.simulation.world import World


async def join(world: World, *, initial: Iterable[DHTNode] = (), **options: Any) -> DHTNode:
    """A new node, which joins through the `initial` ones."""
    node = await world.spawn_node()
    rng = random.Random(f"{world.seed}/{len(world.nodes)}")
    dht = DHTNode(node, clock=world.wall_clock, rng=rng, **options)
    await dht.bootstrap([address for other in initial for address in other.visible_addresses()])
    return dht


async def swarm(world: World, count: int, **options: Any) -> list[DHTNode]:
    """A DHT of `count` nodes, each of which joined through an earlier one."""
    nodes: list[DHTNode] = []
    for _ in range(count):
        nodes.append(await join(world, initial=[world.rng.choice(nodes)] if nodes else [], **options))
    return nodes


def holders(nodes: Iterable[DHTNode], key: str) -> list[DHTNode]:
    """Those of `nodes` that keep `key`, the nearest to it first."""
    identifier = key_id(encode_key(key))
    keep = [dht for dht in nodes if identifier in dht.storage.key_ids()]
    return sorted(keep, key=lambda dht: node_id(dht.peer_id) ^ identifier)


async def value_of(dht: DHTNode, key: str, latest: bool = True) -> Any:
    """The value that `dht` finds under `key`; fails if it finds none."""
    found = await dht.get(key, latest=latest)
    assert found is not None
    return found.value


async def close(nodes: Iterable[DHTNode]) -> None:
    for dht in nodes:
        await dht.close()
        await dht.node.close()
    await asyncio.sleep(0)

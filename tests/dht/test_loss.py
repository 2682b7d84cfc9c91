"""32 peers over real sockets: every key is found from every one, also after a third of them is killed."""

from __future__ import annotations

import random
from contextlib import ExitStack

import pytest

from shoal.dht.dht import DHT
from shoal.dht.node import DHTNode
from shoal.dht.records import get_dht_time

PEERS = 32
KILLED = 10
KEYS = [f"key {index}" for index in range(16)]


async def die(_dht: DHT, dht_node: DHTNode) -> None:
    """End all connections as the death of a process does: nobody is told, nothing is handed over."""
    await dht_node.node.close()


async def find_all(_dht: DHT, dht_node: DHTNode) -> list[object]:
    dht_node.cache.retain(lambda _record: False)
    found = await dht_node.get_many(KEYS)
    found_latest = await dht_node.get_many(KEYS, latest=True)
    assert list(found.values()) == list(found_latest.values())
    return [one.value if one is not None else None for one in found.values()]


@pytest.mark.long
def test_every_key_is_found_from_every_peer_also_after_a_third_was_killed() -> None:
    rng = random.Random()
    with ExitStack() as stack:
        peers: list[DHT] = []
        for _ in range(PEERS):
            initial = rng.choice(peers).get_visible_maddrs() if peers else []
            peers.append(stack.enter_context(DHT(initial, start=True)))
        expiration = get_dht_time() + 300
        for index, key in enumerate(KEYS):
            assert peers[index % PEERS].store(key, index, expiration)
        everything = list(range(len(KEYS)))
        assert all(peer.run_coroutine(find_all) == everything for peer in peers)
        killed = rng.sample(peers, KILLED)
        ends = [peer.run_coroutine(die, return_future=True) for peer in killed]
        for end in ends:
            end.result(60)
        survivors = [peer for peer in peers if peer not in killed]
        assert all(peer.run_coroutine(find_all) == everything for peer in survivors)

"""Who hands records over when a node comes or goes: exactly one, if all know each other."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from shoal.dht.records import DHTRecord, encode_key, key_id, node_id
from shoal.dht.replication import Replication
from shoal.dht.routing import RoutingTable
from shoal.dht.storage import LocalStorage
from shoal.p2p.identity import PeerID

PEERS = [PeerID(index.to_bytes(32, "big")) for index in range(40)]
RECORD = DHTRecord(encode_key("key"), b"", b"value", 1e9)
KEY = key_id(RECORD.key)
REPLICAS = 4


class Node:
    """The parts of a DHT node that decide, in a swarm in which all know all."""

    def __init__(self, peer: PeerID, others: list[PeerID], holds: bool) -> None:
        self.table = RoutingTable(node_id(peer), bucket_size=64)
        for other in others:
            if other != peer:
                self.table.heard(other, (), 0.0)
        self.storage = LocalStorage()
        if holds:
            self.storage.store(RECORD, 0.0)
        self.replication = Replication(self.table, self.storage, REPLICAS, 100.0, random.Random(0))


def swarm(peers: list[PeerID]) -> dict[PeerID, Node]:
    holders = nearest(peers)
    return {peer: Node(peer, peers, peer in holders) for peer in peers}


def nearest(peers: list[PeerID]) -> list[PeerID]:
    return sorted(peers, key=lambda peer: node_id(peer) ^ KEY)[:REPLICAS]


@given(st.permutations(PEERS), st.integers(1, 12))
def test_a_newcomer_gets_what_it_is_near_to_from_one_node(peers: list[PeerID], count: int) -> None:
    newcomer, *old = peers[: count + 1]
    nodes = swarm(old)
    senders = []
    for peer, node in nodes.items():
        node.table.heard(newcomer, (), 1.0)
        if KEY in node.replication.joined(newcomer):
            senders.append(peer)
    assert senders == (nearest(old)[:1] if newcomer in nearest([*old, newcomer]) else [])


@given(st.permutations(PEERS), st.integers(1, 12))
def test_the_next_in_line_gets_what_a_lost_node_held_from_one_node(peers: list[PeerID], count: int) -> None:
    lost, *rest = peers[: count + 1]
    nodes = swarm([lost, *rest])
    sent = []
    for peer in rest:
        nodes[peer].table.failed(lost, 1.0)
        sent += [(peer, target, key) for target, key in nodes[peer].replication.lost(lost)]
    before, after = nearest([lost, *rest]), nearest(rest)
    successors = [peer for peer in after if peer not in before]
    assert sent == [(after[0], successor, KEY) for successor in successors]


def test_only_what_nobody_stored_during_a_period_is_republished() -> None:
    replication = Node(PEERS[0], PEERS[1:5], holds=True).replication
    replication.refreshed(KEY, 0.0)
    assert replication.due(49.0) == []
    replication.refreshed(KEY, 49.0)
    assert replication.due(98.0) == []
    assert replication.due(200.0) == [KEY]
    assert replication.due(200.0) == []
    assert replication.due(351.0) == [KEY]


def test_keys_that_are_gone_are_not_republished() -> None:
    node = Node(PEERS[0], PEERS[1:5], holds=True)
    node.replication.refreshed(KEY, 0.0)
    node.storage.remove_expired(2e9)
    assert node.replication.due(1000.0) == []

"""A lookup asks ever nearer peers, and ends when the nearest that live have answered."""

from __future__ import annotations

import random

import pytest

from shoal.dht.lookup import MAX_CANDIDATES, Lookup
from shoal.dht.records import node_id
from shoal.dht.routing import RoutingTable
from shoal.p2p.identity import PeerID

PEERS = [PeerID(index.to_bytes(32, "big")) for index in range(600)]
OWN = PEERS[0]


def by_distance(peers: list[PeerID], target: int) -> list[PeerID]:
    return sorted(peers, key=lambda peer: node_id(peer) ^ target)


@pytest.mark.parametrize("parallel", [1, 3])
@pytest.mark.parametrize("seed", range(8))
def test_it_finds_the_nearest_living_peers_through_what_others_know(seed: int, parallel: int) -> None:
    rng = random.Random(seed)
    peers = rng.sample(PEERS, 100)
    dead = set(rng.sample(peers, 20))
    tables = {peer: RoutingTable(node_id(peer), bucket_size=8) for peer in peers}
    for peer, table in tables.items():
        for other in rng.sample(peers, len(peers)):
            if other != peer:
                table.heard(other, (), 0.0)
    own = next(peer for peer in peers if peer not in dead)
    target = rng.randrange(1 << 256)
    lookup = Lookup(target, 4, own)
    lookup.add((contact.peer, ()) for contact in tables[own].nearest(target, 8))
    asked: list[PeerID] = []
    under_way: list[PeerID] = []
    while True:
        while len(under_way) < parallel and (named := lookup.next_peer()) is not None:
            under_way.append(named)
        if not under_way:
            break
        peer = under_way.pop(rng.randrange(len(under_way)))
        asked.append(peer)
        if peer in dead:
            lookup.failed(peer)
        else:
            lookup.answered(peer)
            lookup.add((contact.peer, ()) for contact in tables[peer].nearest(target, 8))
    living = [peer for peer in peers if peer not in dead and peer != own]
    assert lookup.nearest()[:4] == by_distance(living, target)[:4]
    assert own not in asked
    assert len(asked) == len(set(asked)) < 60


def test_it_remembers_a_bounded_number_of_peers() -> None:
    lookup = Lookup(0, 4, OWN)
    lookup.add((peer, ()) for peer in PEERS)
    assert len(lookup.addresses) == MAX_CANDIDATES
    assert set(lookup.addresses) == set(by_distance(PEERS[1:], 0)[:MAX_CANDIDATES])


def test_addresses_of_the_first_who_named_a_peer_are_kept() -> None:
    lookup = Lookup(0, 4, OWN)
    lookup.add([(PEERS[1], ("first",))])
    lookup.add([(PEERS[1], ("second",))])
    assert lookup.addresses[PEERS[1]] == ("first",)

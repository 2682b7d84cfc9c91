"""Which records a node must send to whom, so that records stay on the nodes nearest to their keys. No I/O."""

from __future__ import annotations

import random
from itertools import islice

from shoal.dht.records import node_id
from shoal.dht.routing import RoutingTable
from shoal.dht.storage import LocalStorage
from shoal.p2p.identity import PeerID


class Replication:
    """Decides for one node, from its own storage and routing table.

    A new node gets the records whose keys it is now near to. When a node is lost, the next nearest node gets the
    records that the lost one held. In both cases the nearest of the nodes that should hold the record sends it. A
    record can be missed, if sender and receiver are both gone or if routing tables disagree. Republishing repairs that:
    a node that received nothing for a key during a period stores its records of that key again. Periods are drawn at
    random, so usually one node republishes a key and thereby spares the others.

    Args:
        table: the routing table of this node.
        storage: the storage of this node.
        num_replicas: number of nodes that should hold each record.
        period: mean seconds between two republishings of a key.
        rng: draws the periods.
    """

    def __init__(
        self, table: RoutingTable, storage: LocalStorage, num_replicas: int, period: float, rng: random.Random
    ) -> None:
        self._table = table
        self._storage = storage
        self._num_replicas = num_replicas
        self._period = period
        self._rng = rng
        self._due: dict[int, float] = {}

    def joined(self, peer: PeerID) -> list[int]:
        """The ids of the keys whose records this node must send to `peer`, which is new in the table."""
        newcomer = node_id(peer)
        others = [contact.id for contact in self._table.alive() if contact.peer != peer]
        return [
            key
            for key in self._storage.key_ids()
            if self._is_nearest(key, others) and self._is_replica(newcomer, key, [*others, self._table.own_id])
        ]

    def lost(self, peer: PeerID) -> list[tuple[PeerID, int]]:
        """`peer` is gone: the pairs (receiver, key id) of the records that this node must send in its place."""
        gone = node_id(peer)
        others = [contact.id for contact in self._table.alive()]
        successors = []
        for key in self._storage.key_ids():
            if self._is_nearest(key, others) and self._is_replica(gone, key, [*others, self._table.own_id]):
                replicas = self._table.nearest(key, self._num_replicas - 1)  # with this node itself: num_replicas
                if len(replicas) == self._num_replicas - 1:
                    successors.append((replicas[-1].peer, key))
        return successors

    def refreshed(self, key: int, now: float) -> None:
        """Another node has just stored records of this key here, and has sent them to all replicas."""
        self._due[key] = now + self._period * self._rng.uniform(0.5, 1.5)

    def due(self, now: float) -> list[int]:
        """The ids of the keys to republish now; each is due again after another period."""
        kept = set(self._storage.key_ids())
        self._due = {key: when for key, when in self._due.items() if key in kept}
        due = [key for key, when in self._due.items() if when <= now]
        for key in due:
            self.refreshed(key, now)
        return due

    def _is_nearest(self, key: int, others: list[int]) -> bool:
        own = self._table.own_id ^ key
        return not any(other ^ key < own for other in others)

    def _is_replica(self, identifier: int, key: int, others: list[int]) -> bool:
        """Whether fewer than `num_replicas` of `others` are nearer to `key` than `identifier`."""
        distance = identifier ^ key
        nearer = (other for other in others if other ^ key < distance)
        return next(islice(nearer, self._num_replicas - 1, None), None) is None

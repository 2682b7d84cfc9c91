"""Who must be sent which records, so that they stay on the nodes nearest to their keys as nodes come and go. No I/O."""

from __future__ import annotations

import random
from itertools import islice

from shoal.dht.records import node_id
from shoal.dht.routing import RoutingTable
from shoal.dht.storage import LocalStorage
from shoal.p2p.identity import PeerID


class Replication:
    """Decides for one node, from its own storage and routing table.

    A newcomer gets the records that it is now near to, and the node that is next in line when one is lost gets what
    that one held; in both cases from the nearest of the nodes that should hold the record. What falls between (both
    gone, or tables that disagree) is made good by republishing: a node that was sent nothing for a key during a period
    stores its records anew. Periods are drawn at random, so usually one node does it, and by that spares the others.

    Args:
        table: of this node.
        storage: of this node.
        num_replicas: how many nodes should hold each record.
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
        """The ids of the keys whose records this node must now send to `peer`, which was not in the table before."""
        newcomer = node_id(peer)
        others = [contact.id for contact in self._table.alive() if contact.peer != peer]
        return [
            key
            for key in self._storage.key_ids()
            if self._is_nearest(key, others) and self._is_replica(newcomer, key, [*others, self._table.own_id])
        ]

    def lost(self, peer: PeerID) -> list[tuple[PeerID, int]]:
        """Whom this node must now send the records of which keys, as `peer`, which held them, is gone."""
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
        """Records of this key were stored here just now: somebody has just sent them to all replicas."""
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

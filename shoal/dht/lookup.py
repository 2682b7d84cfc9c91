"""Kademlia's iterative search for the nodes nearest to an id: whom to ask next, and when it is over. No I/O."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from itertools import islice

from shoal.dht.records import node_id
from shoal.p2p.identity import PeerID

MAX_CANDIDATES = 256


class Lookup:
    """One search. The caller asks the peers that `next_peer` names and reports each answer; the search is over when
    `next_peer` names none.

    A search is over when the `width` nearest peers that it knows of have all answered, not counting those that failed.

    Args:
        target: the id to search for.
        width: number of nearest nodes to find.
        own: this peer, which is never asked.
    """

    def __init__(self, target: int, width: int, own: PeerID) -> None:
        self.target = target
        self.width = width
        self._own = own
        self.addresses: dict[PeerID, tuple[str, ...]] = {}
        self._by_distance: list[tuple[int, PeerID]] = []
        self._asked: set[PeerID] = set()
        self._answered: set[PeerID] = set()
        self._slow: set[PeerID] = set()

    def add(self, contacts: Iterable[tuple[PeerID, tuple[str, ...]]]) -> None:
        """Add candidates, each with the addresses where it is said to listen. The search remembers the nearest 256."""
        for peer, addresses in contacts:
            if peer in self.addresses or peer == self._own:
                continue
            self.addresses[peer] = addresses
            bisect.insort(self._by_distance, (node_id(peer) ^ self.target, peer))
            if len(self._by_distance) > MAX_CANDIDATES:
                _, farthest = self._by_distance.pop()
                del self.addresses[farthest]

    def next_peer(self) -> PeerID | None:
        """The nearest candidate that was not asked yet, or None if no further answer is needed. It counts as asked from
        now on.
        """
        expected = (peer for _, peer in self._by_distance if peer not in self._slow)
        for peer in islice(expected, self.width):
            if peer not in self._asked:
                self._asked.add(peer)
                return peer
        return None

    def answered(self, peer: PeerID) -> None:
        """`peer` was asked and gave an answer."""
        self._answered.add(peer)
        self._slow.discard(peer)

    def slow(self, peer: PeerID) -> None:
        """`peer` was asked and has given no answer yet: the search asks another peer as well, in case it gives none."""
        self._slow.add(peer)

    def failed(self, peer: PeerID) -> None:
        """`peer` was asked and failed to answer: the search goes on without it."""
        self._by_distance = [item for item in self._by_distance if item[1] != peer]

    def nearest(self) -> list[PeerID]:
        """The peers that answered, nearest first."""
        return [peer for _, peer in self._by_distance if peer in self._answered]

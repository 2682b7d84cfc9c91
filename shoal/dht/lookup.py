"""Kademlia's iterative search for the nodes nearest to an id: whom to ask next, and when it is over. No I/O."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from itertools import islice

from shoal.dht.records import node_id
from shoal.p2p.identity import PeerID

MAX_CANDIDATES = 256


class Lookup:
    """One search. Ask the peers that `next_peer` names, tell what they said; it is over when it names none.

    A search is over when the `width` nearest peers that it knows of, not counting those that failed, have all answered.

    Args:
        target: the id to search for.
        width: how many of the nearest nodes are wanted.
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
        """Somebody knows of these peers, and of the addresses where they listen. The nearest 256 are remembered."""
        for peer, addresses in contacts:
            if peer in self.addresses or peer == self._own:
                continue
            self.addresses[peer] = addresses
            bisect.insort(self._by_distance, (node_id(peer) ^ self.target, peer))
            if len(self._by_distance) > MAX_CANDIDATES:
                _, farthest = self._by_distance.pop()
                del self.addresses[farthest]

    def next_peer(self) -> PeerID | None:
        """The nearest peer that was not asked yet, if it may still matter; it counts as asked from now on."""
        expected = (peer for _, peer in self._by_distance if peer not in self._slow)
        for peer in islice(expected, self.width):
            if peer not in self._asked:
                self._asked.add(peer)
                return peer
        return None

    def answered(self, peer: PeerID) -> None:
        """`peer`, which was asked, gave an answer."""
        self._answered.add(peer)
        self._slow.discard(peer)

    def slow(self, peer: PeerID) -> None:
        """`peer`, which was asked, has given no answer yet: ask another one as well, in case it gives none."""
        self._slow.add(peer)

    def failed(self, peer: PeerID) -> None:
        """`peer`, which was asked, gave none: the search goes on without it."""
        self._by_distance = [item for item in self._by_distance if item[1] != peer]

    def nearest(self) -> list[PeerID]:
        """The peers that answered, nearest first."""
        return [peer for _, peer in self._by_distance if peer in self._answered]

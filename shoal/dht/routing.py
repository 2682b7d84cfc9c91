"""Kademlia's routing table: the peers that a node knows, many near its own id and few far away. No I/O; callers give
the time.

After Maymounkov and Mazières, "Kademlia: a peer-to-peer information system based on the XOR metric" (2002), sections
2.2 and 2.4. Unlike there, failed peers stay for a while to be tried again, so that nodes find each other when a broken
network heals.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

from shoal.dht.records import ID_BITS, node_id
from shoal.p2p.identity import PeerID

CHECK_AFTER = 60.0  # seconds; a peer heard from since then is not asked whether it lives, when its bucket is full
STALE_AFTER = 900.0  # seconds; a peer, or a bucket, is asked when it was not heard from for this long
RETRY_AFTER = 15.0  # seconds after which a failed peer is tried again; doubles with each failure
FORGET_AFTER_FAILURES = 6


@dataclass(slots=True)
class Contact:
    """A peer in the table.

    Attributes:
        peer: the peer's id.
        id: `node_id(peer)`.
        addresses: where it listens, by its own word (multiaddrs).
        heard_at: when it last gave a sign of life, in seconds of the caller's clock.
        failures: failed attempts to reach it since then.
        retry_at: when to try again after a failure.
    """

    peer: PeerID
    id: int
    addresses: tuple[str, ...]
    heard_at: float
    failures: int = 0
    retry_at: float = 0.0


@dataclass(slots=True)
class _Bucket:
    """Contacts, and the replacements that wait for their places. In both, the peer not heard from for longest is
    first.
    """

    contacts: dict[PeerID, Contact] = field(default_factory=dict)
    replacements: dict[PeerID, Contact] = field(default_factory=dict)


class RoutingTable:
    """Peers by their distance from `own_id`.

    Bucket i holds the peers whose ids share exactly i leading bits with `own_id`. The last bucket also holds all peers
    that share more bits, and is split when it is full.

    Args:
        own_id: the id of the node whose table this is. The table never contains it.
        bucket_size: Kademlia's k: contacts per bucket. Up to as many replacements wait beside them.
    """

    def __init__(self, own_id: int, bucket_size: int = 20) -> None:
        self.own_id = own_id
        self.bucket_size = bucket_size
        self._buckets = [_Bucket()]

    def __len__(self) -> int:
        """How many contacts there are, failed ones included, replacements not."""
        return sum(len(bucket.contacts) for bucket in self._buckets)

    def get(self, peer: PeerID) -> Contact | None:
        """The contact of `peer`, or None if it is not in the table."""
        return self._bucket(node_id(peer)).contacts.get(peer)

    def is_alive(self, peer: PeerID) -> bool:
        """Whether `peer` is in the table and has not failed since it was last heard."""
        contact = self.get(peer)
        return contact is not None and not contact.failures

    def heard(self, peer: PeerID, addresses: tuple[str, ...], now: float) -> Contact | None:
        """`peer` gave a sign of life. If its bucket is full, returns the contact that the caller should ask whether it
        lives.

        If that contact fails, the caller reports it by `failed`, and `peer` takes its place.
        """
        identifier = node_id(peer)
        if identifier == self.own_id:
            return None
        bucket = self._bucket(identifier)
        contact = bucket.contacts.pop(peer, None) or bucket.replacements.pop(peer, None)
        if contact is None:
            contact = Contact(peer, identifier, addresses, now)
        contact.addresses, contact.heard_at, contact.failures = addresses, now, 0
        while True:
            failed = next((other.peer for other in bucket.contacts.values() if other.failures), None)
            if len(bucket.contacts) >= self.bucket_size and failed is not None:
                del bucket.contacts[failed]
            if len(bucket.contacts) < self.bucket_size:
                bucket.contacts[peer] = contact
                return None
            if bucket is not self._buckets[-1] or len(self._buckets) == ID_BITS:
                break
            self._split()
            bucket = self._bucket(identifier)
        bucket.replacements[peer] = contact
        if len(bucket.replacements) > self.bucket_size:
            del bucket.replacements[next(iter(bucket.replacements))]
        oldest = next(iter(bucket.contacts.values()))
        return oldest if now - oldest.heard_at > CHECK_AFTER else None

    def failed(self, peer: PeerID, now: float) -> None:
        """`peer` could not be reached, or was lost: replace it if a replacement waits, else try it again later."""
        bucket = self._bucket(node_id(peer))
        bucket.replacements.pop(peer, None)
        contact = bucket.contacts.get(peer)
        if contact is None:
            return
        contact.retry_at = now + RETRY_AFTER * 2**contact.failures
        contact.failures += 1
        if bucket.replacements:
            del bucket.contacts[peer]
            newest, replacement = bucket.replacements.popitem()
            bucket.contacts[newest] = replacement
        elif contact.failures >= FORGET_AFTER_FAILURES:
            del bucket.contacts[peer]

    def forget(self, peer: PeerID) -> None:
        """Remove `peer`, which said that it serves nobody."""
        bucket = self._bucket(node_id(peer))
        bucket.replacements.pop(peer, None)
        bucket.contacts.pop(peer, None)

    def alive(self) -> list[Contact]:
        """All contacts that have not failed since they were last heard."""
        return [contact for bucket in self._buckets for contact in bucket.contacts.values() if not contact.failures]

    def nearest(self, target: int, count: int) -> list[Contact]:
        """The `count` living contacts nearest to `target`, the nearest first."""
        return heapq.nsmallest(count, self.alive(), key=lambda contact: contact.id ^ target)

    def due(self, now: float) -> list[Contact]:
        """The contacts to ask whether they live: failed ones whose time has come, and those not heard from for long."""
        return [
            contact
            for bucket in self._buckets
            for contact in bucket.contacts.values()
            if (now >= contact.retry_at if contact.failures else now - contact.heard_at > STALE_AFTER)
        ]

    def refresh_targets(self, now: float, rng: random.Random) -> list[int]:
        """A random id out of each bucket that was not heard from for long. A search for that id finds the nodes
        there.
        """
        targets = []
        for index, bucket in enumerate(self._buckets[:-1]):
            if all(now - contact.heard_at > STALE_AFTER for contact in bucket.contacts.values()):
                flipped = 1 << (ID_BITS - 1 - index)
                targets.append(self.own_id ^ (flipped | rng.randrange(flipped)))
        return targets

    def _bucket(self, identifier: int) -> _Bucket:
        shared_bits = ID_BITS - (identifier ^ self.own_id).bit_length()
        return self._buckets[min(shared_bits, len(self._buckets) - 1)]

    def _split(self) -> None:
        last = self._buckets[-1]
        self._buckets[-1] = _Bucket()
        self._buckets.append(_Bucket())
        for contact in last.contacts.values():
            self._bucket(contact.id).contacts[contact.peer] = contact
        for contact in last.replacements.values():
            self._bucket(contact.id).replacements[contact.peer] = contact

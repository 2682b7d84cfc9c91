"""The messages between nodes of the DHT. All are bounded: a message that exceeds a bound reaches no handler."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.dht.records import ID_BITS, DHTRecord
from shoal.dht.storage import MAX_ENTRY_RECORDS
from shoal.p2p.identity import KEY_BYTES
from shoal.p2p.multiaddr import MAX_LENGTH
from shoal.p2p.node import Service

MAX_ADDRESSES = 8
MAX_CONTACTS = 32
MAX_RECORDS_PER_STORE = 256
MAX_BYTES_PER_STORE = 512 << 10

Addresses = Annotated[
    tuple[Annotated[str, msgspec.Meta(max_length=MAX_LENGTH)], ...], msgspec.Meta(max_length=MAX_ADDRESSES)
]


class Sender(msgspec.Struct, array_like=True, frozen=True):
    """Part of every request: whether the sender is a client, and if not, the addresses where it listens."""

    client: bool
    addresses: Addresses


class KnownPeer(msgspec.Struct, array_like=True, frozen=True):
    """A peer of the DHT that the sender of a reply knows."""

    key: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    addresses: Addresses


class Ping(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """Are you there?"""

    sender: Sender


class Pong(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """Yes, and I listen here."""

    sender: Sender


class Find(msgspec.Struct, array_like=True, frozen=True, tag=2):
    """Which peers do you know near `target`, and, if `records` is true, which records of the key with this id?"""

    sender: Sender
    target: Annotated[bytes, msgspec.Meta(min_length=ID_BITS // 8, max_length=ID_BITS // 8)]
    records: bool


class Found(msgspec.Struct, array_like=True, frozen=True, tag=3):
    """The nearest peers that the sender knows, nearest first, and the records that it keeps."""

    peers: Annotated[list[KnownPeer], msgspec.Meta(max_length=MAX_CONTACTS)]
    records: Annotated[list[DHTRecord], msgspec.Meta(max_length=MAX_ENTRY_RECORDS)]


class Store(msgspec.Struct, array_like=True, frozen=True, tag=4):
    """Keep these records. If `cache` is true, keep them only as cached copies, and do not pass them on."""

    sender: Sender
    records: Annotated[list[DHTRecord], msgspec.Meta(max_length=MAX_RECORDS_PER_STORE)]
    cache: bool


class Stored(msgspec.Struct, array_like=True, frozen=True, tag=5):
    """For each record of a `Store`, whether the node keeps it now. It keeps none that is invalid, expired or
    outdated.
    """

    kept: Annotated[list[bool], msgspec.Meta(max_length=MAX_RECORDS_PER_STORE)]


Request = Ping | Find | Store

SERVICE = Service("dht", Ping | Pong | Find | Found | Store | Stored)

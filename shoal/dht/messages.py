"""What nodes of the DHT say to each other. All are bounded: a message that exceeds a bound reaches no handler."""

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
    """In every request: whether its sender only asks and never serves, and else where it listens."""

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
    """I am, and this is where I listen."""

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
    """Keep these; as a cached copy only, if `cache` is true: then they are not passed on."""

    sender: Sender
    records: Annotated[list[DHTRecord], msgspec.Meta(max_length=MAX_RECORDS_PER_STORE)]
    cache: bool


class Stored(msgspec.Struct, array_like=True, frozen=True, tag=5):
    """For each record of a Store whether it is kept now; one that is invalid, expired or outdated is not."""

    kept: Annotated[list[bool], msgspec.Meta(max_length=MAX_RECORDS_PER_STORE)]


Request = Ping | Find | Store

SERVICE = Service("dht", Ping | Pong | Find | Found | Store | Stored)

"""The messages of one DHT node: it answers requests, sends its own, and learns from both who is alive."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from shoal.dht.kept_records import KeptRecords
from shoal.dht.messages import (
    MAX_ADDRESSES,
    MAX_BYTES_PER_STORE,
    MAX_CONTACTS,
    MAX_RECORDS_PER_STORE,
    SERVICE,
    Find,
    Found,
    KnownPeer,
    Ping,
    Pong,
    Request,
    Sender,
    Store,
    Stored,
)
from shoal.dht.rates import OWNED_RECORDS, STORED_BYTES, STORED_RECORDS, VERIFIED
from shoal.dht.records import DHTRecord, key_id, owners_of
from shoal.dht.replication import Replication
from shoal.dht.routing import RoutingTable
from shoal.p2p.errors import P2PError, Refused, Unavailable
from shoal.p2p.identity import PeerID
from shoal.p2p.interfaces import concrete_addresses
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.node import Answer, Node
from shoal.p2p.quota import Quota
from shoal.reach.finding import WayIn

log = logging.getLogger(__name__)

# seconds for which a peer that failed is not asked; doubles with each failure, up to MAX_BLOCK_SECONDS
BLOCK_SECONDS = 5.0
MAX_BLOCK_SECONDS = 120.0
MAX_BLOCKED = 4096
# pause per key between two passes over all keys; the passes take some percent of a reactor's time
SECONDS_PER_KEY = 1e-5

_CLIENT = Sender(True, ())
Expected = TypeVar("Expected", bound=msgspec.Struct)


class Protocol:
    """Carries out the decisions of the parts that do no I/O.

    Args:
        node: carries the messages.
        table, records, replication: those of this DHT node.
        client_mode: whether this node only asks others, and serves nobody.
        announce: addresses to announce, besides those at which `node` listens.
        request_timeout: seconds after which a peer that does not answer counts as failed.
    """

    def __init__(
        self,
        node: Node,
        *,
        table: RoutingTable,
        records: KeptRecords,
        replication: Replication,
        client_mode: bool,
        announce: Sequence[Multiaddr],
        request_timeout: float,
    ) -> None:
        self.node = node
        self.table = table
        self._records = records
        self.replication = replication
        self.client_mode = client_mode
        self.announce = announce
        self.request_timeout = request_timeout
        self._blocked: dict[PeerID, tuple[float, int]] = {}  # (blocked until, number of failures)
        # peers that came (True) or went (False), whose records are to be handed over
        self._handovers: dict[PeerID, bool] = {}
        self._handing_over = False
        self._stored_records, self._stored_bytes = Quota(STORED_RECORDS), Quota(STORED_BYTES)
        self._verified, self._owned = Quota(VERIFIED), Quota(OWNED_RECORDS)
        self.finding = WayIn()  # how others reach this node
        self._own: list[Multiaddr] = []
        self._visible: list[Multiaddr] = []
        self._visible_of: tuple[list[Multiaddr], WayIn] = [], self.finding
        self._sender = Sender(False, ())
        self._stop_listening_for_losses = node.on_lost(lambda peer, _reason: self._on_lost(peer))
        if not client_mode:
            node.serve(SERVICE, self._handle)

    def turn(self, client_mode: bool) -> None:
        """Become a client or a node: serve nobody or everybody from now on."""
        if client_mode != self.client_mode:
            self.client_mode = client_mode
            if client_mode:
                self.node.stop_serving(SERVICE)
            else:
                self.node.serve(SERVICE, self._handle)

    def close(self) -> None:
        """Serve nobody from now on."""
        self._stop_listening_for_losses()
        if not self.client_mode:
            self.node.stop_serving(SERVICE)

    # -- this node's addresses

    def visible_addresses(self, latest: bool = False) -> list[Multiaddr]:
        """The addresses at which others can reach this node. `latest` looks at the machine's interfaces again."""
        self._look_at_addresses(latest)
        return self._visible

    def own_addresses(self, latest: bool = False) -> list[Multiaddr]:
        """The addresses where this node listens, and those that its user announces, whether or not others reach it
        there.
        """
        self._look_at_addresses(latest)
        return self._own

    def _look_at_addresses(self, latest: bool) -> None:
        if latest or self._visible_of != (self.node.addresses, self.finding):
            self._visible_of = list(self.node.addresses), self.finding
            listening = [concrete for address in self.node.addresses for concrete in concrete_addresses(address)]
            everywhere = [address.with_peer(self.node.peer_id) for address in (*self.announce, *listening)]
            self._own = list(dict.fromkeys(everywhere))
            self._visible = self.finding.announced(self._own)
            texts = tuple(str(address.with_peer(None)) for address in self._visible)
            self._sender = Sender(False, texts[:MAX_ADDRESSES])

    def sender(self) -> Sender:
        """The first field of every request of this node."""
        self._look_at_addresses(latest=False)
        return _CLIENT if self.client_mode else self._sender

    # -- requests of others

    def _handle(self, peer: PeerID, message: msgspec.Struct, _buffers: Sequence[memoryview]) -> Answer:
        if not isinstance(message, Request):
            raise Refused(f"{type(message).__name__} is a reply, not a request")
        self._heed_sender(peer, message.sender)
        if isinstance(message, Find):
            return self._find(peer, message)
        if isinstance(message, Store):
            return self._store(peer, message)
        return Pong(self.sender())

    def _find(self, peer: PeerID, message: Find) -> Found:
        target = int.from_bytes(message.target, "big")
        nearest = self.table.nearest(target, min(self.table.bucket_size, MAX_CONTACTS - 1) + 1)
        known = [KnownPeer(contact.peer.key, contact.addresses) for contact in nearest if contact.peer != peer]
        return Found(known, self._records.known(target) if message.records else [])

    def _store(self, peer: PeerID, request: Store) -> Stored:
        now = asyncio.get_running_loop().time()
        size = sum(record.size for record in request.records)
        if not self._stored_records.use(peer, len(request.records), now):
            raise Refused(f"store less: more than {STORED_RECORDS.per_second:g} records a second came from this peer")
        if not self._stored_bytes.use(peer, size, now):
            raise Refused(f"store less: more than {STORED_BYTES.per_second:g} bytes a second came from this peer")
        return Stored([self._keep(peer, record, request.cache, now) for record in request.records])

    def _keep(self, peer: PeerID, record: DHTRecord, cache: bool, now: float) -> bool:
        """Store `record` here, if it is valid and its owner does not store too much; returns whether it is kept."""
        if self._records.holds(record):
            return self._records.cache(record) if cache else self.keep_valid(record)
        if not self.believes(peer, record):
            log.debug("refused a record under %r, subkey %r", record.key, record.subkey)
            return False
        owners = owners_of(record)
        if not all(self._owned.allows(owner, 1, now) for owner in owners):
            return False
        kept = self._records.cache(record) if cache else self.keep_valid(record)
        if kept:  # an outdated record, which is not kept, costs its owner nothing: others may send it again and again
            for owner in owners:
                self._owned.use(owner, 1, now)
        return kept

    def believes(self, peer: PeerID, record: DHTRecord) -> bool:
        """Whether `record`, which `peer` has sent, is valid. Checking a signature costs time, so it counts against that
        peer's quota.
        """
        is_known = not owners_of(record) or self._records.holds(record)
        if not is_known and not self._verified.use(peer, 1, asyncio.get_running_loop().time()):
            return False
        return self._records.is_valid(record)

    def keep_valid(self, record: DHTRecord) -> bool:
        """Store `record`, which was found valid, here; returns whether it is kept."""
        kept = self._records.store(record)
        if kept:
            self.replication.refreshed(key_id(record.key), asyncio.get_running_loop().time())
        return kept

    # -- requests to others

    async def call(self, peer: PeerID, request: Request, expect: type[Expected], timeout: float) -> Expected:
        """`p2p.Node.call`. The routing table learns from the outcome whether `peer` is alive."""
        try:
            reply = await self.node.call(peer, SERVICE, request, expect, timeout=timeout)
        except (P2PError, TimeoutError) as error:
            if isinstance(request, Store) and isinstance(error, Refused) and not isinstance(error, Unavailable):
                raise  # it is alive, and takes no more records from this peer for now
            self.block(peer)
            self._failed(peer)
            raise
        if isinstance(reply, Pong):
            self._heed_sender(peer, reply.sender)
        elif addresses := self._addresses(peer):
            self._heard(peer, addresses)
        else:
            self.node.spawn(self.ping(peer))  # it dialled this node; its Pong says where it listens
        return reply

    async def ask(
        self, peer: PeerID, addresses: Sequence[str], request: Request, expect: type[Expected]
    ) -> Expected | None:
        """Send `request` to `peer`; returns the reply, or None if there is none. `addresses` is where others say that
        it listens.
        """
        if not self.node.is_connected(peer):
            contact = self.table.get(peer)  # a peer's own word on its addresses counts for more than that of others
            self.node.learn(peer, _parsed(peer, addresses if contact is None else contact.addresses))
        try:
            return await self.call(peer, request, expect, self.request_timeout)
        except (P2PError, TimeoutError) as error:
            log.debug("%r did not answer %s: %s", peer, type(request).__name__, str(error) or "deadline passed")
            return None

    async def ping(self, peer: PeerID) -> None:
        """Find out whether `peer`, a contact, is alive."""
        await self.ask(peer, (), Ping(self.sender()), Pong)

    async def send_records(
        self, peer: PeerID, addresses: Sequence[str], records: Iterable[DHTRecord], cache: bool = False
    ) -> list[bool] | None:
        """Ask `peer` to keep `records`. Returns for each whether it does, or None if the peer did not answer."""
        kept: list[bool] = []
        for batch in _batches(records):
            reply = await self.ask(peer, addresses, Store(self.sender(), batch, cache), Stored)
            if reply is None or len(reply.kept) != len(batch):
                return None
            kept.extend(reply.kept)
        return kept

    def block(self, peer: PeerID) -> None:
        """Do not ask `peer` for a while: it has failed, or is silent while others have answered."""
        _, failures = self._blocked.pop(peer, (0.0, 0))
        until = asyncio.get_running_loop().time() + min(BLOCK_SECONDS * 2**failures, MAX_BLOCK_SECONDS)
        self._blocked[peer] = until, min(failures + 1, 16)
        if len(self._blocked) > MAX_BLOCKED:
            del self._blocked[next(iter(self._blocked))]

    def is_blocked(self, peer: PeerID) -> bool:
        """Whether `peer` failed so recently that it should not be asked."""
        until, _ = self._blocked.get(peer, (0.0, 0))
        return asyncio.get_running_loop().time() < until

    # -- what the messages say about who is alive

    def _heed_sender(self, peer: PeerID, sender: Sender) -> None:
        if peer == self.node.peer_id:
            return
        contact = self.table.get(peer)
        addresses = sender.addresses
        if contact is None or contact.addresses != addresses:
            addresses = tuple(str(address.with_peer(None)) for address in _parsed(peer, addresses))
        if sender.client or not addresses:
            self.table.forget(peer)
        else:
            self._heard(peer, addresses)

    def _heard(self, peer: PeerID, addresses: tuple[str, ...]) -> None:
        self._blocked.pop(peer, None)
        was_alive = self.table.is_alive(peer)
        check = self.table.heard(peer, addresses, asyncio.get_running_loop().time())
        if check is not None:
            self.node.spawn(self.ping(check.peer))
        if not was_alive and self.table.is_alive(peer):
            self._hand_over_later(peer, joined=True)

    def _addresses(self, peer: PeerID) -> tuple[str, ...]:
        """Where `peer` listens: by its own word, or else where this node has found it."""
        contact = self.table.get(peer)
        if contact is not None:
            return contact.addresses
        return tuple(str(address.with_peer(None)) for address in self.node.known_addresses(peer))

    def _on_lost(self, peer: PeerID) -> None:
        if not self.node.closed:
            self._failed(peer)

    def _failed(self, peer: PeerID) -> None:
        was_alive = self.table.is_alive(peer)
        self.table.failed(peer, asyncio.get_running_loop().time())
        if was_alive:
            self._hand_over_later(peer, joined=False)

    def _hand_over_later(self, peer: PeerID, *, joined: bool) -> None:
        """A peer came or went, so other nodes than before must have its records.

        To find these records, the node goes over all of its keys. So it does this for one peer after the other, and not
        as often as a peer can come and go.
        """
        self._handovers.pop(peer, None)
        self._handovers[peer] = joined
        if len(self._handovers) > MAX_BLOCKED:
            del self._handovers[next(iter(self._handovers))]
        if not self._handing_over:
            self._handing_over = True
            self.node.spawn(self._hand_over())

    async def _hand_over(self) -> None:
        try:
            while self._handovers:
                peer = next(iter(self._handovers))
                if self._handovers.pop(peer):
                    owed = [(peer, key) for key in self.replication.joined(peer)]
                else:
                    owed = self.replication.lost(peer)
                handover: dict[PeerID, list[DHTRecord]] = {}
                for receiver, key in owed:
                    handover.setdefault(receiver, []).extend(self._records.stored(key))
                for receiver, records in handover.items():
                    self.node.spawn(self.send_records(receiver, (), records))
                await asyncio.sleep(SECONDS_PER_KEY * self._records.count())
        finally:
            self._handing_over = False


def _parsed(peer: PeerID, addresses: Iterable[str]) -> list[Multiaddr]:
    """Those of `addresses` that can be addresses of `peer`."""
    parsed = []
    for text in addresses:
        try:
            address = Multiaddr(text)
        except ValueError:
            continue  # a later version may know more kinds of addresses; one bad address must not spoil the others
        if address.peer_id in (None, peer) and address.port:
            parsed.append(address)
    return parsed


def _batches(records: Iterable[DHTRecord]) -> list[list[DHTRecord]]:
    """`records` in lists that fit into one Store each."""
    batches: list[list[DHTRecord]] = []
    size = 0
    for record in records:
        size += record.size
        if not batches or size > MAX_BYTES_PER_STORE or len(batches[-1]) == MAX_RECORDS_PER_STORE:
            batches.append([])
            size = record.size
        batches[-1].append(record)
    return batches

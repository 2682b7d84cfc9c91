"""A node of the DHT: stores and finds records on the nodes nearest to their keys."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Coroutine, Iterable, Sequence
from itertools import repeat
from typing import Any, TypeVar

import msgspec

from shoal.dht.closed_runs import ClosedRunValidator
from shoal.dht.greeting import greet
from shoal.dht.kept_records import KeptRecords
from shoal.dht.lookup import Lookup
from shoal.dht.messages import MAX_CONTACTS
from shoal.dht.protocol import Protocol
from shoal.dht.records import (
    NO_SUBKEY,
    DHTExpiration,
    DHTKey,
    DHTRecord,
    DHTValue,
    Subkey,
    ValueWithExpiration,
    decode_subkey,
    decode_value,
    encode_key,
    get_dht_time,
    key_id,
    make_record,
    node_id,
)
from shoal.dht.replication import Replication
from shoal.dht.routing import RoutingTable
from shoal.dht.run_keys import MAX_HEALTH_BYTES, MAX_HEALTH_SECONDS, is_excessive, is_misplaced
from shoal.dht.search import Heed, search
from shoal.dht.storage import LocalStorage
from shoal.dht.validation import CompositeValidator, RecordValidator, SignatureValidator
from shoal.p2p.errors import PeerUnreachable
from shoal.p2p.identity import PeerID
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.node import Node
from shoal.p2p.redial import SHORTEST, Redial
from shoal.reach.finding import Finding

log = logging.getLogger(__name__)

MAX_SEARCHES = 32  # at a time, of one store_many or get_many

S = TypeVar("S")
T = TypeVar("T")


class DHTNode:
    """One participant of the DHT. Lives on the loop of `node`: make it and call it there.

    How safe a record is: it is stored on the `num_replicas` nodes nearest to its key. If k of n nodes are killed at
    once, before anybody can react, it is lost with probability C(k, r) / C(n, r), r being `num_replicas`: with 32 nodes
    and 10 killed 1.3e-3 for r = 5 (the reference's default), 4.3e-6 for r = 8, 1.6e-8 for r = 10 (the default here); in
    a large swarm that loses a third at once 3^-r, 1.7e-5 for r = 10. Within seconds the survivors that notice then send
    the record to the next nearest nodes, so losses further apart do not add up, and newcomers get what they are now
    near to. Both are the task of the nearest survivor; what falls between is made good when records are republished,
    minutes later.

    Args:
        node: carries the messages; its handlers, address book and connections may be used by others as well.
        client_mode: ask and store, but keep nothing and serve nobody; in no routing table.
        validators: rules for records beside `SignatureValidator`, which every node has.
        announce: addresses to name to others besides those at which `node` listens.
        clock: seconds in which expiration times are measured; everything else is timed by the loop.
        rng: draws the times of upkeep, of redialling and of republishing, and what to look for, and nothing else.
        bucket_size: Kademlia's k, contacts per bucket of the routing table.
        num_replicas: nodes that keep each record.
        parallel: Kademlia's alpha, requests that one search has under way.
        request_timeout: seconds until a node that does not answer counts as failed.
        upkeep_period: mean seconds between two rounds of dropping, asking silent contacts and looking for new ones.
        republish_period: mean seconds after which a node stores anew what nobody else stored meanwhile.
    """

    def __init__(
        self,
        node: Node,
        *,
        client_mode: bool = False,
        validators: Iterable[RecordValidator] = (),
        announce: Sequence[Multiaddr] = (),
        clock: Callable[[], float] = get_dht_time,
        rng: random.Random | None = None,
        bucket_size: int = 20,
        num_replicas: int = 10,
        parallel: int = 5,
        request_timeout: float = 3.0,
        upkeep_period: float = 15.0,
        republish_period: float = 120.0,
    ) -> None:
        self.node = node
        self.peer_id = node.peer_id
        self.num_replicas = num_replicas
        self.table = RoutingTable(node_id(node.peer_id), bucket_size)
        self.storage = LocalStorage()
        self.cache = LocalStorage(max_records=4096, max_bytes=16 << 20)
        self._clock = clock
        self._rng = rng or random.Random()
        self._parallel = parallel
        self._upkeep_period = upkeep_period
        self._initial_peers: dict[PeerID, list[Multiaddr]] = {}
        self._redial = Redial(self._rng)
        self._initial_lost = asyncio.Event()
        self._moved: list[Callable[[], None]] = []
        self._stop_listening_for_losses = node.on_lost(self._on_lost)
        self._validator = CompositeValidator([SignatureValidator(node.identity), ClosedRunValidator(), *validators])
        self._replication = Replication(self.table, self.storage, num_replicas, republish_period, self._rng)
        self._records = KeptRecords(self.storage, self.cache, self._validator, clock)
        self._protocol = Protocol(
            node,
            table=self.table,
            records=self._records,
            replication=self._replication,
            client_mode=client_mode,
            announce=announce,
            request_timeout=request_timeout,
        )
        self._tasks = [node.spawn(self._keep_up()), node.spawn(self._keep_initial_peers())]

    async def close(self) -> None:
        """Take no further part. The others have what this node kept, and notice that it is gone."""
        self._protocol.close()
        self._stop_listening_for_losses()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def client_mode(self) -> bool:
        """Whether it keeps nothing and serves nobody; another value after `found`."""
        return self._protocol.client_mode

    async def found(self, finding: Finding, *, client_mode: bool) -> None:
        """Others reach this node as `finding` says: tell so to those that know it, or are to know it."""
        was_client = self.client_mode
        self._protocol.finding = finding
        self._protocol.turn(client_mode)
        for handler in list(self._moved):
            handler()
        if not (was_client and client_mode):
            await self._meet(self.table.own_id)

    def on_moved(self, handler: Callable[[], None]) -> Callable[[], None]:
        """Have `handler` called when `visible_addresses` may have changed; returns a function that ends that."""
        self._moved.append(handler)
        return lambda: self._moved.remove(handler) if handler in self._moved else None

    def contacts(self) -> list[PeerID]:
        """The peers that it knows as nodes of the DHT, and its initial peers."""
        nearest = self.table.nearest(self.table.own_id, MAX_CONTACTS)
        return [*self._initial_peers, *(contact.peer for contact in nearest)]

    def own_addresses(self, latest: bool = False) -> list[Multiaddr]:
        """Where this node listens, and what its user announces, whether or not others reach it there."""
        return self._protocol.own_addresses(latest)

    def visible_addresses(self, latest: bool = False) -> list[Multiaddr]:
        """Where others can reach this node, those of loopback last; `latest` looks at the interfaces again."""
        return self._protocol.visible_addresses(latest)

    async def get_visible_maddrs(self, latest: bool = False) -> list[Multiaddr]:
        """As `visible_addresses`, under hivemind's name."""
        return self.visible_addresses(latest)

    def add_validators(self, validators: Iterable[RecordValidator]) -> None:
        """Have records checked by these too; what is kept here and does not pass is dropped."""
        self._validator.extend(validators)
        for storage in (self.storage, self.cache):
            storage.retain(self._validator.validate)

    # -- joining

    async def bootstrap(self, initial_peers: Iterable[Multiaddr | str], timeout: float = 10.0) -> None:
        """Join the DHT of which `initial_peers` are nodes. One that answers is enough; none is needed to begin a DHT.
        From then on each that is not connected is dialled every 5 to 60 s.

        Raises ValueError for an address that does not end in /p2p/<peer id>, and PeerUnreachable, with the reason for
        each, if none answers within `timeout` seconds. An address that names this very peer is passed over; if another
        process with its identity answers there, both warn. Of one that leads through a relay, the relay is joined.
        """
        for given in map(Multiaddr, initial_peers):
            # Who is reached through relays serves nobody in the DHT; these do.
            address = given if given.relay is None else given.of_relay()
            if given.peer_id is None or address.peer_id is None:
                raise ValueError(f"{given} does not say who answers there: an initial peer ends in /p2p/<peer id>")
            if address.peer_id != self.peer_id:
                at = self._initial_peers.setdefault(address.peer_id, [])
                at.extend([address] if address not in at else [])
            elif address not in self.visible_addresses():
                self.node.spawn(self.node.look_for_twin(address))
        if not self._initial_peers:
            return
        failures = await greet(self._protocol, self._initial_peers, timeout)
        if len(failures) == len(self._initial_peers):
            reasons = [
                f"\n  {address}: {failures[peer]}" for peer, known in self._initial_peers.items() for address in known
            ]
            raise PeerUnreachable(f"none of the initial peers answered:{''.join(reasons)}")
        self._initial_lost.set()
        await self._meet(self.table.own_id)

    async def _meet(self, target: int) -> None:
        """Get to know the nodes nearest to `target`, and be known to them."""
        await search(self._protocol, target, self.table.bucket_size, self._parallel)

    # -- storing

    async def store(
        self, key: DHTKey, value: DHTValue, expiration_time: DHTExpiration, subkey: Subkey | None = None
    ) -> bool:
        """Keep `value` under `key` (under a subkey of it, if given) until `expiration_time`.

        Returns whether any node keeps it: False if none could be reached, if something newer is there, if it has
        expired already, or if a validator refuses it. Raises TypeError and ValueError as `encode_key` and
        `encode_value` do.
        """
        return await self.store_record(make_record(key, value, expiration_time, subkey, self._clock()))

    async def store_record(self, record: DHTRecord) -> bool:
        """As `store`, of what `make_record` made."""
        record = self._signed(record)
        return (await self._store_records([record]))[record]

    async def store_many(
        self,
        keys: Sequence[DHTKey],
        values: Sequence[DHTValue],
        expiration_time: DHTExpiration | Sequence[DHTExpiration],
        subkeys: Sequence[Subkey | None] | None = None,
    ) -> dict[DHTKey | tuple[DHTKey, Subkey], bool]:
        """As `store`, for many at once. The results are by key, or by (key, subkey) where there is a subkey.

        Raises ValueError if the lists are not equally long.
        """
        times = [expiration_time] * len(keys) if isinstance(expiration_time, (int, float)) else expiration_time
        subkeys = subkeys or [None] * len(keys)
        if not len(keys) == len(values) == len(times) == len(subkeys):
            raise ValueError("keys, values, expiration times and subkeys must be equally many")
        now = repeat(self._clock())
        records = [self._signed(record) for record in map(make_record, keys, values, times, subkeys, now)]
        by_key: dict[bytes, list[DHTRecord]] = {}
        for record in records:
            by_key.setdefault(record.key, []).append(record)
        kept: dict[DHTRecord, bool] = {}
        for outcome in await _gather(self._store_records, by_key.values()):
            kept |= outcome
        return {
            key if subkey is None else (key, subkey): kept[record]
            for key, subkey, record in zip(keys, subkeys, records, strict=True)
        }

    def _signed(self, record: DHTRecord) -> DHTRecord:
        return msgspec.structs.replace(record, value=self._validator.sign_value(record))

    async def _store_records(self, records: list[DHTRecord]) -> dict[DHTRecord, bool]:
        """Store records of one key; for each whether any node keeps it."""
        kept = dict.fromkeys(records, False)
        valid = [record for record in records if self._records.is_valid(record)]
        if len(valid) < len(records):
            why = "the validators refuse them"
            if any(map(is_misplaced, records)):
                why = "under a run's key each peer has its own subkey"
            elif any(is_excessive(record, self._clock()) for record in records):
                bounds = f"{MAX_HEALTH_BYTES} bytes at most, and expires within {MAX_HEALTH_SECONDS:g} s"
                why = f"a health record takes {bounds}"
            log.warning("%d records are not stored: %s", len(records) - len(valid), why)
        if not valid:
            return kept
        target = key_id(records[0].key)
        lookup = await self._search(target)
        candidates = lookup.nearest() + ([] if self.client_mode else [self.peer_id])
        candidates.sort(key=lambda peer: node_id(peer) ^ target)
        missing = self.num_replicas
        while missing and candidates:
            now, candidates = candidates[:missing], candidates[missing:]
            for answer in await asyncio.gather(*(self._store_at(peer, lookup, valid) for peer in now)):
                if answer is not None:
                    missing -= 1
                    for record, ok in zip(valid, answer, strict=True):
                        kept[record] |= ok
        is_cached = bool(self.cache.get(target, self._clock()))
        for record in valid:
            if kept[record] and (is_cached or record.subkey == NO_SUBKEY):
                self.cache.store(record, self._clock())
        return kept

    async def _store_at(self, peer: PeerID, lookup: Lookup, records: list[DHTRecord]) -> list[bool] | None:
        if peer == self.peer_id:
            return [self._protocol.keep_valid(record) for record in records]
        return await self._protocol.send_records(peer, lookup.addresses[peer], records)

    # -- finding

    async def get(self, key: DHTKey, latest: bool = False) -> ValueWithExpiration[DHTValue] | None:
        """What is stored under `key`, and until when; None if nothing is found.

        For a key with subkeys the value is `{subkey: ValueWithExpiration}`. With `latest` all nodes that should keep
        the key are asked, and the newest of what they have is put together; without it the first answer is taken, this
        node's own memory included.
        """
        encoded = encode_key(key)
        target = key_id(encoded)
        found = LocalStorage()
        for record in self.cache.get(target, self._clock()) + self.storage.get(target, self._clock()):
            found.store(record, self._clock())
        if latest or not len(found):
            await self._find(encoded, found, latest)
        records = found.get(target, self._clock())
        for record in records:
            self.cache.store(record, self._clock())
        return self._present(records)

    async def get_many(
        self, keys: Iterable[DHTKey], latest: bool = False
    ) -> dict[DHTKey, ValueWithExpiration[DHTValue] | None]:
        """As `get`, for many keys at once."""
        unique = list(dict.fromkeys(keys))
        return dict(zip(unique, await _gather(lambda key: self.get(key, latest), unique), strict=True))

    async def _find(self, key: bytes, found: LocalStorage, latest: bool) -> None:
        """Search the network for the records of `key` and put them into `found`."""
        lacking: list[PeerID] = []

        def heed(peer: PeerID, records: list[DHTRecord]) -> bool:
            if not records:
                lacking.append(peer)
            for record in records:
                if record.key == key and not found.holds(record) and self._protocol.believes(peer, record):
                    found.store(record, self._clock())
            return not latest and len(found) > 0

        await self._search(key_id(key), heed)
        records = found.get(key_id(key), self._clock())
        if records and lacking:
            # As in Kademlia, the nearest node without it gets a copy: who comes the same way finds it a step earlier.
            nearest = min(lacking, key=lambda peer: node_id(peer) ^ key_id(key))
            self.node.spawn(self._protocol.send_records(nearest, (), records, cache=True))

    def _present(self, records: list[DHTRecord]) -> ValueWithExpiration[DHTValue] | None:
        values = {
            record.subkey: ValueWithExpiration(
                decode_value(self._validator.strip_value(record)), record.expiration_time
            )
            for record in records
        }
        if not values or NO_SUBKEY in values:
            return values.get(NO_SUBKEY)
        dictionary = {decode_subkey(subkey): value for subkey, value in sorted(values.items())}
        return ValueWithExpiration(dictionary, max(value.expiration_time for value in values.values()))

    async def _search(self, target: int, heed: Heed | None = None) -> Lookup:
        return await search(self._protocol, target, self.num_replicas, self._parallel, heed)

    # -- upkeep

    async def _keep_up(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._upkeep_period * self._rng.uniform(0.5, 1.5))
            for storage in (self.storage, self.cache):
                storage.remove_expired(self._clock())
            await _gather(self._protocol.ping, [contact.peer for contact in self.table.due(loop.time())])
            for target in self.table.refresh_targets(loop.time(), self._rng):
                await self._meet(target)
            republished = [self.storage.get(key, self._clock()) for key in self._replication.due(loop.time())]
            await _gather(self._store_records, [records for records in republished if records])

    async def _keep_initial_peers(self) -> None:
        """Dial the initial peers that are not connected: one may have been started again, at its address."""
        loop = asyncio.get_running_loop()
        while True:
            self._initial_lost.clear()
            for peer in self._initial_peers:
                if self.node.is_connected(peer):
                    self._redial.found(peer)
                else:
                    self._redial.missing(peer, loop.time())
            for peer in self._redial.due(loop.time()):
                self.node.spawn(self._greet_again(peer))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._redial.next_time()):
                    await self._initial_lost.wait()

    async def _greet_again(self, peer: PeerID) -> None:
        if not await greet(self._protocol, {peer: self._initial_peers[peer]}, timeout=SHORTEST):
            await self._meet(self.table.own_id)

    def _on_lost(self, peer: PeerID, _reason: str) -> None:
        if peer in self._initial_peers:
            self._initial_lost.set()


async def _gather(function: Callable[[S], Coroutine[Any, Any, T]], items: Iterable[S]) -> list[T]:
    """The results for all items, in order; at most `MAX_SEARCHES` at a time."""
    gate = asyncio.Semaphore(MAX_SEARCHES)

    async def run(item: S) -> T:
        async with gate:
            return await function(item)

    return await asyncio.gather(*map(run, items))

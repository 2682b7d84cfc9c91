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
from shoal.dht.search import Heed, search
from shoal.dht.storage import LocalStorage
from shoal.dht.validation import CompositeValidator, RecordValidator, SignatureValidator
from shoal.p2p.errors import PeerUnreachable
from shoal.p2p.identity import PeerID
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.node import Node
from shoal.p2p.redial import SHORTEST, Redial
from shoal.reach.finding import WayIn

log = logging.getLogger(__name__)

MAX_SEARCHES = 32  # at a time, of one store_many or get_many

S = TypeVar("S")
T = TypeVar("T")


class DHTNode:
    """One node of the DHT. Make it and call it on the event loop of `node`.

    How safe a record is: the `num_replicas` nodes nearest to its key store it. If k of n nodes are killed at once,
    before any node can react, the record is lost with probability C(k, r) / C(n, r), where r is `num_replicas`. With 32
    nodes and 10 killed this is 1.3e-3 for r = 5 (the reference's default), 4.3e-6 for r = 8 and 1.6e-8 for r = 10 (the
    default here). In a large swarm that loses a third of its nodes at once it is 3^-r: 1.7e-5 for r = 10. Within
    seconds the survivors notice the loss and send the record to the next nearest nodes, so losses that lie further
    apart do not add up. A new node gets the records whose keys it is near to. In both cases the nearest living node
    that holds the record sends it. If a record is missed nevertheless, republishing repairs that some minutes later.

    Args:
        node: carries the messages. Other code may use its handlers, address book and connections as well.
        client_mode: only ask and store. A client keeps no records, serves nobody, and is in no routing table.
        validators: further rules for records. Every node also has a `SignatureValidator`.
        announce: addresses to announce to others, besides those at which `node` listens.
        clock: gives the time, in the seconds in which expiration times are measured. Everything else uses the loop's
            time.
        rng: draws the times of upkeep, of redialling and of republishing, and the ids to look for; nothing else.
        bucket_size: Kademlia's k: contacts per bucket of the routing table.
        num_replicas: number of nodes that keep each record.
        parallel: Kademlia's alpha: requests that one search has under way.
        request_timeout: seconds after which a node that does not answer counts as failed.
        upkeep_period: mean seconds between two rounds of upkeep: drop expired records, ask silent contacts, look for
            new ones.
        republish_period: mean seconds after which a node stores its records of a key again, unless another node has
            stored them meanwhile.
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
        self._stop_listening = [node.on_lost(self._on_lost), node.on_another(self._on_another)]
        self._mistaken: dict[PeerID, PeerID] = {}  # initial peers, and who has answered at their addresses instead
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
        """Leave the DHT. The other nodes have the records that this node kept, and notice that it is gone."""
        self._protocol.close()
        for stop in self._stop_listening:
            stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def client_mode(self) -> bool:
        """Whether this node keeps no records and serves nobody. `found` can change it."""
        return self._protocol.client_mode

    async def found(self, finding: WayIn, *, client_mode: bool) -> None:
        """Others reach this node as `finding` says: announce that to the nodes that know it or should know it."""
        was_client = self.client_mode
        self._protocol.finding = finding
        self._protocol.turn(client_mode)
        for handler in list(self._moved):
            handler()
        if not (was_client and client_mode):
            await self._meet(self.table.own_id)

    def on_moved(self, handler: Callable[[], None]) -> Callable[[], None]:
        """Call `handler` whenever `visible_addresses` may have changed. Returns a function that ends this."""
        self._moved.append(handler)
        return lambda: self._moved.remove(handler) if handler in self._moved else None

    def contacts(self) -> list[PeerID]:
        """The initial peers, and the peers that this node knows as nodes of the DHT."""
        nearest = self.table.nearest(self.table.own_id, MAX_CONTACTS)
        return [*self._initial_peers, *(contact.peer for contact in nearest)]

    def own_addresses(self, latest: bool = False) -> list[Multiaddr]:
        """The addresses where this node listens, and those that its user announces, whether or not others reach it
        there.
        """
        return self._protocol.own_addresses(latest)

    def visible_addresses(self, latest: bool = False) -> list[Multiaddr]:
        """The addresses at which others can reach this node, loopback last. `latest` looks at the machine's interfaces
        again.
        """
        return self._protocol.visible_addresses(latest)

    async def get_visible_maddrs(self, latest: bool = False) -> list[Multiaddr]:
        """Same as `visible_addresses`, under hivemind's name."""
        return self.visible_addresses(latest)

    def add_validators(self, validators: Iterable[RecordValidator]) -> None:
        """Check records by these rules too, from now on. Records that this node keeps and that a rule refuses are
        dropped.
        """
        self._validator.extend(validators)
        for storage in (self.storage, self.cache):
            storage.retain(self._validator.validate)

    # -- joining

    async def bootstrap(self, initial_peers: Iterable[Multiaddr | str], timeout: float = 10.0) -> None:
        """Join the DHT through `initial_peers`. One peer that answers is enough; an empty list begins a new DHT.

        From then on, while an initial peer is not connected, this node dials it again every 5 to 60 s. If another peer
        answers at its address, this node logs a warning, once. An address that names this very peer is skipped; if
        another process with the same identity answers there, both log a warning. If an address is that of this very
        peer and names an earlier identity of it, a warning says so, and another initial peer must answer. Of an address
        that leads through a relay, the relay becomes the initial peer.

        Args:
            initial_peers: addresses that end in /p2p/<peer id>.
            timeout: seconds within which one of the peers must answer.

        Raises:
            ValueError: if an address does not end in /p2p/<peer id>.
            PeerUnreachable: if no peer answers in time. The message gives the reason for each address.
        """
        for given in map(Multiaddr, initial_peers):
            # A peer that is reached through relays serves nobody in the DHT; its relays do.
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
        own = [peer for peer, found in self._mistaken.items() if found == self.peer_id and peer in failures]
        failures |= dict.fromkeys(own, "it is this peer's own address, with an earlier identity: give that of another")
        if len(failures) == len(self._initial_peers):
            reasons = [
                f"\n  {address}: {failures[peer]}" for peer, known in self._initial_peers.items() for address in known
            ]
            raise PeerUnreachable(f"none of the initial peers answered:{''.join(reasons)}")
        for peer in own:  # nobody is missing there
            del self._initial_peers[peer]
            self._redial.found(peer)
        self._initial_lost.set()
        await self._meet(self.table.own_id)

    async def _meet(self, target: int) -> None:
        """Learn of the nodes nearest to `target`, and make this node known to them."""
        await search(self._protocol, target, self.table.bucket_size, self._parallel)

    # -- storing

    async def store(
        self, key: DHTKey, value: DHTValue, expiration_time: DHTExpiration, subkey: Subkey | None = None
    ) -> bool:
        """Keep `value` under `key`, or under a subkey of it, until `expiration_time`.

        Args:
            key: as in `DHT.store`.
            value: as in `DHT.store`.
            expiration_time: as in `DHT.store`.
            subkey: as in `DHT.store`.

        Returns:
            Whether any node keeps the value. False if no node could be reached, if the DHT has a value that expires
            later, if the value has expired, or if a validator refuses it.

        Raises:
            TypeError, ValueError: as `encode_key`, `encode_value` and `check_expiration`.
        """
        return await self.store_record(make_record(key, value, expiration_time, subkey, self._clock()))

    async def store_record(self, record: DHTRecord) -> bool:
        """Same as `store`, for a record from `make_record`."""
        record = self._signed(record)
        return (await self._store_records([record]))[record]

    async def store_many(
        self,
        keys: Sequence[DHTKey],
        values: Sequence[DHTValue],
        expiration_time: DHTExpiration | Sequence[DHTExpiration],
        subkeys: Sequence[Subkey | None] | None = None,
    ) -> dict[DHTKey | tuple[DHTKey, Subkey], bool]:
        """Same as `store`, for many values at once.

        Args:
            keys: the key of each value.
            values: the values.
            expiration_time: one time for all values, or one for each.
            subkeys: a subkey or None for each value; None if no value has one.

        Returns:
            The result of `store` for each key, or for each (key, subkey) where there is a subkey.

        Raises:
            ValueError: if the lists are not equally long, and as `store`.
            TypeError: as `store`.
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
        """Store records of one key; returns for each whether any node keeps it."""
        kept = dict.fromkeys(records, False)
        valid = [record for record in records if self._records.is_valid(record)]
        if len(valid) < len(records):
            why = self._records.refusal(next(record for record in records if record not in valid))
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
        """Find the value that is stored under `key`, and its expiration time.

        Args:
            key: as given to `store`.
            latest: ask all nodes that should keep the key, and combine the newest records that they have. Otherwise the
                first answer is taken, and this node's own memory counts as one.

        Returns:
            (value, expiration_time), or None if nothing is found. For a key with subkeys the value is `{subkey:
            ValueWithExpiration}`.

        Raises:
            TypeError, ValueError: as `encode_key`.
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
        """Same as `get`, for many keys at once. Returns the result of each key."""
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
            # As in Kademlia, the nearest node without the record gets a copy: a later search along the same way finds
            # it a step earlier.
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
        """Dial the initial peers that are not connected: one may have restarted at its address."""
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

    def _on_another(self, dialled: PeerID, found: PeerID) -> None:
        """Another peer answers than the one that was dialled: log a warning if that one is an initial peer, once."""
        if dialled not in self._initial_peers or dialled in self._mistaken:
            return
        self._mistaken[dialled] = found
        at = " or ".join(map(str, self._initial_peers[dialled]))
        if found == self.peer_id:
            log.warning(
                "this peer's own address stands in initial_peers with an earlier identity: %s, and this peer is now "
                "%s. Remove it there, or keep the identity with DHT(identity_path=…)",
                at,
                found,
            )
        else:
            log.warning(
                "at %s answers peer %s, and initial_peers names %s there. If it is the same machine, restarted with a "
                "new identity, this peer does not find it again, and their run may become two that do not know of each "
                "other. Start it with DHT(identity_path=…), which keeps its identity, or give its present address in "
                "initial_peers",
                at,
                found,
                dialled,
            )


async def _gather(function: Callable[[S], Coroutine[Any, Any, T]], items: Iterable[S]) -> list[T]:
    """Call `function` for all items, at most `MAX_SEARCHES` at a time; returns the results in order."""
    gate = asyncio.Semaphore(MAX_SEARCHES)

    async def run(item: S) -> T:
        async with gate:
            return await function(item)

    return await asyncio.gather(*map(run, items))

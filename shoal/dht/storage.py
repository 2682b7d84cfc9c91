"""The records that a node keeps, bounded in number and in bytes. No I/O; callers give the time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from shoal.dht.records import NO_SUBKEY, DHTRecord, key_id, owners_of
from shoal.dht.run_keys import MAX_HEALTH_RECORDS, is_health

MAX_ENTRY_BYTES = 512 << 10
"""Bytes of all records of one key, so that they fit into one reply."""
MAX_ENTRY_RECORDS = 4096
MAX_OWNED_RECORDS = 1024  # of one owner, of all keys together

# The rank of a record when records must make room for others, lowest first: whether it has an owner, its expiration
# time, the id of its key, its subkey.
_Place = tuple[bool, float, int, bytes]


@dataclass(slots=True)
class _Entry:
    """The records of one key.

    Attributes:
        records: by subkey.
        bytes: the sum of their sizes.
        owned: the number of records that have an owner.
        latest: the latest expiration time that any of them had.
        order: a heap of their places, which may contain places of records that are gone; None before the bounds are
            first reached.
    """

    records: dict[bytes, DHTRecord] = field(default_factory=dict)
    bytes: int = 0
    owned: int = 0
    latest: float = 0.0
    order: list[_Place] | None = None


class LocalStorage:
    """Unexpired records, by the id of their key.

    A key has either one record without subkey, or one record per subkey. Of two records for the same place, the one
    with the later expiration time wins; if the times are equal, the one with the greater value wins. So all nodes end
    up with the same record, in whatever order the records arrive. A record without subkey replaces a dictionary if it
    expires later than every entry. A subkey replaces a record without subkey if it does not expire earlier.

    Only an owner can replace a record that only the owner can write. A record without owner never replaces one that has
    an owner. A subkey with an owner replaces a record without subkey and without owner, whatever their expiration
    times.

    An owner that has MAX_OWNED_RECORDS records here gets no further places, but it may replace those that it has.

    When another bound is exceeded, records without owner are dropped first, and within each kind those that expire
    soonest. A key of health records (`run_keys`) has MAX_HEALTH_RECORDS places, and a peer that has one keeps it.

    Storing a record takes time logarithmic in the number of kept records.

    Args:
        max_records: records of all keys together; a subkey counts as one.
        max_bytes: bytes of keys, subkeys and values together, see `DHTRecord.size`.
    """

    def __init__(self, max_records: int = 32768, max_bytes: int = 64 << 20) -> None:
        self.max_records = max_records
        self.max_bytes = max_bytes
        self.bytes = 0
        self._entries: dict[int, _Entry] = {}
        self._count = 0
        self._owned: dict[bytes, int] = {}  # the number of records of each owner
        # A heap of (expiration time, key id, subkey). It may contain records that are gone or were replaced.
        self._expirations: list[tuple[float, int, bytes]] = []
        self._order: list[_Place] | None = None  # of all records, as `_Entry.order`

    def __len__(self) -> int:
        """The number of kept records, including those that have expired since the last call that gave the time."""
        return self._count

    def key_ids(self) -> list[int]:
        """The ids of all keys that have records."""
        return list(self._entries)

    def get(self, identifier: int, now: float) -> list[DHTRecord]:
        """The unexpired records of the key with this id: none, one without subkey, or one for each subkey."""
        self.remove_expired(now)
        entry = self._entries.get(identifier)
        return list(entry.records.values()) if entry is not None else []

    def holds(self, record: DHTRecord) -> bool:
        """Whether this very record is kept."""
        return self._kept(key_id(record.key), record.subkey) == record

    def store(self, record: DHTRecord, now: float) -> bool:
        """Keep `record`, unless a newer one is kept. Returns whether `record` is kept, which it may have been
        before.
        """
        self.remove_expired(now)
        if record.expiration_time <= now:
            return False
        identifier = key_id(record.key)
        current = self._kept(identifier, record.subkey)
        if current == record:
            return True
        if current is None and any(self._owned.get(owner, 0) >= MAX_OWNED_RECORDS for owner in owners_of(record)):
            return False
        entry = self._entries.get(identifier)
        if entry is not None:
            if current is None and len(entry.records) >= MAX_HEALTH_RECORDS and is_health(record):
                return False
            if not _wins(record, entry):
                return False
            if (NO_SUBKEY in entry.records) != (record.subkey == NO_SUBKEY):
                for other in list(entry.records.values()):
                    self._remove(identifier, other)
            elif current is not None:
                self._remove(identifier, current)
        self._add(identifier, record)
        self._enforce_entry_bounds(identifier)
        self._enforce_bounds()
        return self._kept(identifier, record.subkey) is record

    def remove_expired(self, now: float) -> None:
        """Drop all records that have expired."""
        while self._expirations and self._expirations[0][0] <= now:
            expiration, identifier, subkey = heapq.heappop(self._expirations)
            self._remove_if_current(identifier, subkey, expiration)

    def retain(self, wanted: Callable[[DHTRecord], bool]) -> None:
        """Drop all records that are not `wanted`."""
        for identifier, entry in list(self._entries.items()):
            for record in list(entry.records.values()):
                if not wanted(record):
                    self._remove(identifier, record)

    def _kept(self, identifier: int, subkey: bytes) -> DHTRecord | None:
        entry = self._entries.get(identifier)
        return entry.records.get(subkey) if entry is not None else None

    def _add(self, identifier: int, record: DHTRecord) -> None:
        entry = self._entries.setdefault(identifier, _Entry())
        entry.records[record.subkey] = record
        entry.bytes += record.size
        entry.latest = max(entry.latest, record.expiration_time)
        self._count += 1
        self.bytes += record.size
        place = _place(identifier, record)
        entry.owned += place[0]
        for owner in owners_of(record):
            self._owned[owner] = self._owned.get(owner, 0) + 1
        heapq.heappush(self._expirations, place[1:])
        for order in (entry.order, self._order):
            if order is not None:
                heapq.heappush(order, place)
        self._forget_what_is_gone(identifier, entry)

    def _remove(self, identifier: int, record: DHTRecord) -> None:
        entry = self._entries[identifier]
        del entry.records[record.subkey]
        if not entry.records:
            del self._entries[identifier]
        entry.bytes -= record.size
        owners = owners_of(record)
        entry.owned -= bool(owners)
        for owner in owners:
            self._owned[owner] -= 1
            if not self._owned[owner]:
                del self._owned[owner]
        self._count -= 1
        self.bytes -= record.size

    def _remove_if_current(self, identifier: int, subkey: bytes, expiration: float) -> None:
        """Drop the record that a heap names, unless it is gone or was replaced."""
        record = self._kept(identifier, subkey)
        if record is not None and record.expiration_time == expiration:
            self._remove(identifier, record)

    def _enforce_entry_bounds(self, identifier: int) -> None:
        entry = self._entries[identifier]
        while len(entry.records) > MAX_ENTRY_RECORDS or entry.bytes > MAX_ENTRY_BYTES:
            if entry.order is None:
                entry.order = _heap(_place(identifier, record) for record in entry.records.values())
            _, expiration, _, subkey = heapq.heappop(entry.order)
            self._remove_if_current(identifier, subkey, expiration)

    def _enforce_bounds(self) -> None:
        while self._count > self.max_records or self.bytes > self.max_bytes:
            if self._order is None:
                self._order = _heap(self._places())
            _, expiration, identifier, subkey = heapq.heappop(self._order)
            self._remove_if_current(identifier, subkey, expiration)

    def _forget_what_is_gone(self, identifier: int, entry: _Entry) -> None:
        """Rebuild each heap that has more gone records than kept ones. That costs constant time per record added."""
        if len(self._expirations) > 2 * self._count + 64:
            self._expirations = [place[1:] for place in self._places()]
            heapq.heapify(self._expirations)
        if self._order is not None and len(self._order) > 2 * self._count + 64:
            self._order = _heap(self._places())
        if entry.order is not None and len(entry.order) > 2 * len(entry.records) + 64:
            entry.order = _heap(_place(identifier, record) for record in entry.records.values())

    def _places(self) -> Iterable[_Place]:
        for identifier, entry in self._entries.items():
            for record in entry.records.values():
                yield _place(identifier, record)


def _place(identifier: int, record: DHTRecord) -> _Place:
    return bool(owners_of(record)), record.expiration_time, identifier, record.subkey


def _heap(places: Iterable[_Place]) -> list[_Place]:
    heap = list(places)
    heapq.heapify(heap)
    return heap


def _wins(record: DHTRecord, entry: _Entry) -> bool:
    """Whether `record` replaces the records that `entry`, the entry of its key, has in its place."""
    if (current := entry.records.get(record.subkey)) is not None:
        return (record.expiration_time, record.value) > (current.expiration_time, current.value)
    is_owned = bool(owners_of(record))
    if record.subkey == NO_SUBKEY:
        return (is_owned or not entry.owned) and record.expiration_time > entry.latest
    regular = entry.records.get(NO_SUBKEY)
    if regular is None or (is_owned and not entry.owned):
        return True
    return record.expiration_time >= regular.expiration_time

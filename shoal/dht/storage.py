"""Records that a node keeps, bounded in number and in bytes. No I/O; time is given."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from shoal.dht.records import NO_SUBKEY, DHTRecord, key_id

MAX_ENTRY_BYTES = 512 << 10
"""Bytes of all records of one key, so that they fit into one reply."""
MAX_ENTRY_RECORDS = 4096


class LocalStorage:
    """Unexpired records, by the id of their key.

    A key has either one record without subkey, or one record per subkey. Of two records for the same place the one with
    the later expiration time wins, of equal ones the one with the greater value: so the order in which nodes hear of
    records makes no difference. A record without subkey replaces a dictionary if it expires later than all of it; a
    subkey replaces a record without subkey if it does not expire earlier.

    When a bound is exceeded, what expires soonest goes.

    Args:
        max_records: of all keys together, a subkey counting as one.
        max_bytes: of keys, subkeys and values together.
    """

    def __init__(self, max_records: int = 32768, max_bytes: int = 64 << 20) -> None:
        self.max_records = max_records
        self.max_bytes = max_bytes
        self.bytes = 0
        self._entries: dict[int, dict[bytes, DHTRecord]] = {}
        self._count = 0
        # (expiration time, key id, subkey), the soonest first. What was replaced meanwhile is still in it.
        self._expirations: list[tuple[float, int, bytes]] = []

    def __len__(self) -> int:
        """How many records are kept; those that expired since the last call with a time are counted."""
        return self._count

    def key_ids(self) -> list[int]:
        """The ids of all keys that have records."""
        return list(self._entries)

    def get(self, identifier: int, now: float) -> list[DHTRecord]:
        """The unexpired records of the key with this id: none, one without subkey, or one for each subkey."""
        self.remove_expired(now)
        return list(self._entries.get(identifier, {}).values())

    def holds(self, record: DHTRecord) -> bool:
        """Whether this very record is kept."""
        return self._entries.get(key_id(record.key), {}).get(record.subkey) == record

    def store(self, record: DHTRecord, now: float) -> bool:
        """Keep `record` unless something newer is kept. Returns whether it is kept (also if it was already)."""
        self.remove_expired(now)
        if record.expiration_time <= now:
            return False
        identifier = key_id(record.key)
        entry = self._entries.get(identifier, {})
        current = entry.get(record.subkey)
        if current == record:
            return True
        if not _wins(record, entry):
            return False
        if (NO_SUBKEY in entry) != (record.subkey == NO_SUBKEY):
            for other in list(entry.values()):
                self._remove(identifier, other)
        elif current is not None:
            self._remove(identifier, current)
        entry = self._entries.setdefault(identifier, {})
        entry[record.subkey] = record
        self._count += 1
        self.bytes += record.size
        heapq.heappush(self._expirations, (record.expiration_time, identifier, record.subkey))
        self._enforce_entry_bounds(identifier)
        self._enforce_bounds()
        return self._entries.get(identifier, {}).get(record.subkey) is record

    def remove_expired(self, now: float) -> None:
        """Drop all records whose time has come."""
        while self._expirations and self._expirations[0][0] <= now:
            self._pop_soonest()

    def retain(self, wanted: Callable[[DHTRecord], bool]) -> None:
        """Drop all records that are not `wanted`."""
        for identifier, entry in list(self._entries.items()):
            for record in list(entry.values()):
                if not wanted(record):
                    self._remove(identifier, record)

    def _pop_soonest(self) -> None:
        expiration, identifier, subkey = heapq.heappop(self._expirations)
        record = self._entries.get(identifier, {}).get(subkey)
        if record is not None and record.expiration_time == expiration:
            self._remove(identifier, record)

    def _remove(self, identifier: int, record: DHTRecord) -> None:
        entry = self._entries[identifier]
        del entry[record.subkey]
        if not entry:
            del self._entries[identifier]
        self._count -= 1
        self.bytes -= record.size

    def _enforce_entry_bounds(self, identifier: int) -> None:
        entry = self._entries[identifier]
        size = sum(record.size for record in entry.values()) if len(entry) > 1 else 0
        while len(entry) > MAX_ENTRY_RECORDS or size > MAX_ENTRY_BYTES:
            soonest = min(entry.values(), key=lambda record: (record.expiration_time, record.subkey))
            size -= soonest.size
            self._remove(identifier, soonest)

    def _enforce_bounds(self) -> None:
        while self._count > self.max_records or self.bytes > self.max_bytes:
            self._pop_soonest()
        if len(self._expirations) > 2 * self._count + 64:
            self._expirations = [
                (record.expiration_time, identifier, record.subkey)
                for identifier, entry in self._entries.items()
                for record in entry.values()
            ]
            heapq.heapify(self._expirations)


def _wins(record: DHTRecord, entry: dict[bytes, DHTRecord]) -> bool:
    """Whether `record` replaces what `entry`, the records of its key, has for it."""
    if (current := entry.get(record.subkey)) is not None:
        return (record.expiration_time, record.value) > (current.expiration_time, current.value)
    if record.subkey == NO_SUBKEY:
        return all(record.expiration_time > other.expiration_time for other in entry.values())
    regular = entry.get(NO_SUBKEY)
    return regular is None or record.expiration_time >= regular.expiration_time

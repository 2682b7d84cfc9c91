"""The records that a DHT node keeps, and which records it accepts. No I/O."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from itertools import islice

from shoal.dht.records import MAX_SECONDS_AHEAD, NO_SUBKEY, DHTRecord, decode_subkey, decode_value
from shoal.dht.run_keys import MAX_HEALTH_BYTES, MAX_HEALTH_SECONDS, is_excessive, is_misplaced
from shoal.dht.storage import LocalStorage
from shoal.dht.validation import CompositeValidator

MAX_DESCRIBED = 16  # entries of a dictionary whose types are in a message
MAX_KEY_CHARACTERS = 40  # of an entry's key there
CLOCK_DIFFERENCE = 60.0  # seconds that another node's clock may be ahead: it may store a record for a whole day


class KeptRecords:
    """The stores of one DHT node, and the rules for the records that enter them.

    Args:
        storage: the records that this node is responsible for.
        cache: copies of other records. This node does not pass them on.
        validator: the rules for records.
        clock: gives the time, in the seconds in which expiration times are measured.
    """

    def __init__(
        self, storage: LocalStorage, cache: LocalStorage, validator: CompositeValidator, clock: Callable[[], float]
    ) -> None:
        self._storage, self._cache = storage, cache
        self._validator, self._clock = validator, clock

    def is_valid(self, record: DHTRecord) -> bool:
        """Whether this node may keep `record`, show it to the user and pass it on. Kept records are not checked
        again.
        """
        if self.holds(record):
            return True
        now = self._clock()
        if record.expiration_time > now + MAX_SECONDS_AHEAD + CLOCK_DIFFERENCE:
            return False
        if is_misplaced(record) or is_excessive(record, now):
            return False
        if not self._validator.validate(record):
            return False
        try:
            decode_value(self._validator.strip_value(record))
            if record.subkey != NO_SUBKEY:
                decode_subkey(record.subkey)
        except ValueError:
            return False
        return True

    def refusal(self, record: DHTRecord) -> str:
        """Why `is_valid` is false of a record that this peer has made, for its log."""
        if is_misplaced(record):
            return "under a run's key each peer has its own subkey"
        if is_excessive(record, self._clock()):
            return (
                f"a health record takes {MAX_HEALTH_BYTES} bytes at most, and expires within {MAX_HEALTH_SECONDS:g} s"
            )
        place = f"key {decode_subkey(record.key)!r}"
        if record.subkey != NO_SUBKEY:
            place += f", subkey {decode_subkey(record.subkey)!r}"
        return f"{place}, value of type {self._type_of_value(record)}: {self._validator.refusal(record)}"

    def _type_of_value(self, record: DHTRecord) -> str:
        for encoded in (self._validator.strip_value(record), record.value):  # the latter was not signed
            with contextlib.suppress(ValueError):
                return described(decode_value(encoded))
        return "bytes"

    def holds(self, record: DHTRecord) -> bool:
        """Whether this very record is kept, and so was found valid before."""
        return self._storage.holds(record) or self._cache.holds(record)

    def known(self, key: int) -> list[DHTRecord]:
        """The records under a key's id: the stored ones, or the cached ones if none is stored."""
        now = self._clock()
        return self._storage.get(key, now) or self._cache.get(key, now)

    def stored(self, key: int) -> list[DHTRecord]:
        """The stored records under a key's id: those that this node is responsible for."""
        return self._storage.get(key, self._clock())

    def store(self, record: DHTRecord) -> bool:
        """Store a valid record; returns whether it is kept."""
        return self._storage.store(record, self._clock())

    def cache(self, record: DHTRecord) -> bool:
        """Cache a valid record; returns whether it is kept."""
        return self._cache.store(record, self._clock())

    def count(self) -> int:
        """How many keys have stored records."""
        return len(self._storage.key_ids())


def described(value: object) -> str:
    """The type of a value, for a message; of a dictionary also those of its first entries."""
    if not isinstance(value, dict) or not value:
        return _type_name(value)
    entries = [f"{_shown(key)}: {_type_name(item)}" for key, item in islice(value.items(), MAX_DESCRIBED)]
    return f"dict ({', '.join(entries)}{', …' if len(value) > MAX_DESCRIBED else ''})"


def _type_name(value: object) -> str:
    return "list or tuple" if isinstance(value, list) else type(value).__name__  # they are stored alike


def _shown(key: object) -> str:
    text = str(key)
    text = text if text.isprintable() else repr(text)
    return text if len(text) <= MAX_KEY_CHARACTERS else f"{text[:MAX_KEY_CHARACTERS]}…"

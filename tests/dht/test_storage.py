"""Local storage keeps the newest, within its bounds, until it expires; the order of arrival makes no difference."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shoal.dht import storage as storage_module
from shoal.dht.records import NO_SUBKEY, DHTRecord, encode_key, key_id
from shoal.dht.storage import MAX_ENTRY_RECORDS, LocalStorage

KEYS = [encode_key(f"key {index}") for index in range(3)]
SUBKEYS = [encode_key(f"subkey {index}") for index in range(3)]
OWNED = [encode_key(f"[owner:peer {index}]") for index in range(3)]  # the storage believes what validators have checked


def record(value: bytes = b"x", expiration: float = 10.0, key: bytes = KEYS[0], subkey: bytes = NO_SUBKEY) -> DHTRecord:
    return DHTRecord(key, subkey, value, expiration)


records = st.builds(
    DHTRecord,
    key=st.sampled_from(KEYS),
    subkey=st.sampled_from(SUBKEYS + OWNED),
    value=st.binary(max_size=20),
    expiration_time=st.integers(1, 60).map(float),
)


class StorageMachine(RuleBasedStateMachine):
    """Any history of dictionary entries, in a storage that is large enough and in one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.large = LocalStorage()
        self.small = LocalStorage(max_records=4, max_bytes=500)
        self.model: dict[tuple[bytes, bytes], DHTRecord] = {}

    @rule(new=records)
    def store(self, new: DHTRecord) -> None:
        self.small.store(new, self.now)
        current = self.model.get((new.key, new.subkey))
        wins = new.expiration_time > self.now and (
            current is None
            or current.expiration_time <= self.now
            or (current.expiration_time, current.value) <= (new.expiration_time, new.value)
        )
        assert self.large.store(new, self.now) == wins
        if wins:
            self.model[new.key, new.subkey] = new

    @rule(seconds=st.integers(0, 20))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        self.large.remove_expired(self.now)
        assert len(self.large) == sum(kept.expiration_time > self.now for kept in self.model.values())

    @invariant()
    def large_equals_the_model(self) -> None:
        for key in KEYS:
            expected = [kept for kept in self.model.values() if kept.key == key and kept.expiration_time > self.now]
            assert sorted(self.large.get(key_id(key), self.now), key=str) == sorted(expected, key=str)

    @invariant()
    def small_is_bounded_and_counts_right(self) -> None:
        entries = self.small._entries.values()
        kept = [one for entry in entries for one in entry.records.values()]
        assert len(self.small) == len(kept) <= 4
        assert self.small.bytes == sum(one.size for one in kept) <= 500
        for entry in entries:
            assert entry.bytes == sum(one.size for one in entry.records.values())
            assert entry.owned == sum(one.subkey in OWNED for one in entry.records.values())

    @invariant()
    def queues_do_not_grow_without_end(self) -> None:
        for storage in (self.large, self.small):
            assert len(storage._expirations) <= 2 * len(storage) + 64 + 2
            assert len(storage._order or []) <= 2 * len(storage) + 64 + 2


TestStorage = StorageMachine.TestCase
TestStorage.settings = settings(max_examples=60, stateful_step_count=40)


@given(st.lists(records, max_size=12), st.integers())
def test_order_of_arrival_makes_no_difference(items: list[DHTRecord], seed: int) -> None:
    one, other = LocalStorage(), LocalStorage()
    shuffled = list(items)
    random.Random(seed).shuffle(shuffled)
    for item in items:
        one.store(item, 0.0)
    for item in shuffled:
        other.store(item, 0.0)
    for key in KEYS:
        assert sorted(one.get(key_id(key), 0.0), key=str) == sorted(other.get(key_id(key), 0.0), key=str)


@given(st.lists(records | st.builds(record, expiration=st.integers(1, 60).map(float)), max_size=12), st.integers())
def test_what_has_an_owner_is_kept_whatever_else_is_stored(items: list[DHTRecord], seed: int) -> None:
    storage, alone = LocalStorage(), LocalStorage()
    for item in items:
        if item.subkey in OWNED:
            alone.store(item, 0.0)
    random.Random(seed).shuffle(items)
    for item in items:
        storage.store(item, 0.0)
    for kept in alone.get(key_id(KEYS[0]), 0.0):
        assert storage.holds(kept)


def test_of_equal_expirations_the_greater_value_wins() -> None:
    storage = LocalStorage()
    assert storage.store(record(b"b"), 0.0)
    assert not storage.store(record(b"a"), 0.0)
    assert storage.store(record(b"c"), 0.0)
    assert storage.store(record(b"c"), 0.0)  # it is there
    assert storage.get(key_id(KEYS[0]), 0.0) == [record(b"c")]


def test_value_and_dictionary_under_one_key() -> None:
    storage = LocalStorage()
    entries = [record(b"1", 10.0, subkey=SUBKEYS[0]), record(b"2", 20.0, subkey=SUBKEYS[1])]
    for entry in entries:
        assert storage.store(entry, 0.0)
    assert not storage.store(record(b"x", 20.0), 0.0)  # not later than all of the dictionary
    assert storage.get(key_id(KEYS[0]), 0.0) == entries
    assert storage.store(record(b"x", 20.5), 0.0)
    assert storage.get(key_id(KEYS[0]), 0.0) == [record(b"x", 20.5)]
    assert not storage.store(record(b"3", 20.0, subkey=SUBKEYS[0]), 0.0)
    assert storage.store(record(b"3", 20.5, subkey=SUBKEYS[0]), 0.0)
    assert storage.get(key_id(KEYS[0]), 0.0) == [record(b"3", 20.5, subkey=SUBKEYS[0])]
    assert len(storage) == 1


def test_what_expires_soonest_makes_room() -> None:
    storage = LocalStorage(max_records=2)
    assert storage.store(record(expiration=10.0, key=KEYS[0]), 0.0)
    assert storage.store(record(expiration=20.0, key=KEYS[1]), 0.0)
    assert not storage.store(record(expiration=5.0, key=KEYS[2]), 0.0)
    assert storage.store(record(expiration=15.0, key=KEYS[2]), 0.0)
    assert storage.get(key_id(KEYS[0]), 0.0) == []


def test_a_dictionary_is_bounded_so_that_it_fits_into_a_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_module, "MAX_ENTRY_BYTES", 1000)
    storage = LocalStorage()
    for index in range(50):
        storage.store(record(bytes(100), 10.0 + index, subkey=encode_key(index)), 0.0)
    kept = storage.get(key_id(KEYS[0]), 0.0)
    assert sum(one.size for one in kept) <= 1000
    assert max(one.expiration_time for one in kept) == 59.0


def test_what_has_no_owner_makes_room_for_what_has_one() -> None:
    storage = LocalStorage(max_records=100)
    owned = [record(b"mine", 10.0, KEYS[0], subkey) for subkey in OWNED]
    for one in owned:
        assert storage.store(one, 0.0)
    for index in range(MAX_ENTRY_RECORDS + 100):
        storage.store(record(b"x", 1000.0 + index, KEYS[0], encode_key(index)), 0.0)
        storage.store(record(b"x", 1000.0 + index, encode_key(index)), 0.0)
    assert len(storage) == 100
    assert all(storage.holds(one) for one in owned)


def test_a_full_key_keeps_what_has_an_owner() -> None:
    storage = LocalStorage()
    owned = [record(b"mine", 10.0, KEYS[0], subkey) for subkey in OWNED]
    for one in owned:
        assert storage.store(one, 0.0)
    for index in range(MAX_ENTRY_RECORDS + 100):
        storage.store(record(b"x", 1000.0 + index, KEYS[0], encode_key(index)), 0.0)
    assert len(storage) == MAX_ENTRY_RECORDS
    assert all(storage.holds(one) for one in owned)
    assert not storage.store(record(b"x", 9.0, KEYS[0], encode_key("new")), 0.0), "it would be the first to go"


@pytest.mark.parametrize("subkey", [encode_key, lambda index: encode_key(0), lambda index: NO_SUBKEY])
def test_to_store_into_a_full_key_takes_hardly_longer_than_into_an_empty_one(subkey: Callable[[int], bytes]) -> None:
    """CPU time, as a ratio: a pass over the key's records for every record would make it 15 to 200."""

    def seconds(fill: int) -> float:
        storage, number = LocalStorage(), 1000
        for index in range(fill):
            storage.store(record(b"x", 1e6 + index, KEYS[0], encode_key(f"full {index}")), 0.0)
        stored = [record(index.to_bytes(2, "big"), 1e6 + fill - 1.5, KEYS[0], subkey(index)) for index in range(number)]
        started = time.process_time()
        for one in stored:
            storage.store(one, 0.0)
        return time.process_time() - started

    empty, full = (min(seconds(fill) for _ in range(3)) for fill in (1, MAX_ENTRY_RECORDS))
    assert full < 10 * empty, (full, empty)


def test_retain_drops_the_rest() -> None:
    storage = LocalStorage()
    storage.store(record(b"good", key=KEYS[0]), 0.0)
    storage.store(record(b"bad", key=KEYS[1]), 0.0)
    storage.retain(lambda kept: kept.value == b"good")
    assert storage.key_ids() == [key_id(KEYS[0])]
    assert storage.bytes == record(b"good").size

"""Local storage keeps the newest, within its bounds, until it expires; the order of arrival makes no difference."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shoal.dht import storage as storage_module
from shoal.dht.records import NO_SUBKEY, DHTRecord, encode_key, key_id
from shoal.dht.storage import LocalStorage

KEYS = [encode_key(f"key {index}") for index in range(3)]
SUBKEYS = [encode_key(f"subkey {index}") for index in range(3)]


def record(value: bytes = b"x", expiration: float = 10.0, key: bytes = KEYS[0], subkey: bytes = NO_SUBKEY) -> DHTRecord:
    return DHTRecord(key, subkey, value, expiration)


records = st.builds(
    DHTRecord,
    key=st.sampled_from(KEYS),
    subkey=st.sampled_from(SUBKEYS),
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
        kept = [one for identifier in self.small.key_ids() for one in self.small._entries[identifier].values()]
        assert len(self.small) == len(kept) <= 4
        assert self.small.bytes == sum(one.size for one in kept) <= 500

    @invariant()
    def queues_do_not_grow_without_end(self) -> None:
        assert len(self.large._expirations) <= 2 * len(self.large) + 64 + 1


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


def test_retain_drops_the_rest() -> None:
    storage = LocalStorage()
    storage.store(record(b"good", key=KEYS[0]), 0.0)
    storage.store(record(b"bad", key=KEYS[1]), 0.0)
    storage.retain(lambda kept: kept.value == b"good")
    assert storage.key_ids() == [key_id(KEYS[0])]
    assert storage.bytes == record(b"good").size

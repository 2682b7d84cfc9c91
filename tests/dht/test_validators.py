"""Owned records are written by their owner only; schemas hold; validators compose."""

from __future__ import annotations

from typing import Annotated

import msgspec
import pytest

from shoal.dht.records import MAX_VALIDATOR_BYTES, NO_SUBKEY, DHTRecord, decode_value, encode_key, encode_value
from shoal.dht.validation import (
    BytesWithPublicKey,
    CompositeValidator,
    RecordValidator,
    SchemaValidator,
    SignatureValidator,
    owner_marker,
)
from shoal.p2p.identity import Identity

ALICE, BOB = Identity(bytes([1]) * 32), Identity(bytes([2]) * 32)
ALICES, BOBS = owner_marker(ALICE.peer_id), owner_marker(BOB.peer_id)


def record(key: str | int = "key", subkey: str | bytes | int | None = None, value: object = 1) -> DHTRecord:
    place = NO_SUBKEY if subkey is None else encode_key(subkey)
    return DHTRecord(encode_key(key), place, encode_value(value), 100.0)


def signed(by: Identity, unsigned: DHTRecord) -> DHTRecord:
    return msgspec.structs.replace(unsigned, value=SignatureValidator(by).sign_value(unsigned))


OWNED = [
    pytest.param(record(subkey=ALICES), id="subkey"),
    pytest.param(record(subkey=f"address of {ALICES}"), id="within a subkey"),
    pytest.param(record(subkey=ALICES.encode()), id="subkey of bytes"),
    pytest.param(record(key=f"public {ALICES} things"), id="key"),
    pytest.param(record(key=ALICES, subkey=ALICES), id="both"),
]


@pytest.mark.parametrize("owned", OWNED)
def test_owned_records_are_valid_only_if_their_owner_signed_them(owned: DHTRecord) -> None:
    anybody = SignatureValidator(Identity())
    assert anybody.validate(signed(ALICE, owned))
    assert anybody.strip_value(signed(ALICE, owned)) == owned.value
    assert not anybody.validate(owned)
    assert not anybody.validate(signed(BOB, owned))


@pytest.mark.parametrize("owned", OWNED)
@pytest.mark.parametrize(
    "change",
    [
        {"key": encode_key(f"other {ALICES}")},
        {"subkey": encode_key(f"other {ALICES}")},
        {"value": b"\x02" + bytes(64)},
        {"expiration_time": 101.0},
    ],
    ids=str,
)
def test_a_signature_is_of_one_record_only(owned: DHTRecord, change: dict[str, object]) -> None:
    assert not SignatureValidator(BOB).validate(msgspec.structs.replace(signed(ALICE, owned), **change))


@pytest.mark.parametrize(
    "place",
    [
        record(subkey=ALICES + BOBS),
        record(key=BOBS, subkey=ALICES),
        record(subkey="[owner:nobody]"),
        record(subkey="[owner:]"),
        record(subkey=f"[owner:b{str(ALICE.peer_id)[1:].upper()}]"),
    ],
    ids=["two owners", "other key", "no peer id", "empty", "another text of the same peer id"],
)
def test_what_has_no_single_owner_can_be_written_by_nobody(place: DHTRecord) -> None:
    for writer in (ALICE, BOB):
        assert not SignatureValidator(ALICE).validate(signed(writer, place))
        signature = writer.sign(SignatureValidator(writer)._signed_bytes(place, place.value))
        forced = msgspec.structs.replace(place, value=place.value + signature)
        assert not SignatureValidator(ALICE).validate(forced)


def test_other_records_are_left_alone() -> None:
    validator = SignatureValidator(ALICE)
    for free in (
        record(),
        record(subkey="alice"),
        record(subkey="owner:x]"),
        record(subkey=f"[Owner:{ALICE.peer_id}]"),
    ):
        assert validator.validate(free)
        assert validator.sign_value(free) == free.value == validator.strip_value(free)


def test_a_signature_fits_into_what_validators_may_add() -> None:
    assert len(signed(ALICE, record(subkey=ALICES)).value) - len(record().value) <= MAX_VALIDATOR_BYTES


class Progress(msgspec.Struct):
    epoch: Annotated[int, msgspec.Meta(ge=0)]
    samples: float


SCHEMA = SchemaValidator({"text": str, "progress": dict[str, Progress], "numbers": list[int] | None, 7: bytes})


@pytest.mark.parametrize(
    ("candidate", "valid"),
    [
        (record("text", value="x"), True),
        (record("text", value=1), False),
        (record("text", value=b"x"), False),
        (record("text", subkey="a", value="x"), False),
        (record("progress", "peer", {"epoch": 1, "samples": 2.0}), True),
        (record("progress", "peer", {"epoch": -1, "samples": 2.0}), False),
        (record("progress", "peer", {"epoch": 1}), False),
        (record("progress", 5, {"epoch": 1, "samples": 2.0}), False),
        (record("progress", None, {"peer": {"epoch": 1, "samples": 2.0}}), False),
        (record("numbers", value=[1, 2]), True),
        (record("numbers", value=None), True),
        (record("numbers", value=[1, "2"]), False),
        (record("numbers", value=[1.0]), False),
        (record(7, value=b"x"), True),
        (record("anything else", value=1), True),
        (DHTRecord(encode_key("text"), b"", b"\xc1", 1.0), False),
        (DHTRecord(encode_key("progress"), b"\xc1", encode_value({"epoch": 1, "samples": 2.0}), 1.0), False),
    ],
    ids=str,
)
def test_schema(candidate: DHTRecord, valid: bool) -> None:
    assert SCHEMA.validate(candidate) is valid


def test_keys_that_a_schema_does_not_name() -> None:
    strict = SchemaValidator({"text": str}, allow_extra_keys=False, prefix="run")
    assert strict.validate(record("run_text", value="x"))
    assert not strict.validate(record("text", value="x"))
    assert not strict.validate(record("run_text", value=1))


def test_several_schemas_act_as_one() -> None:
    first = SchemaValidator({"a": int, "both": int}, allow_extra_keys=False)
    both = CompositeValidator([first, SchemaValidator({"b": str, "both": str}, allow_extra_keys=False)])
    for valid in (record("a", value=1), record("b", value="x"), record("both", value=1), record("both", value="x")):
        assert both.validate(valid)
    for invalid in (record("a", value="x"), record("b", value=1), record("both", value=b"x"), record("c")):
        assert not both.validate(invalid)
    assert not first.validate(record("b", value="x"))  # merging does not change what others may use as well


class Tagged(RecordValidator):
    """Appends a tag, and wants to see it."""

    def __init__(self, tag: bytes, priority: int) -> None:
        self.tag = tag
        self._priority = priority

    def validate(self, record: DHTRecord) -> bool:
        return record.value.endswith(self.tag)

    def sign_value(self, record: DHTRecord) -> bytes:
        return record.value + self.tag

    def strip_value(self, record: DHTRecord) -> bytes:
        return record.value[: -len(self.tag)]

    @property
    def priority(self) -> int:
        return self._priority


def test_validators_sign_by_rising_priority_and_check_the_other_way_round() -> None:
    composite = CompositeValidator([Tagged(b"-high", 20), Tagged(b"-low", 1), SignatureValidator(ALICE)])
    plain = record(subkey=ALICES)
    value = composite.sign_value(plain)
    assert value.startswith(plain.value + b"-low")
    assert value.endswith(b"-high")
    complete = msgspec.structs.replace(plain, value=value)
    assert composite.validate(complete)
    assert decode_value(composite.strip_value(complete)) == 1
    for part in (b"-low", b"-high"):
        assert not composite.validate(msgspec.structs.replace(plain, value=value.replace(part, b"-none")))


def test_a_schema_asks_for_subkeys_with_an_owner() -> None:
    schema = SchemaValidator({"metrics": dict[BytesWithPublicKey, float]})
    owner = owner_marker(Identity(bytes(32)).peer_id)
    subkeys = {owner: True, owner.encode(): True, "x" + owner: True, "anna": False, b"anna": False, 7: False}
    for subkey, valid in subkeys.items():
        record = DHTRecord(encode_key("metrics"), encode_key(subkey), encode_value(0.5), 1e9)
        assert schema.validate(record) is valid, subkey
    assert not schema.validate(DHTRecord(encode_key("metrics"), encode_key(owner), encode_value("text"), 1e9))


def test_merging_as_in_hivemind() -> None:
    first, second = SchemaValidator({"a": int}, allow_extra_keys=False), SchemaValidator({"a": str, "b": str})
    node = CompositeValidator([first, second])
    record = DHTRecord(encode_key("a"), NO_SUBKEY, encode_value("text"), 1e9)
    assert node.validate(record)
    assert not first.validate(record), "what a node is given stays as it is"
    assert first.merge_with(second)
    assert first.validate(record)
    assert not first.merge_with(SignatureValidator(Identity()))

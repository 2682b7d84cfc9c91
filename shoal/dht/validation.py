"""Which records are valid. Every node applies these rules to records that it is asked to keep and to those that it
receives.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any, get_args

import msgspec

from shoal.dht.records import (
    NO_SUBKEY,
    DHTKey,
    DHTRecord,
    decode_subkey,
    decode_value,
    encode_key,
    owners_in,
    owners_of,
)
from shoal.p2p.identity import SIGNATURE_BYTES, Identity, PeerID


class RecordValidator(ABC):
    """A rule for records. All nodes that should apply the rule need an equal validator.

    The semantics are those of hivemind's `RecordValidatorBase`.
    """

    @abstractmethod
    def validate(self, record: DHTRecord) -> bool:
        """Whether `record`, as `sign_value` left it, is valid. Called for records of others and for own records."""

    def refusal(self, record: DHTRecord) -> str:
        """What `validate` has against `record`, for the log of the peer that wanted to store it. Called only if
        `validate` returned false for `record`.
        """
        return f"{type(self).__name__} refuses it"

    def sign_value(self, record: DHTRecord) -> bytes:
        """`record.value` plus the bytes (at most 256) that this validator expects in a valid record. Called before
        storing.
        """
        return record.value

    def strip_value(self, record: DHTRecord) -> bytes:
        """`record.value` without the bytes that `sign_value` added. Called only if `validate` returned true for
        `record`.
        """
        return record.value

    @property
    def priority(self) -> int:
        """The order of validators: they sign in rising order of priority, and validate and strip in falling order.
        Default: 0.
        """
        return 0

    def merge_with(self, other: RecordValidator) -> bool:
        """Take over the rule of `other`, if this validator can; returns whether it did. If not, a record must pass
        both.
        """
        return False


class CompositeValidator(RecordValidator):
    """Several validators as one: all of them must find a record valid."""

    def __init__(self, validators: Iterable[RecordValidator] = ()) -> None:
        self._validators: list[RecordValidator] = []
        self.extend(validators)

    def extend(self, validators: Iterable[RecordValidator]) -> None:
        """Add validators, and merge those that can be merged. The given validators themselves do not change."""
        for validator in validators:
            for index, existing in enumerate(self._validators):
                merged = copy(existing)
                if merged.merge_with(validator):
                    self._validators[index] = merged
                    break
            else:
                self._validators.append(validator)
        self._validators.sort(key=lambda validator: validator.priority)

    def validate(self, record: DHTRecord) -> bool:
        for validator in reversed(self._validators):
            if not validator.validate(record):
                return False
            record = msgspec.structs.replace(record, value=validator.strip_value(record))
        return True

    def refusal(self, record: DHTRecord) -> str:
        for validator in reversed(self._validators):
            if not validator.validate(record):
                return validator.refusal(record)
            record = msgspec.structs.replace(record, value=validator.strip_value(record))
        return "it is no plain data"

    def sign_value(self, record: DHTRecord) -> bytes:
        for validator in self._validators:
            record = msgspec.structs.replace(record, value=validator.sign_value(record))
        return record.value

    def strip_value(self, record: DHTRecord) -> bytes:
        for validator in reversed(self._validators):
            record = msgspec.structs.replace(record, value=validator.strip_value(record))
        return record.value


class SignatureValidator(RecordValidator):
    """Only the peer `<peer id>` can write a key or subkey that contains `[owner:<peer id>]`. That peer signs what it
    writes.

    The signature (ed25519, 64 bytes at the end of the value) covers key, subkey, value and expiration time. Nobody can
    write a record whose key and subkey name different owners, or whose owner is no peer id. Every `DHTNode` has this
    validator.

    Args:
        identity: signs this peer's own records.
    """

    _DOMAIN = b"shoal dht record\0"

    def __init__(self, identity: Identity) -> None:
        self._identity = identity

    @property
    def owner_marker(self) -> str:
        """The text `[owner:<peer id>]` of this peer. A key or subkey that contains it belongs to this peer."""
        return owner_marker(self._identity.peer_id)

    def validate(self, record: DHTRecord) -> bool:
        owners = owners_of(record)
        if not owners:
            return True
        if len(owners) > 1 or len(record.value) < SIGNATURE_BYTES:
            return False
        try:
            owner = PeerID.parse(owners[0].decode())
        except ValueError:
            return False
        # Another spelling of the same peer id would be another subkey, which readers take for the same peer's.
        if str(owner).encode() != owners[0]:
            return False
        return owner.verify(self._signed_bytes(record, self.strip_value(record)), record.value[-SIGNATURE_BYTES:])

    def refusal(self, record: DHTRecord) -> str:
        owners = ", ".join(owner.decode(errors="replace") for owner in owners_of(record))
        return f"only its owner can write it (key and subkey name {owners}), and this peer is {self._identity.peer_id}"

    def sign_value(self, record: DHTRecord) -> bytes:
        if owners_of(record) != [str(self._identity.peer_id).encode()]:
            return record.value
        return record.value + self._identity.sign(self._signed_bytes(record, record.value))

    def strip_value(self, record: DHTRecord) -> bytes:
        return record.value[:-SIGNATURE_BYTES] if owners_of(record) else record.value

    @property
    def priority(self) -> int:
        """High: the signature is added last and checked first."""
        return 10

    def merge_with(self, other: RecordValidator) -> bool:
        """One signature validator is enough: it checks the records of all owners."""
        return isinstance(other, SignatureValidator)

    def _signed_bytes(self, record: DHTRecord, value: bytes) -> bytes:
        return self._DOMAIN + msgspec.msgpack.encode((record.key, record.subkey, value, record.expiration_time))


def owner_marker(peer: PeerID) -> str:
    """The text `[owner:<peer id>]`. Only `peer` may write a key or subkey that contains it."""
    return f"[owner:{peer}]"


class SchemaValidator(RecordValidator):
    """The value of a key must have the type that the schema gives for it.

    Several schema validators of a node act as one. A key that more than one of them names may have any of their types.

    Args:
        schema: a type for each key, as msgspec understands it (with `msgspec.Meta` for bounds). For a key with subkeys
            the type is `dict[<type of a subkey>, <type of its value>]`, and each subkey is checked on its own.
        allow_extra_keys: whether keys that the schema does not name are valid. If one of several schema validators
            allows them, they are. Default: True.
        prefix: a text to put, with an underscore, before the keys of `schema` that are strings; None for none.

    Raises:
        TypeError, ValueError: if a key of the schema is no key of a DHT.
    """

    def __init__(self, schema: Mapping[DHTKey, Any], allow_extra_keys: bool = True, prefix: str | None = None) -> None:
        self._allow_extra_keys = allow_extra_keys
        self._types: dict[bytes, list[Any]] = {}
        for key, expected in schema.items():
            full = f"{prefix}_{key}" if prefix is not None and isinstance(key, str) else key
            self._types[encode_key(full)] = [expected]

    def validate(self, record: DHTRecord) -> bool:
        return not self.refusal(record)

    def refusal(self, record: DHTRecord) -> str:
        """What is wrong with `record`; "" if it is valid."""
        expected_types = self._types.get(record.key)
        if expected_types is None:
            return "" if self._allow_extra_keys else "the schema has no such key, and allow_extra_keys is False"
        try:
            value = decode_value(record.value)
            if record.subkey != NO_SUBKEY:
                value = {decode_subkey(record.subkey): value}
            elif isinstance(value, dict) and any(_is_dictionary(expected) for expected in expected_types):
                # Nobody may overwrite, as a whole, a dictionary that many peers write.
                return "the schema has a dictionary there, of which each record is one subkey: give a subkey"
        except ValueError as error:
            return str(error)
        found = [_misfit(value, expected) for expected in expected_types]
        if not all(found):
            return ""
        if record.subkey != NO_SUBKEY and all(each.endswith("got `object`") for each in found):
            found = ["there is one value there: give no subkey"]
        rules = " or ".join(each.__name__ if isinstance(each, type) else str(each) for each in expected_types)
        return f"the schema wants {rules}: {'; '.join(found)}"

    def merge_with(self, other: RecordValidator) -> bool:
        if not isinstance(other, SchemaValidator):
            return False
        self._allow_extra_keys = self._allow_extra_keys or other._allow_extra_keys
        keys = self._types | other._types
        self._types = {key: self._types.get(key, []) + other._types.get(key, []) for key in keys}
        return True


def _is_dictionary(expected: Any) -> bool:
    return getattr(expected, "__origin__", expected) is dict


class BytesWithPublicKey(bytes):
    """A type for schemas: a subkey (bytes or str) that names an owner (`SignatureValidator.owner_marker`)."""


def _custom(expected: type, value: object) -> object:
    if expected is not BytesWithPublicKey or not isinstance(value, bytes) or not owners_in(value):
        raise ValueError(f"{value!r:.100} is no {expected.__name__}")
    return BytesWithPublicKey(value)


# If two threads of msgspec 0.22 convert to a type for the first time at the same moment, the process crashes.
_one_at_a_time = threading.Lock()


def _misfit(value: object, expected: Any) -> str:
    """Why a value is not of the type that a schema expects; "" if it is."""
    if isinstance(value, dict) and get_args(expected)[:1] == (BytesWithPublicKey,):
        value = {key.encode() if isinstance(key, str) else key: item for key, item in value.items()}
    try:
        with _one_at_a_time:
            msgspec.convert(value, expected, strict=True, dec_hook=_custom)
    except msgspec.ValidationError as error:
        return str(error)
    return ""

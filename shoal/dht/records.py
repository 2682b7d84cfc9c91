"""The records of the DHT: a value under a key, or under a subkey of a key, with an expiration time."""

from __future__ import annotations

import math
import re
import time
from functools import lru_cache
from typing import Annotated, Any, Generic, NamedTuple, TypeVar

import msgspec
from blake3 import blake3

from shoal.p2p.identity import PeerID

DHTKey = str | bytes | int
Subkey = str | bytes | int
DHTValue = Any
DHTExpiration = float

MAX_KEY_BYTES = 512
MAX_VALUE_BYTES = 64 << 10
MAX_VALIDATOR_BYTES = 256  # bytes that validators may add to a value, such as a signature
MAX_DEPTH = 32
MAX_SECONDS_AHEAD = 86400.0  # from now to a record's expiration time; to keep a record longer, store it again
ID_BITS = 256
NO_SUBKEY = b""
_OWNER = re.compile(rb"\[owner:(.*?)\]", re.DOTALL)

T = TypeVar("T")


class ValueWithExpiration(NamedTuple, Generic[T]):
    """The result of `get`.

    Attributes:
        value: the value that was stored. For a key with subkeys: `{subkey: ValueWithExpiration}`.
        expiration_time: in seconds of `get_dht_time()`. For a key with subkeys: the latest of theirs.
    """

    value: T
    expiration_time: DHTExpiration


class DHTRecord(msgspec.Struct, array_like=True, frozen=True):
    """One record as it is sent, kept and validated.

    Attributes:
        key: as `encode_key` writes it, at most 512 bytes.
        subkey: as `encode_key` writes it; b"" for a record without subkey.
        value: as `encode_value` writes it, with the bytes that validators add; at most 64 KiB + 256 bytes.
        expiration_time: seconds of `get_dht_time()`; finite and positive.
    """

    key: Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_KEY_BYTES)]
    subkey: Annotated[bytes, msgspec.Meta(max_length=MAX_KEY_BYTES)]
    value: Annotated[bytes, msgspec.Meta(max_length=MAX_VALUE_BYTES + MAX_VALIDATOR_BYTES)]
    expiration_time: Annotated[float, msgspec.Meta(gt=0, lt=2.0**53)]

    @property
    def size(self) -> int:
        """Bytes that this record counts for in a bounded store."""
        return len(self.key) + len(self.subkey) + len(self.value) + 64


def owners_of(record: DHTRecord) -> list[bytes]:
    """The owners that the key and the subkey name (`[owner:<peer id>]`), each once."""
    return list(dict.fromkeys(owners_in(record.key) + owners_in(record.subkey)))


def owners_in(text: bytes) -> list[bytes]:
    """The owners that a key or a subkey names (`[owner:<peer id>]`)."""
    return _OWNER.findall(text) if b"[owner:" in text else []  # a fast path: most keys have none


def get_dht_time() -> DHTExpiration:
    """Seconds since 1970 by this machine's clock, the unit of expiration times.

    The clocks of peers need not agree to the second. But for a peer whose clock is ahead, records expire early.
    """
    return time.time()


@lru_cache(maxsize=16384)
def node_id(peer: PeerID) -> int:
    """The place of `peer` in the space of 256-bit ids: a hash of its public key, so nobody can choose its place."""
    return int.from_bytes(blake3(peer.key).digest(), "big")


def key_id(key: bytes) -> int:
    """The place of an encoded key in the space of ids. The nodes whose ids are nearest by XOR keep its records."""
    return int.from_bytes(blake3(key).digest(), "big")


def encode_key(key: DHTKey, what: str = "key") -> bytes:
    """The msgpack bytes of a key or subkey.

    Raises:
        TypeError: if it is no str, bytes or int.
        ValueError: if it is an int of more than 64 bits, a str that is no valid Unicode, or takes more than 512 bytes.
    """
    if isinstance(key, bool) or not isinstance(key, (str, bytes, int)):
        raise TypeError(f"a {what} of the DHT is a str, bytes or int, not {key!r}")
    try:
        encoded = msgspec.msgpack.encode(key)
    except (OverflowError, UnicodeEncodeError) as error:
        raise ValueError(f"{key!r} can't be a {what} of the DHT: {error}") from error
    if len(encoded) > MAX_KEY_BYTES:
        raise ValueError(
            f"a {what} of the DHT takes at most {MAX_KEY_BYTES} bytes; {encoded[:40]!r}… takes {len(encoded)}"
        )
    return encoded


def decode_subkey(encoded: bytes) -> Subkey:
    """The subkey that `encode_key` wrote. Raises ValueError if it can't have written `encoded`."""
    try:
        subkey = msgspec.msgpack.decode(encoded)
        canonical = encode_key(subkey, "subkey") == encoded
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise ValueError(f"not a subkey: {error}") from error
    if not canonical:
        raise ValueError("not a subkey: it is not encoded in its shortest form")
    return subkey  # type: ignore[no-any-return]  # encode_key raises for any other type


def encode_value(value: DHTValue) -> bytes:
    """The msgpack bytes of plain data: bool, int (64 bits), float, str, bytes, list, tuple, dict, None.

    `decode_value` reads tuples back as lists.

    Raises:
        TypeError: if the value is or contains anything else.
        ValueError: if it takes more than 64 KiB, is nested deeper than 32 levels, or has an int of more than 64 bits.
    """
    _check_plain(value, MAX_DEPTH)
    try:
        encoded = msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError) as error:
        raise ValueError(f"the value can't be stored in the DHT: {error}") from error
    if len(encoded) > MAX_VALUE_BYTES:
        raise ValueError(
            f"the DHT keeps values of at most {MAX_VALUE_BYTES} bytes, and this one takes {len(encoded)}: "
            "store the address of a copy instead, or split the value over subkeys"
        )
    return encoded


def _check_plain(value: object, depth: int) -> None:
    if depth < 0:
        raise ValueError(f"the value is nested deeper than {MAX_DEPTH} levels")
    if type(value) in (list, tuple):
        for item in value:  # type: ignore[attr-defined]
            _check_plain(item, depth - 1)
    elif type(value) is dict:
        for key, item in value.items():
            if type(key) not in (str, bytes, int, float, bool, type(None)):
                raise TypeError(f"the DHT keeps dictionaries with plain keys, not {key!r}")
            _check_plain(item, depth - 1)
    elif type(value) not in (str, bytes, int, float, bool, type(None)):
        raise TypeError(
            "the DHT keeps plain data (bool, int, float, str, bytes, list, tuple, dict, None), "
            f"not {type(value).__name__}"
        )


def decode_value(encoded: bytes) -> DHTValue:
    """The value that `encode_value` wrote. Raises ValueError if it can't have written `encoded`."""
    try:
        value = msgspec.msgpack.decode(encoded)
        _check_plain(value, MAX_DEPTH)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError) as error:
        raise ValueError(f"not a value of the DHT: {error}") from error
    return value


def make_record(
    key: DHTKey, value: DHTValue, expiration_time: DHTExpiration, subkey: Subkey | None, now: float
) -> DHTRecord:
    """The record of a value to store, before a validator signs it.

    Raises:
        TypeError, ValueError: as `encode_key`, `encode_value` and `check_expiration`.
    """
    place = NO_SUBKEY if subkey is None else encode_key(subkey, "subkey")
    return DHTRecord(encode_key(key), place, encode_value(value), check_expiration(expiration_time, now))


def check_expiration(expiration_time: DHTExpiration, now: float) -> float:
    """`expiration_time` as a float. Raises ValueError if it is not finite and positive, or more than one day after
    `now`.
    """
    seconds = float(expiration_time)
    if not (math.isfinite(seconds) and 0 < seconds < 2.0**53):
        raise ValueError(
            f"an expiration time is in seconds of get_dht_time(), such as get_dht_time() + 60, not {seconds}"
        )
    if seconds > now + MAX_SECONDS_AHEAD:
        raise ValueError(
            f"the DHT keeps records for at most one day, and the expiration time {seconds} is "
            f"{(seconds - now) / 86400:.1f} days ahead: choose an earlier one, and store the record again in time"
        )
    return seconds

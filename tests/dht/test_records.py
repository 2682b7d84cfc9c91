"""Keys and values: what the DHT takes, and that what it takes comes back."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.dht.records import (
    MAX_KEY_BYTES,
    MAX_VALUE_BYTES,
    check_expiration,
    decode_subkey,
    decode_value,
    encode_key,
    encode_value,
)

keys = st.text() | st.binary() | st.integers(-(2**63), 2**64 - 1)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda children: st.lists(children) | st.dictionaries(st.text() | st.integers(0, 9), children),
    max_leaves=20,
)


@given(keys)
def test_subkeys_come_back(key: str | bytes | int) -> None:
    back = decode_subkey(encode_key(key))
    assert (type(back), back) == (type(key), key)


@given(plain)
def test_values_come_back(value: object) -> None:
    assert decode_value(encode_value(value)) == value


def test_tuples_come_back_as_lists() -> None:
    assert decode_value(encode_value((1, (2, 3)))) == [1, [2, 3]]


@given(st.binary(max_size=100))
def test_garbage_is_a_value_error(garbage: bytes) -> None:
    for decode in (decode_subkey, decode_value):
        with suppress(ValueError):
            decode(garbage)


@pytest.mark.parametrize("nested", [b"\x91" * 60_000 + b"\xc0", b"\x91" * 40 + b"\xc0"])
def test_deep_nesting_from_the_network_is_a_value_error(nested: bytes) -> None:
    with pytest.raises(ValueError, match=r"not a value|nested"):
        decode_value(nested)


def test_a_subkey_has_one_encoding() -> None:
    with pytest.raises(ValueError, match="shortest"):
        decode_subkey(b"\xd9\x01a")  # "a" as a str 8, instead of the fixstr that encode_key writes


@pytest.mark.parametrize("value", [Path(), {1, 2}, {"a": object()}, {(1, 2): 3}, [msgspec.UNSET]])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(TypeError, match="plain"):
        encode_value(value)


def test_large_values_are_refused() -> None:
    assert len(encode_value(bytes(MAX_VALUE_BYTES - 5))) <= MAX_VALUE_BYTES
    with pytest.raises(ValueError, match="at most 65536 bytes, and this one takes 65541"):
        encode_value(bytes(MAX_VALUE_BYTES))
    with pytest.raises(ValueError, match="can't be stored"):
        encode_value(2**64)
    with pytest.raises(ValueError, match="can't be stored"):
        encode_value("\ud800")


@pytest.mark.parametrize("key", [None, True, 1.5, ("a",), object()])
def test_other_keys_are_refused(key: object) -> None:
    with pytest.raises(TypeError, match="str, bytes or int"):
        encode_key(key)  # type: ignore[arg-type]


def test_long_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="at most 512 bytes"):
        encode_key("x" * MAX_KEY_BYTES)


@pytest.mark.parametrize("time", [math.nan, math.inf, -1.0, 0.0])
def test_expiration_times_are_finite_and_positive(time: float) -> None:
    with pytest.raises(ValueError, match="get_dht_time"):
        check_expiration(time, 0.0)


def test_expiration_times_are_at_most_one_day_ahead() -> None:
    assert check_expiration(1000 + 86400, 1000.0) == 87400.0
    with pytest.raises(ValueError, match=r"at most one day.*2\.0 days ahead: choose an earlier one"):
        check_expiration(1000 + 2 * 86400, 1000.0)

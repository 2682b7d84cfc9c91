"""Which tensor differs between two peers, in words; whatever another peer sends."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.swarm.protocol.tensors import Tensors, difference, encode_tensors

MINE = [
    Tensors("parameters", ["float32[2, 3]", "float32[3]"], ["weight", "bias"]),
    Tensors("extra_tensors", ["bool[]"]),
]


def theirs(parameters: list[str], extra: list[str]) -> bytes:
    return encode_tensors([Tensors("parameters", parameters), Tensors("extra_tensors", extra)])


@pytest.mark.parametrize(
    ("parameters", "extra", "words"),
    [
        (["float32[2, 3]", "float32[3]"], ["bool[]"], None),
        (["float32[2, 3]", "float16[3]"], ["bool[]"], "parameters[1] (bias) is float32[3] here, and float16[3] there"),
        (["float32[2, 3]"], ["bool[]"], "the number of parameters is 2 here, and 1 there"),
        (
            ["float32[3]", "float32[2, 3]", "float32[1]"],
            ["bool[]"],
            "the number of parameters is 2 here, and 3 there; "
            "parameters[0] (weight) is float32[2, 3] here, and float32[3] there",
        ),
        (["float32[2, 3]", "float32[3]"], ["int64[]"], "extra_tensors[0] is bool[] here, and int64[] there"),
        (["float32[2, 3]", "float32[3]"], [], "the number of extra_tensors is 1 here, and 0 there"),
        (
            ["\n\x1b[31m", "float32[3]"],
            ["bool[]"],
            r"parameters[0] (weight) is float32[2, 3] here, and \n\x1b[31m there",
        ),
    ],
)
def test_the_first_that_differs_is_named(parameters: list[str], extra: list[str], words: str | None) -> None:
    assert difference(MINE, theirs(parameters, extra)) == words


def test_a_kind_that_the_other_does_not_have() -> None:
    assert difference(MINE, encode_tensors([])) == "the number of parameters is 2 here, and 0 there"


def test_what_is_too_large_is_not_sent() -> None:
    assert encode_tensors([Tensors("parameters", ["float32[1024, 1024, 1024]"] * (1 << 18))]) == b""


@given(st.binary(max_size=200))
def test_any_bytes_are_compared_or_refused(data: bytes) -> None:
    try:
        difference(MINE, data)
    except ValueError:
        return
    msgspec.msgpack.decode(data)

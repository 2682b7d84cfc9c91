"""What is encoded comes back: the same bits, or within the codec's bound."""

from __future__ import annotations

import math
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.compression import Codec, Float16Compression, NoCompression

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
OTHERS = [torch.complex64, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]
HALF_MAX = 65504.0
EDGES = [
    0.0, -0.0, math.inf, -math.inf, math.nan, HALF_MAX, 65519.0, 65520.0, -65520.0, 1e300,
    2**-14, 2**-24, 2**-25, 2**-26, 1e-45, 5e-324, 1 + 2**-11,
]  # fmt: skip
numbers = st.sampled_from(EDGES) | st.floats() | st.floats(-70000, 70000) | st.floats(-1e-4, 1e-4)


def round_trip(codec: Codec, chunk: torch.Tensor) -> torch.Tensor:
    payload = codec.encode(chunk)
    assert payload.format == "B"
    assert payload.nbytes == codec.encoded_nbytes(len(chunk), chunk.dtype)
    received = memoryview(bytearray(payload))  # other memory, as after a network
    decoded = codec.decode(received, chunk.dtype, len(chunk))
    assert decoded.shape == chunk.shape
    return decoded


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.view(torch.uint8).tolist()


@given(st.lists(numbers, max_size=40), st.sampled_from(FLOATS))
def test_no_compression_brings_back_the_bits_of_floats(values: list[float], dtype: torch.dtype) -> None:
    chunk = torch.tensor(values, dtype=torch.float64).to(dtype)
    decoded = round_trip(NoCompression(), chunk)
    assert decoded.dtype == dtype
    assert bits(decoded) == bits(chunk)


@pytest.mark.parametrize("codec", [NoCompression(), Float16Compression()])
@given(values=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40), dtype=st.sampled_from(OTHERS))
def test_what_is_not_a_real_float_comes_back_in_all_bits(codec: Codec, values: list[int], dtype: torch.dtype) -> None:
    chunk = torch.tensor(values, dtype=torch.int64).to(dtype)
    decoded = round_trip(codec, chunk)
    assert decoded.dtype == dtype
    assert bits(decoded) == bits(chunk)


@given(st.lists(numbers, max_size=40), st.sampled_from(FLOATS))
def test_float16_stays_within_its_bound(values: list[float], dtype: torch.dtype) -> None:
    chunk = torch.tensor(values, dtype=torch.float64).to(dtype)
    decoded = round_trip(Float16Compression(), chunk)
    for value, got in zip(chunk.tolist(), decoded.tolist(), strict=True):
        if math.isnan(value):
            assert math.isnan(got)
        elif abs(value) >= HALF_MAX:
            assert got == math.copysign(HALF_MAX, value)
        else:
            # float64 is rounded to float32 on the way, which adds at most 2**-24 of the value.
            assert abs(got - value) <= max(abs(value) * (2**-11 + 2**-24), 2**-25 * (1 + 2**-20))
            assert math.copysign(1, got) == math.copysign(1, value)


@given(
    st.integers(1, 5000),
    st.lists(st.tuples(st.integers(0, 4999), numbers), max_size=2),
    st.sampled_from(FLOATS),
)
def test_float16_clamps_wherever_a_value_overflows(
    numel: int, odd: list[tuple[int, float]], dtype: torch.dtype
) -> None:
    chunk = torch.linspace(-HALF_MAX, HALF_MAX, numel, dtype=torch.float64)
    for place, value in odd:
        chunk[place % numel] = value
    chunk = chunk.to(dtype)
    expected = chunk.float().clamp(-HALF_MAX, HALF_MAX).half().float()
    decoded = round_trip(Float16Compression(), chunk).float()
    torch.testing.assert_close(decoded, expected, rtol=0, atol=0, equal_nan=True)


@given(st.lists(st.floats(width=16, allow_infinity=False), max_size=40), st.sampled_from(FLOATS[:3]))
def test_float16_keeps_values_that_are_float16(values: list[float], dtype: torch.dtype) -> None:
    chunk = torch.tensor(values, dtype=dtype)
    decoded = round_trip(Float16Compression(), chunk)
    assert torch.equal(decoded.to(dtype).nan_to_num(), chunk.nan_to_num())


@given(st.lists(numbers, max_size=40), st.sampled_from(FLOATS))
def test_float16_of_what_was_decoded_changes_nothing_more(values: list[float], dtype: torch.dtype) -> None:
    # Bfloat16 rounds a second time when the decoded values are stored in it; the others hold them exactly.
    chunk = torch.tensor(values, dtype=torch.float64).to(dtype)
    stored = torch.empty_like(chunk).copy_(round_trip(Float16Compression(), chunk))
    again = torch.empty_like(chunk).copy_(round_trip(Float16Compression(), stored))
    assert torch.equal(again.nan_to_num(), stored.nan_to_num())


def test_float16_decodes_to_what_sums_and_copies_fastest() -> None:
    codec = Float16Compression()
    for dtype in FLOATS:
        expected = torch.float32 if dtype is torch.bfloat16 else torch.float16
        assert round_trip(codec, torch.ones(3, dtype=dtype)).dtype == expected


def test_decoded_chunks_sum_in_float32() -> None:
    chunk = torch.randn(1000)
    total = torch.zeros(1000)
    for codec in (NoCompression(), Float16Compression()):
        total.add_(round_trip(codec, chunk), alpha=0.5)
    torch.testing.assert_close(total, chunk, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("codec", [NoCompression(), Float16Compression()])
def test_full_chunk(codec: Codec) -> None:
    chunk = torch.randn(2**18)
    assert torch.allclose(round_trip(codec, chunk).float(), chunk, rtol=2**-10, atol=2**-24)


def test_chunk_that_autograd_watches_is_a_chunk_too() -> None:
    chunk = torch.ones(3, requires_grad=True)
    for codec in (NoCompression(), Float16Compression()):
        assert not round_trip(codec, chunk).requires_grad


def test_wire_is_little_endian() -> None:
    assert sys.byteorder == "little"
    assert Float16Compression().encode(torch.tensor([1.0, -2.0])).tobytes() == b"\x00\x3c\x00\xc0"
    assert NoCompression().encode(torch.tensor([1.0])).tobytes() == b"\x00\x00\x80\x3f"

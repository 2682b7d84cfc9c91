"""Decoders are given what anybody sent: they decode it or refuse it, and take no more memory than the chunk needs."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compression import (
    Blockwise4Bit,
    BlockwiseQuantization,
    Codec,
    Float16Compression,
    NoCompression,
    PiecewiseCodec,
    Quantile8BitQuantization,
    ScaledFloat16Compression,
    Uniform8BitQuantization,
)
from shoal.compression.kind import KindCodec
from shoal.compression.statistic import StatisticCodec

CODECS: list[Codec] = [
    NoCompression(), Float16Compression(), ScaledFloat16Compression(), Uniform8BitQuantization(),
    Quantile8BitQuantization(), BlockwiseQuantization(), StatisticCodec(Uniform8BitQuantization()),
    StatisticCodec(Quantile8BitQuantization()), KindCodec(StatisticCodec(BlockwiseQuantization()), 2), Blockwise4Bit(),
]  # fmt: skip
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
DTYPES = [*FLOATS, torch.int64, torch.uint8, torch.bool, torch.complex64]


@st.composite
def codecs(draw: st.DrawFn) -> tuple[Codec, int]:
    """A codec, piecewise ones too, and the elements of a chunk."""
    if draw(st.booleans()):
        return draw(st.sampled_from(CODECS)), draw(st.integers(0, 5000))
    pieces = draw(st.lists(st.tuples(st.integers(1, 2500), st.sampled_from(CODECS)), min_size=1, max_size=6))
    return PiecewiseCodec(tuple(pieces)), sum(size for size, _ in pieces)


@settings(max_examples=200)
@given(codecs(), st.sampled_from(DTYPES), st.integers(0, 2**32), st.sampled_from([0, 0xFF, None]), st.integers(-9, 9))
def test_any_bytes_are_elements_or_a_value_error(
    given_codec: tuple[Codec, int], dtype: torch.dtype, seed: int, byte: int | None, off: int
) -> None:
    codec, numel = given_codec
    nbytes = codec.encoded_nbytes(numel, dtype)
    data = random.Random(seed).randbytes(nbytes) if byte is None else bytes([byte]) * nbytes
    decoded = codec.decode(memoryview(bytearray(data)), dtype, numel)
    assert decoded.shape == (numel,)
    assert decoded.element_size() * decoded.numel() <= max(4, dtype.itemsize) * numel
    torch.empty(numel, dtype=dtype).copy_(decoded)
    if off and nbytes + off >= 0:
        with pytest.raises(ValueError, match="payload"):
            codec.decode(memoryview(bytearray(nbytes + off)), dtype, numel)


@settings(max_examples=100)
@given(codecs(), st.sampled_from(FLOATS), st.integers(0, 2**32))
def test_any_bits_are_encoded(given_codec: tuple[Codec, int], dtype: torch.dtype, seed: int) -> None:
    """Denormal, infinite and other odd numbers too; what is written is read alike by all that read it."""
    codec, numel = given_codec
    bits = bytearray(random.Random(seed).randbytes(numel * dtype.itemsize))
    chunk = torch.frombuffer(bits, dtype=dtype) if numel else torch.empty(0, dtype=dtype)
    payload = bytes(codec.encode(chunk))
    assert len(payload) == codec.encoded_nbytes(numel, dtype)
    assert bytes(codec.encode(chunk.clone())) == payload
    once, again = (codec.decode(memoryview(bytearray(payload)), dtype, numel) for _ in range(2))
    assert torch.equal(once.nan_to_num(), again.nan_to_num())
    finite = once.isfinite()
    if not isinstance(codec, Float16Compression | PiecewiseCodec):  # `Float16Compression` clamps infinities
        assert not (finite & ~chunk.isfinite()).any(), "what was not finite has become so"


VALUES = [0.0, -0.0, 5e-324, 1e-45, -1e-40, 2.0**-126, 2.0**-149, 6e-8, 1.0, -1.0, 65504.0, 1e30, -1e37]
SIZES = [1, 7, 2048, 2049]


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", FLOATS)
def test_constant_and_denormal_chunks(codec: Codec, dtype: torch.dtype) -> None:
    """All come back within 1% (8 bits and bfloat16), or 2**-100 of what is far below float32's normal numbers."""
    turn = CODECS.index(codec) + FLOATS.index(dtype)
    for index, value in enumerate(VALUES):
        numel = SIZES[(index + turn) % len(SIZES)]  # each size meets each value, codec and dtype, though not each three
        chunk = torch.full((numel,), value, dtype=torch.float64).to(dtype)
        if not chunk.isfinite().all():
            chunk = torch.full((numel,), 1.0, dtype=dtype)
        out = torch.empty(numel, dtype=dtype).copy_(codec.decode(codec.encode(chunk), dtype, numel))
        expected = chunk.clamp(-65504, 65504) if isinstance(codec, Float16Compression) else chunk
        floor = 2.0**-25 if isinstance(codec, Float16Compression) else 2.0**-100
        near = (out.double() - expected.double()).abs() <= expected.double().abs() * 0.01 + floor
        assert near.all(), f"{numel} elements of {value} came back as {out[~near].unique().tolist()}"


@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_chunks(codec: Codec, dtype: torch.dtype) -> None:
    payload = codec.encode(torch.empty(0, dtype=dtype))
    assert len(payload) == codec.encoded_nbytes(0, dtype) == 0
    assert codec.decode(payload, dtype, 0).shape == (0,)

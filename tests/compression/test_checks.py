"""What a codec refuses, and how codecs are told apart."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.compression import Codec, Float16Compression, NoCompression, codec_by_name

CODECS = [NoCompression(), Float16Compression()]


@pytest.mark.parametrize("codec", CODECS)
@given(
    nbytes=st.integers(0, 70),
    numel=st.integers(-3, 20) | st.just(2**62),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]),
)
def test_only_a_payload_of_the_exact_size_is_decoded(codec: Codec, nbytes: int, numel: int, dtype: torch.dtype) -> None:
    payload = memoryview(bytearray(nbytes))
    expected = codec.encoded_nbytes(numel, dtype)
    if nbytes == expected:
        assert len(codec.decode(payload, dtype, numel)) == numel
    else:
        with pytest.raises(ValueError, match=f"{codec.name} payload .* has {expected} bytes, got {nbytes}"):
            codec.decode(payload, dtype, numel)


@pytest.mark.parametrize(
    "name",
    ["none", "float16", "uniform_8bit", "quantile_8bit", "blockwise_8bit", "scaled_float16", "blockwise_4bit"],
)
def test_anything_bytes_like_is_decoded(name: str) -> None:
    """hivemind's users hold `bytes`."""
    codec, chunk = codec_by_name(name), torch.randn(1000)
    payload = codec.encode(chunk)
    expected = codec.decode(payload, torch.float32, 1000)
    for given_ in (bytes(payload), bytearray(payload), memoryview(bytes(payload)).cast("H")):
        assert torch.equal(codec.decode(given_, torch.float32, 1000), expected)
    with pytest.raises(ValueError, match=f"has {len(payload)} bytes, got 3"):
        codec.decode(b"abc", torch.float32, 1000)
    with pytest.raises(TypeError, match="bytes-like object is required, not 'str'"):
        codec.decode("abc", torch.float32, 1000)  # type: ignore[arg-type]


def test_sizes() -> None:
    assert NoCompression().encoded_nbytes(10, torch.float64) == 80
    assert Float16Compression().encoded_nbytes(10, torch.float64) == 20
    assert Float16Compression().encoded_nbytes(10, torch.int64) == 80


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize(
    "chunk", [torch.zeros(2, 2), torch.tensor(1.0), torch.zeros(4)[::2], torch.zeros(2, device="meta")]
)
def test_what_is_no_chunk_is_refused(codec: Codec, chunk: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="1-D contiguous CPU tensor"):
        codec.encode(chunk)


def test_codecs_are_values() -> None:
    assert NoCompression() == NoCompression()
    assert CODECS[0] != CODECS[1]
    assert len({NoCompression(), NoCompression(), Float16Compression()}) == 2
    assert repr(Float16Compression()) == "Float16Compression()"
    assert (NoCompression().lossy, Float16Compression().lossy) == (False, True)


def test_wire_names_stay() -> None:
    # Peers of different releases compare them.
    assert [codec.spec for codec in CODECS] == ["none", "float16"]


@pytest.mark.parametrize("codec", CODECS)
def test_codec_is_found_by_its_name(codec: Codec) -> None:
    assert codec_by_name(codec.name) == codec


def test_unknown_name_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown codec 'zip'; known: none, float16"):
        codec_by_name("zip")

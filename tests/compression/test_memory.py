"""Who owns the memory of payloads and decoded chunks, and what happens at odd addresses."""

from __future__ import annotations

import gc

import pytest
import torch

from shoal.compression import Codec, Float16Compression, NoCompression

CODECS = [NoCompression(), Float16Compression()]


def test_payload_of_no_compression_is_the_chunk_itself() -> None:
    flat = torch.arange(8.0)
    payload = NoCompression().encode(flat[2:4])
    flat[2] = 1.0
    assert payload.tobytes() == b"\x00\x00\x80\x3f\x00\x00\x40\x40"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_payload_of_float16_is_memory_of_its_own(dtype: torch.dtype) -> None:
    chunk = torch.ones(2, dtype=dtype)
    payload = Float16Compression().encode(chunk)
    chunk.zero_()
    assert payload.tobytes() == b"\x00\x3c\x00\x3c"


@pytest.mark.parametrize("codec", CODECS)
def test_payload_keeps_its_memory_alive(codec: Codec) -> None:
    chunk = torch.full((1 << 16,), 1.0)
    payload = codec.encode(chunk)[:]
    expected = payload.tobytes()
    del chunk
    gc.collect()
    others = [torch.zeros(payload.nbytes, dtype=torch.uint8) for _ in range(8)]  # would get the memory, were it free
    assert payload == expected
    del others


@pytest.mark.parametrize("codec", CODECS)
def test_decoded_chunk_is_a_view_that_keeps_the_payload_alive(codec: Codec) -> None:
    payload = bytearray(codec.encode(torch.ones(1 << 16)))
    decoded = codec.decode(memoryview(payload), torch.float32, 1 << 16)
    payload[:2] = b"\xff\xff"
    assert decoded[0] != 1
    del payload
    gc.collect()
    others = [bytearray(1 << 18) for _ in range(8)]
    assert decoded[1:].eq(1).all()
    del others


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize("offset", range(9))
def test_payload_at_any_address(codec: Codec, dtype: torch.dtype, offset: int) -> None:
    chunk = torch.tensor([1, 0, 3, 100]).to(dtype)
    memory = bytearray(offset) + codec.encode(chunk)
    decoded = codec.decode(memoryview(memory)[offset:], dtype, 4)
    assert decoded.data_ptr() % decoded.element_size() == 0
    assert torch.equal(decoded.to(dtype), chunk)


@pytest.mark.parametrize("codec", CODECS)
def test_read_only_payload_is_decoded_without_a_warning(codec: Codec) -> None:
    payload = codec.encode(torch.ones(3)).tobytes()
    assert codec.decode(memoryview(payload), torch.float32, 3).tolist() == [1, 1, 1]


def test_any_byte_but_zero_is_true() -> None:
    decoded = NoCompression().decode(memoryview(bytearray(b"\x00\x01\x02\xff")), torch.bool, 4)
    assert decoded.view(torch.uint8).tolist() == [0, 1, 1, 1]

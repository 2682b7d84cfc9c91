"""Bytes that never change: peers of other releases and machines make and read them, with other kernels than these.

So all that a codec computes rounds alike on every processor: `make test-capabilities` runs this with other kernels.
"""

from __future__ import annotations

import hashlib

import pytest
import torch

from shoal.compression import (
    Blockwise4Bit,
    BlockwiseQuantization,
    Codec,
    Float16Compression,
    Quantile8BitQuantization,
    ScaledFloat16Compression,
    TopK,
    Uniform8BitQuantization,
)


def chunk() -> torch.Tensor:
    """5000 values of either sign and many scales, from integers, so the same everywhere."""
    numbers = torch.arange(5000, dtype=torch.int64)
    mantissas = (numbers * 2654435761 % 65521 - 32760).float()
    return mantissas * torch.exp2(-(numbers % 23).float()) / 1024


@pytest.mark.parametrize(
    ("codec", "encoded", "decoded"),
    [
        (Float16Compression(), "77ad5981b2191328", "460a6929666328cc"),
        (ScaledFloat16Compression(), "6bd500d9125b9999", "198c251df6210ac0"),
        (Uniform8BitQuantization(), "1d812fb24d40545e", "4326a57d58a7322d"),
        (Quantile8BitQuantization(), "fb8f92d6740d8ccc", "37804d5713bb6e4b"),
        (BlockwiseQuantization(), "50767ae2cda1c706", "bc0c8c17750bb969"),
        (Blockwise4Bit(), "2f6687129f84f247", "a60cbf7278f9de9c"),
        (TopK(), "23a22a014d854018", "c284dfa56a867368"),
        (TopK(k=100, chunk=1000, bits=4), "76bfeb9f14d60369", "527a51dfcd46ed8f"),
    ],
)
def test_bytes_and_numbers_stay(codec: Codec, encoded: str, decoded: str) -> None:
    payload = codec.encode(chunk())
    numbers = codec.decode(payload, torch.float32, 5000).float()
    assert digest(payload.tobytes()) == encoded
    assert digest(bytes(numbers.view(torch.uint8).tolist())) == decoded


def digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()

"""What a frame is sealed with, and that nothing else opens."""

from __future__ import annotations

import os
import struct
from functools import partial

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from shoal.p2p.sealing import (
    HEADER_BYTES,
    MAX_MESSAGE_BYTES,
    MAX_PAYLOAD_BYTES,
    NAME_BYTES,
    SEALED_HEADER_BYTES,
    BrokenFrame,
    Header,
    Opener,
    Sealer,
    sealed_bytes,
)

KEY, NAME = bytes(range(32)), bytes(range(NAME_BYTES))


def sealed(sealer: Sealer, payload: bytes, message: bytes = b"") -> bytearray:
    out = bytearray(sealed_bytes(len(payload)))
    sealer.seal(Header(len(payload), NAME, message), memoryview(payload), memoryview(out))
    return out


def opened(opener: Opener, frame: bytes | bytearray) -> tuple[Header, bytes]:
    view = memoryview(frame)
    header = opener.header(view[:SEALED_HEADER_BYTES])
    out = bytearray(header.size)
    if header.size:
        opener.payload(view[SEALED_HEADER_BYTES:], memoryview(out))
    return header, bytes(out)


@pytest.mark.parametrize("suite", [AESGCM, ChaCha20Poly1305])
def test_frames_open_in_their_order(suite):
    sealer, opener = Sealer(suite, KEY), Opener(suite, KEY)
    for number, payload in enumerate((b"", b"one", bytes(70_000), b"")):
        message = b"%d" % number
        assert opened(opener, sealed(sealer, payload, message)) == (Header(len(payload), NAME, message), payload)


@pytest.mark.parametrize("suite", [AESGCM, ChaCha20Poly1305])
@pytest.mark.parametrize("size", [1, 15, 16, 17, 1000, (1 << 20) + 1, MAX_PAYLOAD_BYTES])
def test_a_payload_is_opened_in_place(suite, size):
    data = os.urandom(size)
    frame = memoryview(sealed(Sealer(suite, KEY), data))
    opener = Opener(suite, KEY)
    opener.header(frame[:SEALED_HEADER_BYTES])
    payload = frame[SEALED_HEADER_BYTES:]
    opener.payload(payload, payload[:size])
    assert payload[:size] == data


def test_frame_k_has_the_nonces_2k_and_2k_plus_1():
    sealer, cipher = Sealer(AESGCM, KEY), AESGCM(KEY)
    for number, payload in enumerate((b"first", b"", b"third")):
        frame = bytes(sealed(sealer, payload, b"message"))
        nonces = [bytes(4) + (2 * number + i).to_bytes(8, "big") for i in range(2)]
        header = struct.pack(">IH", len(payload), 7) + NAME + b"message"
        assert cipher.decrypt(nonces[0], frame[:SEALED_HEADER_BYTES], None) == header.ljust(HEADER_BYTES, b"\0")
        if payload:
            assert cipher.decrypt(nonces[1], frame[SEALED_HEADER_BYTES:], None) == payload


def test_no_byte_of_a_frame_can_be_changed():
    frame = sealed(Sealer(AESGCM, KEY), b"payload")
    for place in range(len(frame)):
        frame[place] ^= 1
        with pytest.raises(BrokenFrame):
            opened(Opener(AESGCM, KEY), frame)
        frame[place] ^= 1
    assert opened(Opener(AESGCM, KEY), frame)[1] == b"payload"


def test_a_frame_opens_once_and_in_its_place():
    sealer = Sealer(AESGCM, KEY)
    first, second = sealed(sealer, b"first"), sealed(sealer, b"other")
    for frames in ([first, first], [second, first], [first[:SEALED_HEADER_BYTES] + second[SEALED_HEADER_BYTES:]]):
        opener = Opener(AESGCM, KEY)
        with pytest.raises(BrokenFrame):
            list(map(partial(opened, opener), frames))


def test_a_payload_does_not_open_as_a_header_nor_for_another_key():
    frame = sealed(Sealer(AESGCM, KEY), bytes(HEADER_BYTES))
    with pytest.raises(BrokenFrame):
        Opener(AESGCM, KEY).header(memoryview(frame)[SEALED_HEADER_BYTES:])
    with pytest.raises(BrokenFrame):
        Opener(AESGCM, KEY[::-1]).header(memoryview(frame)[:SEALED_HEADER_BYTES])


@pytest.mark.parametrize(("size", "length"), [(MAX_PAYLOAD_BYTES + 1, 0), (0xFFFFFFFF, 0), (1, MAX_MESSAGE_BYTES + 1)])
def test_lengths_beyond_the_bounds_are_refused_though_the_key_is_right(size, length):
    header = struct.pack(">IH", size, length).ljust(HEADER_BYTES, b"\0")
    frame = AESGCM(KEY).encrypt(bytes(12), header, None)
    with pytest.raises(BrokenFrame, match="bounds"):
        Opener(AESGCM, KEY).header(memoryview(frame))

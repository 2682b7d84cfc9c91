"""The sealing of a lane's frames: a header of fixed length and a payload, each encrypted with a nonce from a
counter.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from shoal.p2p.errors import P2PError

KEY_BYTES: Final = 32
TAG_BYTES: Final = 16
NAME_BYTES: Final = 24
HEADER_BYTES: Final = 512
SEALED_HEADER_BYTES: Final = HEADER_BYTES + TAG_BYTES
MAX_PAYLOAD_BYTES: Final = 4 << 20
_FIELDS = struct.Struct(f">IH{NAME_BYTES}s")  # bytes of the payload, bytes of the message, name; the message follows
MAX_MESSAGE_BYTES: Final = HEADER_BYTES - _FIELDS.size
_NONCE = struct.Struct(">4xQ")

Suite = type[AESGCM] | type[ChaCha20Poly1305]


def suite_of(both: bool) -> Suite:
    """The cipher of a lane. `both` says whether the other side has instructions for AES."""
    return AESGCM if both and has_aes() else ChaCha20Poly1305


class BrokenFrame(P2PError):
    """A frame can't be opened, or breaks the bounds. The peer is not to blame: the path may have changed the bytes."""


@cache
def has_aes() -> bool:
    """Whether this processor has instructions for AES. Without them, ChaCha20-Poly1305 is several times faster."""
    try:
        return "aes" in Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return True


@dataclass(frozen=True, slots=True)
class LaneKeys:
    """The keys of one connection of a lane.

    Attributes:
        suite: the cipher of both directions.
        sealing: 32 new random bytes of this side, for its frames. They are used for nothing else.
        opening: those of the other side.
    """

    suite: Suite
    sealing: bytes
    opening: bytes


class Header(NamedTuple):
    """A frame's header: the size of its payload in bytes, the name of the memory for it, and a message about it."""

    size: int
    name: bytes
    message: bytes


class Sealer:
    """Seals the frames of one direction. Frame k uses the nonces 2k and 2k + 1. Not for two threads at once."""

    def __init__(self, suite: Suite, key: bytes) -> None:
        self._cipher = suite(key)
        self._nonce = 0

    def seal(self, header: Header, payload: memoryview, out: memoryview) -> None:
        """Write the frame into `out`, which has exactly `sealed_bytes(header.size)` bytes."""
        fields = _FIELDS.pack(header.size, len(header.message), header.name) + header.message
        nonce, self._nonce = self._nonce, self._nonce + 2
        self._cipher.encrypt_into(
            _NONCE.pack(nonce), fields.ljust(HEADER_BYTES, b"\0"), None, out[:SEALED_HEADER_BYTES]
        )
        if header.size:
            self._cipher.encrypt_into(_NONCE.pack(nonce + 1), payload, None, out[SEALED_HEADER_BYTES:])


def sealed_bytes(size: int) -> int:
    """The size on the wire of a frame with `size` bytes of payload."""
    return SEALED_HEADER_BYTES + (size + TAG_BYTES if size else 0)


class Opener:
    """Opens the frames of one direction, in order: a frame's header first, then its payload if it has one."""

    def __init__(self, suite: Suite, key: bytes) -> None:
        self._cipher = suite(key)
        self._nonce = 0

    def header(self, sealed: memoryview) -> Header:
        """Open a header. Raises BrokenFrame."""
        fields = bytearray(HEADER_BYTES)
        self._open(self._nonce, sealed, memoryview(fields))
        size, length, name = _FIELDS.unpack_from(fields)
        if size > MAX_PAYLOAD_BYTES or length > MAX_MESSAGE_BYTES:
            raise BrokenFrame(f"a frame of {size} bytes with a message of {length} breaks the bounds")
        self._nonce += 2
        return Header(size, name, bytes(fields[_FIELDS.size : _FIELDS.size + length]))

    def payload(self, sealed: memoryview, out: memoryview) -> None:
        """Open the payload that belongs to the last header. `out` may be the beginning of `sealed`, because OpenSSL's
        ciphers work in place.

        Raises:
            BrokenFrame: if it can't be opened. The content of `out` is arbitrary then.
        """
        self._open(self._nonce - 1, sealed, out)

    def _open(self, nonce: int, sealed: memoryview, out: memoryview) -> None:
        try:
            self._cipher.decrypt_into(_NONCE.pack(nonce), sealed, None, out)
        except InvalidTag:
            raise BrokenFrame("a frame does not open: its bytes were changed on the way") from None

"""Who a peer is: an ed25519 key pair. The public key is the peer id."""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

KEY_BYTES = 32
SIGNATURE_BYTES = 64
MAX_VERIFIED = 4096  # signatures that are remembered, each by its hash
# As libp2p specifies peer ids (RFC 0001): identity multihash of protobuf PublicKey{type: Ed25519, data: key}. Its text
# is multibase base32 of that as a CIDv1 (libp2p-key), or, older, its base58.
_MULTIHASH_PREFIX = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])
_TEXT_PREFIX = bytes([0x01, 0x72]) + _MULTIHASH_PREFIX
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_BASE58_LENGTH = 52  # of a multihash with that prefix, whatever the key


class _Verified:
    """The last signatures that were found good: members pass signed statements on to each other, so the same ones come
    again and again. Bad ones are not kept, or they would drive out the good. May be used in any thread, and holds no
    lock that a fork could leave closed."""

    def __init__(self) -> None:
        self._names: set[bytes] = set()
        self._older: set[bytes] = set()

    def __contains__(self, name: bytes) -> bool:
        return name in self._names or name in self._older

    def add(self, name: bytes) -> None:
        if len(self._names) >= MAX_VERIFIED // 2:
            self._names, self._older = set(), self._names
        self._names.add(name)


_verified = _Verified()


@dataclass(frozen=True, slots=True, order=True)
class PeerID:
    """A peer's name: its ed25519 public key, `key`, 32 bytes. Ordered and hashable by those bytes.

    `str(peer_id)` is its text form (libp2p's CIDv1 in base32, 65 characters), `PeerID.parse` reads it back.

    Args:
        key: those 32 bytes, or libp2p's 38 bytes of a peer id (`to_bytes`).

    Raises:
        ValueError: for anything else.
    """

    key: bytes

    def __post_init__(self) -> None:
        if isinstance(self.key, bytes) and self.key.startswith(_MULTIHASH_PREFIX) and len(self.key) != KEY_BYTES:
            object.__setattr__(self, "key", self.key[len(_MULTIHASH_PREFIX) :])
        if not isinstance(self.key, bytes) or len(self.key) != KEY_BYTES:
            raise ValueError(f"a peer id is the {KEY_BYTES} bytes of an ed25519 public key, not {self.key!r}")

    # Written out: a peer id is looked up many times for each message, and those that `dataclass` writes are slower.
    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, PeerID) and self.key == other.key)

    def __str__(self) -> str:
        return "b" + base64.b32encode(_TEXT_PREFIX + self.key).decode().lower().rstrip("=")

    def __repr__(self) -> str:
        return f"<PeerID …{str(self)[-8:]}>"

    def to_bytes(self) -> bytes:
        """libp2p's bytes of this peer id (38); `PeerID` takes them."""
        return _MULTIHASH_PREFIX + self.key

    def to_base58(self) -> str:
        """libp2p's older text form of this peer id, `12D3KooW…` (52 characters)."""
        number = int.from_bytes(self.to_bytes())
        return "".join(_BASE58[number // 58**place % 58] for place in reversed(range(_BASE58_LENGTH)))

    @classmethod
    def from_base58(cls, text: str) -> PeerID:
        """The peer id that `to_base58` writes so. Raises ValueError if it is none of an ed25519 key."""
        digits = enumerate(reversed(text[:_BASE58_LENGTH]))
        number = sum(_BASE58.find(digit) * 58**place for place, digit in digits)
        peer = cls((number % (1 << 8 * KEY_BYTES)).to_bytes(KEY_BYTES))
        if peer.to_base58() != text:
            raise ValueError(f"{text!r} is not a peer id: expected '12D3KooW…', an ed25519 libp2p key in base58")
        return peer

    @classmethod
    def parse(cls, text: str) -> PeerID:
        """The peer id that `text` writes, in either of libp2p's forms. Raises ValueError if it writes none."""
        if text.startswith("12D3KooW"):
            return cls.from_base58(text)
        try:
            raw = base64.b32decode(text[1:].upper() + "=" * (-(len(text) - 1) % 8))
        except ValueError as error:
            raise ValueError(f"{text!r} is not a peer id: {error}") from error
        if not text.startswith("b") or not raw.startswith(_TEXT_PREFIX) or len(raw) != len(_TEXT_PREFIX) + KEY_BYTES:
            raise ValueError(f"{text!r} is not a peer id: expected 'bafzaajaiaejc…', an ed25519 libp2p key in base32")
        return cls(raw[len(_TEXT_PREFIX) :])

    def public_key(self) -> Ed25519PublicKey:
        """This peer id as a key of `cryptography`."""
        return Ed25519PublicKey.from_public_bytes(self.key)

    def verify(self, data: bytes, signature: bytes) -> bool:
        """Whether `signature` (64 bytes) over `data` was made with this peer's secret key."""
        name = blake3(self.key).update(signature).update(data).digest() if len(signature) == SIGNATURE_BYTES else b""
        if name in _verified:
            return True
        try:
            self.public_key().verify(signature, data)
        except (InvalidSignature, ValueError):
            return False
        _verified.add(name)
        return True


# The peer id with that key, mostly one that was made before: messages name peers by their keys.
peer_of = lru_cache(maxsize=4096)(PeerID)


class Identity:
    """A peer's key pair: proves who it is, and signs what it publishes.

    Args:
        seed: the 32 secret bytes; drawn from the system's randomness when not given.

    Attributes:
        secret: the secret key.
        peer_id: the public key.
    """

    def __init__(self, seed: bytes | None = None) -> None:
        self.secret = Ed25519PrivateKey.from_private_bytes(os.urandom(KEY_BYTES) if seed is None else seed)
        self.peer_id = PeerID(self.secret.public_key().public_bytes_raw())

    def sign(self, data: bytes) -> bytes:
        """The 64-byte ed25519 signature over `data`."""
        return self.secret.sign(data)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Identity:
        """The identity kept in `path` (32 bytes, readable by the owner only); made there if the file does not exist.

        Raises ValueError if the file holds something else, OSError if it can't be read or written.
        """
        try:
            with open(path, "xb", opener=partial(os.open, mode=0o600)) as file:
                seed = os.urandom(KEY_BYTES)
                file.write(seed)
        except FileExistsError:
            seed = Path(path).read_bytes()
        if len(seed) != KEY_BYTES:
            raise ValueError(
                f"{path} holds {len(seed)} bytes; an identity file holds the {KEY_BYTES} bytes of an ed25519 seed. "
                "Name another file, or delete this one to make a new identity."
            )
        return cls(seed)

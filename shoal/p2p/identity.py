"""A peer's identity: an ed25519 key pair. The public key is the peer id."""

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
MAX_VERIFIED = 4096  # verified signatures that are remembered, each by its hash
# Peer ids are those of libp2p (RFC 0001): the identity multihash of protobuf PublicKey{type: Ed25519, data: key}. The
# text form is multibase base32 of that as a CIDv1 (libp2p-key), or, older, its base58.
_MULTIHASH_PREFIX = bytes([0x00, 0x24, 0x08, 0x01, 0x12, 0x20])
_TEXT_PREFIX = bytes([0x01, 0x72]) + _MULTIHASH_PREFIX
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_BASE58_LENGTH = 52  # length of every multihash with that prefix


class _Verified:
    """The latest signatures that were verified. Members pass signed statements on to each other, so the same signatures
    come again and again.

    Invalid signatures are not kept, because they would displace valid ones. Any thread may use this. It holds no lock,
    because a fork could leave a lock closed.
    """

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
    """A peer's name: its ed25519 public key, `key`, 32 bytes. Ordered and hashed by those bytes.

    `str(peer_id)` is its text form (libp2p's CIDv1 in base32, 65 characters). `PeerID.parse` reads it back.

    Args:
        key: the 32 bytes of the public key, or libp2p's 38 bytes of a peer id (see `to_bytes`).

    Attributes:
        key: the 32 bytes of the public key.

    Raises:
        ValueError: if `key` is neither.
    """

    key: bytes

    def __post_init__(self) -> None:
        if isinstance(self.key, bytes) and self.key.startswith(_MULTIHASH_PREFIX) and len(self.key) != KEY_BYTES:
            object.__setattr__(self, "key", self.key[len(_MULTIHASH_PREFIX) :])
        if not isinstance(self.key, bytes) or len(self.key) != KEY_BYTES:
            raise ValueError(f"a peer id is the {KEY_BYTES} bytes of an ed25519 public key, not {self.key!r}")

    # Written out, because a peer id is looked up many times for each message, and the methods of `dataclass` are
    # slower.
    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, PeerID) and self.key == other.key)

    def __str__(self) -> str:
        return "b" + base64.b32encode(_TEXT_PREFIX + self.key).decode().lower().rstrip("=")

    def __repr__(self) -> str:
        return f"<PeerID …{str(self)[-8:]}>"

    def to_bytes(self) -> bytes:
        """libp2p's 38 bytes of this peer id; `PeerID` accepts them."""
        return _MULTIHASH_PREFIX + self.key

    def to_base58(self) -> str:
        """libp2p's older text form of this peer id, `12D3KooW…` (52 characters)."""
        number = int.from_bytes(self.to_bytes())
        return "".join(_BASE58[number // 58**place % 58] for place in reversed(range(_BASE58_LENGTH)))

    @classmethod
    def from_base58(cls, text: str) -> PeerID:
        """The peer id with this text form of `to_base58`. Raises ValueError if it is not the form of an ed25519 key."""
        digits = enumerate(reversed(text[:_BASE58_LENGTH]))
        number = sum(_BASE58.find(digit) * 58**place for place, digit in digits)
        peer = cls((number % (1 << 8 * KEY_BYTES)).to_bytes(KEY_BYTES))
        if peer.to_base58() != text:
            raise ValueError(f"{text!r} is not a peer id: expected '12D3KooW…', an ed25519 libp2p key in base58")
        return peer

    @classmethod
    def parse(cls, text: str) -> PeerID:
        """The peer id with this text form, in either form of libp2p.

        Raises:
            ValueError: if the text is neither form of a peer id.
        """
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
        """The public key as an object of `cryptography`."""
        return Ed25519PublicKey.from_public_bytes(self.key)

    def verify(self, data: bytes, signature: bytes) -> bool:
        """Whether `signature` (64 bytes) is this peer's ed25519 signature over `data`."""
        name = blake3(self.key).update(signature).update(data).digest() if len(signature) == SIGNATURE_BYTES else b""
        if name in _verified:
            return True
        try:
            self.public_key().verify(signature, data)
        except (InvalidSignature, ValueError):
            return False
        _verified.add(name)
        return True


# The peer id with that key, usually an existing object: messages name peers by their keys.
peer_of = lru_cache(maxsize=4096)(PeerID)


class Identity:
    """A peer's key pair: proves the peer's identity, and signs its records.

    Args:
        seed: the 32 secret bytes; None draws them from the system's randomness.

    Attributes:
        secret: the secret key.
        peer_id: the public key.

    Raises:
        ValueError: if the seed does not have 32 bytes.
    """

    def __init__(self, seed: bytes | None = None) -> None:
        self.secret = Ed25519PrivateKey.from_private_bytes(os.urandom(KEY_BYTES) if seed is None else seed)
        self.peer_id = PeerID(self.secret.public_key().public_bytes_raw())

    def sign(self, data: bytes) -> bytes:
        """The 64-byte ed25519 signature over `data`."""
        return self.secret.sign(data)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Identity:
        """The identity in the file `path` (32 bytes, readable by its owner only). The file is created if it does not
        exist.

        Raises:
            ValueError: if the file has another size.
            OSError: if it can't be read or written.
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

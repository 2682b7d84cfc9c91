"""Signatures of messages, so that others can pass them on and their authors can't deny them."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Protocol, TypeVar

import msgspec
from blake3 import blake3

from shoal.p2p.identity import SIGNATURE_BYTES, Identity, peer_of

INSTANCE_BYTES = 8
MAX_VERIFIED = 4096  # statements that were verified, and are not verified again


class Seal(msgspec.Struct, array_like=True, frozen=True):
    """A signature: the instance of the start that has signed, and the ed25519 signature."""

    instance: Annotated[bytes, msgspec.Meta(min_length=INSTANCE_BYTES, max_length=INSTANCE_BYTES)]
    signature: Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]


UNSIGNED = Seal(bytes(INSTANCE_BYTES), bytes(SIGNATURE_BYTES))


class Signed(Protocol):
    """A message that is signed."""

    @property
    def seal(self) -> Seal: ...


S = TypeVar("S", bound=msgspec.Struct)


class Signer:
    """Signs the messages of one peer in one run, and checks the signatures of others.

    The signed text has 88 bytes: `shoal statement` and the message's tag (16), the hash of the run's name (32), the
    instance (8), and the hash of the message without its signature (32).

    Args:
        identity: the identity of this peer.
        run_id: the name of the run.

    Attributes:
        instance: 8 bytes that name this start of the peer. So the messages of a peer that was started anew do not
            contradict those that it signed before.
    """

    def __init__(self, identity: Identity, run_id: str) -> None:
        self._identity, self._run = identity, blake3(run_id.encode()).digest()
        self._verified: dict[bytes, None] = {}  # hashes of verified statements, the newest last
        self.instance = bytes(INSTANCE_BYTES)

    def sign(self, message: S) -> S:
        """The message with this peer's signature. It equals what others decode, so all peers hash the same bytes."""
        exact = _decoder(type(message)).decode(_encoder.encode(msgspec.structs.replace(message, seal=UNSIGNED)))
        signature = self._identity.sign(self._statement(exact, self.instance))
        signed: S = msgspec.structs.replace(exact, seal=Seal(self.instance, signature))
        return signed

    def is_signed(self, message: Signed, key: bytes) -> bool:
        """Whether the peer with this key has signed the message, in this run."""
        assert isinstance(message, msgspec.Struct)
        statement = self._statement(msgspec.structs.replace(message, seal=UNSIGNED), message.seal.instance)
        name = blake3(key + message.seal.signature + statement).digest()
        if name not in self._verified:
            if not peer_of(key).verify(statement, message.seal.signature):
                return False
            if len(self._verified) >= MAX_VERIFIED:
                del self._verified[next(iter(self._verified))]
            self._verified[name] = None
        return True

    def _statement(self, blank: msgspec.Struct, instance: bytes) -> bytes:
        tag = blank.__struct_config__.tag
        assert isinstance(tag, int)
        kind = b"shoal statement" + tag.to_bytes()
        return kind + self._run + instance + blake3(_encoder.encode(blank)).digest()


def name_of_statement(message: msgspec.Struct) -> bytes:
    """16 bytes that name a signed message."""
    return blake3(b"shoal name\0" + _encoder.encode(message)).digest(length=16)


@cache
def _decoder(kind: type[S]) -> msgspec.msgpack.Decoder[S]:
    return msgspec.msgpack.Decoder(kind)


_encoder = msgspec.msgpack.Encoder()

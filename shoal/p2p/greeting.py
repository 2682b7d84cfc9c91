"""What the two ends of a new connection say to each other first, before any message of a node passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import zmq

from shoal.p2p.identity import KEY_BYTES, PeerID

MAGIC = "shoal"
VERSION = 1
INSTANCE_BYTES = 8
_MAX_REASON = 1024


class Hello(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """The first message in each direction.

    Attributes:
        magic: MAGIC: which network this is.
        version: of the protocol.
        peer: the key of the peer id of who speaks. CURVE or ZAP must confirm it.
        instance: random; tells a peer that was started anew from one that connects once more.
    """

    magic: Annotated[str, msgspec.Meta(max_length=16)]
    version: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    peer: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    instance: Annotated[bytes, msgspec.Meta(min_length=INSTANCE_BYTES, max_length=INSTANCE_BYTES)]


class Refusal(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """The answer to a hello that is not accepted; the connection ends."""

    reason: Annotated[str, msgspec.Meta(max_length=_MAX_REASON)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Hello | Refusal)


def hello(peer: PeerID, instance: bytes) -> zmq.Frame:
    """The frame by which `peer` introduces itself."""
    return zmq.Frame(_encoder.encode(Hello(MAGIC, VERSION, peer.key, instance)), copy=True)


def refusal(reason: str) -> zmq.Frame:
    """The frame that declines a hello."""
    return zmq.Frame(_encoder.encode(Refusal(reason[:_MAX_REASON])), copy=True)


def parse(frames: Sequence[zmq.Frame]) -> Hello:
    """The hello in a first message. Raises ValueError that says what it is instead."""
    if len(frames) != 1:
        raise ValueError(f"a hello is one frame, not {len(frames)}")
    try:
        said: Hello | Refusal = _decoder.decode(frames[0].buffer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a hello: {error}") from error
    if isinstance(said, Refusal):
        raise ValueError(f"it refused: {said.reason}")
    if (said.magic, said.version) != (MAGIC, VERSION):
        raise ValueError(f"it speaks {said.magic!r} version {said.version}, this peer {MAGIC!r} version {VERSION}")
    return said

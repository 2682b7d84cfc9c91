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
# The first of two frames by which the transports of connected peers talk to each other; no msgpack begins like this, so
# no message of a node does.
LATER = b"\xc1shoal"


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


class Taken(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """Another process has said hello with the receiver's identity, and is not the one that is `instance`.

    It is the answer to the hello of the one that came later, and a question to the one that is connected: does it live?
    """

    instance: Annotated[bytes, msgspec.Meta(min_length=INSTANCE_BYTES, max_length=INSTANCE_BYTES)]


class Alive(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """The answer to `Taken` of the one that is connected."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Hello | Refusal | Taken)
_later_decoder = msgspec.msgpack.Decoder(Taken | Alive)


def hello(peer: PeerID, instance: bytes) -> zmq.Frame:
    """The frame by which `peer` introduces itself."""
    return zmq.Frame(_encoder.encode(Hello(MAGIC, VERSION, peer.key, instance)), copy=True)


def refusal(reason: str) -> zmq.Frame:
    """The frame that declines a hello."""
    return zmq.Frame(_encoder.encode(Refusal(reason[:_MAX_REASON])), copy=True)


def taken(instance: bytes) -> zmq.Frame:
    """The frame that says that `instance` has the receiver's identity, too."""
    return zmq.Frame(_encoder.encode(Taken(instance)), copy=True)


def alive() -> zmq.Frame:
    """The frame that answers it."""
    return zmq.Frame(_encoder.encode(Alive()), copy=True)


def is_later(frames: Sequence[zmq.Frame]) -> bool:
    """Whether a connected peer's transport says this to this one's."""
    return len(frames) == 2 and len(frames[0]) == len(LATER) and frames[0].bytes == LATER


def parse_later(frames: Sequence[zmq.Frame]) -> Taken | Alive:
    """What it says. Raises ValueError that says what it is instead."""
    try:
        said: Taken | Alive = _later_decoder.decode(frames[1].buffer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a message of a transport: {error}") from error
    return said


def parse(frames: Sequence[zmq.Frame]) -> Hello:
    """The hello in a first message. Raises ValueError that says what it is instead."""
    said = parse_answer(frames)
    if isinstance(said, Taken):
        raise ValueError("not a hello, but an answer to one")
    return said


def parse_answer(frames: Sequence[zmq.Frame]) -> Hello | Taken:
    """As `parse`, of what a dialler is answered."""
    if len(frames) != 1:
        raise ValueError(f"a hello is one frame, not {len(frames)}")
    try:
        said: Hello | Refusal | Taken = _decoder.decode(frames[0].buffer)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a hello: {error}") from error
    if isinstance(said, Refusal):
        raise ValueError(f"it refused: {said.reason}")
    if isinstance(said, Taken):
        return said
    if (said.magic, said.version) != (MAGIC, VERSION):
        raise ValueError(f"it speaks {said.magic!r} version {said.version}, this peer {MAGIC!r} version {VERSION}")
    return said

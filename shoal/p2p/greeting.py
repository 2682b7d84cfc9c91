"""What the two transports of a link say to each other: who they are, before any message passes, and later.

The listener, which TLS has proven, challenges; the dialler says hello with a signature that holds for this link only;
the listener keeps the link, or not.

Later versions of the protocol may add fields at the end of a challenge and of a hello. They change none of those that
are there. So every peer can read the version and the release of every other one, and say which to install.
"""

from __future__ import annotations

import hashlib
from typing import Annotated

import msgspec

from shoal.p2p.identity import KEY_BYTES, SIGNATURE_BYTES, PeerID
from shoal.p2p.release import RELEASE, Release, how_to_match

MAGIC = "shoal"
VERSION = 2
INSTANCE_BYTES = 8
NONCE_BYTES = 32
TOKEN_BYTES = 32
# The first byte of what comes to the port where links come, and is none. Nothing of TLS begins so.
LANE_BYTE = b"\0"  # of a lane's token
CIRCUIT_BYTE = b"\1"  # of the token of a circuit's end
_MAX_REASON = 1024
_MAX_HOST = 64  # characters of a numeric address
# The first bytes of version 1, which was ZeroMQ's (ZMTP), and what they are answered.
FIRST_VERSION = b"\xff\0\0\0\0\0\0\0\1\x7f"
OUTDATED = f"This peer of Shoal speaks version {VERSION} of its protocol, and no earlier one: update it.\n".encode()

Version = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Magic = Annotated[str, msgspec.Meta(max_length=16)]
LaneKey = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Instance = Annotated[bytes, msgspec.Meta(min_length=INSTANCE_BYTES, max_length=INSTANCE_BYTES)]


class Challenge(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """The listener's first words.

    Attributes:
        magic: MAGIC: which network this is.
        version: of the protocol.
        instance: random; tells a peer that was started anew from one that connects once more.
        nonce: random; what the dialler signs.
        release: of Shoal.
    """

    magic: Magic
    version: Version
    instance: Instance
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    release: Release = ""


class Hello(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """The dialler's answer.

    Attributes:
        magic, version, instance: as above.
        peer: the key of its peer id.
        signature: made with that key, over `signed`.
        succeeds: whether this link is to take the place of the one that the two have.
        release: of Shoal.
    """

    magic: Magic
    version: Version
    instance: Instance
    peer: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    signature: Annotated[bytes, msgspec.Meta(min_length=SIGNATURE_BYTES, max_length=SIGNATURE_BYTES)]
    succeeds: bool = False
    release: Release = ""


class Kept(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """The link stays: the listener's answer to a hello, and the dialler's to that if its peer id is the smaller."""


class Refusal(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """The answer to a hello that is not accepted; the link ends."""

    reason: Annotated[str, msgspec.Meta(max_length=_MAX_REASON)]


class Taken(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """Another link of the receiver's identity is there, of the start `instance`.

    It is the answer to the hello of a process that came later, and a question to the one that is connected: does it
    live?
    """

    instance: Instance


class Alive(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """The answer to `Taken` of the one that is connected."""


class Wanted(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """The listener has chunks to send: the dialler is to dial a lane."""


class Key(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """The dialler is about to dial a connection of the lane.

    Attributes:
        key: fresh and random; what it will seal with.
        aes: whether its processor has instructions for AES.
        bbr: whether its kernel has BBR.
    """

    key: LaneKey
    aes: bool
    bbr: bool


class Token(msgspec.Struct, tag=8, array_like=True, frozen=True):
    """The listener's answer.

    Attributes:
        key, aes, bbr: as above.
        token: by which the connection is known; good once.
    """

    key: LaneKey
    aes: bool
    bbr: bool
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class Observe(msgspec.Struct, tag=9, array_like=True, frozen=True):
    """In place of a hello: from where does this connection come? The link ends with the answer."""


class Observed(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """The listener's answer, as it sees the dialler.

    Attributes:
        host: an IPv4 or IPv6 address.
        port: of TCP.
    """

    host: Annotated[str, msgspec.Meta(max_length=_MAX_HOST)]
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Moved(msgspec.Struct, tag=11, array_like=True, frozen=True):
    """The last word over a link: what follows comes over the one that succeeds it."""


Said = Challenge | Hello | Kept | Refusal | Taken | Alive | Wanted | Key | Token | Observe | Observed | Moved
_decoder = msgspec.msgpack.Decoder(Said)
encode = msgspec.msgpack.Encoder().encode


def decode(payload: memoryview) -> Said:
    """What the other transport says. Raises ValueError that says what it is instead, or of which other version."""
    try:
        said: Said = _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a greeting: {error}") from error
    if isinstance(said, Challenge | Hello):
        if said.magic != MAGIC:
            raise ValueError(f"it speaks {said.magic!r}, this peer {MAGIC!r}")
        if said.version != VERSION:
            raise ValueError(other_version(said.version, said.release))
    return said


def other_version(version: int, release: Release = "") -> str:
    """What is told of a peer that speaks that version of the protocol."""
    theirs, mine = f"version {version} of Shoal's protocol", f"this peer version {VERSION}"
    if release:
        theirs, mine = f"{theirs} (Shoal {release})", f"{mine} (Shoal {RELEASE})"
    return f"it speaks {theirs}, {mine}; {how_to_match(release)}"


def refusal(reason: str) -> Refusal:
    """A refusal, with as much of its reason as fits."""
    return Refusal(reason[:_MAX_REASON])


def signed(dialler: PeerID, listener: PeerID, instance: bytes, nonce: bytes, certificate: bytes) -> bytes:
    """What a dialler signs: all fields but the first, which says what it is, have a fixed length."""
    digest = hashlib.sha256(certificate).digest()
    return b"shoal hello %d\0" % VERSION + dialler.key + listener.key + instance + nonce + digest

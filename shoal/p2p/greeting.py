"""The control messages between the two transports of a link: introductions before any message passes, and later ones.

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
# The first byte of a connection to the port for links that is not a link. TLS never begins with these bytes.
LANE_BYTE = b"\0"  # begins the token of a lane's connection
CIRCUIT_BYTE = b"\1"  # begins the token of an end of a circuit
MAX_REASON = 1024
_MAX_HOST = 64  # characters of a numeric address
# The first bytes of version 1, which used ZeroMQ's protocol (ZMTP), and the answer to them.
FIRST_VERSION = b"\xff\0\0\0\0\0\0\0\1\x7f"
OUTDATED = f"This peer of Shoal speaks version {VERSION} of its protocol, and no earlier one: update it.\n".encode()

Version = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Magic = Annotated[str, msgspec.Meta(max_length=16)]
LaneKey = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Instance = Annotated[bytes, msgspec.Meta(min_length=INSTANCE_BYTES, max_length=INSTANCE_BYTES)]


class Challenge(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """The listener's first message.

    Attributes:
        magic: MAGIC, the name of the network.
        version: of the protocol.
        instance: random; distinguishes a restarted peer from one that connects again.
        nonce: random; what the dialler signs.
        release: of Shoal.
    """

    magic: Magic
    version: Version
    instance: Instance
    nonce: Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
    release: Release = ""


class LinkHello(msgspec.Struct, tag=1, array_like=True, frozen=True):
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


class LinkKept(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """The link stays. The listener answers a hello with this, and the dialler answers in turn if its peer id is the
    smaller.
    """


class Refusal(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """The answer to a hello that is not accepted. The link ends."""

    reason: Annotated[str, msgspec.Meta(max_length=MAX_REASON)]


class Taken(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """There is another link of the receiver's identity. `instance` identifies the start of the process that made that
    link.

    This is the answer to the hello of a process that came later. It is also a question to the process that is
    connected: are you alive?
    """

    instance: Instance


class Alive(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """The answer to `Taken` from the process that is connected."""


class Wanted(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """The listener has chunks to send: the dialler should dial a lane."""


class Key(msgspec.Struct, tag=7, array_like=True, frozen=True):
    """The dialler is about to dial a connection of the lane.

    Attributes:
        key: the key by which it will seal; new and random.
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
        token: identifies the connection, and is valid once.
    """

    key: LaneKey
    aes: bool
    bbr: bool
    token: Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class Observe(msgspec.Struct, tag=9, array_like=True, frozen=True):
    """Instead of a hello: from which address does this connection come? The link ends with the answer."""


class Observed(msgspec.Struct, tag=10, array_like=True, frozen=True):
    """The listener's answer: the dialler's address as the listener sees it.

    Attributes:
        host: an IPv4 or IPv6 address.
        port: the TCP port.
    """

    host: Annotated[str, msgspec.Meta(max_length=_MAX_HOST)]
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)]


class Moved(msgspec.Struct, tag=11, array_like=True, frozen=True):
    """The last message over a link. All later messages come over the link that replaces it."""


Said = Challenge | LinkHello | LinkKept | Refusal | Taken | Alive | Wanted | Key | Token | Observe | Observed | Moved
_decoder = msgspec.msgpack.Decoder(Said)
encode = msgspec.msgpack.Encoder().encode


def decode(payload: memoryview) -> Said:
    """Decode a control message of the other transport.

    Raises:
        ValueError: if it is no such message, or of another version. The message says which.
    """
    try:
        said: Said = _decoder.decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not a greeting: {error}") from error
    if isinstance(said, Challenge | LinkHello):
        if said.magic != MAGIC:
            raise ValueError(f"it speaks {said.magic!r}, this peer {MAGIC!r}")
        if said.version != VERSION:
            raise ValueError(other_version(said.version, said.release))
    return said


def unexpected(said: Said) -> ValueError:
    """The error of a message that may not come now."""
    return ValueError(f"{type(said).__name__} is not expected now")


def other_version(version: int, release: Release = "") -> str:
    """What is told of a peer that speaks that version of the protocol."""
    theirs, mine = f"version {version} of Shoal's protocol", f"this peer version {VERSION}"
    if release:
        theirs, mine = f"{theirs} (Shoal {release})", f"{mine} (Shoal {RELEASE})"
    return f"it speaks {theirs}, {mine}; {how_to_match(release)}"


def signed(dialler: PeerID, listener: PeerID, instance: bytes, nonce: bytes, certificate: bytes) -> bytes:
    """The bytes that a dialler signs. All fields but the constant first one have a fixed length."""
    digest = hashlib.sha256(certificate).digest()
    return b"shoal hello %d\0" % VERSION + dialler.key + listener.key + instance + nonce + digest

"""What a relay and its peers say to each other. All are bounded: a message that exceeds a bound reaches no handler."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.p2p.greeting import TOKEN_BYTES
from shoal.p2p.identity import KEY_BYTES
from shoal.p2p.multiaddr import MAX_LENGTH
from shoal.p2p.node import Service

MAX_BACK = 4
LEASE_SECONDS = 600.0  # of a reservation; no relay grants more

Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class Reserve(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """To a relay: lead others to me. Repeated, it renews."""


class Reserved(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """The answer: as long as the link between the two lasts, and at most for so many seconds."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=LEASE_SECONDS)]


class Circuit(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """To a relay: lead me to that peer."""

    to: Key


class Opened(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """The answer: both ends open a connection to the port where the relay listens, and begin it with this token. It is
    good once for each end, and for a short time."""

    token: Token


class Incoming(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """From a relay to a peer that has reserved: that peer asks for you, and this is the token of the circuit."""

    token: Token
    peer: Key


class Meet(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """To a peer that is reached through a circuit, and its answer: I dial you, over and over, and come from there.

    Attributes:
        host, port: from where, as others see it.
        seconds: that it took to ask them.
        relay: whose circuit it is: the other side can ask it, too.
    """

    host: Annotated[str, msgspec.Meta(max_length=64)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    seconds: Annotated[float, msgspec.Meta(ge=0, le=3)]
    relay: Key


class Back(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """To a peer that was dialled through a circuit: dial me back, without a relay, at one of these."""

    addresses: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=MAX_LENGTH)], ...], msgspec.Meta(min_length=1, max_length=MAX_BACK)
    ]


class Came(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """The answer: that is done, and the new link takes the place of the circuit."""


RELAY = Service("relay/1", Reserve | Reserved | Circuit | Opened)
CIRCUIT = Service("circuit/1", Incoming)
PUNCH = Service("punch/1", Meet | Back | Came)

"""The messages between a relay and its peers. All are bounded: a message that exceeds a bound reaches no handler."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.p2p.greeting import TOKEN_BYTES
from shoal.p2p.identity import KEY_BYTES
from shoal.p2p.multiaddr import MAX_LENGTH
from shoal.p2p.node import Service

MAX_BACK = 4
LEASE_SECONDS = 600.0  # of a reservation at most

Key = Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class Reserve(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """To a relay: connect others to me. Sent again, it renews the reservation."""


class Reserved(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """The answer: the reservation lasts as long as the link between the two, and at most this many seconds."""

    seconds: Annotated[float, msgspec.Meta(gt=0, le=LEASE_SECONDS)]


class Circuit(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """To a relay: connect me to that peer."""

    to: Key


class Opened(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """The answer: both ends open a connection to the port where the relay listens, and send this token first. Each end
    may use the token once, and for a short time.
    """

    token: Token


class Incoming(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """From a relay to a peer with a reservation: that peer asks for a connection to you, and this is the token of the
    circuit.
    """

    token: Token
    peer: Key


class Meet(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """To a peer that is reached through a circuit, and its answer: I dial you again and again, from this address.

    Attributes:
        host, port: the address from which the sender's connections come, as others see it.
        seconds: how long asking these others took.
        relay: the relay of the circuit. The other side can ask it too.
    """

    host: Annotated[str, msgspec.Meta(max_length=64)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    seconds: Annotated[float, msgspec.Meta(ge=0, le=3)]
    relay: Key


class Back(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """To a peer that was dialled through a circuit: dial me back, without a relay, at one of these addresses."""

    addresses: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=MAX_LENGTH)], ...], msgspec.Meta(min_length=1, max_length=MAX_BACK)
    ]


class Came(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """The answer: the new link is open and replaces the circuit."""


RELAY = Service("relay/1", Reserve | Reserved | Circuit | Opened)
CIRCUIT = Service("circuit/1", Incoming)
PUNCH = Service("punch/1", Meet | Back | Came)

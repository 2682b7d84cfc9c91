"""What a relay and its peers say to each other. All are bounded: a message that exceeds a bound reaches no handler."""

from __future__ import annotations

from typing import Annotated

import msgspec

from shoal.p2p.greeting import TOKEN_BYTES
from shoal.p2p.identity import KEY_BYTES
from shoal.p2p.node import Service

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


RELAY = Service("relay/1", Reserve | Reserved | Circuit | Opened)
CIRCUIT = Service("circuit/1", Incoming)

"""What the machines of the protocol want done: the driver performs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from shoal.p2p.transport import Buffer
from shoal.swarm.protocol.contribution import BytesExchange
from shoal.swarm.protocol.messages import Begin, Join, Repair, Source, Survey
from shoal.swarm.protocol.view import Member


@dataclass(frozen=True, slots=True)
class Send:
    """Send `message` to those of the peers with these keys that are connected. `name` is as in `Transport.send`."""

    to: tuple[bytes, ...]
    message: msgspec.Struct
    buffers: Sequence[Buffer] = ()
    name: bytes = b""


@dataclass(frozen=True, slots=True)
class Ask:
    """Send a request to the peers with these keys. Each answer, or why there is none, is an event of the machine."""

    to: tuple[bytes, ...]
    message: Join | Survey | Repair
    buffers: Sequence[Buffer] = ()


@dataclass(frozen=True, slots=True)
class Enter:
    """This peer is in a round: connect to its reducers and wait until the input can be read; then it is `started`."""

    begin: Begin


@dataclass(frozen=True, slots=True)
class FetchChunks:
    """Fetch these chunks of a round's result from their owners, and none that were to be fetched before."""

    exchange: BytesExchange
    sources: Sequence[Source]


@dataclass(frozen=True, slots=True)
class Cancel:
    """The memory of this round is about to be used for something else: nothing is sent from it or fetched into it."""

    round: bytes


@dataclass(frozen=True, slots=True)
class Meet:
    """Exchange HELLO with this member, which may coordinate; the peer `instead_of` has said so, if one has."""

    member: Member
    instead_of: bytes = b""


Action = Send | Ask | Enter | FetchChunks | Cancel | Meet

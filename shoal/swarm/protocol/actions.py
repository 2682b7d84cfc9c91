"""The actions that the state machines of the protocol ask for. The driver (`Swarm`) performs them."""

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
    """Send a request to the peers with these keys. The machine receives each answer, or the error, as an event."""

    to: tuple[bytes, ...]
    message: Join | Survey | Repair
    buffers: Sequence[Buffer] = ()


@dataclass(frozen=True, slots=True)
class Enter:
    """This peer is in a round: connect to its reducers, wait until the input can be read, and then call `started`."""

    begin: Begin


@dataclass(frozen=True, slots=True)
class FetchChunks:
    """Fetch these chunks of a round's result from their owners. Stop fetching chunks for an earlier action."""

    exchange: BytesExchange
    sources: Sequence[Source]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop sending from the memory of this round and fetching into it, because it is about to be used again."""

    round: bytes


@dataclass(frozen=True, slots=True)
class Greet:
    """Exchange HELLO with this member, which may be the coordinator. If `instead_of` is given, that peer has said that
    the member coordinates in its place."""

    member: Member
    instead_of: bytes = b""


Action = Send | Ask | Enter | FetchChunks | Cancel | Greet

"""One peer, as the others of its run know it."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import msgspec

from shoal.p2p.identity import PeerID
from shoal.p2p.multiaddr import MAX_LENGTH, Multiaddr
from shoal.swarm.protocol.tip import Digest

MAX_ADDRESSES = 8
MAX_MEMBERS = 1024


class Role(Enum):
    """What a peer does in a round."""

    NODE = "node"  # contributes, reduces, receives
    CLIENT = "client"  # contributes and receives; nobody can dial it, so it reduces and coordinates nothing
    AUXILIARY = "auxiliary"  # only reduces: lends bandwidth


class Member(msgspec.Struct, frozen=True, array_like=True):
    """A peer of a run: who, where, and what it can do.

    Attributes:
        key: the bytes of its peer id.
        addresses: where it listens; none for a client.
        role: see `Role`.
        bandwidth: how much it can carry, in any unit that is the same in the whole run; spans are sized by it. None:
            not known, and taken for the mean of those that are.
    """

    key: Digest
    addresses: Annotated[
        tuple[Annotated[str, msgspec.Meta(max_length=MAX_LENGTH)], ...], msgspec.Meta(max_length=MAX_ADDRESSES)
    ]
    role: Role
    bandwidth: Annotated[float, msgspec.Meta(ge=0, le=1e18)] | None = None

    @property
    def peer(self) -> PeerID:
        return PeerID(self.key)

    @property
    def reduces(self) -> bool:
        return self.role is not Role.CLIENT and self.bandwidth != 0

    @property
    def contributes(self) -> bool:
        return self.role is not Role.AUXILIARY

    def multiaddrs(self) -> list[Multiaddr]:
        """The addresses, parsed; those that are none are left out (they are what another peer claims of itself)."""
        parsed = []
        for text in self.addresses:
            try:
                parsed.append(Multiaddr(text))
            except ValueError:
                continue
        return parsed

"""Ways to a peer other than to dial where it listens: somebody else finds them, the transport uses them."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable

from shoal.p2p.multiaddr import Multiaddr


class Route(ABC):
    """A way to one peer, for the link and for each connection of its lane.

    Attributes:
        relayed: whether it leads through somebody else.
    """

    relayed = False

    @abstractmethod
    async def connect(self) -> socket.socket:
        """A TCP connection that does not block, whose other end the peer's transport accepts. Raises PeerUnreachable.
        The caller sets the deadline."""

    def opened(self) -> None:  # noqa: B027 - most routes need not know
        """A link over this route, which this side has dialled, is open."""


Router = Callable[[Multiaddr], Route]
"""Finds the route for an address that leads through a relay."""

"""Routes to a peer other than dialling its address. Other code finds them, and the transport uses them."""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable

from shoal.p2p.multiaddr import Multiaddr


class PeerRoute(ABC):
    """A route to one peer, for the link and for each connection of its lane.

    Attributes:
        relayed: whether it leads through a relay.
    """

    relayed = False

    @abstractmethod
    async def connect(self) -> socket.socket:
        """A non-blocking TCP connection whose other end the peer's transport accepts. The caller sets the deadline.
        Raises PeerUnreachable.
        """

    def opened(self) -> None:  # noqa: B027 - most routes need not know
        """Called when a link over this route that this side has dialled is open."""


Router = Callable[[Multiaddr], PeerRoute]
"""Finds the route for an address that leads through a relay."""

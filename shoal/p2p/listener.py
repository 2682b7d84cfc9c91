"""Accepts connections, up to the limits."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import resource
import socket
import sys
from collections.abc import Callable, Hashable

from shoal.p2p import forks

log = logging.getLogger(__name__)

HANDSHAKES_PER_ADDRESS = 128  # at once, per IPv4 address or IPv6 /64
HANDSHAKES = 512  # at once, in all
RESERVED_DESCRIPTORS = 256  # kept free for everything but accepted connections
ACCEPT_AGAIN = 1.0  # seconds until a listener that was out of descriptors tries again
_BACKLOG = 512


class Admission:
    """Decides who may connect. No I/O."""

    def __init__(self, connections: int) -> None:
        self._most = connections
        # the network of each connection that has not proven its identity; "" for the others
        self._accepted: dict[Hashable, str] = {}

    def refusal(self, address: str, lanes: int = 0, *, expected: bool = False) -> str:
        """Why a connection from that address is refused now; "" if it is accepted.

        Args:
            address: the numeric address.
            lanes: the number of connections that lanes have.
            expected: whether a connection from there is expected. Such a connection need not wait for those that have
                not proven their identity.
        """
        if len(self._accepted) + lanes >= self._most:
            return f"there are {self._most} already, which is as many as RLIMIT_NOFILE allows"
        if expected:
            return ""
        proving = [where for where in self._accepted.values() if where]
        if len(proving) >= HANDSHAKES:
            return f"{HANDSHAKES} others are about to prove who they are"
        network = _network(address)
        if proving.count(network) >= HANDSHAKES_PER_ADDRESS:
            return f"{HANDSHAKES_PER_ADDRESS} others from {network} are about to prove who they are"
        return ""

    def enter(self, connection: Hashable, address: str) -> None:
        """A connection was accepted."""
        self._accepted[connection] = _network(address)

    def proven(self, connection: Hashable) -> None:
        """That connection has proven its identity."""
        self._accepted[connection] = ""

    def leave(self, connection: Hashable) -> None:
        """That connection has ended."""
        self._accepted.pop(connection, None)


def plain(host: str) -> str:
    """A numeric address as people write it: IPv4 without the IPv6 around it, and no zone."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)


def _network(address: str) -> str:
    host = plain(address)
    return str(ipaddress.ip_network((host, 64), strict=False)) if ":" in host else host


def most_connections() -> int:
    """How many connections may be accepted. Raises the soft limit of file descriptors to the hard limit first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(1, (sys.maxsize if hard == resource.RLIM_INFINITY else hard) - RESERVED_DESCRIPTORS)


class Listener:
    """Accepts connections at one address.

    Args:
        address: the address of the interface.
        port: the TCP port; 0 for any free one.
        on_accepted: called with each new socket and the address from which it comes.

    Attributes:
        port: the port in use.

    Raises:
        OSError: if the address is taken, or not one of this machine.
    """

    def __init__(
        self,
        address: ipaddress.IPv4Address | ipaddress.IPv6Address,
        port: int,
        on_accepted: Callable[[socket.socket, str], None],
    ) -> None:
        six = address.version == 6
        self._socket = socket.create_server(
            (str(address), port),
            family=socket.AF_INET6 if six else socket.AF_INET,
            backlog=_BACKLOG,
            dualstack_ipv6=six and socket.has_dualstack_ipv6(),
        )
        forks.close_in_children(self._socket)
        self._socket.setblocking(False)
        self.port: int = self._socket.getsockname()[1]
        self._on_accepted, self._full = on_accepted, False
        self._loop = asyncio.get_running_loop()
        self._listen()

    def _listen(self) -> None:
        if self._socket.fileno() != -1:
            self._loop.add_reader(self._socket, self._accept)

    def _accept(self) -> None:
        try:
            connection, where = self._socket.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no file descriptors or no memory left: connections wait in the kernel for a while
            if not self._full:
                log.warning("no connection can be accepted for now: %s; those that are there stay", error.strerror)
            self._full = True
            self._loop.remove_reader(self._socket)
            self._loop.call_later(ACCEPT_AGAIN, self._listen)
            return
        self._full = False
        connection.setblocking(False)
        self._on_accepted(connection, where[0])

    def close(self) -> None:
        """Stop accepting."""
        self._loop.remove_reader(self._socket)
        self._socket.close()

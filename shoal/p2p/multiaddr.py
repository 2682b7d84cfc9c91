"""Addresses of peers, as multiaddrs.

A direct address is `/ip4/203.0.113.7/tcp/31337/p2p/<peer id>`. One through a relay is
`/ip4/203.0.113.7/tcp/31337/p2p/<relay's id>/p2p-circuit/p2p/<peer id>`.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from dataclasses import dataclass, field
from functools import lru_cache

from shoal.p2p.identity import PeerID

MAX_LENGTH = 512
FAMILIES = {"dns": socket.AF_UNSPEC, "dns4": socket.AF_INET, "dns6": socket.AF_INET6}
"""The protocols of host names, and the family of the addresses to which each resolves."""
_PEER = re.compile(r"/p2p/([^/]+)")
# the ids that an address may have, without and with a relay
_NAMED = {False: ([], ["p2p"]), True: (["p2p"], ["p2p", "p2p"])}
_HOST_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}))*\.?")


@dataclass(frozen=True, slots=True, order=True, init=False)
class Multiaddr:
    """The address where a peer listens, or of a relay to the peer, with the id of the peer that must answer.

    Args:
        address: `"/ip4/<address>/tcp/<port>"`, optionally followed by `/p2p/<peer id>`; or another `Multiaddr`.

    Attributes:
        protocol: the protocol of the host: "ip4", "ip6", "dns4", "dns6" or "dns".
        host: the address or host name; that of the relay, if there is one.
        port: the TCP port. 0 means any free port, and is valid for listening only.
        relay: the id of the relay that listens there; None if the peer itself listens there.
        peer_id: the id of the peer that answers; None in an address to listen on.

    Raises:
        ValueError: if `address` is malformed. The message says what is wrong.
    """

    protocol: str = field(init=False)
    host: str = field(init=False)
    port: int = field(init=False)
    relay: PeerID | None = field(init=False)
    peer_id: PeerID | None = field(init=False)

    def __init__(self, address: str | Multiaddr) -> None:
        for name, value in zip(self.__slots__, _parsed(str(address)), strict=True):
            object.__setattr__(self, name, value)

    @property
    def is_loopback(self) -> bool:
        """Whether only its own machine can reach it."""
        if self.protocol in ("ip4", "ip6"):
            return ipaddress.ip_address(self.host).is_loopback
        return self.host.rstrip(".") == "localhost"

    def __str__(self) -> str:
        return self._text(self.port, self.relay, self.peer_id)

    def _text(self, port: int, relay: PeerID | None, peer_id: PeerID | None) -> str:
        way = f"/p2p/{relay}/p2p-circuit" if relay is not None else ""
        tail = f"/p2p/{peer_id}" if peer_id is not None else ""
        return f"/{self.protocol}/{self.host}/tcp/{port}{way}{tail}"

    def with_peer(self, peer_id: PeerID | None) -> Multiaddr:
        """This address with another peer id, or without one if `peer_id` is None. The relay, if there is one, stays."""
        return self if peer_id == self.peer_id else Multiaddr(self._text(self.port, self.relay, peer_id))

    def with_port(self, port: int) -> Multiaddr:
        """This address with another port."""
        return Multiaddr(self._text(port, self.relay, self.peer_id))

    def by_relay(self, peer_id: PeerID | None) -> Multiaddr:
        """The address of the peer `peer_id` through the relay that listens here.

        Raises:
            ValueError: if this address has no peer id, or leads through a relay itself.
        """
        if self.peer_id is None or self.relay is not None:
            raise ValueError(f"{self} is not the address of a relay")
        return Multiaddr(self._text(self.port, self.peer_id, peer_id))

    def of_relay(self) -> Multiaddr:
        """The address of the relay in this address. Raises ValueError if there is none."""
        if self.relay is None:
            raise ValueError(f"{self} does not lead through a relay")
        return Multiaddr(self._text(self.port, None, self.relay))

    def encapsulate(self, other: str | Multiaddr) -> Multiaddr:
        """This address followed by `other`, as in py-multiaddr: `address.encapsulate(f"/p2p/{peer_id}")`.

        Raises:
            ValueError: if the result is no address.
        """
        return Multiaddr(f"{self}{other}")

    def decapsulate(self, other: str | Multiaddr) -> Multiaddr:
        """This address without the last `other` in it and without everything after that, as in py-multiaddr.

        Raises:
            ValueError: if `other` is not in it, or if the rest is no complete address (py-multiaddr also has partial
                addresses).
        """
        other = _PEER.sub(lambda found: f"/p2p/{PeerID.parse(found[1])}", str(other))  # a peer id has two spellings
        before, found, _ = f"{self}/".rpartition(f"{other}/")
        if not found:
            raise ValueError(f"{other} is not in {self}")
        return Multiaddr(before)

    def value_for_protocol(self, protocol: str) -> str:
        """The value of `protocol` ("ip4", "tcp", "p2p", …) in this address, as text, as in py-multiaddr.

        For "p2p" it is the id of the peer that answers, not of the relay; for "p2p-circuit" it is "".

        Raises:
            LookupError: if the address does not have this protocol.
        """
        _, *parts = str(self).replace("/p2p-circuit", "/p2p-circuit/").split("/")
        values = dict(zip(parts[::2], parts[1::2], strict=True))
        if protocol not in values:
            raise LookupError(f"there is no /{protocol}/ in {self}")
        return values[protocol]


@lru_cache(maxsize=4096)  # members send each other the same addresses again and again
def _parsed(text: str) -> tuple[str, str, int, PeerID | None, PeerID | None]:
    parts = text.split("/") if len(text) <= MAX_LENGTH else []
    ids = [*parts[5:]]
    by_relay = parts[7:8] == ["p2p-circuit"]
    if by_relay:
        del ids[2]
    if len(parts) < 5 or parts[0] or parts[3] != "tcp" or ids[::2] not in _NAMED[by_relay] or len(ids) % 2:
        raise ValueError(f"{text[:MAX_LENGTH]!r} is not an address: use /ip4/<address>/tcp/<port>[/p2p/<peer id>]")
    try:
        _check_host(parts[1], parts[2])
        if not (parts[4].isascii() and parts[4].isdigit() and int(parts[4]) <= 65535):
            raise ValueError(f"{parts[4]!r} is not a TCP port")
        named = [PeerID.parse(name) for name in ids[1::2]]
    except ValueError as error:
        raise ValueError(f"{text!r} is not an address: {error}") from error
    relay = named.pop(0) if by_relay else None
    return parts[1], parts[2], int(parts[4]), relay, named[0] if named else None


def _check_host(protocol: str, host: str) -> None:
    if protocol in ("ip4", "ip6"):
        # A zone ("%eth0") is valid on one machine only.
        if "%" in host or f"ip{ipaddress.ip_address(host).version}" != protocol:
            raise ValueError(f"{host} is not an {protocol} address")
    elif protocol not in FAMILIES:
        raise ValueError(f"/{protocol}/ is not known here: use ip4, ip6, dns, dns4 or dns6")
    elif not _HOST_NAME.fullmatch(host):
        raise ValueError(f"{host!r} is not a host name")

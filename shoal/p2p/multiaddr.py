"""Addresses of peers, in multiaddr form: `/ip4/203.0.113.7/tcp/31337/p2p/<peer id>`."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from functools import lru_cache

from shoal.p2p.identity import PeerID

MAX_LENGTH = 512
_HOST_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}))*\.?")


@dataclass(frozen=True, slots=True, order=True, init=False)
class Multiaddr:
    """Where a peer listens, and who must answer there.

    Args:
        address: `"/ip4/<address>/tcp/<port>"`, or with `/p2p/<peer id>` at its end; or another `Multiaddr`.

    Attributes:
        protocol: of the host: "ip4", "ip6", "dns4", "dns6" or "dns".
        host: an address or a host name.
        port: of TCP; 0 means "any free one" and makes sense only for listening.
        peer_id: who answers there; None in an address to listen on.

    Raises:
        ValueError: that says what is wrong with `address`.
    """

    protocol: str = field(init=False)
    host: str = field(init=False)
    port: int = field(init=False)
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
        tail = f"/p2p/{self.peer_id}" if self.peer_id is not None else ""
        return f"/{self.protocol}/{self.host}/tcp/{self.port}{tail}"

    def with_peer(self, peer_id: PeerID | None) -> Multiaddr:
        """This address, of that peer; None: of nobody in particular."""
        if peer_id == self.peer_id:
            return self
        tail = f"/p2p/{peer_id}" if peer_id is not None else ""
        return Multiaddr(f"/{self.protocol}/{self.host}/tcp/{self.port}{tail}")

    def with_port(self, port: int) -> Multiaddr:
        """This address with another port."""
        return Multiaddr(f"/{self.protocol}/{self.host}/tcp/{port}").with_peer(self.peer_id)

    def encapsulate(self, other: str | Multiaddr) -> Multiaddr:
        """This address, and then `other`: `address.encapsulate(f"/p2p/{peer_id}")`, as in py-multiaddr. Raises
        ValueError if the two are no address together."""
        return Multiaddr(f"{self}{other}")

    def decapsulate(self, other: str | Multiaddr) -> Multiaddr:
        """This address without the last `other` in it, and without what comes after, as in py-multiaddr. Raises
        ValueError if `other` is not in it, or if no address is left (py-multiaddr has parts of addresses, too)."""
        head, peer, name = str(other).partition("/p2p/")
        other = f"{head}{peer}{PeerID.parse(name)}" if peer else str(other)  # it has two spellings
        before, found, _ = f"{self}/".rpartition(f"{other}/")
        if not found:
            raise ValueError(f"{other} is not in {self}")
        return Multiaddr(before)

    def value_for_protocol(self, protocol: str) -> str:
        """What `protocol` ("ip4", "tcp", "p2p", …) has in this address, as text, as in py-multiaddr. Raises LookupError
        for one that is not in it."""
        _, *parts = str(self).split("/")
        values = dict(zip(parts[::2], parts[1::2], strict=True))
        if protocol not in values:
            raise LookupError(f"there is no /{protocol}/ in {self}")
        return values[protocol]


@lru_cache(maxsize=4096)  # members tell each other the same addresses again and again
def _parsed(text: str) -> tuple[str, str, int, PeerID | None]:
    parts = text.split("/") if len(text) <= MAX_LENGTH else []
    if len(parts) not in (5, 7) or parts[0] or parts[3] != "tcp" or (len(parts) == 7 and parts[5] != "p2p"):
        raise ValueError(f"{text[:MAX_LENGTH]!r} is not an address: use /ip4/<address>/tcp/<port>[/p2p/<peer id>]")
    try:
        _check_host(parts[1], parts[2])
        if not (parts[4].isascii() and parts[4].isdigit() and int(parts[4]) <= 65535):
            raise ValueError(f"{parts[4]!r} is not a TCP port")
        peer_id = PeerID.parse(parts[6]) if len(parts) == 7 else None
    except ValueError as error:
        raise ValueError(f"{text!r} is not an address: {error}") from error
    return parts[1], parts[2], int(parts[4]), peer_id


def _check_host(protocol: str, host: str) -> None:
    if protocol in ("ip4", "ip6"):
        # A zone ("%eth0") means something on one machine only.
        if "%" in host or f"ip{ipaddress.ip_address(host).version}" != protocol:
            raise ValueError(f"{host} is not an {protocol} address")
    elif protocol not in ("dns", "dns4", "dns6"):
        raise ValueError(f"/{protocol}/ is not known here: use ip4, ip6, dns, dns4 or dns6")
    elif not _HOST_NAME.fullmatch(host):
        raise ValueError(f"{host!r} is not a host name")

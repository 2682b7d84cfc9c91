"""Addresses of peers, in multiaddr form: `/ip4/203.0.113.7/tcp/31337/p2p/<peer id>`."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, replace

from shoal.p2p.identity import PeerID

MAX_LENGTH = 512
_HOST_NAME = re.compile(r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}))*\.?")


@dataclass(frozen=True, slots=True, order=True)
class Multiaddr:
    """Where a peer listens, and who must answer there.

    Attributes:
        protocol: of the host: "ip4", "ip6", "dns4", "dns6" or "dns".
        host: an address or a host name.
        port: of TCP; 0 means "any free one" and makes sense only for listening.
        peer_id: who answers there; None in an address to listen on.
    """

    protocol: str
    host: str
    port: int
    peer_id: PeerID | None = None

    def __post_init__(self) -> None:
        if self.protocol in ("ip4", "ip6"):
            version = 4 if self.protocol == "ip4" else 6
            # A zone ("%eth0") means something on one machine only.
            if "%" in self.host or ipaddress.ip_address(self.host).version != version:
                raise ValueError(f"{self.host} is not an {self.protocol} address")
        elif self.protocol in ("dns", "dns4", "dns6"):
            if not _HOST_NAME.fullmatch(self.host):
                raise ValueError(f"{self.host!r} is not a host name")
        else:
            raise ValueError(f"/{self.protocol}/ is not known here: use ip4, ip6, dns, dns4 or dns6")
        if not 0 <= self.port <= 65535:
            raise ValueError(f"{self.port} is not a TCP port")

    def __str__(self) -> str:
        tail = f"/p2p/{self.peer_id}" if self.peer_id is not None else ""
        return f"/{self.protocol}/{self.host}/tcp/{self.port}{tail}"

    @classmethod
    def parse(cls, text: str | Multiaddr) -> Multiaddr:
        """The address that `text` writes. Raises ValueError that says what is wrong with it."""
        if isinstance(text, Multiaddr):
            return text
        parts = text.split("/") if len(text) <= MAX_LENGTH else []
        if len(parts) not in (5, 7) or parts[0] or parts[3] != "tcp" or (len(parts) == 7 and parts[5] != "p2p"):
            raise ValueError(f"{text[:MAX_LENGTH]!r} is not an address: use /ip4/<address>/tcp/<port>[/p2p/<peer id>]")
        try:
            if not (parts[4].isascii() and parts[4].isdigit()):
                raise ValueError(f"{parts[4]!r} is not a TCP port")
            peer_id = PeerID.parse(parts[6]) if len(parts) == 7 else None
            return cls(parts[1], parts[2], int(parts[4]), peer_id)
        except ValueError as error:
            raise ValueError(f"{text!r} is not an address: {error}") from error

    def with_peer(self, peer_id: PeerID) -> Multiaddr:
        """This address, of that peer."""
        return replace(self, peer_id=peer_id)

    def with_port(self, port: int) -> Multiaddr:
        """This address with another port."""
        return replace(self, port=port)

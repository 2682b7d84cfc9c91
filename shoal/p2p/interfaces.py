"""The addresses at which others can reach a peer that listens on all interfaces (Linux)."""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from shoal.p2p.multiaddr import Multiaddr

_SIOCGIFADDR = 0x8915


def concrete_addresses(address: Multiaddr) -> list[Multiaddr]:
    """`address` itself, or one address for each interface if it means all interfaces (0.0.0.0, ::). Loopback comes
    last.
    """
    if address.protocol == "ip4" and ipaddress.ip_address(address.host).is_unspecified:
        hosts = _ip4_hosts()
    elif address.protocol == "ip6" and ipaddress.ip_address(address.host).is_unspecified:
        hosts = _ip6_hosts()
    else:
        return [address]
    hosts.sort(key=lambda host: ipaddress.ip_address(host).is_loopback)
    concrete = (Multiaddr(f"/{address.protocol}/{host}/tcp/{address.port}") for host in hosts)
    return [found.with_peer(address.peer_id) for found in concrete]


def is_of_this_machine(address: Multiaddr) -> bool:
    """Whether `address` is a loopback address or that of an interface of this machine. A host name counts as another
    machine.
    """
    if address.is_loopback:
        return True
    return address.protocol in ("ip4", "ip6") and is_host_of_this_machine(address.host)


def is_host_of_this_machine(host: str) -> bool:
    """Whether this numeric address is a loopback address or that of an interface of this machine."""
    address = ipaddress.ip_address(host)
    if address.is_loopback:
        return True
    hosts = _ip4_hosts() if address.version == 4 else _ip6_hosts()
    return any(ipaddress.ip_address(own) == address for own in hosts)


def _ip4_hosts() -> list[str]:
    hosts = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # the interface has no IPv4 address
            hosts.append(socket.inet_ntoa(answer[20:24]))
    return hosts


def _ip6_hosts() -> list[str]:
    table = Path("/proc/net/if_inet6")
    if not table.exists():
        return []
    found = [ipaddress.IPv6Address(bytes.fromhex(row.split()[0])) for row in table.read_text().splitlines()]
    # A link-local address is valid only with the name of the interface, which differs on other machines.
    return [str(host) for host in found if not host.is_link_local]

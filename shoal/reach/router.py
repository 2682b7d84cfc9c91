"""The kind of router in front of a machine: how it changes the source port of connections to different hosts."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Sequence

from shoal.p2p.errors import P2PError
from shoal.p2p.interfaces import is_host_of_this_machine
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.transport import Observation, Transport

TIMEOUT = 3.0  # seconds that a host has to answer


class Router(enum.Enum):
    """What a router does with the source port of outgoing connections."""

    NONE = "none"  # others see this machine's own address
    CONE = "cone"  # one port for all destinations ("endpoint-independent mapping"): holes can be punched
    SYMMETRIC = "symmetric"  # another port for each destination: a hole for one host is of no use to another
    UNKNOWN = "unknown"  # there may be a router, but fewer than two hosts have answered


def kind_of(observations: Sequence[Observation]) -> Router:
    """The kind of router, from the observations of one port by different hosts; UNKNOWN if there are none."""
    if observations and all(is_host_of_this_machine(seen.host) for seen in observations):
        return Router.NONE
    if len(observations) < 2:
        return Router.UNKNOWN
    return Router.CONE if len({(seen.host, seen.port) for seen in observations}) == 1 else Router.SYMMETRIC


async def observe_all(transport: Transport, addresses: Sequence[Multiaddr]) -> list[Observation]:
    """The observations of connections from one port of this machine, by peers at these addresses, each on another host.

    Peers that do not answer are left out. (Use addresses of one family, because a router may treat IPv4 and IPv6
    differently.)
    """
    observations: list[Observation] = []
    for address in addresses:
        source_port = observations[0].source_port if observations else 0
        try:
            async with asyncio.timeout(TIMEOUT):
                observations.append(await transport.observe(address, source_port))
        except (P2PError, TimeoutError):
            continue
    return observations

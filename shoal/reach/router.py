"""Which kind of router a machine is behind: what becomes of a port of it on the way to different hosts."""

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
    """What a router does with the source port of what goes out."""

    NONE = "none"  # others see this machine's own address
    CONE = "cone"  # one port for all destinations ("endpoint-independent mapping"): holes can be punched
    SYMMETRIC = "symmetric"  # another port for each destination: a hole that one host sees is of no use to another
    UNKNOWN = "unknown"  # there is one, but fewer than two hosts have answered


def kind_of(observations: Sequence[Observation]) -> Router:
    """The kind of router, by what different hosts saw of one port; UNKNOWN if nobody saw anything."""
    if observations and all(is_host_of_this_machine(seen.host) for seen in observations):
        return Router.NONE
    if len(observations) < 2:
        return Router.UNKNOWN
    return Router.CONE if len({(seen.host, seen.port) for seen in observations}) == 1 else Router.SYMMETRIC


async def observe_all(transport: Transport, addresses: Sequence[Multiaddr]) -> list[Observation]:
    """What the peers at these addresses, each on another host, see of connections from one port of this machine; those
    that do not answer are left out. (One family of addresses at a time: a router may treat them differently.)"""
    observations: list[Observation] = []
    for address in addresses:
        source_port = observations[0].source_port if observations else 0
        try:
            async with asyncio.timeout(TIMEOUT):
                observations.append(await transport.observe(address, source_port))
        except (P2PError, TimeoutError):
            continue
    return observations

"""The service by which a peer learns whether others reach it: the asked peer dials back."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated

import msgspec

from shoal.p2p.errors import P2PError, Refused, Unavailable
from shoal.p2p.identity import PeerID
from shoal.p2p.multiaddr import FAMILIES, MAX_LENGTH, Multiaddr
from shoal.p2p.node import Node, Service
from shoal.p2p.quota import Quota, Rate

MAX_ADDRESSES = 4
DIAL_BACK = 1.5  # seconds to wait for an answer at each address
PROBES = Rate(1, 128)  # probes per second and at once, of one peer
AT_ONCE = 32  # probes at once, of all peers

Addresses = Annotated[
    tuple[Annotated[str, msgspec.Meta(max_length=MAX_LENGTH)], ...], msgspec.Meta(max_length=MAX_ADDRESSES)
]


class Probe(msgspec.Struct, array_like=True, frozen=True, tag=0):
    """Do you reach me at these addresses?

    Attributes:
        addresses: where the sender listens. Behind a router, the sender does not know the host from which the receiver
            sees it come. So an address with any other host stands for its port at that host.
    """

    addresses: Addresses


class Probed(msgspec.Struct, array_like=True, frozen=True, tag=1):
    """The answer.

    Attributes:
        host: the address from which the asker's connection comes.
        reached: addresses of the asker at which it has answered and proven its identity.
        failed: addresses at which it has not.
    """

    host: Annotated[str, msgspec.Meta(max_length=64)]
    reached: Addresses
    failed: Addresses


SERVICE = Service("reach/1", Probe | Probed)


class DialBack:
    """Answers the probes of others, as long as its node lives.

    Args:
        node: serves the probes, and dials by its transport.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._asked = Quota(PROBES)
        self._gate = asyncio.Semaphore(AT_ONCE)
        # A thread of its own: names that resolve slowly delay only other probes.
        self._resolver = ThreadPoolExecutor(1, "shoal-reach-names")
        node.serve(SERVICE, self._handle)

    async def _handle(self, peer: PeerID, message: msgspec.Struct, _buffers: Sequence[memoryview]) -> Probed:
        if not isinstance(message, Probe):
            raise Refused(f"{type(message).__name__} is a reply, not a request")
        if not self._asked.use(peer, 1, asyncio.get_running_loop().time()):
            raise Unavailable(f"ask less: more than {PROBES.per_second:g} probes a second came from this peer")
        source = self._node.transport.source(peer)
        if not source:
            raise Unavailable("its connection has ended, or leads through a relay")
        addresses = _parsed(message.addresses, peer)
        async with self._gate:
            there = [await self._is_at(address, source) for address in addresses]
            # Keyed by the dialled place, so that no place is dialled twice.
            asked: dict[Multiaddr, Multiaddr] = {}
            for address, is_there in zip(addresses, there, strict=True):
                place = _at(source, address.port, peer)
                if is_there or place not in asked:
                    asked[place] = address if is_there else place
            answers = await asyncio.gather(*map(self._answers, asked))
        pairs = list(zip(asked.values(), answers, strict=True))
        reached, failed = (tuple(str(a.with_peer(None)) for a, ok in pairs if ok is want) for want in (True, False))
        return Probed(source, reached, failed)

    async def _is_at(self, address: Multiaddr, source: str) -> bool:
        """Whether the host of that address is the one at `source`."""
        own = ipaddress.ip_address(source)
        if address.protocol not in FAMILIES:
            return ipaddress.ip_address(address.host) == own
        with suppress(OSError, UnicodeError, TimeoutError):
            async with asyncio.timeout(DIAL_BACK / 2):
                found = await asyncio.get_running_loop().run_in_executor(
                    self._resolver, _resolve, address.host, address.port, FAMILIES[address.protocol]
                )
            return any(ipaddress.ip_address(host) == own for host in found)
        return False

    async def _answers(self, address: Multiaddr) -> bool:
        with suppress(P2PError, TimeoutError):
            async with asyncio.timeout(DIAL_BACK):
                await self._node.transport.observe(address)
            return True
        return False


@dataclass(frozen=True, slots=True)
class Answer:
    """A host's answer about this peer.

    Attributes:
        seen: the address from which this peer's connection comes.
        reached, failed: addresses of this peer at which that host reaches it, or does not.
    """

    seen: str
    reached: frozenset[Multiaddr]
    failed: frozenset[Multiaddr]


async def probe(node: Node, peer: PeerID, addresses: Sequence[Multiaddr], timeout: float) -> Answer:
    """Ask `peer` whether it reaches this peer at `addresses`, at most MAX_ADDRESSES.

    Raises P2PError and TimeoutError as `Node.call`. Raises P2PError also if the answer names other addresses than
    those, or than their ports at the host from which this peer comes, by that answer.
    """
    asked = Probe(tuple(str(address.with_peer(None)) for address in addresses))
    said = await node.call(peer, SERVICE, asked, Probed, timeout=timeout)
    try:
        places = {_at(said.host, address.port, node.peer_id) for address in addresses} | set(addresses)
        answer = Answer(
            str(ipaddress.ip_address(said.host)),
            frozenset(_parsed(said.reached, node.peer_id)),
            frozenset(_parsed(said.failed, node.peer_id)),
        )
    except (ValueError, Refused) as error:
        raise P2PError(f"{peer!r} sent an invalid answer to a probe: {error}") from error
    if not answer.reached | answer.failed <= places or not answer.reached | answer.failed:
        raise P2PError(f"{peer!r} answered a probe of {asked.addresses} for {said.reached + said.failed}")
    return answer


def _parsed(addresses: Sequence[str], peer: PeerID) -> list[Multiaddr]:
    try:
        parsed = [Multiaddr(text) for text in addresses]
    except ValueError as error:
        raise Refused(str(error)) from error
    for address in parsed:
        if address.peer_id not in (None, peer) or not address.port:
            raise Refused(f"{address} is no address of {peer} to be dialled")
    return [address.with_peer(peer) for address in parsed]


def _at(host: str, port: int, peer: PeerID) -> Multiaddr:
    return Multiaddr(f"/ip{ipaddress.ip_address(host).version}/{host}/tcp/{port}").with_peer(peer)


def _resolve(host: str, port: int, family: int) -> list[str]:
    return [str(where[0]) for *_, where in socket.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM)]

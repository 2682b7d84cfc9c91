"""Checks whether others reach this machine, and which kind of router it is behind."""

from __future__ import annotations

import asyncio
import ipaddress
import random
from collections.abc import AsyncIterator, Sequence

from shoal.cli.doctor.finding import Check, Level
from shoal.dht.created import CreatedNode
from shoal.p2p.identity import PeerID
from shoal.p2p.interfaces import is_host_of_this_machine
from shoal.p2p.multiaddr import Multiaddr
from shoal.reach.asking import Asker, Asking
from shoal.reach.finding import Reached, host_of
from shoal.reach.finding import WayIn as Found
from shoal.reach.mapper import MappingFailed
from shoal.reach.natpmp import NatPmp
from shoal.reach.portmap import TIMEOUT
from shoal.reach.router import Router, kind_of, observe_all
from shoal.reach.upnp import Upnp
from shoal.reach.words import open_port, ways_out

KINDS = {
    Router.NONE: "no router changes the addresses of what this machine sends: hole punching is not needed",
    Router.CONE: "a router that keeps the port of what goes out for all destinations (cone): hole punching works",
    Router.SYMMETRIC: "a router that takes another port for each destination (symmetric): hole punching fails",
}


class _Onlooker(Asker):
    """An asker that does not announce what it finds out."""

    def __init__(self, dht: CreatedNode) -> None:
        self._dht, self.node = dht, dht.node

    def contacts(self) -> Sequence[PeerID]:
        return self._dht.contacts()

    def own_addresses(self, latest: bool = False) -> Sequence[Multiaddr]:
        return self._dht.own_addresses(latest)

    def mapped_address(self) -> None:
        return None

    async def found_out(self, finding: Found) -> None:
        pass


async def look_at_reach(dht: CreatedNode, address: Multiaddr, port: int) -> AsyncIterator[Check]:
    """Ask other peers how they see this machine.

    Args:
        dht: a DHT node that is connected to the peer at `address`. The other peers are those that it knows.
        address: the address of that peer.
        port: the TCP port at which this peer would listen; 0 for any free one.
    """
    assert address.peer_id is not None  # otherwise it would not be connected
    source = dht.node.transport.source(address.peer_id)
    if not source or is_host_of_this_machine(source):
        return  # only a peer elsewhere can tell
    yield await _router(dht, address, source)
    reached = await _reached(dht, source, port)
    yield reached
    if reached.facts.get("reached") in ("nobody", "relayed") and _family(source) == 4:
        yield await _mapping(reached.facts["port"])


async def _router(dht: CreatedNode, address: Multiaddr, source: str) -> Check:
    """Find the kind of router by asking one peer at each host, the given one first."""
    by_host = {host_of(source): address}
    for peer in dht.contacts():
        host = dht.node.transport.source(peer)
        at_host = (known for known in dht.node.known_addresses(peer) if known.host == host)
        if host and (known := next(at_host, None)) and _family(host) == _family(source):
            by_host.setdefault(host_of(host), known)
    observations = await observe_all(dht.node.transport, list(by_host.values()))
    kind = kind_of(observations)
    facts = {"kind": kind.value, "seen_from": observations[0].host if observations else ""}
    if kind is not Router.UNKNOWN:
        return Check("router", Level.WELL, f"{KINDS[kind]} (asked: {', '.join(by_host)})", "", facts)
    if not observations:
        advice = "install the same version of Shoal on both machines"
        return Check("router", Level.MIND, "not known: that peer does not say what it sees", advice, facts)
    found = f"this machine is behind a router at {observations[0].host}, whose kind is not known"
    advice = "ask again when nodes at two hosts are in the swarm: one sees only that there is a router"
    return Check("router", Level.MIND, found, advice, facts)


async def _reached(dht: CreatedNode, source: str, port: int) -> Check:
    try:
        everywhere = "/ip4/0.0.0.0" if _family(source) == 4 else "/ip6/::"
        await dht.node.listen(Multiaddr(f"{everywhere}/tcp/{port}"))
    except OSError as error:
        return Check("reach", Level.MIND, f"others were not asked: {error}", "end what listens there, and ask again")

    asking = Asking(_Onlooker(dht), dht.circuits.reserve, insists=False, rng=random.Random())
    found = await asking.ask()
    hosts = ", ".join(asking.asked)
    tried = dht.node.addresses[0].port
    facts = {"reached": found.reached.name.lower() if found else "unknown", "port": tried, "asked": asking.asked}
    if found is None:
        advice = "ask again with another ADDRESS, or when there are more nodes in the swarm"
        return Check(
            "reach", Level.MIND, f"not known: those asked ({hosts}) do not agree, or are silent", advice, facts
        )
    if found.reached is Reached.NOBODY:
        part = "it would take part through a relay, if it knows one, or as a client"
        text = f"nobody reaches TCP port {tried} of this machine (asked: {hosts}): {part}"
        return Check("reach", Level.MIND, text, ways_out(dht.own_addresses(), found.seen), facts)
    if found.reached is Reached.RELAYED:
        by = ", ".join(str(address.of_relay()) for address in found.addresses)
        text = f"nobody reaches TCP port {tried} of this machine (asked: {hosts}), but through a relay: {by}"
        advice = f"nothing needs to change. To spare the relay: {open_port(dht.own_addresses(), found.seen)}"
        return Check("reach", Level.WELL, text, advice, facts)
    where = ", ".join(str(address.with_peer(None)) for address in found.addresses)
    facts["addresses"] = [str(address.with_peer(None)) for address in found.addresses]
    advice = f"DHT(host_maddrs=['{everywhere}/tcp/{tried}'])"
    return Check("reach", Level.WELL, f"others reach this machine at {where} (asked: {hosts})", advice, facts)


async def _mapping(port: int) -> Check:
    """Check whether the router would map a port. It is not asked to do so."""
    reasons = []
    for mapper in (NatPmp(), Upnp()):
        try:
            async with asyncio.timeout(TIMEOUT):
                host = await mapper.external_address()
        except (MappingFailed, TimeoutError) as error:
            reasons.append(f"{mapper.name}: {str(error) or f'no answer within {TIMEOUT:g} s'}")
        else:
            found = f"the router maps ports by {mapper.name}, to its address {host}"
            advice = f"DHT(host_maddrs=['/ip4/0.0.0.0/tcp/{port}'], port_mapping=True)"
            return Check("port mapping", Level.WELL, found, advice, {"protocol": mapper.name, "address": host})
    found = f"the router maps no ports ({'; '.join(reasons)})"
    advice = "switch on UPnP or NAT-PMP in the router, for DHT(port_mapping=True)"
    return Check("port mapping", Level.MIND, found, advice, {"protocol": ""})


def _family(host: str) -> int:
    return ipaddress.ip_address(host).version

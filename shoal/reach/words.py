"""The log messages about a peer's reachability, and about the remedies."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

from shoal.p2p.interfaces import is_host_of_this_machine
from shoal.p2p.multiaddr import Multiaddr
from shoal.reach.finding import Reached, WayIn

log = logging.getLogger(__name__)

EXAMPLE_PORT = 31337


def found(before: WayIn, finding: WayIn, own: Sequence[Multiaddr], asked: Collection[str], *, insists: bool) -> None:
    """Log a finding in one line: a warning if nobody reaches this peer, and again when somebody does."""
    hosts = ", ".join(asked)
    level = logging.WARNING if before.reached is Reached.NOBODY else logging.INFO
    match finding.reached:
        case Reached.NOBODY if before.reached is Reached.RELAYED:
            lost = ", ".join(str(address.of_relay()) for address in before.addresses)
            log.warning(
                "the relay through which others reach this peer was lost (%s): until it is back nobody new reaches it; "
                "connections that stand stay. Start the relay again at that address, with its --identity; or start "
                "`shoal node --relay` on another machine that others reach, and give both addresses to all peers as "
                "initial_peers.",
                lost,
            )
        case Reached.NOBODY:
            part = "stays a node, as it was told to (client_mode=False), and takes no place at a relay"
            if not insists:
                part = (
                    "is a client of the DHT, and of the runs that it joins from now on (client_mode=False if all peers "
                    "are in its network)"
                )
            log.warning("this peer %s; it %s. %s", unreached(finding, own, hosts), part, ways_out(own, finding.seen))
        case Reached.RELAYED:
            where = ", ".join(map(str, finding.addresses))
            if before.reached is Reached.NOBODY:
                log.warning("all is well: others reach this peer through relays: %s", where)
            else:
                log.info("this peer %s; it is reached by relays: %s", unreached(finding, own, hosts), where)
        case _:
            level = logging.WARNING if before.reached is Reached.NOBODY else logging.INFO
            where = ", ".join(str(address.with_peer(None)) for address in finding.addresses)
            log.log(level, "this peer is reached at %s (asked: %s)", where, hosts)


def unreached(finding: WayIn, own: Sequence[Multiaddr], hosts: str) -> str:
    """A text that says that nobody reaches a peer, and who has tried where."""
    if own and all(address.is_loopback for address in own):
        where = ", ".join(str(address.with_peer(None)) for address in own)
        return f"listens on loopback only ({where}), where no other machine reaches it, and has joined through {hosts}"
    tried = ", ".join(sorted(str(address.with_peer(None)) for address in finding.failed)) or "any address"
    return f"can't be reached from outside: {hosts} tried {tried}"


def ways_out(own: Sequence[Multiaddr], seen: str) -> str:
    """A text with the three ways to be reached, each with the command or argument to use; see `open_port`."""
    return (
        f"Either {open_port(own, seen)}; or start `shoal node --relay` on any machine that others reach, and give its "
        "address to all peers as initial_peers."
    )


def open_port(own: Sequence[Multiaddr], seen: str) -> str:
    """A text with the two ways to be reached directly.

    Args:
        own: the addresses where the peer listens.
        seen: the address from which others see it come; "" if that is not known.
    """
    others = [address for address in own if not address.is_loopback]
    port = others[0].port if others else EXAMPLE_PORT
    listen = f"DHT(host_maddrs=['/ip4/0.0.0.0/tcp/{port}'])"
    if not others:
        first = f"listen where others reach it, {listen}, and open that port"
    elif seen and is_host_of_this_machine(seen):
        first = (
            f"open TCP port {port} in this machine's firewall (`sudo ufw allow {port}/tcp`) and listen there: {listen}"
        )
    else:
        router = f"the router {seen}" if seen else "the router"
        first = f"forward TCP port {port} of {router} to {others[0].host}, port {port}, and listen there: {listen}"
    return f"{first}; or have the router do that: DHT(host_maddrs=..., port_mapping=True)"

"""The conclusion that a peer draws from the answers of others about its reachability. No I/O; callers give the time."""

from __future__ import annotations

import enum
import ipaddress
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shoal.p2p.multiaddr import Multiaddr
from shoal.reach.probe import Answer

ENOUGH = 2  # hosts that must agree, if there are that many to ask
SOON = 30.0  # seconds until others are asked again if nothing was decided
# seconds if something was decided: a router may have got another address, or somebody has opened the port
LATER = 300.0


class Reached(enum.Enum):
    """How others reach this peer. A new judgement may be any of these, whatever the last one was."""

    UNKNOWN = enum.auto()  # nobody could be asked, or the hosts do not agree: the arguments decide what the peer is
    PUBLIC = enum.auto()  # at an address of its own, or at that of a router that forwards the port
    MAPPED = enum.auto()  # at a port that its router has mapped on request
    RELAYED = enum.auto()  # only through relays
    NOBODY = enum.auto()  # nobody reaches it, and no relay does


@dataclass(frozen=True, slots=True)
class WayIn:
    """How others reach this peer.

    Attributes:
        reached: in which way.
        addresses: the addresses at which they reach it, the most certain first; for a relayed peer those at its relays.
        failed: addresses of this peer at which nobody reaches it.
        seen: the address from which its connections come, as others see it; "" if that is not known.
    """

    reached: Reached = Reached.UNKNOWN
    addresses: tuple[Multiaddr, ...] = ()
    failed: frozenset[Multiaddr] = frozenset()
    seen: str = ""

    def announced(self, own: Sequence[Multiaddr]) -> list[Multiaddr]:
        """The addresses to announce, out of the `own` addresses and the found ones: found ones first, loopback last,
        and none that failed.
        """
        if self.reached in (Reached.NOBODY, Reached.RELAYED):
            return list(self.addresses)
        rest = [address for address in own if address not in self.failed and address not in self.addresses]
        return [*self.addresses, *sorted(rest, key=lambda address: address.is_loopback)]


def host_of(source: str) -> str:
    """The host that an address counts as in votes: an IPv4 address, or an IPv6 /64, because a machine may have many
    IPv6 addresses.
    """
    address = ipaddress.ip_address(source)
    return source if address.version == 4 else str(ipaddress.ip_network((source, 64), strict=False))


def judge(
    answers: Collection[Answer], num_hosts: int, own: Collection[Multiaddr], mapped: Multiaddr | None = None
) -> WayIn | None:
    """The common finding from the answers of different hosts.

    ENOUGH hosts must agree, and more hosts than say the opposite. If there is only one host to ask, its answer counts,
    because nobody else can know.

    Args:
        answers: one answer of each host.
        num_hosts: the number of hosts that could be asked, including those that have not answered.
        own: the addresses in the question. Any other address counts only if ENOUGH hosts name it.
        mapped: the address that a router has mapped; None if there is none.

    Returns:
        The finding; None if nothing is decided.
    """
    enough = min(ENOUGH, max(num_hosts, 1))
    yes = [answer for answer in answers if answer.reached]
    num_no = len(answers) - len(yes)
    votes = Counter(address for answer in yes for address in answer.reached)
    against = Counter(address for answer in answers for address in answer.failed)
    seen = Counter(answer.seen for answer in answers)
    origin = next((host for host, number in seen.most_common(1) if number >= enough), "")
    failed = frozenset(a for a, number in against.items() if number >= enough and number > votes[a])
    if len(yes) >= enough and len(yes) > num_no:
        # (Sorted by text if votes are equal, so that the same answers give the same order.)
        sure = sorted(votes, key=lambda address: (-votes[address], str(address)))
        addresses = tuple(a for a in sure if a not in failed and (votes[a] >= enough or a in own))
        if not addresses:
            return None
        reached = Reached.MAPPED if set(addresses) == {mapped} else Reached.PUBLIC
        return WayIn(reached, addresses, failed, origin)
    if num_no >= enough and num_no > len(yes):
        return WayIn(Reached.NOBODY, (), failed, origin)
    return None

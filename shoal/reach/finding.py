"""What a peer concludes from what others say of its reach. No I/O; time is given."""

from __future__ import annotations

import enum
import ipaddress
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from shoal.p2p.multiaddr import Multiaddr
from shoal.reach.probe import Answer

ENOUGH = 2  # hosts that have to agree, where there are so many to ask
SOON = 30.0  # seconds until others are asked again where nothing is known
LATER = 300.0  # and where something is: a router may have got another address, or somebody has opened the port


class Reached(enum.Enum):
    """How others reach this peer. Each judgement goes to any of them, whatever was before."""

    UNKNOWN = enum.auto()  # nobody could be asked, or they do not agree: the peer is what its arguments say
    PUBLIC = enum.auto()  # at an address of its own, or of a router that sends the port on
    MAPPED = enum.auto()  # at a port that its router has mapped when it was asked to
    RELAYED = enum.auto()  # nobody reaches it, but relays take connections to it
    NOBODY = enum.auto()  # nobody reaches it


@dataclass(frozen=True, slots=True)
class Finding:
    """How others reach this peer.

    Attributes:
        reached: in which way.
        addresses: at which addresses they do, the surest first; of a relayed peer those at its relays.
        failed: addresses of this peer at which nobody reaches it.
        seen: the address from which its connections come, as others see it; "" where that is not known.
    """

    reached: Reached = Reached.UNKNOWN
    addresses: tuple[Multiaddr, ...] = ()
    failed: frozenset[Multiaddr] = frozenset()
    seen: str = ""

    def announced(self, own: Sequence[Multiaddr]) -> list[Multiaddr]:
        """Of its `own` addresses, and those that were found, the ones to tell others: those that work first, those of
        loopback last, and none that fails."""
        if self.reached in (Reached.NOBODY, Reached.RELAYED):
            return list(self.addresses)
        rest = [address for address in own if address not in self.failed and address not in self.addresses]
        return [*self.addresses, *sorted(rest, key=lambda address: address.is_loopback)]


def host_of(source: str) -> str:
    """Which host an address belongs to, as far as votes go: one machine may have many addresses of IPv6."""
    address = ipaddress.ip_address(source)
    return source if address.version == 4 else str(ipaddress.ip_network((source, 64), strict=False))


def judge(
    answers: Collection[Answer], num_hosts: int, own: Collection[Multiaddr], mapped: Multiaddr | None = None
) -> Finding | None:
    """What the answers of different hosts say together.

    ENOUGH hosts have to agree, and more than say the opposite. Where there is only one host to ask, its word holds,
    since nobody else can know.

    Args:
        answers: one of each host.
        num_hosts: how many hosts could be asked, those that have not answered included.
        own: the addresses that were asked for. Any other is the word of those that name it, and counts only if ENOUGH
            do.
        mapped: the address that a router has mapped.

    Returns:
        None if nothing is decided.
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
        # (By text where votes are equal, so that the same answers give the same order.)
        sure = sorted(votes, key=lambda address: (-votes[address], str(address)))
        addresses = tuple(a for a in sure if a not in failed and (votes[a] >= enough or a in own))
        if not addresses:
            return None
        reached = Reached.MAPPED if set(addresses) == {mapped} else Reached.PUBLIC
        return Finding(reached, addresses, failed, origin)
    if num_no >= enough and num_no > len(yes):
        return Finding(Reached.NOBODY, (), failed, origin)
    return None

"""A relay's books: reservations, circuits that wait for their ends, and running circuits. No I/O; callers give the
time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from shoal.p2p.errors import Refused
from shoal.p2p.identity import PeerID
from shoal.reach.messages import LEASE_SECONDS

RESERVATIONS: Final = 1024
RESERVATIONS_PER_NETWORK: Final = 64  # a network is an IPv4 address or an IPv6 /64
CIRCUITS: Final = 1024  # including waiting ones, as in the next two limits
CIRCUITS_PER_PEER: Final = 64
CIRCUITS_PER_PAIR: Final = 12  # a link and its lane take up to five
WAITING: Final = 256  # circuits that wait for an end
WAITING_PER_NETWORK: Final = 64  # network of the asking peer
WAITING_PER_PEER: Final = 16
TOKEN_SECONDS: Final = 10.0  # for which a circuit waits for its ends
# a circuit that was idle for this long is ended to make room for a new one, if there is no other room
IDLE_SECONDS: Final = 60.0

Connection = TypeVar("Connection")
Joined = TypeVar("Joined", bound=Hashable)


@dataclass(slots=True, eq=False)
class WaitingCircuit(Generic[Connection]):
    """A circuit that waits for its ends.

    Attributes:
        asker, to: the peers at its two ends.
        network: the network of the asker.
        first: the end that has come; None if none has.
    """

    asker: PeerID
    to: PeerID
    network: str
    first: Connection | None = None


class Ledger(Generic[Connection, Joined]):
    """Decides which reservations and circuits peers may have.

    Args:
        idle_since: returns when the last byte passed over a circuit.
    """

    def __init__(self, idle_since: Callable[[Joined], float]) -> None:
        self._idle_since = idle_since
        self._reserved: dict[PeerID, tuple[float, str]] = {}  # (until when, from which network)
        self._waiting: dict[bytes, WaitingCircuit[Connection]] = {}
        self._joined: dict[Joined, tuple[PeerID, PeerID]] = {}
        self._of_peer: Counter[PeerID] = Counter()  # circuits, waiting ones included
        self._of_pair: Counter[tuple[PeerID, PeerID]] = Counter()

    # -- reservations

    def reserve(self, peer: PeerID, network: str, now: float) -> float:
        """Reserve a place for a peer, so that others can reach it. Returns for how many seconds; raises Refused."""
        self._reserved = {who: kept for who, kept in self._reserved.items() if kept[0] > now}
        others = [where for who, (_, where) in self._reserved.items() if who != peer]
        if len(others) >= RESERVATIONS:
            raise Refused(f"there are {RESERVATIONS} reservations already")
        if others.count(network) >= RESERVATIONS_PER_NETWORK:
            raise Refused(f"there are {RESERVATIONS_PER_NETWORK} reservations from {network} already")
        self._reserved[peer] = now + LEASE_SECONDS, network
        return LEASE_SECONDS

    def lose(self, peer: PeerID) -> None:
        """The link to that peer is lost, so nobody can be connected to it. Its running circuits stay."""
        self._reserved.pop(peer, None)

    # -- circuits

    def ask(self, token: bytes, asker: PeerID, network: str, to: PeerID, now: float) -> Joined | None:
        """A peer asks for a circuit to another peer; `token` is new. Raises Refused.

        Returns the circuit that must be ended to make room for the new one, or None.
        """
        if asker == to or self._reserved.get(to, (now, ""))[0] <= now:
            raise Refused("that peer has no reservation here")
        waiting = self._waiting.values()
        if len(waiting) >= WAITING:
            raise Refused(f"{WAITING} circuits wait for an end already")
        if sum(each.network == network for each in waiting) >= WAITING_PER_NETWORK:
            raise Refused(f"{WAITING_PER_NETWORK} circuits that {network} has asked for wait for an end already")
        if sum(each.asker == asker for each in waiting) >= WAITING_PER_PEER:
            raise Refused(f"{WAITING_PER_PEER} circuits of this peer wait for an end already")
        if self._of_pair[asker, to] >= CIRCUITS_PER_PAIR:
            raise Refused(f"there are {CIRCUITS_PER_PAIR} circuits to that peer already")
        full = [peer for peer in (asker, to) if self._of_peer[peer] >= CIRCUITS_PER_PEER]
        idle = None
        if full or len(waiting) + len(self._joined) >= CIRCUITS:
            idle = self._idle((j for j, ends in self._joined.items() if all(peer in ends for peer in full)), now)
            if idle is None:
                whose = f"{CIRCUITS_PER_PEER} circuits of one peer" if full else f"{CIRCUITS} circuits of all peers"
                raise Refused(f"the limit of {whose} is reached")
        self._waiting[token] = WaitingCircuit(asker, to, network)
        self._count(asker, to, 1)
        return idle

    def arrive(self, token: bytes, connection: Connection) -> WaitingCircuit[Connection] | None:
        """A connection has come with a token.

        Returns:
            If both ends have come: the circuit, whose ends are this connection and `first`; then call `joined`. If the
            other end has not come yet: a circuit without `first`. If the token is not valid: None.
        """
        waiting = self._waiting.get(token)
        if waiting is None:
            return None
        if waiting.first is None:
            waiting.first = connection
            return WaitingCircuit(waiting.asker, waiting.to, waiting.network)
        return self._waiting.pop(token)

    def joined(self, waiting: WaitingCircuit[Connection], circuit: Joined) -> None:
        """The ends of that circuit have been joined."""
        self._joined[circuit] = waiting.asker, waiting.to

    def late(self, token: bytes) -> Connection | None:
        """The time of a token is over. Returns the end that has waited in vain, or None."""
        waiting = self._waiting.pop(token, None)
        if waiting is None:
            return None
        self._count(waiting.asker, waiting.to, -1)
        return waiting.first

    def over(self, circuit: Joined) -> None:
        """A circuit has ended."""
        ends = self._joined.pop(circuit, None)
        if ends is not None:
            self._count(*ends, -1)

    def _idle(self, circuits: Iterable[Joined], now: float) -> Joined | None:
        idlest = min(circuits, key=self._idle_since, default=None)
        return idlest if idlest is not None and now - self._idle_since(idlest) >= IDLE_SECONDS else None

    def _count(self, asker: PeerID, to: PeerID, change: int) -> None:
        self._of_peer.update({asker: change, to: change})
        self._of_pair.update({(asker, to): change})
        for peer in (asker, to):
            if not self._of_peer[peer]:
                del self._of_peer[peer]
        if not self._of_pair[asker, to]:
            del self._of_pair[asker, to]

    @property
    def numbers(self) -> tuple[int, int, int]:
        """The numbers of reservations, of waiting circuits and of running circuits."""
        return len(self._reserved), len(self._waiting), len(self._joined)

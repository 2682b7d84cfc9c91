"""Asks other hosts whether they reach this peer: at its start, and again."""

from __future__ import annotations

import asyncio
import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from shoal.p2p.errors import P2PError, Unavailable
from shoal.p2p.identity import PeerID
from shoal.p2p.interfaces import is_host_of_this_machine
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.node import Node
from shoal.reach.finding import LATER, SOON, Finding, Reached, host_of, judge
from shoal.reach.probe import DIAL_BACK, MAX_ADDRESSES, Answer, probe
from shoal.reach.words import found

log = logging.getLogger(__name__)

HOSTS = 3  # that are asked at once: two that agree outvote one that lies
LOOK = 30.0  # seconds between two looks at the interfaces
TIMEOUT = DIAL_BACK + 0.4  # seconds for an answer
GRACE = 0.2  # seconds that the others have when it is decided: they may name more addresses


Reserve = Callable[[], Awaitable[Sequence[Multiaddr]]]
"""Takes places at relays for a node that nobody reaches: asks its connected peers, and returns the addresses at which
it is reached through those that relay; none if nobody takes it. It is asked again as long as nobody reaches the node,
so it keeps what it has. It raises nothing of the network."""


async def no_relays() -> list[Multiaddr]:
    """Reserves nothing."""
    return []


class Asker(ABC):
    """The peer that wants to know how it is reached.

    Attributes:
        node: its node.
    """

    node: Node

    @abstractmethod
    def contacts(self) -> Sequence[PeerID]:
        """The peers that can be asked; those that are not connected are left out."""

    @abstractmethod
    def own_addresses(self, latest: bool = False) -> Sequence[Multiaddr]:
        """Where it listens, and what its user announces; `latest` looks at the interfaces again."""

    @abstractmethod
    def mapped_address(self) -> Multiaddr | None:
        """The address that a router says to have mapped for it, if it has."""

    @abstractmethod
    async def found_out(self, finding: Finding) -> None:
        """Told of each finding that differs from the one before."""


class Asking:
    """Finds out how others reach a peer, keeps that up to date, and says what was found.

    Args:
        asker: the peer.
        reserve: tried where nobody reaches it.
        insists: whether it stays a node then.
        rng: draws whom to ask, and when.

    Attributes:
        finding: the last one.
        asked: the hosts that were asked last.
    """

    def __init__(self, asker: Asker, reserve: Reserve, *, insists: bool, rng: random.Random) -> None:
        self._asker, self._reserve, self._insists, self._rng = asker, reserve, insists, rng
        self._asked_of: list[Multiaddr] = []  # what was asked about last
        self._decided = False
        self.finding = Finding()
        self.asked: list[str] = []

    async def find_out(self) -> None:
        """Ask, take it in, and say what is new. Takes TIMEOUT at most, and what `reserve` takes."""
        finding = await self.ask()
        self._decided = finding is not None
        if finding is not None:
            await self._take_in(finding)

    async def ask(self) -> Finding | None:
        """What others say of this peer's reach; None if nobody can be asked, or that decides nothing."""
        hosts = self._hosts()
        self.asked = list(hosts)[-HOSTS:]
        if not hosts:
            return None
        own, mapped = self._asker.own_addresses(latest=True), self._mapped_address()
        self._asked_of = self._to_ask(own, mapped)
        finding: Finding | None = Finding(Reached.NOBODY)  # if it listens on loopback only
        if self._asked_of:
            finding = await self._ask(list(hosts.values()), self._asked_of, mapped)
        if finding is not None and finding.reached is Reached.NOBODY:
            circuits = await self._reserve()
            if circuits:
                return Finding(Reached.RELAYED, tuple(circuits), finding.failed, finding.seen)
        return finding

    async def keep_up(self) -> None:
        """Ask again: when the addresses of this machine change, soon where nothing is known, and else now and then."""
        loop = asyncio.get_running_loop()
        asked_at = loop.time()
        while True:
            await asyncio.sleep(LOOK * self._rng.uniform(0.8, 1.2))
            wait = LATER if self._decided else SOON
            if (
                self._to_ask(self._asker.own_addresses(latest=True), self._mapped_address()) != self._asked_of
                or loop.time() - asked_at >= wait
            ):
                asked_at = loop.time()
                await self.find_out()

    async def led(self, circuits: Sequence[Multiaddr]) -> None:
        """The addresses at which this peer is reached through relays are these now, if nobody reaches it directly."""
        if self.finding.reached in (Reached.NOBODY, Reached.RELAYED):
            reached = Reached.RELAYED if circuits else Reached.NOBODY
            await self._take_in(replace(self.finding, reached=reached, addresses=tuple(circuits)))

    async def _take_in(self, finding: Finding) -> None:
        if finding == self.finding:
            return
        before, self.finding = self.finding, finding
        moved = finding.addresses != before.addresses and finding.reached is not Reached.RELAYED
        if moved or finding.reached is not before.reached:
            found(before, finding, self._asker.own_addresses(latest=True), self.asked, insists=self._insists)
        await self._asker.found_out(finding)

    def _mapped_address(self) -> Multiaddr | None:
        address = self._asker.mapped_address()
        return None if address is None else address.with_peer(self._asker.node.peer_id)

    def _to_ask(self, own: Sequence[Multiaddr], mapped: Multiaddr | None) -> list[Multiaddr]:
        asked = ([] if mapped is None else [mapped]) + [address for address in own if not address.is_loopback]
        return list(dict.fromkeys(asked))[:MAX_ADDRESSES]

    def _hosts(self) -> dict[str, PeerID]:
        """The other machines that can be asked, each with one peer there, in an order that nobody can foresee."""
        contacts = list(dict.fromkeys(self._asker.contacts()))
        self._rng.shuffle(contacts)
        found: dict[str, PeerID] = {}
        for peer in contacts:
            source = self._asker.node.transport.source(peer)
            if source and not is_host_of_this_machine(source):
                found.setdefault(host_of(source), peer)
        return found

    async def _ask(self, peers: list[PeerID], addresses: list[Multiaddr], mapped: Multiaddr | None) -> Finding | None:
        """What HOSTS of them say together, a moment after that is decided; who can't answer is replaced."""
        loop = asyncio.get_running_loop()
        finding: Finding | None = None
        answers: list[Answer] = []
        running: set[asyncio.Task[Answer]] = set()
        num_hosts, until = 0, loop.time() + TIMEOUT
        try:
            while True:
                while peers and len(running) + len(answers) < HOSTS:
                    running.add(asyncio.create_task(probe(self._asker.node, peers.pop(), addresses, TIMEOUT)))
                    num_hosts += 1
                ended: set[asyncio.Task[Answer]] = set()
                if running:
                    wait = until - loop.time()
                    ended, running = await asyncio.wait(running, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
                if not ended:
                    return finding
                for task in ended:
                    try:
                        answers.append(task.result())
                    except Unavailable:  # an earlier version, or too much to do: it is none of those to ask
                        num_hosts -= 1
                    except (P2PError, TimeoutError) as error:
                        log.debug("a probe failed: %s", error)
                if num_hosts > 1 or not peers:
                    finding = judge(answers, num_hosts, addresses, mapped)
                    until = min(until, loop.time() + GRACE) if finding is not None else until
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

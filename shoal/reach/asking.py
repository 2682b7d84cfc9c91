"""Asks other hosts whether they reach this peer: at the start, and again later."""

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
from shoal.reach.finding import LATER, SOON, Reached, WayIn, host_of, judge
from shoal.reach.probe import DIAL_BACK, MAX_ADDRESSES, Answer, probe
from shoal.reach.words import found

log = logging.getLogger(__name__)

HOSTS = 3  # hosts asked at once: two that agree outvote one that lies
LOOK = 30.0  # seconds between two looks at the interfaces
TIMEOUT = DIAL_BACK + 0.4  # seconds for an answer
GRACE = 0.2  # seconds that the other hosts have after the decision: they may name more addresses


Reserve = Callable[[], Awaitable[Sequence[Multiaddr]]]
"""Reserves places at relays for a node that nobody reaches. It asks the node's connected peers, and returns the
addresses at which relays make the node reachable; none if no relay takes it. It is called again as long as nobody
reaches the node, so it keeps the places that it has. It raises no network errors.
"""


async def no_relays() -> list[Multiaddr]:
    """A `Reserve` that reserves nothing."""
    return []


class Asker(ABC):
    """The peer whose reachability is to be found.

    Attributes:
        node: its node.
    """

    node: Node

    @abstractmethod
    def contacts(self) -> Sequence[PeerID]:
        """The peers to ask. Those that are not connected are left out later."""

    @abstractmethod
    def own_addresses(self, latest: bool = False) -> Sequence[Multiaddr]:
        """The addresses where it listens, and those that its user announces. `latest` looks at the interfaces again."""

    @abstractmethod
    def mapped_address(self) -> Multiaddr | None:
        """The address that a router says it has mapped for this peer; None if there is none."""

    @abstractmethod
    async def found_out(self, finding: WayIn) -> None:
        """Called with each finding that differs from the one before."""


class Asking:
    """Finds out how others reach a peer, keeps that up to date, and reports the findings.

    Args:
        asker: the peer.
        reserve: called if nobody reaches the peer.
        insists: whether the peer stays a node even if nobody reaches it.
        rng: draws whom to ask, and when.

    Attributes:
        finding: the last finding.
        asked: the hosts that were asked last.
    """

    def __init__(self, asker: Asker, reserve: Reserve, *, insists: bool, rng: random.Random) -> None:
        self._asker, self._reserve, self._insists, self._rng = asker, reserve, insists, rng
        self._asked_of: list[Multiaddr] = []  # the addresses of the last question
        self._decided = False
        self.finding = WayIn()
        self.asked: list[str] = []

    async def find_out(self) -> None:
        """Ask, record the finding, and report it if it is new. Takes at most TIMEOUT, plus the time of `reserve`."""
        finding = await self.ask()
        self._decided = finding is not None
        if finding is not None:
            await self._take_in(finding)

    async def ask(self) -> WayIn | None:
        """The finding from the answers of others; None if nobody can be asked, or if the answers decide nothing."""
        hosts = self._hosts()
        self.asked = list(hosts)[-HOSTS:]
        if not hosts:
            return None
        own, mapped = self._asker.own_addresses(latest=True), self._mapped_address()
        self._asked_of = self._to_ask(own, mapped)
        finding: WayIn | None = WayIn(Reached.NOBODY)  # the finding if it listens on loopback only
        if self._asked_of:
            finding = await self._ask(list(hosts.values()), self._asked_of, mapped)
        if finding is not None and finding.reached is Reached.NOBODY:
            circuits = await self._reserve()
            if circuits:
                return WayIn(Reached.RELAYED, tuple(circuits), finding.failed, finding.seen)
        return finding

    async def keep_up(self) -> None:
        """Ask again: when this machine's addresses change, soon if nothing was decided, and otherwise from time to
        time.
        """
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
        """The addresses through relays have changed. They become this peer's addresses, if nobody reaches it
        directly.
        """
        if self.finding.reached in (Reached.NOBODY, Reached.RELAYED):
            reached = Reached.RELAYED if circuits else Reached.NOBODY
            await self._take_in(replace(self.finding, reached=reached, addresses=tuple(circuits)))

    async def _take_in(self, finding: WayIn) -> None:
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

    async def _ask(self, peers: list[PeerID], addresses: list[Multiaddr], mapped: Multiaddr | None) -> WayIn | None:
        """The common finding of HOSTS hosts, a moment after it is decided. A host that can't answer is replaced by
        another one.
        """
        loop = asyncio.get_running_loop()
        finding: WayIn | None = None
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
                    except Unavailable:  # an earlier version of Shoal, or too busy: it does not count as a host to ask
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

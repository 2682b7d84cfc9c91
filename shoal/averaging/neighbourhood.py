"""Keeps one peer connected to the members of its run, and keeps what they know of each other alike."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from shoal.averaging.channel import Channel
from shoal.averaging.directory import REFRESH_SECONDS, Directory
from shoal.averaging.errors import Rejected
from shoal.averaging.member import MAX_MEMBERS, Member, Role
from shoal.averaging.membership import Membership
from shoal.averaging.messages import Hello, Terms
from shoal.averaging.participant import Participant
from shoal.averaging.tip import Tip
from shoal.p2p.errors import P2PError, Refused
from shoal.p2p.identity import PeerID

log = logging.getLogger(__name__)

MEET_TIMEOUT = 5.0
FIRST_REFRESH_SECONDS = 0.5  # until the first commit
SPREAD_DELAY = 0.02  # news of members that come together is told together


class Neighbourhood:
    """One peer among the members of its run. Drives a `Membership`: dials members, says Hello, reads the directory,
    notices losses.

    Args:
        channel: over which all messages of the run go.
        participant: this peer's state, and its promises.
        membership: the members that it knows.
        directory: where members are listed.
        terms: what must be equal in the run; peers of other terms are no members here (`strangers`).
        changed: called after what is known or connected has changed.
        heard: called with the tip of a member, when one tells it.
    """

    def __init__(
        self,
        channel: Channel,
        participant: Participant,
        membership: Membership,
        directory: Directory,
        terms: Terms,
        changed: Callable[[], None],
        heard: Callable[[PeerID, Tip], None],
    ) -> None:
        self.channel, self.participant, self.membership = channel, participant, membership
        self._directory, self.terms = directory, terms
        self.strangers: dict[bytes, tuple[str, Tip]] = {}  # peers of the run with other terms: what differs, their tip
        self._changed, self._heard = changed, heard
        self._meeting: set[bytes] = set()
        self._spread: asyncio.TimerHandle | None = None
        self._look_now = asyncio.Event()
        self._seen = asyncio.Event()
        self._refreshing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """List this peer, and meet all that are listed: when this returns, each side knows the other."""
        await self._directory.publish(self.membership.me)
        found = await self._directory.read()
        await asyncio.gather(*(self.meet(member) for member in found))
        self._refreshing = self.channel.spawn(self._refresh())

    def stop(self) -> None:
        """Be listed no longer than the record lives, and meet nobody any more."""
        if self._refreshing is not None:
            self._refreshing.cancel()
        if self._spread is not None:
            self._spread.cancel()

    def connected(self) -> list[Member]:
        """The members that a message can reach now, this peer included."""
        return [m for m in self.membership.members.values() if self.channel.is_connected(m.key)]

    async def seen(self) -> None:
        """Return when a member has said Hello, and so may have come."""
        await self._seen.wait()

    def coordinator(self) -> Member:
        """Who coordinates at this peer's tip, of those that it can reach."""
        for member in self.membership.candidates(self.participant.tip.epoch):
            if self.channel.is_connected(member.key):
                return member
        return self.membership.me

    def hello(self) -> Hello:
        """What this peer says of itself and of those it knows."""
        return Hello(self.membership.me, self.terms, self.participant.tip, self.membership.snapshot())

    def check_terms(self) -> None:
        """Raises `Rejected` if other peers of the run go by other terms, and this peer is the one that differs.

        The side that has more samples behind it stays. Before there are any, the side with more peers does, and of
        sides of one size that with the smallest key, so that exactly one gives way."""
        strangers = {k: known for k, known in self.strangers.items() if self.channel.is_connected(k)}
        if not strangers:
            return
        tip = self.participant.tip
        outranked = any(theirs.outranks(tip) for _, theirs in strangers.values())
        if not outranked:
            alike = [member.key for member in self.connected()]
            if tip.epoch or (len(strangers), min(alike)) < (len(alike), min(strangers)):
                return
        difference = next(difference for difference, _ in strangers.values())
        raise Rejected(f"the other peers of the run go by other terms: {difference}. Make it equal on all peers")

    def on_hello(self, peer: PeerID, hello: Hello) -> Hello:
        """A member speaks. Raises Refused if it gives itself out as another."""
        if hello.sender.key != peer.key:
            raise Refused("HELLO in the name of another peer")
        difference = self.terms.difference(hello.terms)
        if difference is not None:
            if peer.key not in self.strangers:
                log.warning("%r is in the run with other terms: %s", peer, difference)
            if len(self.strangers) < MAX_MEMBERS:
                self.strangers[peer.key] = (difference, hello.tip)
            self.lose(peer.key)
            self._changed()
            return self.hello()
        self.strangers.pop(peer.key, None)
        self.spoke(peer, hello.sender)
        self.channel.learn(hello.sender)
        news = self.membership.learn(hello.members)
        for member in news:
            self.channel.spawn(self.meet(member))
        self.told(peer, hello.tip)
        seen, self._seen = self._seen, asyncio.Event()
        seen.set()
        return self.hello()

    def spoke(self, peer: PeerID, member: Member) -> None:
        """A member has shown that it is there, whatever was known of it before."""
        if self.membership.returned(member):
            log.debug("%r knows %r now", self.membership.me.peer, peer)
            self.tell_others()

    def told(self, peer: PeerID, tip: Tip) -> None:
        """A member says at which state it is."""
        behind = self.participant.tip.outranks(tip) and not self.participant.is_followed_by(peer.key, tip)
        if self.membership.told(peer.key, behind):
            self._changed()
        self._heard(peer, tip)

    def announce(self) -> None:
        """Tell all others what this peer says of itself, and of those it knows."""
        self.channel.notify(self.membership.others(), self.hello())

    async def meet(self, member: Member) -> None:
        """Connect to a member and exchange Hello; one that can't be reached is not a member here."""
        if member.key in self._meeting or member.key == self.membership.me.key:
            return
        if member.role is Role.CLIENT and not self.channel.is_connected(member.key):
            return  # it dials; nobody can dial it
        self._meeting.add(member.key)
        self.channel.learn(member)
        try:
            if not await self.meet_peer(member.peer):
                self.lose(member.key)
        finally:
            self._meeting.discard(member.key)

    async def meet_peer(self, peer: PeerID) -> bool:
        """Exchange Hello with a peer, who may not be known as a member; returns whether that could be done."""
        try:
            self.on_hello(peer, await self.channel.call(peer.key, self.hello(), Hello, MEET_TIMEOUT))
        except (P2PError, TimeoutError) as error:
            log.debug("%r could not meet %r: %s", self.membership.me.peer, peer, error)
            return False
        return True

    def look(self) -> None:
        """Read the directory now: somebody must be there, and is not known."""
        self._look_now.set()

    def lose(self, key: bytes) -> None:
        """A member can't be reached any more."""
        if not self.channel.is_connected(key):
            self.strangers.pop(key, None)
        if self.membership.lose(key):
            self._changed()

    def tell_others(self) -> None:
        """Something is known that others may not know: the coordinator tells everybody, others tell the coordinator."""
        self._changed()
        if self._spread is None:
            self._spread = asyncio.get_running_loop().call_later(SPREAD_DELAY, self._tell)

    def _tell(self) -> None:
        self._spread = None
        if self.channel.node.closed:
            return
        coordinator = self.coordinator()
        if coordinator.key == self.membership.me.key:
            self.announce()
        else:
            self.channel.notify([coordinator.key], self.hello())

    async def _refresh(self) -> None:
        """Stay listed, and meet whoever is listed and not connected: newcomers, and both sides of a healed
        partition."""
        while True:
            # Peers that start together may each have read the directory before the other was listed: look again soon.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_SECONDS if self.participant.tip.epoch else FIRST_REFRESH_SECONDS):
                    await self._look_now.wait()
            self._look_now.clear()
            try:
                await self._directory.publish(self.membership.me)
                listed = await self._directory.read()
            except (P2PError, TimeoutError) as error:
                log.warning("%r could not refresh its record in the DHT: %s", self.membership.me.peer, error)
                continue
            unknown = [
                m for m in listed if m.key not in self.membership.members or not self.channel.is_connected(m.key)
            ]
            await asyncio.gather(*(self.meet(member) for member in unknown))

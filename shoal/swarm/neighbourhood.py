"""Keeps one peer connected to the members of its run, and keeps what they know of each other alike."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from shoal.p2p.errors import P2PError, Refused
from shoal.p2p.identity import PeerID
from shoal.p2p.node import Reply
from shoal.p2p.transport import Buffer
from shoal.swarm.channel import Channel
from shoal.swarm.directory import REFRESH_SECONDS, Directory
from shoal.swarm.protocol.errors import Rejected
from shoal.swarm.protocol.member import MAX_MEMBERS, Member, Role
from shoal.swarm.protocol.membership import Membership
from shoal.swarm.protocol.messages import Describe, Description, Hello, Terms
from shoal.swarm.protocol.participant import Participant
from shoal.swarm.protocol.reach import Reach, Reachability
from shoal.swarm.protocol.tensors import Tensors, difference, encode_tensors
from shoal.swarm.protocol.tip import Tip

log = logging.getLogger(__name__)

MEET_TIMEOUT = 5.0
FIRST_REFRESH_SECONDS = 0.5  # until the first commit
SPREAD_DELAY = 0.02  # news of members that come together is told together
MAX_REPORTS = 64  # of whom this peer reaches, that nobody has read


class Neighbourhood:
    """One peer among the members of its run. Drives a `Membership` and a `Reach`: reads the directory, dials members,
    says Hello, notices losses, and says who can't be reached.

    Args:
        channel: over which all messages of the run go.
        participant: this peer's state, and its promises.
        membership: the members that it knows.
        directory: where members are listed.
        terms: what must be equal in the run; peers of other terms are no members here (`strangers`).
        tensors: those behind the schema hash in `terms`.
        changed: called after what is known or connected has changed.
        heard: called with the tip of a member, when one tells it.

    Attributes:
        reports: what has changed in whom this peer reaches; whoever reads one takes it out, in any thread.
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
        tensors: Sequence[Tensors] = (),
    ) -> None:
        self.channel, self.participant, self.membership = channel, participant, membership
        self._directory, self.terms, self._tensors = directory, terms, tensors
        self._describing: dict[bytes, asyncio.Task[None]] = {}  # strangers that are asked for their tensors
        self._terms_of: dict[bytes, Terms] = {}
        self._unexplained: set[bytes] = set()  # those of whom it was not said yet what differs
        self.strangers: dict[bytes, tuple[str, Tip]] = {}  # peers of the run with other terms: what differs, their tip
        self._refusals: dict[bytes, Tip] = {}  # members that have refused this peer's JOIN, and of which tip
        self._changed, self._heard = changed, heard
        self._meeting: set[bytes] = set()
        self._spread: asyncio.TimerHandle | None = None
        self._look_now = asyncio.Event()
        self._seen = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self.reports: deque[Reachability] = deque(maxlen=MAX_REPORTS)
        self._reach = Reach(membership.run_id, membership.me, random.Random(membership.me.key))
        self._reach_changed = asyncio.Event()

    async def start(self) -> None:
        """List this peer, and meet all that are listed: when this returns, each side knows the other."""
        await self._directory.publish(self.membership.me)
        self._reach.begin(self._now())
        listed = await self._directory.read()
        self._reach.known(listed, self._now(), listed=True)
        await asyncio.gather(*map(self.meet, [*self._reach.due(self._now()), *self._connected_only(listed)]))
        self._tasks = [self.channel.spawn(self._refresh()), self.channel.spawn(self._keep_reaching())]

    def stop(self) -> None:
        """Be listed no longer than the record lives, and meet nobody any more."""
        for task in self._tasks:
            task.cancel()
        if self._spread is not None:
            self._spread.cancel()

    def connected(self) -> list[Member]:
        """The members that a message can reach now, this peer included."""
        return [m for m in self.membership.members.values() if self.channel.is_connected(m.key)]

    def num_clients(self) -> int:
        """How many clients train with this peer, itself included if it is one; in any thread.

        Clients of other nodes are known by hearsay, so they count where there are such nodes."""
        members = list(self.membership.members.values())
        reached = [member for member in members if self.channel.is_connected(member.key)]
        others = any(m.role is not Role.CLIENT and m.key != self.membership.me.key for m in reached)
        return sum(member.role is Role.CLIENT for member in (members if others else reached))

    async def seen(self) -> None:
        """Return when a member has said Hello, and so may have come."""
        await self._seen.wait()

    def coordinator(self) -> Member:
        """Who coordinates at this peer's tip, of those that it can reach and that have not refused its JOIN."""
        tip = self.participant.tip
        for member in self.membership.candidates(tip.epoch):
            if self.channel.is_connected(member.key) and self._refusals.get(member.key) != tip:
                return member
        return self.membership.me

    def refused(self, key: bytes, reason: str) -> None:
        """A coordinator does not take this peer's JOIN: at this tip it is none for this peer."""
        if key not in self._refusals:
            me = self.membership.me.peer
            log.warning("%r refuses %r as a member: %s. It trains with those who take it", PeerID(key), me, reason)
        self._refusals[key] = self.participant.tip
        self._changed()

    def hello(self) -> Hello:
        """What this peer says of itself and of those it knows."""
        return Hello(self.membership.me, self.terms, self.participant.tip, self.membership.snapshot())

    def check_terms(self) -> None:
        """For a newcomer: raises `Rejected` if other peers of the run go by other terms, and this peer is the one that
        differs.

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
        differs_in = self.terms.difference(hello.terms)
        if differs_in is not None:
            self._is_stranger(peer, hello, differs_in)
            self.lose(peer.key)
            self._reach.reached(hello.sender)
            self._changed()
            return self.hello()
        self._forget_stranger(peer.key)
        self.spoke(peer, hello.sender)
        self.channel.learn(hello.sender)
        self._reach.known(self._out_of_reach(hello.members), self._now(), listed=False)
        news = self.membership.learn(hello.members)
        for member in news:
            self.channel.spawn(self.meet(member))
        self.told(peer, hello.tip)
        seen, self._seen = self._seen, asyncio.Event()
        seen.set()
        return self.hello()

    def _is_stranger(self, peer: PeerID, hello: Hello, differs_in: str) -> None:
        """A peer of the run goes by other terms: say so once of these. Where the tensors differ, the two ask each other
        which."""
        known = self.strangers.get(peer.key)
        if known is not None and self._terms_of[peer.key] == hello.terms:
            self.strangers[peer.key] = (known[0], hello.tip)
        elif known is not None or len(self.strangers) < MAX_MEMBERS:
            self.strangers[peer.key], self._terms_of[peer.key] = (differs_in, hello.tip), hello.terms
            if self._tensors and self.terms.schema != hello.terms.schema:
                task = self._describing[peer.key] = self.channel.spawn(self._compare_tensors(peer, differs_in))
                task.add_done_callback(lambda _: self._describing.pop(peer.key, None))
            else:
                self._explain(peer, differs_in)

    async def _compare_tensors(self, peer: PeerID, differs_in: str) -> None:
        self._unexplained.add(peer.key)
        try:
            reply = await self.channel.ask(peer.key, Describe(), MEET_TIMEOUT, [encode_tensors(self._tensors)])
            if isinstance(reply.body, Description) and reply.buffers:
                self._compare(peer, reply.buffers[0])
        except (P2PError, TimeoutError) as error:
            log.debug("%r did not describe its tensors: %s", peer, error)
        if peer.key in self._unexplained:
            self._explain(peer, differs_in)

    def on_describe(self, peer: PeerID, theirs: Buffer) -> Reply:
        """A peer asks for this one's tensors, and tells its own."""
        if peer.key in self._unexplained:
            self._compare(peer, theirs)
        return Reply(Description(), [encode_tensors(self._tensors)])

    def _compare(self, peer: PeerID, theirs: Buffer) -> None:
        try:
            found = difference(self._tensors, theirs)
        except ValueError as error:
            log.debug("%r: %s", peer, error)
            return
        if found is not None and peer.key in self._unexplained:
            self._explain(peer, found)

    def _explain(self, peer: PeerID, differs_in: str) -> None:
        self._unexplained.discard(peer.key)
        if (known := self.strangers.get(peer.key)) is not None:
            self.strangers[peer.key] = (differs_in, known[1])
        log.warning("%r is in the run with other terms: %s", peer, differs_in)

    def _forget_stranger(self, key: bytes) -> None:
        self.strangers.pop(key, None)
        self._terms_of.pop(key, None)

    def spoke(self, peer: PeerID, member: Member) -> None:
        """A member has shown that it is there, whatever was known of it before."""
        self._reach.reached(member)
        self._reach_changed.set()
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
            await self._greet(member.peer)
        except (P2PError, TimeoutError) as error:
            if not (isinstance(error, TimeoutError) and self.channel.is_connected(member.key)):
                self.lose(member.key)  # one that is slow to answer is left to `Liveness`
        finally:
            self._meeting.discard(member.key)

    async def meet_peer(self, peer: PeerID) -> bool:
        """Exchange Hello with a peer, who may not be known as a member; returns whether that could be done."""
        try:
            await self._greet(peer)
        except (P2PError, TimeoutError):
            return False
        return True

    async def _greet(self, peer: PeerID) -> None:
        try:
            self.on_hello(peer, await self.channel.call(peer.key, self.hello(), Hello, MEET_TIMEOUT))
        except (P2PError, TimeoutError) as error:
            log.debug("%r could not meet %r: %s", self.membership.me.peer, peer, error)
            self._reach.failed(peer.key, str(error) or f"no answer within {MEET_TIMEOUT:g} s")
            raise
        if peer.key in self._describing:
            await asyncio.wait([self._describing[peer.key]])

    def look(self, *, dial: bool = False) -> None:
        """Read the directory now: somebody must be there, and is not known. With `dial`, dial all that are missing:
        this peer was away, not they."""
        if dial:
            self._reach.hurry(self._now())
        self._look_now.set()

    def left(self, key: bytes) -> None:
        """A member says that it leaves: it is not dialled again, unless it is listed anew."""
        self._reach.left(key, self._now())
        self._reach_changed.set()
        self._directory.gone(key)

    def lose(self, key: bytes) -> None:
        """A member can't be reached any more."""
        was_reached = self._reach.lost(key, self._now())
        if was_reached:
            self._directory.gone(key)
            self._reach_changed.set()
        if not self.channel.is_connected(key):
            self._forget_stranger(key)
        self._refusals.pop(key, None)
        if self.membership.lose(key):
            if was_reached and key not in self.strangers:
                connected = len(self.connected())
                are = "member is" if connected == 1 else "members are"
                log.info("%s is lost; %d %s connected, this peer included", PeerID(key), connected, are)
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
                # Read before its own record is renewed: another process that writes that record is seen then.
                listed = await self._directory.read()
                await self._directory.publish(self.membership.me)
            except (P2PError, TimeoutError) as error:
                log.warning("%r could not refresh its record in the DHT: %s", self.membership.me.peer, error)
                continue
            now = self._now()
            self._reach.known(listed, now, listed=True)
            self._reach.known(self._out_of_reach(self.membership.members.values()), now, listed=False)
            self._reach_changed.set()
            await asyncio.gather(*map(self.meet, self._connected_only(listed)))

    async def _keep_reaching(self) -> None:
        """Dial who is missing, for as long as it is; say what does not change by that."""
        while True:
            self._reach_changed.clear()
            now = self._now()
            for member in self._reach.due(now):
                self.channel.spawn(self.meet(member))
            report = self._reach.notice(now, self._directory.others())
            if report is not None:
                if report.advice:
                    log.warning("%s", report.advice)
                else:
                    log.info("all known members of the run are reached or have left: %d peers", report.num_peers)
                self.reports.append(report)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._reach.next_time(now)):
                    await self._reach_changed.wait()

    def _out_of_reach(self, members: Iterable[Member]) -> list[Member]:
        return [member for member in members if not self.channel.is_connected(member.key)]

    def _connected_only(self, listed: Iterable[Member]) -> list[Member]:
        """Who is connected, and no member here all the same: the connection may be the DHT's; or they have other terms
        by now, or have been taken for lost."""
        unknown = (member for member in listed if member.key not in self.membership.members)
        return [member for member in unknown if self.channel.is_connected(member.key)]

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

"""Connects one peer to the members of its run, tells them which members it knows, and notices members that hang."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from msgspec.structs import replace

from shoal.p2p.errors import P2PError
from shoal.p2p.identity import PeerID
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.node import Reply
from shoal.p2p.transport import Buffer, Movement
from shoal.swarm.channel import Channel, loop_time
from shoal.swarm.directory import REFRESH_SECONDS, Directory
from shoal.swarm.losses import Losses
from shoal.swarm.protocol import messages as msg
from shoal.swarm.protocol.book import require
from shoal.swarm.protocol.errors import Rejected
from shoal.swarm.protocol.peer import Peer
from shoal.swarm.protocol.promptness import Promptness
from shoal.swarm.protocol.reach import Reachability, Reaching
from shoal.swarm.protocol.sparing import Sparing
from shoal.swarm.protocol.tensors import Tensors, difference, encode_tensors
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.protocol.view import MAX_MEMBERS, Member, Role

log = logging.getLogger(__name__)

MEET_TIMEOUT = 5.0
FIRST_REFRESH_SECONDS = 0.5  # until the first commit
SPREAD_DELAY = 0.02  # new members that appear within this time are told of in one message
EXPLAINED, EXPLAINED_SECONDS = 8, 60.0  # how often the log reports other terms of one peer, which may make them up
ALONE_SECONDS = 5.0  # if a newcomer meets only peers with other terms for so long, it is the one that differs
REFUSED_SECONDS = 60.0  # a peer with other terms is remembered for so long after it has gone
MAX_REPORTS = 64  # unread `reports`
PING_SECONDS = 1.0  # a peer that this peer waits for is asked again for a sign of life after so long
CONTROLS = 2  # so many others are asked when one is silent, and nobody else was heard since
GET_KNOWN = 16  # so many members are asked in a second until it is known how late their answers are


@dataclass(slots=True)
class _Stranger:
    """A peer of the run with other terms. For this peer it is no member.

    Attributes:
        terms, tip: those of its last HELLO.
        difference: how the terms differ, in words.
        explaining: the task that asks the peer for its tensors if they differ, and logs the difference.
    """

    terms: msg.Terms
    tip: Tip
    difference: str
    explaining: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Watch:
    """A peer that this peer waits for.

    Attributes:
        since: when the peer last gave a sign of life.
        movement: the bytes on the connection to the peer.
        asked: when it was last asked for one because this peer waits for it, or may have to soon.
    """

    since: float
    movement: Movement
    asked: float = -math.inf

    @property
    def owes_an_answer(self) -> bool:
        return self.asked > self.since


class Contacts:
    """The connections of this peer to the other peers of its run.

    It reads the directory, dials members, exchanges HELLO, notices losses, and reports which members it cannot reach.
    `Peer` and `Reaching` hold the state.

    Args:
        channel: sends the messages of the run.
        peer: the machine that is told of members.
        directory: lists the members.
        tensors: the tensors behind the schema hash of the terms.
        most_silent: the longest that a peer that this peer waits for may be silent, in seconds.
        act: performs the actions of the machine.

    Attributes:
        reports: changes of the set of members that this peer reaches. A reader in any thread takes them out.
        told: the tip of each member, from its last HELLO.
        losses: the members that were lost, for monitoring.
    """

    def __init__(
        self,
        channel: Channel,
        peer: Peer,
        directory: Directory,
        tensors: Sequence[Tensors],
        most_silent: float,
        act: Callable[[], None],
    ) -> None:
        self._channel, self._peer, self._view, self._most_silent = channel, peer, peer.view, most_silent
        self._directory, self._tensors, self._act = directory, tensors, act
        self.reports: deque[Reachability] = deque(maxlen=MAX_REPORTS)
        self.told: dict[bytes, Tip] = {}
        self.losses = Losses()
        self._strangers: dict[bytes, _Stranger] = {}
        self._sparing = Sparing(EXPLAINED, EXPLAINED_SECONDS)
        self._meeting: set[bytes] = set()
        self._pinged: dict[bytes, None] = {}  # peers that owe an answer
        self._promptness = Promptness(most_silent)
        self._watches: dict[bytes, _Watch] = {}
        self._spread: asyncio.TimerHandle | None = None
        self._again: asyncio.TimerHandle | None = None  # repeats how the last peer with other terms differs
        self._look_now = asyncio.Event()
        self._seen = asyncio.Event()
        self._has_met = False  # whether this peer has met a peer with the same terms
        self._tasks: list[asyncio.Task[None]] = []
        self._stop_following: Callable[[], None] = lambda: None
        self._stopped = False
        self._refused: tuple[bytes, float] | None = None  # a peer with other terms, and until when it is reported
        self._refused_difference = ""
        self._reach = Reaching(self._view.run_id, self._view.me, random.Random(self._view.me.key))
        self._reach_changed = asyncio.Event()

    async def start(self) -> None:
        """List this peer, and exchange HELLO with all listed peers that can be reached."""
        await self._directory.publish(self._view.me)
        self._reach.begin(loop_time())
        listed = await self._directory.read()
        self._reach.known(listed, loop_time(), listed=True)
        await asyncio.gather(*map(self.meet, [*self._reach.due(loop_time()), *self._connected_only(listed)]))
        self._tasks = [self._channel.node.spawn(self._refresh()), self._channel.node.spawn(self._keep_reaching())]
        self._stop_following = self._directory.on_moved(self._moved)

    def stop(self) -> None:
        """Stop renewing this peer's record, and meet no further peers."""
        self._stopped = True
        self._stop_following()
        for task in self._tasks:
            task.cancel()
        for timer in (self._spread, self._again):
            if timer is not None:
                timer.cancel()

    async def seen(self) -> None:
        """Return when the next member says HELLO; it may be a new one."""
        await self._seen.wait()

    # -- for monitoring

    def missing(self) -> list[PeerID]:
        """The known members that this peer should reach but does not, and of which it has warned."""
        return self._reach.told()

    def refused(self) -> tuple[bytes, str] | None:
        """The last peer of the run that had other terms, and how they differ. None if that peer is not connected any
        more and was refused longer ago than REFUSED_SECONDS."""
        if self._refused is None:
            return None
        key, until = self._refused
        stranger = self._strangers.get(key)
        if stranger is not None:
            self._refused_difference = stranger.difference
        elif loop_time() >= until:
            self._refused = None
            return None
        return key, self._refused_difference

    # -- peers with other terms

    async def check_terms(self) -> None:
        """Raise `Rejected` if this peer, a newcomer, is the one whose terms differ from those of the run: it meets
        only peers with other terms for `ALONE_SECONDS`.

        It waits because a single liar may be the first peer that it meets, for example when all peers start anew. Of
        two peers alone, the one with more samples behind its state stays; before there are samples, the one with the
        smaller key stays."""
        until = loop_time() + ALONE_SECONDS
        while (difference := self._differs()) is not None:
            if loop_time() >= until:
                other = f"the other peers of the run go by other terms: {difference}"
                raise Rejected(f"{other}. Make it equal on all peers")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(until - loop_time()):
                    await self.seen()

    def _differs(self) -> str | None:
        """How the terms of this peer differ from those of all peers that it reaches, if this peer is the one that
        differs; else None."""
        strangers = {k: known for k, known in self._strangers.items() if self._channel.is_connected(k)}
        if not strangers or self._has_met:
            return None
        tip = self._peer.tip
        is_first = bool(tip.epoch) or (len(strangers) == 1 and self._view.me.key < min(strangers))
        if is_first and not any(known.tip.outranks(tip) for known in strangers.values()):
            return None
        return next(iter(strangers.values())).difference

    def _is_stranger(self, peer: PeerID, hello: msg.Hello, differs_in: str) -> None:
        """A peer of the run has other terms: log that once. If the tensors differ, the two peers first find out which
        ones."""
        known = self._strangers.get(peer.key)
        if known is not None and known.terms == hello.terms:
            known.tip = hello.tip
        elif known is not None or len(self._strangers) < MAX_MEMBERS:
            stranger = self._strangers[peer.key] = _Stranger(hello.terms, hello.tip, differs_in)
            if self._sparing.allows(peer.key, loop_time()):
                stranger.explaining = self._channel.node.spawn(self._explain(peer, stranger))
            self._refused, self._refused_difference = (peer.key, loop_time() + REFUSED_SECONDS), differs_in

    async def _explain(self, peer: PeerID, stranger: _Stranger) -> None:
        if self._tensors and self._peer.terms.schema != stranger.terms.schema:
            try:
                reply = await self._channel.ask(peer.key, msg.Describe(), MEET_TIMEOUT, [encode_tensors(self._tensors)])
                if isinstance(reply.body, msg.Description) and reply.buffers:
                    self._compare(stranger, reply.buffers[0])
            except (P2PError, TimeoutError) as error:
                log.debug("%r did not describe its tensors: %s", peer, error)
        if self._refused is not None and self._refused[0] == peer.key:
            self._refused_difference = stranger.difference
        self._tell_difference(peer, stranger.difference)

    def _tell_difference(self, peer: PeerID, difference: str) -> None:
        """Log it, and again each minute while this peer waits in vain for one with its own terms."""
        fields = {"event": "other terms", "peer": str(peer), "difference": difference}
        log.warning("%r is in the run with other terms: %s", peer, difference, extra={"shoal": fields})
        if self._again is not None:
            self._again.cancel()
        self._again = asyncio.get_running_loop().call_later(EXPLAINED_SECONDS, self._tell_again, peer, difference)

    def _tell_again(self, peer: PeerID, difference: str) -> None:
        is_alone = not self._has_met and (self._channel.is_connected(peer.key) or not self._peer.participant.made)
        if is_alone and not self._stopped:
            self._tell_difference(peer, difference)

    def on_describe(self, peer: PeerID, theirs: Buffer) -> Reply:
        """A peer asks for the description of this peer's tensors, and sends that of its own."""
        stranger = self._strangers.get(peer.key)
        if stranger is not None:
            self._compare(stranger, theirs)
        return Reply(msg.Description(), [encode_tensors(self._tensors)])

    def _compare(self, stranger: _Stranger, theirs: Buffer) -> None:
        try:
            stranger.difference = difference(self._tensors, theirs) or stranger.difference
        except ValueError as error:
            log.debug("%s", error)

    # -- members

    def on_hello(self, peer: PeerID, hello: msg.Hello) -> msg.Hello:
        """A peer of the run says HELLO. Returns this peer's HELLO. Raises Refused if the peer uses another peer's
        name, or a tip that can't exist."""
        require(hello.sender.key == peer.key, "HELLO in the name of another peer")
        require(self._channel.believes(hello.tip), "a tip with a pin that is not known here")
        differs_in = self._peer.terms.difference(hello.terms)
        if differs_in is not None:
            self._is_stranger(peer, hello, differs_in)
            self.lose(peer.key)
            self._reach.refused(hello.sender)
            self._changed()
            return self._peer.hello()
        self._strangers.pop(peer.key, None)
        self._reach.accepted(peer.key)
        self._promptness.may_be_late(peer.key, hello.held, self._peer.tip.epoch)
        self.spoke(hello.sender)
        new = self._view.hear(peer.key, hello.members, loop_time())
        # If others reach a member that this peer has lost, it is alive.
        known = [m for m in hello.members if self._view.is_known(m.key) or self._reach.misses(m.key)]
        self._reach.known(self._out_of_reach(known), loop_time(), listed=False)
        self._reach_changed.set()
        for member in new:
            self._channel.node.spawn(self.meet(member))
        self._peer.told(peer.key, hello.tip, loop_time())
        if peer.key in self._view.members:
            self.told[peer.key] = hello.tip
        seen, self._seen = self._seen, asyncio.Event()
        seen.set()
        self._act()
        return self._peer.hello()

    def spoke(self, member: Member) -> None:
        """A member has sent a message, so it is in the run and alive, whatever was known of it before."""
        self._has_met = True
        if self._reach.reached(member):
            self.losses.back(member.key)
            self._channel.learn(member)
            self._reach_changed.set()
        if self._view.returned(member):
            log.debug("%r knows %r now", self._view.me.peer, member.peer)
            self._changed()
            if self._spread is None:
                self._spread = asyncio.get_running_loop().call_later(SPREAD_DELAY, self._tell_others)

    def _tell_others(self) -> None:
        """Tell others of a new member that they may not know. The coordinator tells all; others tell the
        coordinator."""
        self._spread = None
        if not self._channel.node.closed:
            coordinator, me = self._peer.participant.coordinator().key, self._view.me.key
            self._channel.notify(self._view.others() if coordinator == me else [coordinator], self._peer.hello())

    async def meet(self, member: Member) -> None:
        """Connect to a member and exchange HELLO. If it cannot be reached, it counts as lost."""
        if member.key in self._meeting or member.key == self._view.me.key:
            return
        if member.role is Role.CLIENT and not self._channel.is_connected(member.key):
            return  # nobody can dial a client: it dials others
        self._meeting.add(member.key)
        self._channel.learn(member)
        try:
            await self._greet(member.peer)
        except (P2PError, TimeoutError) as error:
            if not (isinstance(error, TimeoutError) and self._channel.is_connected(member.key)):
                self.lose(member.key)  # `look_after` handles a connected member that is slow to answer
        finally:
            self._meeting.discard(member.key)

    async def meet_peer(self, peer: PeerID) -> None:
        """Exchange HELLO with a peer if it can be reached. The peer need not be a known member."""
        with contextlib.suppress(P2PError, TimeoutError):
            await self._greet(peer)

    async def _greet(self, peer: PeerID) -> None:
        said = self._view.said(peer.key)
        try:
            hello = await self._channel.call(peer.key, self._peer.hello(), msg.Hello, MEET_TIMEOUT)
            if self._stopped:  # that peer may have received HELLO after LEAVE, or no LEAVE at all
                self._channel.notify([peer.key], msg.Leave())
                return
            self.on_hello(peer, replace(hello, tip=self._view.newest(peer.key, hello.tip, said)))
        except (P2PError, TimeoutError) as error:
            log.debug("%r could not meet %r: %s", self._view.me.peer, peer, error)
            self._reach.failed(peer.key, str(error) or f"no answer within {MEET_TIMEOUT:g} s")
            raise
        stranger = self._strangers.get(peer.key)
        if stranger is not None and stranger.explaining is not None:
            await asyncio.wait([stranger.explaining])

    def look(self, *, dial: bool = False) -> None:
        """Read the directory now, since a missing member may be listed there. With `dial`, also dial all missing
        members at once, because this peer was away, and not they."""
        if dial:
            self._reach.hurry(loop_time())
        self._look_now.set()

    def _moved(self, addresses: Sequence[Multiaddr]) -> None:
        """This peer is reached at other addresses: publish them, and tell the connected members. If there are none, do
        nothing: the relays of this peer may come back."""
        if not addresses:
            return
        me = self._view.me.at(addresses)
        if me.role is not Role.CLIENT and me.addresses != self._view.me.addresses:
            self._peer.say(me, loop_time())
            self._look_now.set()
            self._act()

    def left(self, key: bytes) -> None:
        """A member says that it leaves. This peer dials it again only if it is listed anew."""
        self._reach.left(key, loop_time())
        self._reach_changed.set()
        self._directory.gone(key)

    def lose(self, key: bytes) -> bool:
        """A peer cannot be reached any more. Returns whether it was a member."""
        was_reached = self._reach.lost(key, loop_time())
        if was_reached:
            self._directory.gone(key)
            self._reach_changed.set()
        is_stranger = key in self._strangers
        if not self._channel.is_connected(key):
            self._strangers.pop(key, None)
        coordinated = was_reached and key in self._coordinators()
        known = self._view.lose(key)
        self.told.pop(key, None)
        if known and was_reached and not is_stranger:
            connected, epoch = len(self._view.connected()), self._peer.tip.epoch
            self.losses.add(key, coordinated=coordinated, connected=connected, epoch=epoch, now=loop_time())
        if known:
            self._changed()
        return known

    def _coordinators(self) -> list[bytes]:
        """The coordinator of the round that this peer is in, if it is in one, and the member that calls the next round
        of its tip."""
        participant = self._peer.participant
        in_round = [] if participant.begin is None else [participant.at.ballot.coordinator]
        return [*in_round, participant.coordinator().key]

    def _changed(self) -> None:
        self._peer.members_changed(loop_time())
        self._act()

    # -- signs of life

    def forget_watches(self) -> None:
        """Forget when peers last gave a sign of life. This process stood still, so it has not read what has arrived."""
        self._watches.clear()

    def look_after(self, awaited: Iterable[bytes], suspected: Iterable[bytes], cost: float, now: float) -> None:
        """Ping peers that owe something. Called several times a second. One that this peer waits for, and that gives no
        sign of life for too long, is disconnected, and so is lost: see `Promptness`.

        Args:
            awaited: the peers for which this peer waits.
            suspected: others for which it may have to wait soon.
            cost: see `Promptness.limit`.
            now: the time.
        """
        node, before = self._channel.node, self._watches
        waited_for = dict.fromkeys(key for key in awaited if key != node.peer_id.key)
        owing = waited_for | dict.fromkeys(key for key in suspected if key != node.peer_id.key)
        self._watches = {}
        for key in owing | self._pinged:
            peer = PeerID(key)
            moved = node.transport.moved(peer)
            watch = self._watches[key] = before.get(key) or _Watch(now, Movement(moved))
            if watch.movement.goes_on(moved):
                watch.since = now
            watch.since = max(watch.since, node.heard(peer))
            is_due = key in before and now - watch.asked >= PING_SECONDS  # mostly it comes before the next look
            if key in owing and is_due:
                watch.asked = watch.asked if watch.owes_an_answer else now  # a PING that fails is no sign of life
                self._ask(key)
        for key, watch in list(self._watches.items()):
            silent = now - max(watch.since, watch.asked)
            limit = self._promptness.limit(key, cost)
            if silent > limit / 2 and not self._hears_others(key, watch.since):
                limit = self._most_silent  # it may be this peer that nobody reaches
            if key in waited_for and watch.owes_an_answer and silent > limit:
                log.info("%r: %r does not answer", node.peer_id, PeerID(key))
                node.disconnect(PeerID(key), f"it has given no sign of life for {limit:.3g} s")
                del self._watches[key]

    def answered(self, key: bytes, seconds: float) -> None:
        """That peer has answered so late."""
        self._promptness.answered(key, seconds, self._peer.tip.epoch)

    def was_held(self, seconds: float) -> None:
        """This peer's trainer has kept its reactor from running for so long. The others give it more time."""
        if self._peer.was_held(seconds):
            self._channel.notify(self._view.others(), self._peer.hello())

    def _hears_others(self, key: bytes, since: float) -> bool:
        """Whether another member has given a sign of life since then. If none has, ask some."""
        node, here = self._channel.node, [member.key for member in self._view.connected()]
        others = [other for other in here if other not in (key, self._view.me.key)]
        if any(node.heard(PeerID(other)) > since for other in others):
            return True
        for other in [other for other in others if other not in self._pinged][:CONTROLS]:
            self._ask(other)
        return False

    def get_to_know(self) -> None:
        """Ask some of the members that have not answered often enough to be known. Called every second."""
        here = [member.key for member in self._view.connected() if member.key != self._view.me.key]
        for key in islice((key for key in here if not self._promptness.knows(key)), GET_KNOWN):
            self._ask(key)

    def _ask(self, key: bytes) -> None:
        if key in self._pinged:
            return
        self._pinged[key] = None
        self._channel.node.spawn(self._ping(key))

    async def _ping(self, key: bytes) -> None:
        ping, began = self._peer.ping(), loop_time()
        try:
            pong = await self._channel.call(key, ping, msg.Pong, self._most_silent + PING_SECONDS)
        except (P2PError, TimeoutError) as error:
            log.debug("%r: %s", PeerID(key), error)  # the node reports a lost connection
        else:
            self.answered(key, loop_time() - began)
            self._peer.on_pong(key, ping, pong, loop_time())
            self._act()
        finally:
            self._pinged.pop(key, None)

    # -- the directory

    async def _refresh(self) -> None:
        """Keep this peer listed, and meet listed peers that it does not know: newcomers, and the other side of a healed
        partition."""
        while True:
            # Peers that start together may each have read the directory before the other was listed. So early in a run
            # the directory is read often.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_SECONDS if self._peer.tip.epoch else FIRST_REFRESH_SECONDS):
                    await self._look_now.wait()
            self._look_now.clear()
            try:
                # Read before this peer renews its record, to see whether another process has written that record.
                listed = await self._directory.read()
                await self._directory.publish(self._view.me)
            except (P2PError, TimeoutError) as error:
                log.warning("%r could not refresh its record in the DHT: %s", self._view.me.peer, error)
                continue
            now = loop_time()
            self._view.listed(listed, now)
            self._reach.forget(self._view.forget(now), but=[member.key for member in listed])
            self._reach.known(listed, now, listed=True)
            self._reach.known(self._out_of_reach(self._view.members.values()), now, listed=False)
            self._reach_changed.set()
            await asyncio.gather(*map(self.meet, self._connected_only(listed)))

    async def _keep_reaching(self) -> None:
        """Dial missing members for as long as they are missing, and report those that stay missing."""
        while True:
            self._reach_changed.clear()
            now = loop_time()
            for member in self._reach.due(now):
                self._channel.node.spawn(self.meet(member))
            report = self._reach.notice(now, self._directory.others)
            if report is not None:
                all_well = f"all known members of the run are reached or have left: {report.num_peers} peers"
                fields = {"event": "reachability", "num_peers": report.num_peers, "advice": report.advice}
                fields["unreached"] = [str(peer) for peer in report.unreached]
                level = logging.WARNING if report.advice else logging.INFO
                log.log(level, "%s", report.advice or all_well, extra={"shoal": fields})
                self.reports.append(report)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._reach.next_time(now)):
                    await self._reach_changed.wait()

    def _out_of_reach(self, members: Iterable[Member]) -> list[Member]:
        return [member for member in members if not self._channel.is_connected(member.key)]

    def _connected_only(self, listed: Iterable[Member]) -> list[Member]:
        """The listed peers that are connected but no members here. The connection may be one of the DHT, the peer may
        have changed its terms, or this peer may have taken it for lost."""
        unknown = (member for member in listed if member.key not in self._view.members)
        return [member for member in unknown if self._channel.is_connected(member.key)]

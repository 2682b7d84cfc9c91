"""One peer's part in a run: the driver of its `Peer`, on the event loop of its node.

`Peer` is the state machine that makes the decisions (*the machine* below). This file passes messages, losses and the
time to it, and performs its actions. It imports no torch: `BytesExchange` hides the tensors of a round.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import struct
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

from blake3 import blake3
from msgspec.structs import replace as replace_struct

from shoal.p2p.errors import P2PError, Refused, Unavailable
from shoal.p2p.identity import PeerID
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.node import Answer, Node, Service
from shoal.p2p.release import RELEASE
from shoal.swarm.channel import Channel
from shoal.swarm.contacts import Contacts
from shoal.swarm.directory import Directory
from shoal.swarm.duties import parts_for, parts_of
from shoal.swarm.fetching import Fetching
from shoal.swarm.gates import gate_of
from shoal.swarm.loading import Loading
from shoal.swarm.protocol import messages as msg
from shoal.swarm.protocol.actions import Action, Ask, Cancel, Enter, FetchChunks, Greet, Send
from shoal.swarm.protocol.book import require
from shoal.swarm.protocol.contribution import Buffers, Contribution, Outcome
from shoal.swarm.protocol.errors import AveragingError, Behind, ResultLost
from shoal.swarm.protocol.peer import Peer
from shoal.swarm.protocol.rates import LEAST_BYTES, Flow, Measured
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.silence import Silence
from shoal.swarm.protocol.statements import Signer
from shoal.swarm.protocol.tensors import Tensors
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.protocol.view import Member, Reach, Role, View

DEFAULT_CHUNK_TIMEOUT = 15.0  # `next_chunk_timeout` if none is given, in seconds
DEFAULT_REQUEST_TIMEOUT = 10.0  # `request_timeout` if none is given, in seconds
AGAIN_SECONDS = 1.5  # a round waits this long for a member that this peer could not reach before
HEED_SECONDS = 1.0  # a coordinator that others name is to be met within this time; it may be silent
DECLINED_SECONDS = 0.05  # pause after a declined JOIN, in which the two peers exchange their tips or views
WAIT_FOR_TIP = 2.0  # how long a message about the next tip is kept: COMMIT reaches members at different times
LOOK_SECONDS, ASK_SECONDS = 1.0, 0.25
SLOW_RATE = 2.5e6  # bytes per second, for a line of which nothing is known
BUSY = 0.05  # a process that has computed for less than this part of the time in which it did not run was stopped
TELL_SECONDS = 2.0  # a member may take this long to say how a round has ended
MOST_ASKED = 3  # how many members are asked how a round has ended
ROUND_SECONDS = 10.0  # a newcomer waits this long for the end of the round that follows the state it wants
LATER_SECONDS = 0.01  # more than the resolution of any loop's clock

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The options of a run that each peer chooses for itself. None stands for the default.

    Attributes:
        role: the role of this peer in rounds. A client declares no addresses.
        bandwidth: see `Member`.
        chunk_timeout: seconds of silence after which a member that holds up a round is put out; 15 if None.
        sender_timeout: the same for members that owe parts; `chunk_timeout` if None.
        reducer_timeout: the same for members that owe results; twice `sender_timeout` if None.
        request_timeout: the time, in seconds, within which the coordinator must answer; 10 if None.
        keeps_state: whether a tip names a state that this peer holds. Then the peer moves to the next tip only when it
            has the result of the round between the two.
        redo_bytes: how many bytes of the results of past rounds this peer keeps while others may want them.
        tensors: the tensors behind the schema hash of the terms, to tell a peer with other ones which of them differ.
    """

    role: Role = Role.NODE
    bandwidth: float | None = None
    chunk_timeout: float | None = None
    sender_timeout: float | None = None
    reducer_timeout: float | None = None
    request_timeout: float | None = None
    keeps_state: bool = False
    redo_bytes: int = 0
    tensors: Sequence[Tensors] = ()


class Swarm:
    """The rounds of one run, for one peer.

    Args:
        node: the node of this peer.
        addresses: the addresses at which this peer listens.
        directory: lists the members of the run.
        run_id: the name of the run.
        terms: the options that must be equal in the run.
        rules: when a round begins; the same for all members except for the times.
        place: the options that this peer chooses for itself.
        measured: the measured rates of this peer's links in other runs; this run adds those of its rounds. None: no
            rates are known.

    Attributes:
        peer: the machine.
        contacts: the connections to members.
        loading: tells the members how long this peer still loads the state; None if it loads none.
        gate: the gate of a closed run; None in an open run.

    Raises:
        ValueError: if the run is closed, and this peer has no membership, or none for its role.
    """

    def __init__(
        self,
        node: Node,
        addresses: Iterable[Multiaddr],
        directory: Directory,
        run_id: str,
        terms: msg.Terms,
        rules: Rules,
        place: Place,
        measured: Measured | None = None,
    ) -> None:
        me = Member(node.peer_id.key, (), place.role, place.bandwidth)
        me = me if place.role is Role.CLIENT else me.at(addresses)
        chunk_timeout = DEFAULT_CHUNK_TIMEOUT if place.chunk_timeout is None else place.chunk_timeout
        sender_timeout = chunk_timeout if place.sender_timeout is None else place.sender_timeout
        # A reducer that waits for a part looks like one that stalls, so it may complain first.
        reducer_timeout = 2 * sender_timeout if place.reducer_timeout is None else place.reducer_timeout
        self.node, self.rules, self._chunk_timeout = node, rules, chunk_timeout
        self._request_timeout = DEFAULT_REQUEST_TIMEOUT if place.request_timeout is None else place.request_timeout
        self.gate = gate = gate_of(node, run_id)
        self._averages = bool(rules.sizes or rules.due_sizes or rules.state_sizes)
        if gate is not None:
            gate.holder.require(*parts_of(place.role, averages=self._averages))
        admit = (lambda peer: None) if gate is None else gate.admit
        self.service = Service(f"averaging/{run_id}", msg.Message, self._undecodable, admit)
        has_pins = gate is not None and gate.run.run_id == run_id  # the owner pins states of the run itself
        channel = self._channel = Channel(node, self.service, gate, has_pins=has_pins)
        view, silence = View(run_id, me, channel.is_connected), Silence(sender_timeout, reducer_timeout)
        self._signer = Signer(node.identity, run_id)
        options = {**terms.options, "protocol": msg.PROTOCOL}
        terms = replace_struct(terms, options=options, release=RELEASE)
        keeps_state, redo_bytes = place.keeps_state, place.redo_bytes
        self.peer = Peer(view, terms, rules, silence, self._signer, keeps_state=keeps_state, redo_bytes=redo_bytes)
        self.contacts = Contacts(channel, self.peer, directory, place.tensors, chunk_timeout, self._act)
        self._fetching = Fetching(channel, chunk_timeout, self._progressed, rules)
        self.loading: Loading | None = None
        # What a round that it replays costs it; None if it can't replay any.
        elements = sum(rules.vector(0, with_state=rules.state_always))
        self._round_bytes = rules.element_bytes * elements
        self._result_bytes = self._round_bytes if redo_bytes else None
        self._rate = 0.0  # bytes per second of the last download
        self._measured = Measured() if measured is None else measured
        self._before: dict[bytes, Flow] = {}  # by member: what was delivered before the measured round began
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._wake_at: float | None = None  # the time for which the timer is set
        self._performing = False
        self._changed = asyncio.Event()  # set when the call of `average` may go on
        self._news = asyncio.Event()
        self._news_told = self._changes_seen = 0
        self._patience: asyncio.Timeout | None = None  # ends the call of `average`
        self._timeout = 0.0  # `_patience` lasts so many seconds without progress
        self._round: msg.Begin | None = None  # the round that the call of `average` was last woken for
        self._reported: msg.Progress | None = None
        self._reported_to: tuple[bytes, Tip] | None = None  # the coordinator that has the last report, and its tip
        self._asked: list[bytes] = []  # coordinators that have not answered a report yet
        self._watching: list[bytes] = []
        self._retired = self._stopped = False
        self._tasks: list[asyncio.Task[Any]] = []
        self._fetches: dict[asyncio.Task[Any], bytes] = {}  # tasks that fetch chunks for a repair, each with its round
        self._stop_listening: Callable[[], None] = lambda: None
        self._leave_gate: Callable[[], None] = lambda: None

    # -- what this peer knows

    @property
    def me(self) -> Member:
        """This peer as a member."""
        return self.peer.view.me

    @property
    def tip(self) -> Tip:
        """The state that this peer is at."""
        return self.peer.tip

    @property
    def called(self) -> bool:
        """Whether the coordinator has called the round of this tip."""
        return self.peer.participant.at.called

    @property
    def behind(self) -> Tip | None:
        """The tip of the best state that a connected member holds, if it outranks this peer's state."""
        return self.peer.participant.behind(self._now())

    @property
    def behind_pin(self) -> int:
        """The pin of the state in `behind`; 0 if it has none, or if there is no such state."""
        behind = self.behind
        return 0 if behind is None else behind.pin

    def believes(self, tip: Tip) -> bool:
        """Whether such a tip can exist. One with a pin exists only if the run's owner has made that pin."""
        return self._channel.believes(tip)

    @property
    def made(self) -> bool:
        """Whether this peer has completed an epoch since it started. Until then it is a newcomer."""
        return self.peer.participant.made

    def members_behind(self) -> list[Member]:
        """The connected members that train and whose state this peer's state outranks, according to their last HELLO.
        Members of the round that led to this tip are not among them, since they have its result."""
        commit, told = self.peer.participant.at.commit, self.contacts.told
        # A COMMIT's view lacks the members that were put out of the round.
        there = set() if commit is None else {*commit.members} & {member.key for member in commit.view}
        others = [m for m in self.peer.view.connected() if m.contributes and m.key in told.keys() - there]
        return [member for member in others if self.tip.outranks(told[member.key])]

    @property
    def missed(self) -> bool:
        """Whether the round of this tip was committed and this peer does not have its result."""
        return self.peer.participant.at.missed is not None

    @property
    def got_on_at(self) -> float:
        """The time at which a round last made progress here, or until which it waits for newcomers, on the loop's
        clock."""
        return max(self.peer.participant.progressed_at, self.peer.newcomers.told_until)

    # -- life

    async def start(self, *, tip: Tip | None = None, members: Iterable[Member] = ()) -> None:
        """Join the run: serve its messages, list this peer, and meet the members that are there. If the start fails,
        the peer has left the run again.

        Args:
            tip: the state that this peer is at; None: the beginning of the run.
            members: members that are known already.
        """
        self._loop = asyncio.get_running_loop()
        self._signer.instance = struct.pack(">d", self._now())
        self.peer.view.learn(members)
        if tip is not None:
            self.peer.participant.move(tip)
        self.peer.settle(self._now())
        self.node.serve(self.service, self._handle)
        if self.gate is not None:
            self._leave_gate = self.gate.enter(self._left, self._tell_news)
        self._stop_listening = self.node.on_lost(lambda peer, reason: self._lost(peer.key))
        try:
            await self.contacts.start()
        except BaseException:  # cancelled, too: a peer that did not start must not stay listed
            self.stop()
            raise
        self._tasks = [self.node.spawn(self._keep_looking())]

    def stop(self) -> None:
        """Leave the run."""
        if not self._retired:
            self.retire()
        self.node.stop_serving(self.service)
        self._stop_listening()
        self._leave_gate()
        for task in self._tasks:
            task.cancel()
        self._stopped = True
        self._set_timer()

    def retire(self) -> None:
        """Leave the run, but until `stop` still tell members that missed the last round what its result was."""
        self._channel.notify(self.peer.view.others(), msg.Leave())
        self.contacts.stop()
        self._retired = True

    def move(self, tip: Tip, *, made: bool = False) -> None:
        """Move to another state, which this peer has downloaded, or has `made` alone. Tells all members. A JOIN for the
        old tip is void."""
        self.peer.move(tip, self._now(), made=made)
        self._act()

    def catch_up(self) -> Tip:
        """Move to the best state that this peer has heard of, and return its tip. For a peer that holds no state. An
        auxiliary peer moves even if its own tip outranks that state, since its own tip does not count."""
        best, lends = self.peer.view.best(self._now()), self.me.role is Role.AUXILIARY
        if best is not None and best != self.tip and (lends or best.outranks(self.tip)):
            self.move(best)
        return self.tip

    def forget_behind(self, cost: float = 0.0) -> float:
        """Do not ask for states that outrank this peer's for a while: no member could send one, and the attempt took
        `cost` seconds.

        Returns:
            After how many seconds it may ask again; infinity if no state was ignored.
        """
        now = self._now()
        return self._ask_at(self.peer.view.ignore(self.tip, now, cost)) - now

    def wait_for_room(self, seconds: float) -> float:
        """Do not ask for others' states for so many seconds, and rest: the run has no room for this peer before.
        Returns after how many seconds it may ask again."""
        now = self._now()
        until = self.peer.view.wait(now, seconds)
        return self._ask_at([until]) - now if until > now else self.forget_behind()

    def _ask_at(self, times: Sequence[float]) -> float:
        for at in times:
            asyncio.get_running_loop().call_at(at + LATER_SECONDS, self._tell_news)
        return min(times, default=math.inf)

    def rests(self, tip: Tip) -> bool:
        """Whether a peer whose state is `tip` should make no epoch for now, see `View.rests`."""
        return self.peer.view.rests(tip, self._now())

    def is_reached(self, reach: Reach) -> None:
        """Members reach this peer in this way from now on. Tells all members if that is a change."""
        if reach is not self.me.reach:
            self.peer.say(replace_struct(self.me, reach=reach), self._now())
            self._act()

    def _now(self) -> float:
        """The loop's time. Any thread may call this once the peer has started."""
        return (self._loop or asyncio.get_running_loop()).time()

    async def wait_for_those_behind(self, idle: float, longest: float, served_at: Callable[[], float]) -> list[Member]:
        """Wait until no connected member is behind this peer's state (`members_behind`), or the run continues from it:
        the next round is called, or others hold a better state.

        Args:
            idle: stop waiting after this many seconds in which no member has caught up or left, and none was sent the
                state.
            longest: stop waiting after this many seconds in all.
            served_at: returns when a member was last sent a chunk of the state, on the loop's clock.

        Returns:
            The members that are still behind if this peer has waited in vain; otherwise an empty list.
        """
        began = changed = self._now()
        tip, behind = self.tip, self.members_behind()
        for member in behind:  # this peer's knowledge of them may be old
            self.node.spawn(self.contacts.meet_peer(member.peer))
        while behind and self.tip == tip and not (self.called or self.missed or self.behind):
            until = min(began + longest, max(changed, served_at()) + idle)
            if self._now() >= until:
                return behind
            told = asyncio.ensure_future(self.contacts.seen()), asyncio.ensure_future(self.news())
            try:  # no event tells of lost members, so look every second
                await asyncio.wait(told, timeout=LOOK_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in told:
                    task.cancel()
            before, behind = behind, self.members_behind()
            if behind != before:
                changed = self._now()
        return []

    # -- samples

    async def report(self, report: msg.Progress) -> msg.Count:
        """Tell the coordinator how many samples this peer has since the tip. Returns how many all members have.

        Raises:
            Behind: if the coordinator is at a state that outranks this peer's.
            P2PError: if the coordinator cannot be asked.
            Rejected: if the run has other terms than this peer.
        """
        if not self.made:
            await self.contacts.check_terms()
        self._reported = report
        return await self._report(report)

    async def _report(self, report: msg.Progress) -> msg.Count:
        coordinator = self.peer.participant.coordinator()
        self._reported_to = (coordinator.key, report.tip)
        self._asked.append(coordinator.key)
        self.peer.doubts.asked(coordinator.key, began := self._now(), report.samples)
        said = self.peer.view.said(coordinator.key)
        try:
            answer = (await self._channel.ask(coordinator.key, report, self._request_timeout)).body
        finally:
            self._asked.remove(coordinator.key)
        if isinstance(answer, msg.Count):
            if report.samples:  # a first report may have come before the COMMIT of the epoch before
                self.contacts.answered(coordinator.key, self._now() - began)
            self.peer.coordinator_answered(coordinator.key, None, self._now())
            if answer.called and answer.tip == self.tip and not self.called:
                self.peer.is_called()
                self._act()
            return answer
        await self._heed(coordinator.key, report.tip, answer, said)
        is_heeded = not self.missed and not self.peer.view.ignores(coordinator.key, self._now())
        if isinstance(answer, msg.Hello) and answer.tip.outranks(self.tip) and is_heeded:
            raise Behind(f"the swarm is at epoch {answer.tip.epoch}, this peer at {self.tip.epoch}")
        return msg.Count(report.tip, report.samples, report.rate, 1, False)

    async def learn_of_round(self, timeout: float = TELL_SECONDS) -> bool:
        """Ask some members for the COMMIT of this tip's round, and believe what more than half of the answers say. This
        takes at most `timeout` seconds.

        Returns:
            Whether this peer has missed the round; then `average` fetches its result.
        """
        before, began = self.tip, self._now()
        view = self.peer.view
        reached = [k for k in view.others() if view.reaches(k) and view.keeps_state(k) and not view.ignores(k, began)]
        # Different members at each tip, as some may lie: nobody can choose its key so that it is always asked.
        in_order = iter(sorted(reached, key=lambda key: blake3(before.lineage + key).digest()))
        answers: list[msg.Commit] = []
        under_way: set[asyncio.Task[None]] = set()

        async def ask(key: bytes) -> None:
            with contextlib.suppress(P2PError, TimeoutError):
                answers.append(await self._channel.call(key, msg.After(before), msg.Commit, timeout))

        while self.tip == before and not self.missed and self._now() < began + timeout:
            # Others are asked in place of those that do not know it, such as members at this tip, or newcomers.
            for key in islice(in_order, MOST_ASKED - len(under_way) - len(answers)):
                under_way.add(self.node.spawn(ask(key)))
            if not under_way or len(answers) > MOST_ASKED // 2:
                self.peer.answered_after(answers, self._now())
                self._act()
            if not under_way:
                break
            _, under_way = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
        return self.missed

    def keep_redo_log(self) -> None:
        """Somebody downloads this peer's state, so it will want the rounds that follow."""
        self.peer.redo.want(self._now())

    async def _heed(self, key: bytes, tip: Tip, answer: object, said: Tip | None) -> None:
        """React to a coordinator's answer to a message about the state `tip`; `said` is where it had said to be before.
        ELSEWHERE says that another peer is the coordinator. HELLO says that the peer knows other members, or is at
        another state."""
        match answer:
            case msg.Elsewhere():
                await asyncio.wait([self.node.spawn(self.contacts.meet(answer.coordinator))], timeout=HEED_SECONDS)
            case msg.Hello() if answer.tip == tip or not self._channel.believes(answer.tip):
                await self.contacts.meet_peer(PeerID(key))
            case msg.Hello():
                self.peer.told(key, self.peer.view.newest(key, answer.tip, said), self._now())
                self._act()

    async def _report_again(self) -> None:
        """Repeat the last report, because another member counts the samples now."""
        try:
            if self._reported is not None and self._reported.tip == self.tip:  # the epoch has not ended meanwhile
                await self._report(self._reported)
        except (P2PError, AveragingError, TimeoutError) as error:
            log.debug("%r could not report: %s", self.node.peer_id, error)

    @property
    def can_replay(self) -> bool:
        """Whether this peer can replay rounds that it has missed: all that they average is in this run's rounds."""
        return self._result_bytes is not None

    def begin_loading(self) -> None:
        """This peer is about to load the run's state: from its first download on, it tells the members how long that
        takes (`loading`), until `end_loading`."""
        replays, timeout = self._result_bytes, self._request_timeout
        self.loading = Loading(self._channel, self.contacts, self.peer, replays, self._rate, timeout)

    async def reserve(self, state: Tip, holders: Sequence[PeerID], nbytes: int) -> bool:
        """The download of a state is about to begin, see `download_state`. If the round that follows the state has
        begun, this waits until members are past it.

        Args:
            state: the tip of the state.
            holders: members that hold the state.
            nbytes: how much will be downloaded.

        Returns:
            Whether that round has not begun yet, or this peer can replay it, or it counts as a member of that round.
        """
        assert self.loading is not None
        if await self.loading.reserve(state, holders, nbytes) or state == self.tip:
            return True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROUND_SECONDS):
                while any(self.peer.view.reaches(holder.key) for holder in holders) and not self._are_past(state):
                    await self.news()
        return False

    def _are_past(self, state: Tip) -> bool:
        """Whether a member is past that state, as far as this peer knows, or it may not ask for states now."""
        best = self.peer.view.best(self._now())
        return best is None or best.outranks(state)

    def end_loading(self) -> None:
        """This peer has loaded the state, or has given up."""
        if self.loading is not None:
            self._rate = self.loading.rate
            self.loading.close()
            self.loading = None

    @contextlib.contextmanager
    def watching(self, keys: Iterable[bytes]) -> Iterator[None]:
        """A context in which this peer waits for these peers. One that gives no sign of life is disconnected."""
        self._watching = list(keys)
        try:
            yield
        finally:
            self._watching = []

    async def news(self) -> None:
        """Return when the round of this tip is called, when the tip changes, or when this peer hears of a state that
        outranks its own."""
        await self._news.wait()

    # -- rounds

    async def average(self, contribution: Contribution, timeout: float) -> Outcome:
        """Take part in the next round and return when it is committed; the exchange's outputs then hold the average.

        Args:
            contribution: what this peer brings to the round.
            timeout: seconds until the call fails. If the contribution has a tip, they count from the last progress of
                the round.

        Raises:
            AveragingError: if there is no result within `timeout` seconds, or the round fails.
            Behind: if the swarm is not at `contribution.tip`.
            Rejected: if the run has other terms than this peer.
        """
        participant, started = self.peer.participant, self._now()
        participant.offer(contribution, self._measured.rates(self.node.transport.limit, started))
        sent, received = self.node.bytes_sent, self.node.bytes_received
        try:
            async with asyncio.timeout(timeout) as self._patience:
                self._timeout = timeout
                while (finished := participant.given.finished) is None:
                    await self._between_events()
            return replace(
                finished,
                matchmaking_seconds=finished.began - started,
                allreduce_seconds=self._now() - finished.began,
                bytes_sent=self.node.bytes_sent - sent,
                bytes_received=self.node.bytes_received - received,
            )
        except TimeoutError:
            where = "in a round" if participant.begin is not None else "waiting for one"
            peers, seconds = len(self.peer.view.connected()), self._now() - started
            raise AveragingError(f"no result within {seconds:.3g} s ({where}; {peers} members are connected)") from None
        finally:
            self._patience = None
            self._end_measuring()
            participant.withdraw()
            self._act()

    def _begin_measuring(self, begin: msg.Begin) -> None:
        """A round begins: measure the rates of links in it, unless it is too small for that."""
        self._end_measuring()
        if begin.starts[-1] * begin.chunk_elements * self.rules.element_bytes >= LEAST_BYTES:
            self._before = self._flows(key for key in begin.keys if key != self.me.key)

    def _end_measuring(self) -> None:
        """The round has ended: add the rates that it has shown. A round without a result counts as well: with these
        rates, the next plan may succeed."""
        if self._before:
            self._measured.add(self._before, self._flows(self._before), self._now())
            self._before = {}

    def _flows(self, keys: Iterable[bytes]) -> dict[bytes, Flow]:
        """What was delivered so far to each of these peers."""
        return {key: self.node.transport.delivered(PeerID(key)) for key in keys}

    async def _between_events(self) -> None:
        """Do the next step for the waiting input, and wait for the next event."""
        participant = self.peer.participant
        begin = participant.begin
        if begin is not None and self._timeout < begin.timeout + self._request_timeout:
            # In a round, the coordinator's time-out counts. It takes a while until this peer hears of its end.
            self._timeout = begin.timeout + self._request_timeout
            self._be_patient()
        if not self.made:
            await self.contacts.check_terms()
        if participant.given.error is not None:
            raise participant.given.error
        self._changed.clear()
        commit = participant.next_step(self._now())
        self._perform()
        if commit is not None:
            await self._fetch_result(commit)
        elif participant.given.finished is None and participant.given.error is None:
            await self._changed.wait()

    def rejoin(self) -> None:
        """The content of the JOIN has changed: send it again. Does nothing once the round has begun."""
        self.peer.participant.rejoin()
        self._act()

    def _progressed(self) -> None:
        """A round has made progress, so the time-out of a waiting `average` counts from now on. (It does not if the
        input has no tip: there the user has said how long the whole call may take.)"""
        self.peer.participant.progressed(self._now())
        self._be_patient()

    def _be_patient(self) -> None:
        given, patience = self.peer.participant.given.input, self._patience
        if patience is not None and not patience.expired() and given is not None and given.tip is not None:
            until = max(self.peer.participant.stands_since, self.peer.newcomers.told_until) + self._timeout
            if until > (patience.when() or 0.0):
                patience.reschedule(until)

    async def _fetch_result(self, commit: msg.Commit) -> None:
        """Get the result of a round that this peer has missed, or did not use. If no member sends it, the round is
        repeated. Raises `Behind` if a member holds a better state instead."""
        peer, given = self.peer, self.peer.participant.given.input
        assert given is not None
        is_missed = commit is peer.participant.at.missed
        exchange = peer.participant.recall(commit, self._now())
        fetched = exchange is None
        if exchange is None:
            try:
                exchange = await self._fetching.fetch_committed(
                    commit, lambda begin: given.open(begin, self._channel.notify, lambda key, reason: None)
                )
            except ResultLost as error:
                if is_missed:  # the members of the round may hold a better state by now
                    others = [PeerID(k) for k in commit.members if k != self.me.key and self._channel.is_connected(k)]
                    await asyncio.gather(*map(self.contacts.meet_peer, others))
                    peer.give_up_missed(self._now())
                else:
                    peer.move(commit.tip, self._now())  # this peer's state is still there
                self._act()
                if self.behind is not None:
                    raise Behind(f"{error}. Others hold a later state") from error
                log.warning("%s: the epoch is repeated", error)
                return
        peer.has_result(exchange, commit, self._now(), missed=fetched)
        self._act()
        if fetched:  # by now the others may have gone on, and this peer may believe that it coordinates
            others = [PeerID(k) for k in commit.members if k != self.me.key and self._channel.is_connected(k)]
            for other in others[:MOST_ASKED]:
                self.node.spawn(self.contacts.meet_peer(other))

    # -- messages

    def _handle(self, peer: PeerID, message: Any, buffers: Buffers) -> Answer | Awaitable[Answer]:
        if self.gate is not None:
            self.gate.require(peer, *parts_for(message, averages=self._averages))
        tip = getattr(message, "tip", None)
        require(tip is None or self.believes(tip), "a tip with a pin that is not known here")
        if isinstance(message, msg.Hello | msg.Progress | msg.Join | msg.Call | msg.Moves | msg.Begin):
            self._require_to_be_in_the_run()
        match message:
            case msg.Hello():
                return self.contacts.on_hello(peer, message)
            case msg.Describe():
                return self.contacts.on_describe(peer, buffers[0] if buffers else b"")
            case msg.Leave():
                self._left(peer.key)
                return None
            case msg.Join():
                return self._on_join(peer, message, buffers)
            case msg.Progress() if not message.loading:
                return self._at_tip(peer, message, buffers)
        return self._receive(peer, message, buffers)

    def _require_to_be_in_the_run(self) -> None:
        if self._retired:
            raise Unavailable("this peer has left the run")

    def _receive(self, peer: PeerID, message: Any, buffers: Buffers) -> Answer:
        try:
            return self.peer.receive(peer.key, message, buffers, self._now())
        finally:
            self._act()

    def _on_join(self, peer: PeerID, join: msg.Join, buffers: Buffers) -> Answer | Awaitable[Answer]:
        require(join.sender.key == peer.key, "JOIN in the name of another peer")
        if join.terms.difference(self.peer.terms) is not None:
            return self.peer.hello()  # HELLO tells which of the two gives way
        self.contacts.spoke(join.sender)
        self.peer.expect_join(peer.key, join)
        return self._at_tip(peer, join, buffers)

    def _at_tip(self, peer: PeerID, message: msg.Join | msg.Progress, buffers: Buffers) -> Answer | Awaitable[Answer]:
        """Receive a message about a tip. If that is the next tip, first wait until this peer is there."""
        if message.tip.epoch == self.tip.epoch + 1:
            return self._when_at_tip(peer, message, [memoryview(bytes(buffer)) for buffer in buffers])
        return self._receive(peer, message, buffers)

    async def _when_at_tip(self, peer: PeerID, message: msg.Join | msg.Progress, buffers: Buffers) -> Answer:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_FOR_TIP):
                while self.tip != message.tip:
                    await self.news()
        self._require_to_be_in_the_run()  # still
        return self._receive(peer, message, buffers)

    def _undecodable(self, peer: PeerID, reason: str) -> None:
        self.peer.undecodable(peer.key, reason)
        self._act()

    def _left(self, key: bytes) -> None:
        """That peer leaves the run, or its membership of the closed run has ended."""
        self.contacts.left(key)
        self._lost(key)

    def _lost(self, key: bytes) -> None:
        known = self.contacts.lose(key)
        self.peer.lost(key, known, self._now())
        self._act()

    # -- actions

    def _act(self) -> None:
        """Something has happened: perform the machine's actions, and wake the callers that wait."""
        self._perform()
        peer, participant = self.peer, self.peer.participant
        if peer.leading is not None:
            self.contacts.losses.look(peer.leading)
        if peer.news != self._news_told:
            self._tell_news()
        if peer.changes != self._changes_seen:
            self._changes_seen = peer.changes
            if self._reported is not None and self._reported_to != (participant.coordinator().key, self.tip):
                self.node.spawn(self._report_again())
        if participant.given.input is not None:
            self._be_patient()
            if participant.begin is None or participant.begin is not self._round or participant.given.error is not None:
                self._round = participant.begin  # chunks of a round do not wake the call that waits for its end
                self._changed.set()

    def _tell_news(self) -> None:
        self._news_told = self.peer.news
        waited_for, self._news = self._news, asyncio.Event()
        waited_for.set()
        self._changed.set()

    def _perform(self) -> None:
        """Perform the machine's actions in order, including those that follow from messages to this peer itself."""
        if self._performing:
            return
        self._performing = True
        try:
            while self.peer.out:  # if one action fails, the next call performs the others
                self._do(self.peer.out.pop(0))
        finally:
            self._performing = False
        self._set_timer()

    def _do(self, action: Action) -> None:
        match action:
            case Send():
                if isinstance(action.message, msg.Broken):
                    broken = action.message
                    log.info("%r cannot go on with %r: %s", self.node.peer_id, PeerID(broken.peer), broken.reason)
                self._channel.notify(action.to, action.message, action.buffers, action.name)
            case Ask(message=msg.Join() as join):
                self.node.spawn(self._join(action.to[0], join, action.buffers))
            case Ask(message=msg.Survey() | msg.Repair() as request):
                for key in action.to:
                    self.node.spawn(self._ask(key, request, action.buffers))
            case Enter():
                self.node.spawn(self._enter(action.begin))
            case FetchChunks():
                self._stop_fetching(action.exchange.book.begin.round)
                task = self.node.spawn(self._fetch(action))
                self._fetches[task] = action.exchange.book.begin.round
                task.add_done_callback(self._fetches.pop)
            case Cancel():
                self._stop_fetching(action.round)
                for carries in (msg.Carries.PART, msg.Carries.RESULT):
                    self.node.transport.cancel(action.round + carries.value)
            case Greet():
                self.node.spawn(self._meet(action))

    def _stop_fetching(self, round_id: bytes) -> None:
        for task in [task for task, fetched in self._fetches.items() if fetched == round_id]:
            task.cancel()

    async def _fetch(self, action: FetchChunks) -> None:
        failed = await self._fetching.fetch(action.exchange, action.sources)
        self.peer.participant.fetched(action.exchange, failed)
        self._act()

    async def _meet(self, action: Greet) -> None:
        if action.instead_of:
            await self.contacts.meet(action.member)
            self.peer.participant.rejoin(action.instead_of)  # `action.member` may be out of reach
            self._act()
        else:
            await self.contacts.meet_peer(action.member.peer)

    async def _ask(self, key: bytes, request: msg.Survey | msg.Repair, buffers: Sequence[Any]) -> None:
        """Ask a member on behalf of this peer as the coordinator."""
        answer: object
        timeout = self.peer.participant.silence.patience.of(key, self._chunk_timeout, self._now())
        try:
            answer = (await self._channel.ask(key, request, timeout, buffers)).body
        except (P2PError, TimeoutError) as error:
            answer = error
        self.peer.answered(key, request, answer, self._now())
        self._act()

    async def _join(self, key: bytes, join: msg.Join, buffers: Sequence[Any]) -> None:
        """Send this peer's JOIN to the coordinator with that key."""
        participant, coordinator = self.peer.participant, PeerID(key)
        self.peer.doubts.asked(key, self._now())
        said = self.peer.view.said(key)
        try:
            answer = (await self._channel.ask(key, join, self._request_timeout, buffers)).body
        except TimeoutError:
            participant.rejoin(key)  # `Contacts` notices if the coordinator is gone
        except Unavailable:
            self._lost(key)
        except Refused as error:
            if participant.refused(key, str(error)):
                who = f"{coordinator!r} refuses this peer, {self.me.peer!r}"
                log.warning("%s: %s. It trains with members that accept it", who, error)
            self.peer.members_changed(self._now())
        except P2PError as error:
            log.debug("%r could not join %r: %s", self.me.peer, coordinator, error)
            self._lost(key)
        else:
            if isinstance(answer, msg.Joined):
                self.peer.coordinator_answered(key, answer, self._now())
                self._act()
                return
            await self._heed(key, join.tip, answer, said)
            if isinstance(answer, msg.Hello) and answer.tip == join.tip:
                participant.introduced(key)  # now the coordinator knows all members that this peer knows
            else:
                await asyncio.sleep(DECLINED_SECONDS)
            participant.rejoin(key)
        self._act()

    async def _enter(self, begin: msg.Begin) -> None:
        """Connect to the members with which this peer exchanges chunks, and wait until the input can be read."""
        participant, node = self.peer.participant, self.node
        given = participant.given.input
        reduces = {m.key: some < more for m, (some, more) in zip(begin.members, pairwise(begin.starts), strict=True)}
        others = begin.members if reduces[self.me.key] else [m for m in begin.members if reduces[m.key]]
        missing = [m for m in others if m.addresses and not node.is_connected(m.peer)]
        for member in missing:
            self._channel.learn(member)
        # A member that could not be reached before may be there now. Try briefly: all members wait for this peer.
        lost = self.peer.view.lost
        patience = {member.key: AGAIN_SECONDS if member.key in lost else self._chunk_timeout for member in missing}
        failed = await self._channel.connect(patience)
        await self._channel.introduce_all([key for key in begin.keys if key not in patience], self._chunk_timeout)
        if participant.begin is not begin:
            return  # the round has ended meanwhile
        for key, reason in failed.items():
            participant.complain(key, reason, fault=False)
        if given is not None and given.prepare is not None:
            participant.ask_to_wait()
            self._act()
            await given.prepare()
        self._begin_measuring(begin)
        participant.started(begin, node.transport.leases)
        self._act()

    # -- time

    def _set_timer(self) -> None:
        wake_at = None if self._stopped else self.peer.wake_at()
        if wake_at != self._wake_at:
            if self._timer is not None:
                self._timer.cancel()
            self._wake_at, self._timer = wake_at, None
            if wake_at is not None:
                self._timer = asyncio.get_running_loop().call_at(max(wake_at, self._now()), self._tick, wake_at)

    def _tick(self, due: float) -> None:
        self._timer = self._wake_at = None
        now = max(due, self._now())  # a loop may call early, by the resolution of its clock
        if now - due > 2 * LOOK_SECONDS:
            self.peer.stood_still(now)
        self.peer.tick(now)
        self._act()

    def _look_how_it_is_reached(self) -> None:
        """Tell members whether this peer is relayed. A peer that listens only at relays is relayed until all its
        connections to members are direct, or one connection to another such peer is direct. The latter shows that holes
        can be punched in the routers of both."""
        is_direct = not self.me.listens_at_relays
        if not is_direct:
            others = [member for member in self.peer.view.connected() if member.key != self.me.key]
            direct = [member for member in others if self.node.transport.is_direct(member.peer)]
            is_direct = any(m.listens_at_relays for m in direct) or len(direct) == len(others) > 0
        self.is_reached(Reach.DIRECT if is_direct else Reach.RELAYED)

    async def _keep_looking(self) -> None:
        """Check every second whether the round makes progress, and more often whether the awaited peers are alive."""
        looked = self._now()
        while True:
            asleep, computed = self._now(), time.process_time()
            await asyncio.sleep(ASK_SECONDS)
            now = self._now()
            if now - asleep > 2 * ASK_SECONDS:
                self.contacts.forget_watches()
                if time.process_time() - computed > BUSY * (now - asleep):
                    self.contacts.was_held(now - asleep)
            if now - asleep > 2 * LOOK_SECONDS:
                self.peer.stood_still(now)
            awaited = self.peer.awaited(now) or list(self._asked)
            suspected, cost = self.peer.suspected(now), self._cost_of_being_left_out()
            self.contacts.look_after([*awaited, *self._watching], suspected, cost, now)
            if now - looked < LOOK_SECONDS:
                continue
            looked = now
            if now - asleep > LOOK_SECONDS + self._chunk_timeout:
                # The process was stopped, or the machine asleep. The others may have continued without this peer: find
                # them before this peer begins a round without them.
                log.info("%r stood still for %.1f s", self.node.peer_id, now - asleep)
                self.peer.settle(now)
                self.contacts.look(dial=True)
            self._look_how_it_is_reached()
            self.contacts.get_to_know()
            connected = len(self.peer.view.connected())
            least = max(2, self.rules.min_group) if self.peer.participant.given.input is not None else 0
            if connected < least or (connected == 1 and self.peer.view.lost):
                self.contacts.look()
            self.peer.look(lambda key: self.node.transport.moved(PeerID(key)), now)
            self._act()

    def _cost_of_being_left_out(self) -> float:
        """For how many seconds each of the others would have to wait for a member to cost all of them as much as the
        member if it is left out: then it downloads the result. As far as the rate of this peer's line is known, which
        is as good a guess as any."""
        rate = self.peer.participant.given.rates.own or SLOW_RATE
        others = max(1, len(self.peer.view.connected()) - 1)
        return self._round_bytes / rate / others

"""One peer's part in the rounds of a run: joins them, goes through them, commits them, and coordinates when it is its turn.

This is a driver: what is decided, is decided in `Membership`, `Coordinator`, `Participant` and `Book`. It lives on the
node's loop, and imports no torch: the bytes are the `Exchange`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from shoal.averaging.book import RuleBroken, root_of
from shoal.averaging.coordinator import Coordinator, Phase, Rules
from shoal.averaging.directory import Directory
from shoal.averaging.errors import AveragingError, Behind, Rejected
from shoal.averaging.lead import Lead
from shoal.averaging.member import Member, Role
from shoal.averaging.membership import Membership
from shoal.averaging.messages import (
    MAX_GATHER_BYTES,
    Abort,
    Begin,
    Broken,
    Call,
    Commit,
    Committed,
    Count,
    Digests,
    Done,
    Elsewhere,
    Fetch,
    Have,
    Hello,
    Join,
    Joined,
    Leave,
    Message,
    Orphaned,
    Part,
    Ping,
    Pong,
    Progress,
    Repair,
    Result,
    Survey,
)
from shoal.averaging.neighbourhood import Neighbourhood
from shoal.averaging.participant import Participant
from shoal.averaging.tip import Tip
from shoal.p2p.errors import P2PError, Refused
from shoal.p2p.identity import PeerID
from shoal.p2p.node import Answer, Node, Reply, Service

if TYPE_CHECKING:
    from shoal.averaging.exchange import Exchange

log = logging.getLogger(__name__)

DEFAULT_CHUNK_TIMEOUT = 5.0  # `next_chunk_timeout` when none is given, in seconds
PING_SECONDS = 1.0
JOIN_TIMEOUT = 10.0
WAIT_FOR_TIP = 2.0  # how long a message about a tip to come is kept: COMMIT reaches members at different times
SETTLE_SECONDS = 1.0  # before a run's first commit, BEGIN waits until nobody new was found for so long
MAX_EARLY = 512  # messages of a round whose BEGIN has not come yet
FETCHES = 8  # chunks fetched at a time

SendTo = Callable[[Sequence[bytes], Any, Sequence[memoryview]], None]
Fault = Callable[[bytes, str], None]


@dataclass(frozen=True, slots=True)
class Contribution:
    """What a peer brings to a round.

    Attributes:
        weight: of its input in the mean, at least 0 (then it only receives).
        schema: hash of the layout, 32 bytes; must be equal in the round.
        open: makes the exchange of a round: `open(begin, send, fault)`.
        patience: how many seconds to wait for others.
        prepare: awaited between BEGIN and the first byte, if given: may wait for the input to be free.
        gathered: bytes that all members of the round get; at most 64 KiB.
        tip: the state that the input was made from: a round of any other tip raises `Behind`. None: of any tip.
        options: that must be equal in the run, by name.
        machine: names all on which the bits of a local step depend.
        state: digest of the local state, or b"".
    """

    weight: float
    schema: bytes
    open: Callable[[Begin, SendTo, Fault], Exchange]
    patience: float = 15.0
    prepare: Callable[[], Awaitable[None]] | None = None
    gathered: bytes = b""
    tip: Tip | None = None
    options: dict[str, str] = field(default_factory=dict)
    machine: str = ""
    state: bytes = b""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A round that was committed.

    Attributes:
        begin: its BEGIN.
        commit: its COMMIT.
        gathered: what the members brought, by key.
        missed: whether this peer was not in it and fetched the result afterwards.
        matchmaking_seconds: from the call of `average` to BEGIN.
        allreduce_seconds: from BEGIN to COMMIT.
        join_to_begin_seconds: from the last JOIN to BEGIN; None on members that did not coordinate.
        bytes_sent, bytes_received: payload bytes of this peer in the round.
    """

    begin: Begin
    commit: Commit
    gathered: dict[bytes, bytes]
    missed: bool
    matchmaking_seconds: float
    allreduce_seconds: float
    join_to_begin_seconds: float | None
    bytes_sent: int
    bytes_received: int

    @property
    def coordinator(self) -> PeerID:
        return PeerID(self.begin.ballot.coordinator)


@dataclass
class _Attempt:
    """A call of `average` that is under way."""

    contribution: Contribution
    started: float
    sent: int  # the node's counters when the round began
    received: int
    joined: tuple[bytes, Tip] | None = None  # where, and for which tip
    began: float = 0.0
    exchange: Exchange | None = None
    gathered: dict[bytes, bytes] = field(default_factory=dict)
    outcome: Outcome | None = None
    error: AveragingError | None = None
    progressed: tuple[int, float] = (0, 0.0)  # the exchange's counter, and since when it stands there


class Swarm:
    """The rounds of one run, for one peer.

    Args:
        node: this peer.
        directory: where the members of the run are listed.
        run_id: names the run.
        me: this peer as a member.
        rules: when a round begins; the same for all members.
        chunk_timeout: seconds of silence after which a member that holds up a round is left out.
        on_commit: called with every commit that this peer follows.
    """

    def __init__(
        self,
        node: Node,
        directory: Directory,
        run_id: str,
        me: Member,
        rules: Rules,
        *,
        chunk_timeout: float | None = None,
        on_commit: Callable[[Commit], None] = lambda commit: None,
    ) -> None:
        self.node = node
        self.me = me
        self.rules = rules
        self.chunk_timeout = DEFAULT_CHUNK_TIMEOUT if chunk_timeout is None else chunk_timeout
        self.participant = Participant(me.key, Tip.genesis(run_id))
        self.membership = Membership(run_id, me)
        self.service = Service(f"averaging/{run_id}", Message)
        self.neighbourhood = Neighbourhood(
            node,
            self.service,
            self.membership,
            directory,
            tip=lambda: self.tip,
            changed=self._review,
            heard=self._heard,
        )
        self.called = False  # whether the coordinator has called the round of this tip
        self.behind: Tip | None = None  # a state that outranks ours, of which a member told
        self._on_commit_callback = on_commit
        self._lead: Lead | None = None
        self._attempt: _Attempt | None = None
        self._last: Exchange | None = None  # of the last commit: serves those that missed it
        self._last_begin: Begin | None = None
        self._early: list[tuple[PeerID, Part | Result, Sequence[memoryview]]] = []
        self._changed = asyncio.Event()
        self._tip_waiters: list[asyncio.Future[None]] = []
        self._report: Progress | None = None
        self._reported_to: tuple[bytes, Tip] | None = None
        self._count: Count | None = None
        self._settled_at = 0.0
        self._met = 1
        self._pinged: set[bytes] = set()
        self._stop_listening: Callable[[], None] = lambda: None

    @property
    def tip(self) -> Tip:
        return self.participant.tip

    # -- life

    async def start(self) -> None:
        """Serve, be listed, and meet the members that are there."""
        self._settled_at = self._now() + SETTLE_SECONDS
        self._stop_listening = self.node.on_lost(lambda peer, reason: self._lost(peer.key))
        self.node.serve(self.service, self._handle)
        await self.neighbourhood.start()
        self._watcher = self.node.spawn(self._watch())

    def stop(self) -> None:
        """Leave the run."""
        others = [member.peer for member in self.neighbourhood.connected() if member.key != self.me.key]
        self.node.notify(others, self.service, Leave())
        self.node.stop_serving(self.service)
        self._stop_listening()
        self._watcher.cancel()
        if self._lead is not None:
            self._lead.stop()

    def move(self, tip: Tip) -> None:
        """Be at another state: it was downloaded."""
        self.participant.move(tip)
        self._new_tip()

    # -- progress

    async def report(self, samples: float, rate: float) -> Count:
        """Tell the coordinator this peer's samples since the tip, and how many it makes per second; returns what all
        members have. Raises `Behind` if the coordinator is at a state that outranks ours, P2PError if it can't be
        asked."""
        self._report = Progress(self.tip, samples, rate)
        return await self._send_report()

    async def _send_report(self) -> Count:
        report, coordinator = self._report, self.neighbourhood.coordinator()
        assert report is not None
        self._reported_to = (coordinator.key, report.tip)
        answer = await self.node.call_for_buffers(coordinator.peer, self.service, report, timeout=JOIN_TIMEOUT)
        match answer.body:
            case Count():
                self._count = answer.body
                self.called = self.called or (answer.body.called and answer.body.tip == self.tip)
                return answer.body
            case Elsewhere():
                await self.neighbourhood.meet(answer.body.coordinator)
            case Hello():
                self._heard(answer.body.tip)
                if answer.body.tip.outranks(self.tip):
                    raise Behind(f"the swarm is at epoch {answer.body.tip.epoch}, this peer at {self.tip.epoch}")
        return Count(report.tip, report.samples, report.rate, 1, False)

    # -- rounds

    async def average(self, contribution: Contribution, timeout: float) -> Outcome:
        """Take part in the next round and return when it is committed; the exchange's outputs then hold the average.

        Raises AveragingError with the reason if there is no result within `timeout` seconds, `Behind` if the swarm is
        not at `contribution.tip`.
        """
        if self._attempt is not None:
            raise AveragingError("this peer is in a round already")
        if len(contribution.gathered) > MAX_GATHER_BYTES:
            raise ValueError(
                f"gather is {len(contribution.gathered)} bytes long; at most {MAX_GATHER_BYTES} are allowed"
            )
        node = self.node
        attempt = self._attempt = _Attempt(contribution, self._now(), node.bytes_sent, node.bytes_received)
        try:
            async with asyncio.timeout(timeout):
                while attempt.outcome is None:
                    self._changed.clear()
                    if attempt.error is not None:
                        raise attempt.error
                    if self.participant.begin is None:
                        await self._between_rounds(attempt)
                    if attempt.outcome is None and attempt.error is None:
                        await self._changed.wait()
                return attempt.outcome
        except TimeoutError:
            where = "in a round" if self.participant.begin is not None else "waiting for one"
            peers = len(self.neighbourhood.connected())
            raise AveragingError(f"no result within {timeout:g} s ({where}; {peers} members are connected)") from None
        finally:
            if attempt.outcome is None and self.participant.begin is not None:
                self._complain(self.me.key, "it gave up", fault=False)
                self._leave_round()
            self._attempt = None
            self._early.clear()

    async def _between_rounds(self, attempt: _Attempt) -> None:
        """Not in a round: fetch the one that was missed, or join the next."""
        wanted, commit = attempt.contribution.tip, self.participant.commit
        if wanted is not None and wanted != self.tip:
            if commit is None or commit.tip != wanted:
                raise Behind("the swarm has gone on from the state that this input was made from")
            await self._fetch_committed(attempt, commit)
            return
        if wanted is not None and self.behind is not None and self.behind.outranks(self.tip):
            raise Behind(f"the swarm is at epoch {self.behind.epoch}, this peer at {self.tip.epoch}")
        coordinator = self.neighbourhood.coordinator()
        if attempt.joined != (coordinator.key, self.tip):
            attempt.joined = (coordinator.key, self.tip)
            self.node.spawn(self._join(attempt, coordinator))

    async def _join(self, attempt: _Attempt, coordinator: Member) -> None:
        given = attempt.contribution
        tip = self.tip
        join = Join(
            tip=tip,
            sender=self.me,
            weight=given.weight,
            schema=given.schema,
            options=given.options,
            machine=given.machine,
            state=given.state,
            attempt=self.participant.attempt,
            patience=given.patience,
        )
        buffers = [given.gathered] if given.gathered else []
        try:
            answer = await self.node.call_for_buffers(
                coordinator.peer, self.service, join, timeout=JOIN_TIMEOUT, buffers=buffers
            )
        except Refused as error:
            attempt.error = Rejected(f"the run refuses this peer: {error}")
        except (P2PError, TimeoutError):
            self._lost(coordinator.key)
        else:
            if isinstance(answer.body, Joined):
                return
            attempt.joined = None
            if isinstance(answer.body, Elsewhere):
                await self.neighbourhood.meet(answer.body.coordinator)
            elif isinstance(answer.body, Hello):
                self._heard(answer.body.tip)
            # The two views or tips differ, and are about to be exchanged; asking at once again would only spin.
            await asyncio.sleep(0.05)
        self._changed.set()

    async def _fetch_committed(self, attempt: _Attempt, commit: Commit) -> None:
        """Get the average of a round that went on without this peer, from those who were in it."""
        reasons = []
        for key in commit.members:
            if key == self.me.key or not self.node.is_connected(PeerID(key)):
                continue
            try:
                answer = await self.node.call(
                    PeerID(key), self.service, Digests(commit.round), Committed, timeout=self.chunk_timeout
                )
                if answer.begin.round != commit.round or root_of(answer.digests) != commit.root:
                    raise RuleBroken("its chunks are not those that were committed")
                exchange = attempt.contribution.open(answer.begin, self._send, lambda key, reason: None)
                await self._fetch(exchange, [(key, chunk, digest) for chunk, digest in enumerate(answer.digests)])
            except (P2PError, RuleBroken, TimeoutError) as error:
                reasons.append(f"{PeerID(key)!r}: {error}")
                continue
            attempt.began = self._now()
            self._last, self._last_begin = exchange, answer.begin
            attempt.outcome = self._outcome(attempt, answer.begin, commit, missed=True)
            return
        raise Behind(f"the round of epoch {commit.tip.epoch} was missed, and nobody has its result any more: {reasons}")

    def _outcome(self, attempt: _Attempt, begin: Begin, commit: Commit, *, missed: bool) -> Outcome:
        lead = self._lead if self._lead is not None and self._lead.coordinator.begin == begin else None
        return Outcome(
            begin=begin,
            commit=commit,
            gathered=attempt.gathered,
            missed=missed,
            matchmaking_seconds=attempt.began - attempt.started,
            allreduce_seconds=self._now() - attempt.began,
            join_to_begin_seconds=lead.join_to_begin if lead is not None else None,
            bytes_sent=self.node.bytes_sent - attempt.sent,
            bytes_received=self.node.bytes_received - attempt.received,
        )

    # -- messages

    def _handle(self, peer: PeerID, message: Any, buffers: Sequence[memoryview]) -> Answer | Awaitable[Answer]:
        match message:
            case Part() | Result():
                self._on_chunk(peer, message, buffers)
                return None
            case Done():
                if self._lead is not None and self._lead.coordinator.begin is not None:
                    self._lead.done(peer, message)
                return None
            case Progress():
                return self._on_progress(peer, message)
            case Join():
                return self._on_join(peer, message, bytes(buffers[0]) if buffers else b"")
            case Begin():
                self._on_begin(peer, message, buffers)
                return None
            case Orphaned():
                self._on_orphaned(peer, message.begin, buffers)
                return None
            case Survey():
                return self._on_survey(peer, message, buffers)
            case Fetch() | Digests():
                return self._on_fetch(message)
            case Hello():
                return self.neighbourhood.on_hello(peer, message)
            case Ping():
                return Pong()
        self._on_notice(peer, message)
        return None

    def _on_notice(self, peer: PeerID, message: Any) -> None:
        match message:
            case Call():
                if message.tip == self.tip:
                    self.called = True
                    self._changed.set()
            case Repair():
                self._on_repair(peer, message)
            case Commit():
                self._on_commit(message)
            case Broken():
                if self._lead is not None and _round_of(self._lead.coordinator) == message.round:
                    self._lead.broken(peer, message)
            case Abort():
                if self.participant.begin is not None and self.participant.begin.round == message.round:
                    self._fail(AveragingError(f"the round was ended by {peer!r}: {message.reason}"))
            case Elsewhere():
                self.node.spawn(self.neighbourhood.meet(message.coordinator))
            case Leave():
                self._lost(peer.key)
            case _:
                raise Refused(f"{type(message).__name__} is an answer, and nothing was asked")

    # -- as coordinator

    async def _on_progress(self, peer: PeerID, report: Progress) -> Answer:
        standing = await self._standing(peer, report.tip)
        if standing is not None:
            return standing
        return self._leading().progress(peer, report)

    async def _on_join(self, peer: PeerID, join: Join, gathered: bytes) -> Answer:
        if join.sender.key != peer.key:
            raise Refused("JOIN in the name of another peer")
        if len(gathered) > MAX_GATHER_BYTES:
            raise Refused(f"gather is {len(gathered)} bytes long; at most {MAX_GATHER_BYTES} are allowed")
        if not join.weight < float("inf"):
            raise Refused(f"a weight of {join.weight}")
        self.node.learn(peer, join.sender.multiaddrs())
        self.neighbourhood.spoke(peer, join.sender)
        standing = await self._standing(peer, join.tip)
        if standing is not None:
            return standing
        lead = self._leading()
        for other in [*lead.coordinator.joins.values()][:1]:
            _check_equal(join, other)
        lead.join(peer, join, gathered)
        return Joined(self.tip)

    async def _standing(self, peer: PeerID, tip: Tip) -> Answer:
        """None if this peer coordinates for that tip; else what to answer instead."""
        if tip != self.tip and not self.tip.outranks(tip):
            await self._wait_for_tip(tip)
        if tip != self.tip:
            self._heard(tip)
            return self.neighbourhood.hello()
        if self._lead is not None and not self._lead.over:
            return None
        coordinator = self.neighbourhood.coordinator()
        return None if coordinator.key == self.me.key else Elsewhere(coordinator)

    async def _wait_for_tip(self, tip: Tip) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + WAIT_FOR_TIP
        while self.tip != tip and loop.time() < until:
            waiter: asyncio.Future[None] = loop.create_future()
            self._tip_waiters.append(waiter)
            await asyncio.wait([waiter], timeout=until - loop.time())

    def _leading(self) -> Lead:
        """This peer's coordination of its tip, begun if need be."""
        if self._lead is None or self._lead.over:
            settled = self._settled_at if self.tip.epoch == 0 else 0.0
            veterans = frozenset(self.participant.commit.members) if self.participant.commit is not None else frozenset()
            self._follow_lead(Coordinator(self.me.key, self.tip, self.rules, settled, veterans))
        assert self._lead is not None
        return self._lead

    def _follow_lead(self, coordinator: Coordinator) -> None:
        if self._lead is not None:
            self._lead.stop()
        self._lead = Lead(coordinator, self.node, self.service, self.neighbourhood.connected, self.chunk_timeout)
        self._lead.members_changed()

    # -- as member

    def _on_begin(self, peer: PeerID, begin: Begin, buffers: Sequence[memoryview]) -> None:
        try:
            self._enter_round(peer, begin, buffers, relayed=False)
        except RuleBroken as error:
            # The coordinator waits for this peer now: it must hear that it waits in vain.
            self.node.notify([peer], self.service, Broken(begin.round, self.me.key, False, str(error)[:256]))
            raise Refused(str(error)) from error

    def _enter_round(self, peer: PeerID, begin: Begin, buffers: Sequence[memoryview], *, relayed: bool) -> None:
        attempt = self._attempt
        joined = attempt is not None and attempt.outcome is None
        self.participant.follow_begin(peer.key, begin, joined=joined, relayed=relayed)
        assert attempt is not None
        try:
            if attempt.contribution.tip not in (None, begin.tip):
                raise RuleBroken("BEGIN of a state that this peer's input was not made from")
            attempt.gathered = _gathered.decode(buffers[0]) if buffers else {}
            attempt.exchange = attempt.contribution.open(begin, self._send, self._fault)
        except (RuleBroken, msgspec.MsgspecError) as error:
            self.participant.leave()
            raise RuleBroken(str(error)) from error
        attempt.began = self._now()
        attempt.progressed = (0, attempt.began)
        self._last = self._last_begin = None  # its memory is written again
        self.node.spawn(self._enter(attempt, begin))

    async def _enter(self, attempt: _Attempt, begin: Begin) -> None:
        """Connect to the reducers, then let the bytes flow."""
        missing = [m for m in begin.members if m.addresses and not self.node.is_connected(m.peer)]
        for member in missing:
            self.node.learn(member.peer, member.multiaddrs())
        results = await asyncio.gather(
            *(self.node.connect(member.peer, self.chunk_timeout) for member in missing), return_exceptions=True
        )
        for member, result in zip(missing, results, strict=True):
            if isinstance(result, P2PError):
                self._complain(member.key, str(result), fault=False)
            elif isinstance(result, BaseException):
                raise result
        if attempt.contribution.prepare is not None:
            await attempt.contribution.prepare()
        if attempt.exchange is None or self.participant.begin is not begin:
            return
        attempt.exchange.start()
        early, self._early = self._early, []
        for peer, message, buffers in early:
            if message.round == begin.round:
                try:
                    self._on_chunk(peer, message, buffers)
                except Refused as error:
                    log.warning("%r refused a chunk of %r: %s", self.node.peer_id, peer, error)
        self._check_done()

    def _on_chunk(self, peer: PeerID, message: Part | Result, buffers: Sequence[memoryview]) -> None:
        attempt, begin = self._attempt, self.participant.begin
        if attempt is None or begin is None or begin.round != message.round:
            if self.participant.commit is not None and self.participant.commit.round == message.round:
                return  # late, from a member that was left out
            if attempt is None or begin is not None or len(self._early) >= MAX_EARLY:
                raise Refused("this peer is not in that round")
            self._early.append((peer, message, buffers))  # it overtook BEGIN
            return
        assert attempt.exchange is not None
        if peer.key in attempt.exchange.book.out:
            return
        try:
            if isinstance(message, Part):
                attempt.exchange.part(peer.key, message.chunk, buffers)
            else:
                attempt.exchange.result(peer.key, message.chunk, buffers)
        except RuleBroken as error:
            self._fault(peer.key, str(error))
            raise Refused(str(error)) from error
        self._check_done()

    def _check_done(self) -> None:
        attempt, participant = self._attempt, self.participant
        if attempt is None or attempt.exchange is None or participant.begin is None or participant.ballot is None:
            return
        if attempt.exchange.book.complete and participant.done != participant.ballot:
            ballot = participant.was_complete()
            done = Done(participant.begin.round, ballot, attempt.exchange.book.root())
            self.node.notify([PeerID(ballot.coordinator)], self.service, done)

    def _on_survey(self, peer: PeerID, survey: Survey, buffers: Sequence[memoryview]) -> Have:
        commit = self.participant.commit
        if commit is not None and commit.round == survey.round:
            return Have(survey.ballot, (), None, (), None, commit)
        try:
            if self.participant.begin is None and survey.begin is not None and survey.begin.round == survey.round:
                self._enter_round(peer, survey.begin, buffers, relayed=True)
            self.participant.follow_survey(peer.key, survey)
        except RuleBroken as error:
            raise Refused(str(error)) from error
        attempt = self._attempt
        if attempt is None or attempt.exchange is None:
            raise Refused("this peer has left the round")
        attempt.exchange.put_out(survey.out)
        book = attempt.exchange.book
        digests = tuple(book.digests) if book.receives[self.me.key] else ()
        out = tuple(book.out)
        return Have(survey.ballot, digests, self.participant.done, out, self.participant.repair, None)

    def _on_repair(self, peer: PeerID, repair: Repair) -> None:
        attempt = self._attempt
        try:
            self.participant.follow_repair(peer.key, repair)
            if attempt is None or attempt.exchange is None:
                raise RuleBroken("this peer has left the round")
            sources = attempt.exchange.repair(repair)
        except RuleBroken as error:
            raise Refused(str(error)) from error
        if sources:
            self.node.spawn(self._fetch_for_repair(attempt, [(s.owner, s.chunk, s.digest) for s in sources]))
        self._check_done()

    async def _fetch_for_repair(self, attempt: _Attempt, wanted: list[tuple[bytes, int, bytes]]) -> None:
        assert attempt.exchange is not None
        try:
            await self._fetch(attempt.exchange, wanted)
        except (P2PError, RuleBroken, TimeoutError) as error:
            if self.participant.begin is not None:
                self._complain(self.me.key, f"it could not fetch what it misses: {error}", fault=False)
            return
        self._check_done()

    async def _fetch(self, exchange: Exchange, wanted: list[tuple[bytes, int, bytes]]) -> None:
        """Fetch (holder, chunk, digest), a few at a time, and put them in place."""
        slots = asyncio.Semaphore(FETCHES)

        async def one(holder: bytes, chunk: int, digest: bytes) -> None:
            async with slots:
                reply = await self.node.call_for_buffers(
                    PeerID(holder),
                    self.service,
                    Fetch(exchange.book.begin.round, chunk),
                    timeout=self.chunk_timeout,
                )
                if len(reply.buffers) != 1:
                    raise RuleBroken(f"chunk {chunk} came without its bytes")
                exchange.fetched(chunk, digest, memoryview(reply.buffers[0]))

        async with asyncio.TaskGroup() as group:
            for source in wanted:
                group.create_task(one(*source))

    def _on_fetch(self, message: Fetch | Digests) -> Answer:
        attempt = self._attempt
        exchange = attempt.exchange if attempt is not None and self.participant.begin is not None else self._last
        if exchange is None or exchange.book.begin.round != message.round:
            raise Refused("this peer does not have that round's result any more")
        book = exchange.book
        if isinstance(message, Digests):
            if exchange is not self._last:
                raise Refused("that round is not committed yet")
            return Committed(book.begin, tuple(book.digests))
        if message.chunk >= len(book.chunks) or not book.digests[message.chunk]:
            raise Refused(f"chunk {message.chunk} is not here")
        return Reply(Result(message.round, message.chunk), [exchange.chunk_bytes(message.chunk)])

    def _on_commit(self, commit: Commit) -> None:
        participant, attempt = self.participant, self._attempt
        if commit.tip != self.tip:
            return
        begin = participant.begin
        if attempt is not None and begin is not None:
            exchange = attempt.exchange
            mine = begin.round == commit.round and exchange is not None and exchange.book.complete
            if mine and exchange is not None and exchange.book.root() in (commit.root, b""):
                attempt.outcome = self._outcome(attempt, begin, commit, missed=False)
                self._last, self._last_begin = exchange, begin
        participant.advance(commit)
        self.membership.fix(commit.view)
        self._new_tip()
        self._on_commit_callback(commit)

    def _new_tip(self) -> None:
        """The tip has changed: what was about the old one is over."""
        self.called = False
        self._report = self._count = None
        if self.behind is not None and not self.behind.outranks(self.tip):
            self.behind = None
        if self._lead is not None and self._lead.coordinator.tip != self.tip:
            self._lead.stop()
            self._lead = None
        for waiter in self._tip_waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._tip_waiters.clear()
        self._changed.set()

    def _leave_round(self) -> None:
        self.participant.leave()
        if self._attempt is not None:
            self._attempt.exchange = None
            self._attempt.joined = None

    def _fail(self, error: AveragingError) -> None:
        self._leave_round()
        if self._attempt is not None:
            self._attempt.error = error
        self._changed.set()

    def _fault(self, key: bytes, reason: str) -> None:
        self._complain(key, reason, fault=True)

    def _complain(self, key: bytes, reason: str, *, fault: bool) -> None:
        begin, ballot = self.participant.begin, self.participant.ballot
        if begin is not None and ballot is not None:
            log.info("%r in round of epoch %d: %r: %s", self.node.peer_id, begin.tip.epoch, PeerID(key), reason)
            broken = Broken(begin.round, key, fault, reason[:256])
            self.node.notify([PeerID(ballot.coordinator)], self.service, broken)

    def _send(self, keys: Sequence[bytes], message: Part | Result, buffers: Sequence[memoryview]) -> None:
        self.node.notify([PeerID(key) for key in keys], self.service, message, buffers)

    # -- who is there

    def _review(self) -> None:
        """Members came or went: does somebody else coordinate now?"""
        if self.tip.epoch == 0 and len(self.membership.members) > self._met:
            self._settled_at = self._now() + SETTLE_SECONDS
            if self._lead is not None:
                self._lead.coordinator.settled_at = self._settled_at
        self._met = len(self.membership.members)
        coordinator = self.neighbourhood.coordinator()
        if self._lead is not None and not self._lead.over:
            phase = self._lead.coordinator.phase
            if coordinator.key != self.me.key and phase in (Phase.COUNTING, Phase.GATHERING):
                # Somebody before us in the order has appeared: those who reported or joined here belong there.
                told = [PeerID(k) for k in {**self._lead.coordinator.counts, **self._lead.coordinator.joins}]
                self._lead.stop()
                self._lead = None
                self.node.notify([p for p in told if p.key != self.me.key], self.service, Elsewhere(coordinator))
            else:
                self._lead.members_changed()
        if self._report is not None and self._report.tip == self.tip:
            if self._reported_to != (coordinator.key, self.tip):
                self.node.spawn(self._report_again())
        self._changed.set()

    async def _report_again(self) -> None:
        try:
            await self._send_report()
        except (P2PError, AveragingError, TimeoutError) as error:
            log.debug("%r could not report: %s", self.node.peer_id, error)

    def _heard(self, tip: Tip) -> None:
        """A member told its tip."""
        if not tip.outranks(self.tip):
            return
        attempt = self._attempt
        self.behind = tip
        if self.participant.begin is None and attempt is not None and attempt.contribution.tip is None:
            self.move(tip)  # what is averaged here hangs on no state: go on from where the others are
        self._changed.set()

    def _lost(self, key: bytes) -> None:
        """A member is gone."""
        commit, begin = self.participant.commit, self.participant.begin
        known = key in self.membership.members
        self.neighbourhood.lose(key)
        if commit is not None and known:
            # It may have been the coordinator, and may have died before all had its COMMIT.
            others = [PeerID(k) for k in commit.members if k not in (key, self.me.key)]
            self.node.notify([p for p in others if self.node.is_connected(p)], self.service, commit)
        if begin is None or all(member.key != key for member in begin.members):
            if begin is None or begin.ballot.coordinator != key:
                return
        assert self.participant.ballot is not None
        if self.participant.ballot.coordinator == self.me.key:
            return  # we coordinate: `Lead` has been told of it by the review
        if self.participant.ballot.coordinator != key:
            self._complain(key, "the connection to it was lost", fault=False)
        elif (successor := self._successor(begin)) == self.me.key:
            self._take_over(begin)
        elif successor is not None and self._attempt is not None:
            # It may not even have the BEGIN.
            gathered = msgspec.msgpack.encode(self._attempt.gathered)
            self.node.notify([PeerID(successor)], self.service, Orphaned(begin), [gathered])

    def _on_orphaned(self, peer: PeerID, begin: Begin, buffers: Sequence[memoryview]) -> None:
        """A member of a round has lost its coordinator and takes this peer for the successor."""
        if self.participant.begin is not None or self.tip != begin.tip:
            return  # in the round already, and takes over when the loss is seen here too; or past it
        try:
            self._enter_round(peer, begin, buffers, relayed=True)
        except RuleBroken as error:
            raise Refused(str(error)) from error
        if not self.node.is_connected(PeerID(begin.ballot.coordinator)):
            self._take_over(begin)

    def _take_over(self, begin: Begin) -> None:
        log.info("%r takes over the round of epoch %d", self.node.peer_id, begin.tip.epoch)
        gone = [m.key for m in begin.members if m.key != self.me.key and not self.node.is_connected(m.peer)]
        coordinator = Coordinator.successor(self.me.key, begin, self.participant.attempt, gone, self.rules)
        if self._attempt is not None:
            coordinator.gathered = dict(self._attempt.gathered)
        self._follow_lead(coordinator)
        assert self._lead is not None
        self._lead.take_over()

    def _successor(self, begin: Begin) -> bytes | None:
        keys = {member.key for member in begin.members}
        for member in self.membership.candidates(begin.tip.epoch):
            if member.key in keys and member.role is not Role.CLIENT and self.node.is_connected(member.peer):
                return member.key
        return None

    async def _watch(self) -> None:
        """See that those on whom a round waits are alive and get on: a process that hangs keeps its connections."""
        while True:
            await asyncio.sleep(PING_SECONDS)
            targets: list[bytes] = []
            if self._lead is not None and not self._lead.over and self._lead.coordinator.phase is not Phase.COUNTING:
                targets = self._lead.watched
            elif self._attempt is not None and self._attempt.joined is not None:
                ballot = self.participant.ballot if self.participant.begin is not None else None
                targets = [ballot.coordinator if ballot is not None else self._attempt.joined[0]]
            for key in targets:
                if key != self.me.key and key not in self._pinged:
                    self._pinged.add(key)
                    self.node.spawn(self._ping(PeerID(key)))
            self._check_stalled()

    async def _ping(self, peer: PeerID) -> None:
        try:
            await self.node.call(peer, self.service, Ping(), Pong, timeout=self.chunk_timeout)
        except TimeoutError:
            log.info("%r: %r does not answer", self.node.peer_id, peer)
            self.node.transport.disconnect(peer)
            self._lost(peer.key)
        except P2PError:
            pass  # a lost connection is told by the node itself
        finally:
            self._pinged.discard(peer.key)

    def _check_stalled(self) -> None:
        attempt = self._attempt
        if attempt is None or attempt.exchange is None or self.participant.begin is None:
            return
        now, (count, since) = self._now(), attempt.progressed
        if attempt.exchange.progressed != count or attempt.exchange.book.complete:
            attempt.progressed = (attempt.exchange.progressed, now)
            return
        # A reducer that waits for a part looks like one that stalls, so it may complain first.
        late: dict[bytes, None] = {}
        if now - since > self.chunk_timeout:
            late.update(attempt.exchange.book.waiting_for())
        if now - since > 2 * self.chunk_timeout:
            late.update(attempt.exchange.book.owed_results())
        for key in late:
            self._complain(key, f"nothing came from it for {now - since:.1f} s", fault=False)
        if late:
            attempt.progressed = (count, now)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _round_of(coordinator: Coordinator) -> bytes | None:
    return coordinator.begin.round if coordinator.begin is not None else None


def _check_equal(join: Join, other: Join) -> None:
    """Raise Refused if what must be equal in a run differs from what another member said."""
    for name in sorted({*join.options, *other.options}):
        mine, theirs = join.options.get(name), other.options.get(name)
        if mine != theirs:
            raise Refused(f"{name}={mine}, while the other peers of the run have {name}={theirs}: make them equal")
    if join.schema != other.schema:
        raise Refused(
            f"the schema hash is {join.schema.hex()[:16]}, while the other peers of the run have "
            f"{other.schema.hex()[:16]}: the averaged tensors differ in number, order, shape or dtype"
        )


_gathered = msgspec.msgpack.Decoder(dict[bytes, bytes])

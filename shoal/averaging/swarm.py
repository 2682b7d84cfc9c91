"""One peer's part in a run: finds out who coordinates, joins rounds, follows commits, and coordinates when it is its
turn.

This is a driver: what is decided, is decided in `Membership`, `Coordinator`, `Participant` and `Book`. It lives on the
node's loop, and imports no torch: the bytes are the `Exchange`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from shoal.averaging.contribution import Attempt, Contribution, Outcome
from shoal.averaging.coordination import Coordination
from shoal.averaging.directory import Directory
from shoal.averaging.errors import AveragingError, Behind, Rejected
from shoal.averaging.liveness import Liveness
from shoal.averaging.member import Member
from shoal.averaging.membership import Membership
from shoal.averaging.messages import (
    MAX_GATHER_BYTES,
    Abort,
    Begin,
    Broken,
    Call,
    Commit,
    Count,
    Digests,
    Done,
    Elsewhere,
    Fetch,
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
    Terms,
    Unjoin,
    Waiting,
)
from shoal.averaging.neighbourhood import Neighbourhood
from shoal.averaging.participant import Participant
from shoal.averaging.round import RoundDriver
from shoal.averaging.rules import Rules
from shoal.averaging.tip import Tip
from shoal.p2p.errors import P2PError, Refused, Unavailable
from shoal.p2p.identity import PeerID
from shoal.p2p.node import Answer, Node, Service

log = logging.getLogger(__name__)

DEFAULT_CHUNK_TIMEOUT = 5.0  # `next_chunk_timeout` when none is given, in seconds
JOIN_TIMEOUT = 10.0


class Swarm:
    """The rounds of one run, for one peer.

    Args:
        node: this peer.
        directory: where the members of the run are listed.
        run_id: names the run.
        me: this peer as a member.
        terms: what must be equal in the run.
        rules: when a round begins; the same for all members.
        chunk_timeout: seconds of silence after which a member that holds up a round is left out.
        sender_timeout, reducer_timeout: the same of those that owe parts (`chunk_timeout` when None), and of those that
            owe results (twice `sender_timeout`).
        request_timeout: seconds that the coordinator may take to answer.
        on_commit: called with every commit that this peer follows.
    """

    def __init__(
        self,
        node: Node,
        directory: Directory,
        run_id: str,
        me: Member,
        terms: Terms,
        rules: Rules,
        *,
        chunk_timeout: float | None = None,
        sender_timeout: float | None = None,
        reducer_timeout: float | None = None,
        request_timeout: float = JOIN_TIMEOUT,
        on_commit: Callable[[Commit], None] = lambda commit: None,
    ) -> None:
        chunk_timeout = DEFAULT_CHUNK_TIMEOUT if chunk_timeout is None else chunk_timeout
        sender_timeout = chunk_timeout if sender_timeout is None else sender_timeout
        # A reducer that waits for a part looks like one that stalls, so it may complain first.
        reducer_timeout = 2 * sender_timeout if reducer_timeout is None else reducer_timeout
        self.node, self.me, self.rules = node, me, rules
        self.participant = Participant(me.key, Tip.genesis(run_id))
        self.membership = Membership(run_id, me)
        self.service = Service(f"averaging/{run_id}", Message)
        self.neighbourhood = Neighbourhood(
            node,
            self.service,
            self.membership,
            directory,
            terms,
            tip=lambda: self.tip,
            changed=self._review,
            heard=self._heard,
            follows=self._follows,
        )
        self.called = False  # whether the coordinator has called the round of this tip
        self.behind: Tip | None = None  # a state that outranks ours, of which a member told
        self._changed = asyncio.Event()
        self._news = asyncio.Event()
        self._round = RoundDriver(
            node,
            self.service,
            me,
            self.participant,
            self.membership,
            chunk_timeout,
            sender_timeout,
            reducer_timeout,
            self._changed.set,
        )
        self._liveness = Liveness(node, self.service, chunk_timeout, self._waited_for, self._stood_still)
        self._on_commit_callback = on_commit
        self._request_timeout = request_timeout
        self._coordination = Coordination(
            node,
            self.service,
            me,
            self.participant,
            self.membership,
            self.neighbourhood,
            self._round,
            rules,
            chunk_timeout,
            self._heard,
        )
        self._retired = False
        self._report: Progress | None = None
        self._reporting_to: list[bytes] = []  # who has not answered yet
        self._reported_to: tuple[bytes, Tip] | None = None
        self._tasks: list[asyncio.Task[Any]] = []
        self._stop_listening: Callable[[], None] = lambda: None

    @property
    def tip(self) -> Tip:
        return self.participant.tip

    # -- life

    async def start(self) -> None:
        """Serve, be listed, and meet the members that are there."""
        self._coordination.settle()
        self._stop_listening = self.node.on_lost(lambda peer, reason: self._lost(peer.key))
        self.node.serve(self.service, self._handle)
        await self.neighbourhood.start()
        self._tasks = [self.node.spawn(self._liveness.run())]

    def stop(self) -> None:
        """Leave the run."""
        if not self._retired:
            self.retire()
        self.node.stop_serving(self.service)
        self._stop_listening()
        for task in self._tasks:
            task.cancel()
        self._coordination.stop()

    def retire(self) -> None:
        """Leave the run, but until `stop` still tell those who missed the last round what it was."""
        others = [member.peer for member in self.neighbourhood.connected() if member.key != self.me.key]
        self.node.notify(others, self.service, Leave())
        self.neighbourhood.stop()
        self._retired = True

    def move(self, tip: Tip) -> None:
        """Be at another state: it was downloaded, or made alone. All are told: a JOIN for the old tip is void."""
        self._move(tip)
        others = [member.peer for member in self.neighbourhood.connected() if member.key != self.me.key]
        self.node.notify(others, self.service, self.neighbourhood.hello())

    def catch_up(self) -> Tip:
        """For a peer that holds no state: be at the best one that was heard of; returns it."""
        if self.behind is not None and self.behind.outranks(self.tip):
            self.move(self.behind)
        return self.tip

    def _move(self, tip: Tip) -> None:
        self.participant.move(tip)
        self._new_tip()
        self.neighbourhood.announce()

    # -- progress

    async def report(self, report: Progress) -> Count:
        """Tell the coordinator this peer's samples since the tip; returns what all members have. Raises `Behind` if
        the coordinator is at a state that outranks ours, P2PError if it can't be asked, `Rejected` if the run goes by
        other terms."""
        self._check_terms()
        self._report = report
        return await self._send_report()

    async def news(self) -> None:
        """Return when the round of this tip is called, the tip changes, or a state that outranks it is heard of."""
        await self._news.wait()

    def _tell_news(self) -> None:
        waited_for, self._news = self._news, asyncio.Event()
        waited_for.set()
        self._changed.set()

    async def _send_report(self) -> Count:
        report, coordinator = self._report, self.neighbourhood.coordinator()
        assert report is not None
        self._reported_to = (coordinator.key, report.tip)
        self._reporting_to.append(coordinator.key)
        try:
            answer = await self.node.call_for_buffers(
                coordinator.peer, self.service, report, timeout=self._request_timeout
            )
        finally:
            self._reporting_to.remove(coordinator.key)
        match answer.body:
            case Count():
                if answer.body.called and answer.body.tip == self.tip and not self.called:
                    self.called = True
                    self._tell_news()
                return answer.body
            case Elsewhere():
                await self.neighbourhood.meet(answer.body.coordinator)
            case Hello():
                if answer.body.tip == report.tip:
                    await self.neighbourhood.meet_peer(coordinator.peer)  # it has lost this peer
                else:
                    self.neighbourhood.told(coordinator.peer, answer.body.tip)
                if answer.body.tip.outranks(self.tip):
                    raise Behind(f"the swarm is at epoch {answer.body.tip.epoch}, this peer at {self.tip.epoch}")
        return Count(report.tip, report.samples, report.rate, 1, False)

    # -- rounds

    async def average(self, contribution: Contribution, timeout: float) -> Outcome:
        """Take part in the next round and return when it is committed; the exchange's outputs then hold the average.

        Raises AveragingError with the reason if there is no result within `timeout` seconds, `Behind` if the swarm is
        not at `contribution.tip`, `Rejected` if the run goes by other terms.
        """
        if self._round.attempt is not None:
            raise AveragingError("this peer is in a round already")
        if len(contribution.gathered) > MAX_GATHER_BYTES:
            raise ValueError(
                f"gather is {len(contribution.gathered)} bytes long; at most {MAX_GATHER_BYTES} are allowed"
            )
        node = self.node
        attempt = self._round.attempt = Attempt(contribution, self._now(), node.bytes_sent, node.bytes_received)
        try:
            async with asyncio.timeout(timeout):
                while attempt.outcome is None:
                    self._changed.clear()
                    self._check_terms()
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
            raise AveragingError(f"no result within {timeout:.3g} s ({where}; {peers} members are connected)") from None
        finally:
            if attempt.outcome is None and attempt.joined is not None and self.participant.begin is None:
                self.node.notify([PeerID(attempt.joined[0])], self.service, Unjoin())
            self._round.finish()

    async def _between_rounds(self, attempt: Attempt) -> None:
        """Not in a round: fetch the one that was missed, or join the next."""
        wanted, commit = attempt.contribution.tip, self.participant.commit
        if wanted is not None and wanted != self.tip:
            if commit is None or commit.tip != wanted:
                raise Behind("the swarm has gone on from the state that this input was made from")
            await self._round.fetch_committed(attempt, commit)
            return
        if self.behind is not None and self.behind.outranks(self.tip):
            if wanted is not None:
                raise Behind(f"the swarm is at epoch {self.behind.epoch}, this peer at {self.tip.epoch}")
            self.move(self.behind)
        coordinator = self.neighbourhood.coordinator()
        if attempt.joined != (coordinator.key, self.tip):
            attempt.joined = (coordinator.key, self.tip)
            self.node.spawn(self._join(attempt, coordinator))

    def rejoin(self) -> None:
        """What the JOIN said has changed: say it anew. Nothing to do once the round has begun."""
        attempt = self._round.attempt
        if attempt is not None and self.participant.begin is None:
            attempt.joined = None
            self._changed.set()

    def _check_terms(self) -> None:
        difference = self.neighbourhood.mismatch()
        if difference is not None:
            raise Rejected(f"the other peers of the run go by other terms: {difference}. Make it equal on all peers")

    async def _join(self, attempt: Attempt, coordinator: Member) -> None:
        given, tip, view = attempt.contribution, self.tip, self.membership.fingerprint()
        join = Join(
            tip=tip,
            sender=self.me,
            terms=self.neighbourhood.terms,
            weight=given.weight,
            machine=given.machine,
            state=given.state,
            attempt=self.participant.attempt,
            patience=given.patience,
            view=b"" if attempt.introduced == (coordinator.key, view) else view,
        )
        buffers = [given.gathered] if given.gathered else []
        try:
            answer = await self.node.call_for_buffers(
                coordinator.peer, self.service, join, timeout=self._request_timeout, buffers=buffers
            )
        except (P2PError, TimeoutError) as error:
            if isinstance(error, Refused) and not isinstance(error, Unavailable):
                attempt.error = Rejected(f"the run refuses this peer: {error}")
            else:
                log.debug("%r could not join %r: %s", self.node.peer_id, coordinator.peer, error)
                self._lost(coordinator.key)
        else:
            if isinstance(answer.body, Joined):
                return
            attempt.joined = None
            if isinstance(answer.body, Hello) and answer.body.tip == tip:
                # It knows others than this peer does: tell each other, before it begins a round without somebody.
                await self.neighbourhood.meet_peer(coordinator.peer)
                attempt.introduced = (coordinator.key, self.membership.fingerprint())
            else:
                if isinstance(answer.body, Elsewhere):
                    await self.neighbourhood.meet(answer.body.coordinator)
                elif isinstance(answer.body, Hello):
                    self.neighbourhood.told(coordinator.peer, answer.body.tip)
                # The tips or views differ, and are about to be exchanged; asking at once again would only spin.
                await asyncio.sleep(0.05)
        self._changed.set()

    async def _go_elsewhere(self, peer: PeerID, coordinator: Member) -> None:
        await self.neighbourhood.meet(coordinator)
        self._join_again(peer)  # that other one may be out of reach

    def _join_again(self, peer: PeerID) -> None:
        """If this peer waits for a round of `peer`: it waits in vain."""
        attempt = self._round.attempt
        if attempt is None or attempt.joined is None or self.participant.begin is not None:
            return
        if attempt.joined[0] == peer.key:
            attempt.joined = None
            self._changed.set()

    # -- messages

    def _handle(self, peer: PeerID, message: Any, buffers: Sequence[memoryview]) -> Answer | Awaitable[Answer]:
        if self._retired and isinstance(message, Hello | Progress | Join | Call | Begin):
            raise Unavailable("this peer has left the run")
        match message:
            case Part() | Result():
                self._round.on_chunk(peer, message, buffers)
                return None
            case Done():
                self._coordination.done(peer, message)
                return None
            case Progress():
                return self._coordination.on_progress(peer, message)
            case Join():
                return self._coordination.on_join(peer, message, bytes(buffers[0]) if buffers else b"")
            case Begin():
                self._on_begin(peer, message, buffers)
                return None
            case Orphaned():
                self._coordination.on_orphaned(peer, message, buffers)
                return None
            case Survey() if message.tip != self.tip and not self._committed(message.round):
                return self.neighbourhood.hello()
            case Survey():
                return self._round.on_survey(peer, message, buffers)
            case Repair():
                return self._round.on_repair(peer, message)
            case Fetch() | Digests():
                return self._round.on_fetch(message)
            case Unjoin():
                self._coordination.unjoin(peer)
                return None
            case Waiting():
                self._round.on_waiting(peer, message)
                self._coordination.waiting(peer, message)
                return None
            case Hello():
                return self.neighbourhood.on_hello(peer, message)
            case Ping():
                return Pong()
        self._on_notice(peer, message)
        return None

    def _on_begin(self, peer: PeerID, begin: Begin, buffers: Sequence[memoryview]) -> None:
        if peer.key not in self.membership.members:
            # Should it be one that is wrongly believed to be lost, it must hear that it waits in vain.
            reason = "BEGIN from a peer that is no member"
            self.node.notify([peer], self.service, Broken(begin.round, self.me.key, False, reason))
            raise Refused(reason)
        lead = self._coordination.lead
        if self._round.attempt is not None and lead is not None and peer == self.node.peer_id:
            self._round.attempt.join_to_begin = lead.join_to_begin
        self._round.on_begin(peer, begin, buffers)

    def _on_notice(self, peer: PeerID, message: Any) -> None:
        match message:
            case Call():
                self._on_call(peer, message)
            case Commit():
                self._on_commit(peer, message)
            case Broken():
                self._coordination.broken(peer, message)
            case Abort():
                self._round.on_abort(peer, message)
                self._join_again(peer)
            case Elsewhere():
                self._coordination.elsewhere(peer)
                self.node.spawn(self._go_elsewhere(peer, message.coordinator))
            case Leave():
                self._lost(peer.key)
            case _:
                raise Refused(f"{type(message).__name__} is an answer, and nothing was asked")

    def _committed(self, round_id: bytes) -> bool:
        """Whether that round is the one that led to this peer's tip."""
        return self.participant.commit is not None and self.participant.commit.round == round_id

    def _on_call(self, peer: PeerID, call: Call) -> None:
        """A peer that takes itself for the coordinator calls the round of a tip."""
        begin = self.participant.begin
        if call.tip != self.tip:
            self.node.notify([peer], self.service, self.neighbourhood.hello())
        elif begin is not None and self.participant.ballot is not None:
            coordinator = self.membership.members.get(self.participant.ballot.coordinator)
            if coordinator is not None and coordinator.peer != peer:
                self.node.notify([peer], self.service, Elsewhere(coordinator))
        else:
            self.called = True
            self._tell_news()
            if self.neighbourhood.coordinator().peer != peer:
                # One of the two does not know somebody whom the other knows: tell each other.
                self.node.spawn(self.neighbourhood.meet_peer(peer))

    def _on_commit(self, peer: PeerID, commit: Commit) -> None:
        if commit.tip != self.tip:
            return  # passed on by another member before, or of a state that this peer does not have
        begin = self.participant.begin
        in_round = begin is not None and any(member.key == peer.key for member in begin.members)
        if not in_round and peer.key not in self.membership.members:
            raise Refused("COMMIT from a peer that is no member")
        self._round.on_commit(commit)
        if begin is not None and begin.round != commit.round:
            # Another round of this tip than the one that we are in: those in ours must hear that it is void.
            others = [member.peer for member in begin.members if member.key != self.me.key]
            self.node.notify(others, self.service, commit)
        self.participant.advance(commit)
        self.membership.fix(commit.view)
        for key in commit.members:
            self.membership.told(key, behind=False)
        # The coordinator may not reach all whom this peer reaches.
        reached = {peer.key, self.me.key, *(member.key for member in commit.view)}
        others = [member.peer for member in self.neighbourhood.connected() if member.key not in reached]
        self.node.notify(others, self.service, commit)
        self._new_tip()
        self._on_commit_callback(commit)

    def _follows(self, peer: PeerID, tip: Tip) -> bool:
        """Whether a member that is at that tip was in the round which ended it: it hears of the commit, too. (Counted
        as behind it would be no candidate any more for us alone, and nothing that it says later need come here.)"""
        commit = self.participant.commit
        return commit is not None and commit.tip == tip and peer.key in commit.members

    def _new_tip(self) -> None:
        """The tip has changed: what was about the old one is over."""
        self.called = False
        self._report = None
        if self.behind is not None and not self.behind.outranks(self.tip):
            self.behind = None
        self._coordination.new_tip()
        self._tell_news()

    # -- who is there

    def _review(self) -> None:
        """Members came or went: does somebody else coordinate now?"""
        self._coordination.members_changed()
        coordinator = self.neighbourhood.coordinator()
        here = (coordinator.key, self.tip)
        if self._report is not None and self._report.tip == self.tip and self._reported_to != here:
            self.node.spawn(self._report_again())
        self._changed.set()

    async def _report_again(self) -> None:
        try:
            if self._report is not None:  # else the epoch has ended meanwhile
                await self._send_report()
        except (P2PError, AveragingError, TimeoutError) as error:
            log.debug("%r could not report: %s", self.node.peer_id, error)

    def _heard(self, peer: PeerID, tip: Tip) -> None:
        """A member told its tip."""
        if not tip.outranks(self.tip):
            return
        self.behind = tip
        self._coordination.others_are_past(peer)
        if self._coordination.coordinator_of_round() is None:
            self._round.leave()  # an orphan of a round that the others are past
        attempt = self._round.attempt
        if self.participant.begin is None and attempt is not None and attempt.contribution.tip is None:
            self._move(tip)  # what is averaged here hangs on no state: go on from where the others are
        self._tell_news()

    def _lost(self, key: bytes) -> None:
        """A member is gone."""
        commit, begin = self.participant.commit, self.participant.begin
        known = key in self.membership.members
        self.neighbourhood.lose(key)
        if commit is not None and known:
            # It may have been the coordinator, and may have died before all had its COMMIT.
            others = [PeerID(k) for k in commit.members if k not in (key, self.me.key)]
            self.node.notify([p for p in others if self.node.is_connected(p)], self.service, commit)
        coordinator = self._coordination.coordinator_of_round()
        in_round = begin is not None and any(member.key == key for member in begin.members)
        if in_round and coordinator not in (None, self.me.key):  # if we coordinate, the review has told `Lead`
            self._round.complain(key, "the connection to it was lost", fault=False)
        self._coordination.succeed()

    def _stood_still(self) -> None:
        """The others may have gone on without this peer: find them before a round is begun without them."""
        self._coordination.settle()
        self.neighbourhood.look()

    def _waited_for(self) -> list[bytes]:
        """On whom this peer waits now; also the moment to see whether a round gets on, and has a coordinator."""
        if self._is_short_of_members():
            self.neighbourhood.look()
        self._round.check_stalled()
        self._coordination.succeed()
        watched = self._coordination.watched
        if watched is not None:
            return watched
        attempt, ballot = self._round.attempt, self.participant.ballot
        if self.participant.begin is not None and ballot is not None:
            return [ballot.coordinator]
        if attempt is not None and attempt.joined is not None:
            return [attempt.joined[0]]
        return list(dict.fromkeys(self._reporting_to))

    def _is_short_of_members(self) -> bool:
        connected = len(self.neighbourhood.connected())
        alone_again = connected == 1 and bool(self.membership.lost)
        return alone_again or (self._round.attempt is not None and connected < max(2, self.rules.min_group))

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

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

import msgspec

from shoal.averaging.book import RuleBroken
from shoal.averaging.contribution import Attempt, Contribution, Outcome
from shoal.averaging.coordinator import Coordinator, Phase
from shoal.averaging.directory import Directory
from shoal.averaging.errors import AveragingError, Behind, Rejected
from shoal.averaging.lead import Lead
from shoal.averaging.liveness import Liveness
from shoal.averaging.member import Member, Role
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
WAIT_FOR_TIP = 2.0  # how long a message about a tip to come is kept: COMMIT reaches members at different times
SETTLE_SECONDS = 1.0  # before a run's first commit, BEGIN waits until nobody new was found for so long


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
        on_commit: Callable[[Commit], None] = lambda commit: None,
    ) -> None:
        chunk_timeout = DEFAULT_CHUNK_TIMEOUT if chunk_timeout is None else chunk_timeout
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
        )
        self.called = False  # whether the coordinator has called the round of this tip
        self.behind: Tip | None = None  # a state that outranks ours, of which a member told
        self._changed = asyncio.Event()
        self._round = RoundDriver(
            node, self.service, me, self.participant, self.membership, chunk_timeout, self._changed.set
        )
        self._liveness = Liveness(node, self.service, chunk_timeout, self._waited_for, self._lost)
        self._chunk_timeout = chunk_timeout
        self._on_commit_callback = on_commit
        self._lead: Lead | None = None
        self._tip_waiters: list[asyncio.Future[None]] = []
        self._report: Progress | None = None
        self._reported_to: tuple[bytes, Tip] | None = None
        self._settled_at = 0.0
        self._met = 1
        self._tasks: list[asyncio.Task[Any]] = []
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
        self._tasks = [self.node.spawn(self._liveness.run())]

    def stop(self) -> None:
        """Leave the run."""
        others = [member.peer for member in self.neighbourhood.connected() if member.key != self.me.key]
        self.node.notify(others, self.service, Leave())
        self.node.stop_serving(self.service)
        self._stop_listening()
        self.neighbourhood.stop()
        for task in self._tasks:
            task.cancel()
        if self._lead is not None:
            self._lead.stop()

    def move(self, tip: Tip) -> None:
        """Be at another state: it was downloaded, or made alone. All are told: a JOIN for the old tip is void."""
        self._move(tip)
        others = [member.peer for member in self.neighbourhood.connected() if member.key != self.me.key]
        self.node.notify(others, self.service, self.neighbourhood.hello())

    def _move(self, tip: Tip) -> None:
        self.participant.move(tip)
        self._new_tip()
        self.neighbourhood.announce()

    # -- progress

    async def report(self, samples: float, rate: float) -> Count:
        """Tell the coordinator this peer's samples since the tip, and how many it makes per second; returns what all
        members have. Raises `Behind` if the coordinator is at a state that outranks ours, P2PError if it can't be
        asked, `Rejected` if the run goes by other terms."""
        self._check_terms()
        self._report = Progress(self.tip, samples, rate)
        return await self._send_report()

    async def _send_report(self) -> Count:
        report, coordinator = self._report, self.neighbourhood.coordinator()
        assert report is not None
        self._reported_to = (coordinator.key, report.tip)
        answer = await self.node.call_for_buffers(coordinator.peer, self.service, report, timeout=JOIN_TIMEOUT)
        match answer.body:
            case Count():
                self.called = self.called or (answer.body.called and answer.body.tip == self.tip)
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
                coordinator.peer, self.service, join, timeout=JOIN_TIMEOUT, buffers=buffers
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
        match message:
            case Part() | Result():
                self._round.on_chunk(peer, message, buffers)
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
                self._on_orphaned(peer, message, buffers)
                return None
            case Survey() if message.tip != self.tip and not self._committed(message.round):
                return self.neighbourhood.hello()
            case Survey():
                return self._round.on_survey(peer, message, buffers)
            case Repair():
                return self._round.on_repair(peer, message)
            case Fetch() | Digests():
                return self._round.on_fetch(message)
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
        if self._round.attempt is not None and self._lead is not None and peer == self.node.peer_id:
            self._round.attempt.join_to_begin = self._lead.join_to_begin
        self._round.on_begin(peer, begin, buffers)

    def _on_notice(self, peer: PeerID, message: Any) -> None:
        match message:
            case Call():
                self._on_call(peer, message)
            case Commit():
                self._on_commit(peer, message)
            case Broken():
                if self._lead is not None and _round_of(self._lead.coordinator) == message.round:
                    self._lead.broken(peer, message)
            case Abort():
                self._round.on_abort(peer, message)
                self._join_again(peer)
            case Elsewhere():
                if self._lead is not None:
                    self._lead.elsewhere(peer)
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
            self._changed.set()
            if self.neighbourhood.coordinator().peer != peer:
                # One of the two does not know somebody whom the other knows: tell each other.
                self.node.spawn(self.neighbourhood.meet_peer(peer))

    # -- as coordinator

    async def _on_progress(self, peer: PeerID, report: Progress) -> Answer:
        if peer.key not in self.membership.members:
            return self.neighbourhood.hello()
        standing = await self._standing(peer, report.tip)
        if standing is not None:
            return standing
        return self._leading().progress(peer, report)

    async def _on_join(self, peer: PeerID, join: Join, gathered: bytes) -> Answer:
        if join.sender.key != peer.key:
            raise Refused("JOIN in the name of another peer")
        if len(gathered) > MAX_GATHER_BYTES:
            raise Refused(f"gather is {len(gathered)} bytes long; at most {MAX_GATHER_BYTES} are allowed")
        if join.terms.difference(self.neighbourhood.terms) is not None:
            return self.neighbourhood.hello()  # which of the two gives way, Hello tells
        self.node.learn(peer, join.sender.multiaddrs())
        self.neighbourhood.spoke(peer, join.sender)
        standing = await self._standing(peer, join.tip)
        if standing is not None:
            return standing
        if join.view and join.view != self.membership.fingerprint():
            return self.neighbourhood.hello()
        self._leading().join(peer, join, gathered)
        return Joined(self.tip)

    async def _standing(self, peer: PeerID, tip: Tip) -> Answer:
        """None if this peer coordinates for that tip; else what to answer instead."""
        if tip.epoch == self.tip.epoch + 1:
            await self._wait_for_tip(tip)
        self.neighbourhood.told(peer, tip)
        if tip != self.tip:
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
            veterans = (
                frozenset(self.participant.commit.members) if self.participant.commit is not None else frozenset()
            )
            self._follow_lead(Coordinator(self.me.key, self.tip, self.rules, settled, veterans))
        assert self._lead is not None
        return self._lead

    def _follow_lead(self, coordinator: Coordinator) -> None:
        if self._lead is not None:
            self._lead.stop()
        self._lead = Lead(
            coordinator, self.node, self.service, self.neighbourhood.connected, self._heard, self._chunk_timeout
        )
        self._lead.members_changed()

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

    def _new_tip(self) -> None:
        """The tip has changed: what was about the old one is over."""
        self.called = False
        self._report = None
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
                self._resign(coordinator)  # somebody before us in the order has appeared
            else:
                self._lead.members_changed()
        here = (coordinator.key, self.tip)
        if self._report is not None and self._report.tip == self.tip and self._reported_to != here:
            self.node.spawn(self._report_again())
        self._changed.set()

    def _resign(self, other: Member) -> None:
        """Coordinate this tip no more: those who reported or joined here are sent to `other`."""
        assert self._lead is not None
        told = [PeerID(key) for key in {**self._lead.coordinator.counts, **self._lead.coordinator.joins}]
        self._lead.stop()
        self._lead = None
        self.node.notify([p for p in told if p != self.node.peer_id], self.service, Elsewhere(other))

    async def _report_again(self) -> None:
        try:
            await self._send_report()
        except (P2PError, AveragingError, TimeoutError) as error:
            log.debug("%r could not report: %s", self.node.peer_id, error)

    def _heard(self, peer: PeerID, tip: Tip) -> None:
        """A member told its tip."""
        if not tip.outranks(self.tip):
            return
        self.behind = tip
        lead = self._lead
        if lead is not None and lead.coordinator.phase in (Phase.COUNTING, Phase.GATHERING):
            # The round of our tip was committed without us: none is begun any more, and those who wait hear where.
            self._resign(self.membership.members.get(peer.key, self.me))
        if self._coordinator_of_round() is None:
            self._round.leave()  # an orphan of a round that the others are past
        attempt = self._round.attempt
        if self.participant.begin is None and attempt is not None and attempt.contribution.tip is None:
            self._move(tip)  # what is averaged here hangs on no state: go on from where the others are
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
        coordinator = self._coordinator_of_round()
        in_round = begin is not None and any(member.key == key for member in begin.members)
        if in_round and coordinator not in (None, self.me.key):  # if we coordinate, the review has told `Lead`
            self._round.complain(key, "the connection to it was lost", fault=False)
        self._succeed()

    def _coordinator_of_round(self) -> bytes | None:
        """Who coordinates the round that this peer is in; None if that one is lost, or gave way to another."""
        ballot, lead = self.participant.ballot, self._lead
        if ballot is None or not self.node.is_connected(PeerID(ballot.coordinator)):
            return None
        if ballot.coordinator == self.me.key and (lead is None or lead.coordinator.phase is Phase.ABORTED):
            return None
        return ballot.coordinator

    def _succeed(self) -> None:
        """If nobody coordinates the round that this peer is in: take over, or tell the one whose turn it is."""
        begin, ballot = self.participant.begin, self.participant.ballot
        if begin is None or ballot is None or self._coordinator_of_round() is not None:
            return
        successor = self._successor(begin)
        if successor == self.me.key:
            self._take_over(begin)
        elif successor is not None and self._round.attempt is not None:
            # It may not even have the BEGIN.
            gathered = msgspec.msgpack.encode(self._round.attempt.gathered)
            self.node.notify([PeerID(successor)], self.service, Orphaned(begin, ballot), [gathered])

    def _on_orphaned(self, peer: PeerID, orphaned: Orphaned, buffers: Sequence[memoryview]) -> None:
        """A member of a round has lost its coordinator and takes this peer for the successor."""
        begin, commit = orphaned.begin, self.participant.commit
        if all(member.key != peer.key for member in begin.members):
            raise Refused("only a member of a round can ask to take it over")
        if commit is not None and commit.round == begin.round:
            self.node.notify([peer], self.service, commit)
            return
        if self.tip != begin.tip:
            self.node.notify([peer], self.service, self.neighbourhood.hello())
            return
        if self.participant.begin is None:
            try:
                self._round.enter(peer, begin, buffers, relayed=True)
            except RuleBroken as error:
                raise Refused(str(error)) from error
        if self.participant.begin is not None and self.participant.begin.round == begin.round:
            self.participant.heard_of(orphaned.ballot)
            self._succeed()  # unless the coordinator is still there for this peer

    def _take_over(self, begin: Begin) -> None:
        log.info("%r takes over the round of epoch %d", self.node.peer_id, begin.tip.epoch)
        gone = [m.key for m in begin.members if m.key != self.me.key and not self.node.is_connected(m.peer)]
        coordinator = Coordinator.successor(self.me.key, begin, self.participant.attempt, gone, self.rules)
        if self._round.attempt is not None:
            coordinator.gathered = dict(self._round.attempt.gathered)
        self._follow_lead(coordinator)
        assert self._lead is not None
        self._lead.take_over()

    def _successor(self, begin: Begin) -> bytes | None:
        keys = {member.key for member in begin.members}
        for member in self.membership.candidates(begin.tip.epoch):
            if member.key in keys and member.role is not Role.CLIENT and self.node.is_connected(member.peer):
                return member.key
        return None

    def _waited_for(self) -> list[bytes]:
        """On whom this peer waits now; also the moment to see whether a round gets on, and has a coordinator."""
        if self._round.attempt is not None and len(self.neighbourhood.connected()) < max(2, self.rules.min_group):
            self.neighbourhood.look()
        self._round.check_stalled()
        self._succeed()
        if self._lead is not None and not self._lead.over and self._lead.coordinator.phase is not Phase.COUNTING:
            return self._lead.watched
        attempt, ballot = self._round.attempt, self.participant.ballot
        if self.participant.begin is not None and ballot is not None:
            return [ballot.coordinator]
        return [attempt.joined[0]] if attempt is not None and attempt.joined is not None else []

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _round_of(coordinator: Coordinator) -> bytes | None:
    return coordinator.begin.round if coordinator.begin is not None else None

"""One peer's part as coordinator: whether it is its turn, and who takes over when a coordinator is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence

import msgspec

from shoal.p2p.errors import Refused
from shoal.p2p.identity import PeerID
from shoal.p2p.node import Answer
from shoal.swarm.lead import Lead
from shoal.swarm.neighbourhood import Neighbourhood
from shoal.swarm.protocol.book import RuleBroken
from shoal.swarm.protocol.coordinator import Coordinator, Phase
from shoal.swarm.protocol.errors import AveragingError
from shoal.swarm.protocol.member import Member, Role
from shoal.swarm.protocol.messages import (
    MAX_GATHER_BYTES,
    Begin,
    Broken,
    Commit,
    Done,
    Elsewhere,
    Join,
    Joined,
    Orphaned,
    Progress,
    Unjoin,
    Waiting,
)
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.round import RoundDriver

log = logging.getLogger(__name__)

WAIT_FOR_TIP = 2.0  # how long a message about a tip to come is kept: COMMIT reaches members at different times
SETTLE_SECONDS = 1.0  # while not everybody may have been found yet, BEGIN waits until nobody new was found for so long


class Coordination:
    """Coordinates the rounds of one peer's tip when it is its turn, and takes over those that are orphaned.

    Args:
        neighbourhood: this peer among the members of its run.
        driver: of the round that this peer is in.
        rules: when a round begins.
        survey_timeout: seconds that a member may take to answer a survey.

    Attributes:
        lead: what this peer coordinates, if it does.
    """

    def __init__(self, neighbourhood: Neighbourhood, driver: RoundDriver, rules: Rules, survey_timeout: float) -> None:
        self._channel, self._participant = neighbourhood.channel, neighbourhood.participant
        self._neighbourhood, self._membership = neighbourhood, neighbourhood.membership
        self._round, self._rules, self._survey_timeout = driver, rules, survey_timeout
        self.lead: Lead | None = None
        self._joining: dict[bytes, Join] = {}  # not joined yet: the tip is waited for
        self._tip_waiters: list[asyncio.Future[None]] = []
        self._settled_at = self._all_until = 0.0
        self._met = 1

    def settle(self) -> None:
        """Before the run's first commit, or when this peer was away: not everybody may have been found yet, so BEGIN
        waits."""
        self._settled_at = asyncio.get_running_loop().time() + SETTLE_SECONDS
        if self.lead is not None:
            self.lead.coordinator.settled_at = self._settled_at

    def stop(self) -> None:
        """This peer leaves the run."""
        if self.lead is not None:
            self.lead.stop()

    def on_notice(self, peer: PeerID, notice: Done | Broken | Unjoin | Waiting | Elsewhere) -> None:
        """A member says how it gets on in the round that this peer coordinates, if it does; of one that was committed
        it hears so."""
        if isinstance(notice, Unjoin):
            self._joining.pop(peer.key, None)
        if isinstance(notice, Done | Broken | Waiting):
            commit = self._participant.commit_of(notice.round)
            if commit is not None and peer.key != self._participant.me:
                self._channel.notify([peer.key], commit)
        if self.lead is not None:
            self.lead.on_notice(peer, notice)

    def saw(self, key: bytes, signs: int) -> None:
        """A member has so often seen the round get on that this peer coordinates, if it does."""
        if self.lead is not None:
            self.lead.saw(key, signs)

    def new_tip(self, arrived: bool) -> None:
        """The tip has changed: what was about the old one is over. With `arrived`, its state was downloaded."""
        self._all_until = asyncio.get_running_loop().time() + SETTLE_SECONDS if arrived else 0.0
        if self.lead is not None and self.lead.coordinator.tip != self._participant.tip:
            self.lead.stop()
            self.lead = None
        for waiter in self._tip_waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._tip_waiters.clear()

    def missed(self, commit: Commit) -> None:
        """This tip's round was committed elsewhere: none is coordinated here, and those who wait for it hear why."""
        if self.lead is not None:
            waiting = {**self.lead.coordinator.counts, **self.lead.coordinator.joins}
            self.lead.stop()
            self.lead = None
            self._channel.notify([key for key in waiting if key != self._participant.me], commit)

    def members_changed(self) -> None:
        """Members came or went: does somebody else coordinate now?"""
        if self._participant.tip.epoch == 0 and len(self._membership.members) > self._met:
            self.settle()
        self._met = len(self._membership.members)
        coordinator = self._neighbourhood.coordinator()
        if self.lead is not None and not self.lead.over:
            if coordinator.key != self._participant.me and self.lead.coordinator.is_before_begin:
                self.resign(coordinator)  # somebody before us in the order has appeared
            else:
                self.lead.members_changed()

    def others_are_past(self, peer: PeerID) -> None:
        """A member is at a better state: the round of our tip was committed without us. None is begun any more, and
        those who wait hear where."""
        lead = self.lead
        if lead is not None and lead.coordinator.is_before_begin:
            self.resign(self._membership.members.get(peer.key, self._membership.me))

    @property
    def watched(self) -> list[bytes] | None:
        """On whom a round that this peer coordinates waits; None if there is none."""
        if self.lead is None or self.lead.over or self.lead.coordinator.phase is Phase.COUNTING:
            return None
        return self.lead.watched

    # -- members report and join

    async def on_progress(self, peer: PeerID, report: Progress) -> Answer:
        """A member reports its samples; the answer is what all have, or where to report instead."""
        if peer.key not in self._membership.members:
            return self._neighbourhood.hello()
        if report.loading:
            return self._on_loading(peer, report)
        standing = await self._standing(peer, report.tip)
        if standing is not None:
            return standing
        return self._leading().progress(peer, report)

    def _on_loading(self, peer: PeerID, report: Progress) -> Answer:
        """A member downloads the state of that tip; it is counted only if the round that follows can still wait."""
        if report.tip != self._participant.tip or self._participant.missed is not None:
            return self._neighbourhood.hello()
        coordinator = self._neighbourhood.coordinator()
        if coordinator.key != self._participant.me:
            return Elsewhere(coordinator)
        lead = self._leading()
        return lead.progress(peer, report) if lead.coordinator.is_before_begin else self._neighbourhood.hello()

    def on_join(self, peer: PeerID, join: Join, gathered: bytes) -> Awaitable[Answer]:
        """A member's input is ready; void if it has said otherwise by the time that this is awaited. Raises Refused for
        what breaks a rule."""
        self._joining[peer.key] = join
        return self._join(peer, join, gathered)

    async def _join(self, peer: PeerID, join: Join, gathered: bytes) -> Answer:
        try:
            return await self._join_unless_void(peer, join, gathered)
        finally:
            if self._joining.get(peer.key) is join:
                del self._joining[peer.key]

    async def _join_unless_void(self, peer: PeerID, join: Join, gathered: bytes) -> Answer:
        if join.sender.key != peer.key:
            raise Refused("JOIN in the name of another peer")
        if len(gathered) > MAX_GATHER_BYTES:
            raise Refused(f"gather is {len(gathered)} bytes long; at most {MAX_GATHER_BYTES} are allowed")
        if join.terms.difference(self._neighbourhood.terms) is not None:
            return self._neighbourhood.hello()  # which of the two gives way, Hello tells
        self._channel.learn(join.sender)
        self._neighbourhood.spoke(peer, join.sender)
        standing = await self._standing(peer, join.tip)
        if standing is not None:
            return standing
        if join.view and join.view != self._membership.fingerprint():
            return self._neighbourhood.hello()
        if self._joining.get(peer.key) is join:
            self._leading().join(peer, join, gathered)
        return Joined(self._participant.tip)

    async def _standing(self, peer: PeerID, tip: Tip) -> Answer:
        """None if this peer coordinates for that tip; else what to answer instead."""
        if tip.epoch == self._participant.tip.epoch + 1:
            await self._wait_for_tip(tip)
        self._neighbourhood.told(peer, tip)
        for commit in self._participant.commits:
            if commit.tip == tip and peer.key != self._participant.me:
                self._channel.notify([peer.key], commit)  # it has missed that
        if tip != self._participant.tip or self._participant.missed is not None:
            return self._neighbourhood.hello()
        if self.lead is not None and not self.lead.over:
            return None
        coordinator = self._neighbourhood.coordinator()
        return None if coordinator.key == self._participant.me else Elsewhere(coordinator)

    async def _wait_for_tip(self, tip: Tip) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + WAIT_FOR_TIP
        while self._participant.tip != tip and loop.time() < until:
            waiter: asyncio.Future[None] = loop.create_future()
            self._tip_waiters.append(waiter)
            await asyncio.wait([waiter], timeout=until - loop.time())

    def _leading(self) -> Lead:
        """This peer's coordination of its tip, begun if need be."""
        if self.lead is None or self.lead.over:
            me, tip, commit = self._participant.me, self._participant.tip, self._participant.commit
            # Whoever was put out of the last round is in no view, and is not waited for.
            kept = {member.key for member in commit.view} if commit is not None else set()
            veterans = frozenset(key for key in commit.members if key in kept) if commit is not None else frozenset()
            return self._lead_with(Coordinator(me, tip, self._rules, self._settled_at, self._all_until, veterans))
        return self.lead

    def _lead_with(self, coordinator: Coordinator) -> Lead:
        if self.lead is not None:
            self.lead.stop()
        self.lead = Lead(coordinator, self._neighbourhood, self._survey_timeout)
        self.lead.members_changed()
        return self.lead

    def resign(self, other: Member) -> None:
        """Coordinate this tip no more: those who reported or joined here are sent to `other`."""
        assert self.lead is not None
        counted = {**self.lead.coordinator.counts, **self.lead.coordinator.joins}
        self.lead.stop()
        self.lead = None
        self._channel.notify([key for key in counted if key != self._participant.me], Elsewhere(other))

    def coordinator_of_round(self) -> bytes | None:
        """Who coordinates the round that this peer is in; None if that one is lost, or gave way to another."""
        ballot, lead = self._participant.ballot, self.lead
        if ballot is None or not self._channel.is_connected(ballot.coordinator):
            return None
        if ballot.coordinator == self._participant.me and (lead is None or lead.coordinator.phase is Phase.ABORTED):
            return None
        return ballot.coordinator

    def lost(self, key: bytes) -> None:
        """A member is gone."""
        me, in_round = self._participant.me, self._participant.is_with(key)
        known = key in self._membership.members
        self._neighbourhood.lose(key)
        for commit in self._participant.commits if known else ():
            # It may have been the coordinator, and may have died before all had its COMMIT.
            self._channel.notify([other for other in commit.members if other not in (key, me)], commit)
        if in_round and self.coordinator_of_round() not in (None, me):  # if we coordinate, `Lead` has heard of it
            self._round.complain(key, "the connection to it was lost", fault=False)
        self.succeed()

    def succeed(self) -> None:
        """If nobody coordinates the round that this peer is in: take over, or tell the one whose turn it is."""
        begin, ballot = self._participant.begin, self._participant.ballot
        if begin is None or ballot is None or self.coordinator_of_round() is not None:
            return
        successor = self._successor(begin)
        if successor == self._participant.me:
            self._take_over(begin)
        elif successor is not None and self._round.attempt is not None:
            # It may not even have the BEGIN.
            gathered = msgspec.msgpack.encode(self._round.attempt.gathered)
            self._channel.notify([successor], Orphaned(begin, ballot), [gathered])
        elif successor is None:
            self._round.fail(AveragingError("its coordinator is lost, and nobody in reach can take the round over"))

    def on_orphaned(self, peer: PeerID, orphaned: Orphaned, buffers: Sequence[memoryview]) -> None:
        """A member of a round has lost its coordinator and takes this peer for the successor."""
        begin = orphaned.begin
        if all(member.key != peer.key for member in begin.members):
            raise Refused("only a member of a round can ask to take it over")
        commit = self._participant.commit_of(begin.round)
        if commit is not None:
            self._channel.notify([peer.key], commit)
            return
        if self._participant.tip != begin.tip:
            self._channel.notify([peer.key], self._neighbourhood.hello())
            return
        if self._participant.begin is None:
            try:
                self._round.enter(peer, begin, buffers, relayed=True)
            except RuleBroken as error:
                raise Refused(str(error)) from error
        if self._participant.begin is not None and self._participant.begin.round == begin.round:
            self._participant.heard_of(orphaned.ballot)
            self.succeed()  # unless the coordinator is still there for this peer

    def _take_over(self, begin: Begin) -> None:
        log.info("%r takes over the round of epoch %d", self._membership.me.peer, begin.tip.epoch)
        gone = [member.key for member in begin.members if not self._channel.is_connected(member.key)]
        coordinator = Coordinator.successor(self._participant.me, begin, self._participant.attempt, gone, self._rules)
        if self._round.attempt is not None:
            coordinator.gathered = dict(self._round.attempt.gathered)
        self._lead_with(coordinator).take_over()

    def _successor(self, begin: Begin) -> bytes | None:
        keys = {member.key for member in begin.members}
        for member in self._membership.candidates(begin.tip.epoch):
            if member.key in keys and member.role is not Role.CLIENT and self._channel.is_connected(member.key):
                return member.key
        return None

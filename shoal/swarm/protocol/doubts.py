"""Holds the coordinators of a tip to their deadlines, and finds those that most members doubt."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from shoal.p2p.identity import PeerID
from shoal.swarm.protocol import messages as msg
from shoal.swarm.protocol.book import require
from shoal.swarm.protocol.deadlines import ANSWER_SECONDS, BEGIN_SLACK_SECONDS, CALL_SECONDS, Deadlines, Duty
from shoal.swarm.protocol.history import LEAP, History
from shoal.swarm.protocol.participant import MemberState, Participant
from shoal.swarm.protocol.rules import Rules

log = logging.getLogger(__name__)

# The time from a member's time-out until the coordinator hears of it. A member looks every second. So it notices up to
# a second late that something arrived, and up to a second late that nothing has arrived since. Then it sends a
# complaint.
COMPLAINT_SECONDS = 3.0
DECIDE_SLACK_SECONDS = COMPLAINT_SECONDS + 2.0  # the same, and until all have seen the coordinator's decision
MOST_ENDED = 4  # a coordinator is doubted when it has ended so many rounds of one tip without a result


class Doubts:
    """The doubts of one peer, and of other members, about the coordinators of its tip.

    Args:
        participant: the peer as a member. It has the lists of coordinators that it doubts and that are deposed.
        rules: when a round begins.
        history: the samples that members brought to earlier commits.
    """

    def __init__(self, participant: Participant, rules: Rules, history: History) -> None:
        self._participant, self._rules, self._history = participant, rules, history
        self._view, self._me = participant.view, participant.me
        self._deadlines = Deadlines()
        self._said: dict[tuple[bytes, bytes], msg.Doubt] = {}  # by (doubted coordinator, sender)
        self._reported = 0.0  # samples of this peer since the tip

    def new_tip(self) -> None:
        """Forget all duties and doubts, because there is a new tip."""
        self._deadlines.new_tip()
        self._said, self._reported = {}, 0.0

    # -- what coordinators owe

    def asked(self, key: bytes, now: float, samples: float | None = None) -> None:
        """This peer has sent a request to its coordinator. If it was a report, `samples` is the reported number."""
        self._deadlines.owed(key, Duty.ANSWER, now)
        self._reported = self._reported if samples is None else samples

    def answered(self, key: bytes, *, joined: bool, now: float) -> None:
        """The coordinator has answered a report, or a JOIN (`joined`)."""
        self._deadlines.done(key, Duty.ANSWER)
        if joined:
            self._deadlines.owed(key, Duty.BEGIN, now)

    def was_asked(self, key: bytes) -> bool:
        """Whether this peer has sent a request to that one as the coordinator of this tip."""
        return self._deadlines.owes(key)

    def stood_still(self, now: float) -> None:
        """Let all times start again. This peer's process did not run for a while, so it has not read what others have
        sent."""
        self._deadlines.forgive(now)

    def look(self, now: float) -> None:
        """Doubt the coordinator of this tip if it has missed a deadline, has held up too many rounds, or has ended too
        many. Called every second."""
        participant, deadlines = self._participant, self._deadlines
        is_in_round = participant.begin is not None
        coordinator = participant.at.ballot.coordinator if is_in_round else participant.coordinator().key
        if coordinator == self._me or participant.at.missed is not None:
            return
        if participant.given.input is None and participant.behind(now) is not None:
            deadlines.forgive(now)  # this peer loads another state, and answers are queued behind its chunks
            return
        for duty in Duty if is_in_round else (Duty.DECIDE,):
            deadlines.done(coordinator, duty)
        stands_since = max(self._begun_at(coordinator, now), participant.progressed_at)
        if now - stands_since > 1.0:
            deadlines.owed(coordinator, Duty.DECIDE, stands_since)
        if not is_in_round and self.is_due() and not participant.at.called:
            deadlines.owed(coordinator, Duty.CALL, now)
        if not is_in_round and (participant.state is not MemberState.JOINED or not self._are_enough_here()):
            deadlines.done(coordinator, Duty.BEGIN)
        elif now < self._history.newcomers.told_until:  # its time begins when that is over
            deadlines.done(coordinator, Duty.BEGIN)
            deadlines.owed(coordinator, Duty.BEGIN, now)
        given, rules = participant.given.input, self._rules
        wait = rules.matchmaking_time if rules.target_samples is not None else given.patience if given else 0
        seconds = {Duty.ANSWER: ANSWER_SECONDS, Duty.CALL: CALL_SECONDS, Duty.BEGIN: wait + BEGIN_SLACK_SECONDS}
        seconds[Duty.DECIDE] = participant.silence.reducer_timeout + DECIDE_SLACK_SECONDS
        missed = deadlines.missed(coordinator, seconds, len(participant.at.deposed), now)
        reason = None if missed is None else missed.value
        if rules.target_samples is not None and not is_in_round:
            if participant.silence.patience.is_over(coordinator, now):
                reason = "has held up too many rounds lately"
            elif participant.at.ended[coordinator] >= MOST_ENDED:
                reason = f"has ended {participant.at.ended[coordinator]} rounds of this epoch without a result"
        if reason is not None and coordinator not in participant.at.doubted:
            log.info("%r doubts the coordinator %r: it %s", self._view.me.peer, PeerID(coordinator), reason)
            self.doubt(coordinator)

    def _begun_at(self, coordinator: bytes, now: float) -> float:
        """Since when that coordinator owes the result of a round; `now` if it owes none. If samples are counted, the
        time starts with its first round of this tip: otherwise a coordinator could end each round before its time is
        over, and begin another one, for ever."""
        participant = self._participant
        if self._rules.target_samples is None or participant.given.input is None or not self._are_enough_here():
            participant.at.first_begun.pop(coordinator, None)  # this peer does not wait for the coordinator
        begun = now if participant.round is None else participant.round.began
        return participant.at.first_begun.get(coordinator, begun)

    def is_due(self) -> bool:
        """Whether the round must be due, by this peer's estimate. The estimate takes its own samples, and its share of
        the last commit among the members that are still there. The round is due if all members together then have twice
        the target."""
        target, shares = self._rules.target_samples, self._history.last
        here = sum(share for key, share in shares.items() if self._view.reaches(key))
        mine = shares.get(self._me, 0.0)
        if target is None or not self._reported > 0 < mine:
            return False
        # The share alone can mislead: it is small if another member claimed very many samples. What this peer brought
        # can mislead, too: it is large after an epoch that was called late. So the larger of the two estimates counts.
        if self._rules.target_is_each:
            return self._reported >= LEAP * target
        usual = max(target * mine, min(target, self._history.brought.get(self._me, 0.0)))
        return self._reported * here >= LEAP * usual

    def has_its_part(self) -> bool:
        """Whether this peer has made its part of the epoch, if each member makes one, and waits for CALL."""
        part = self._rules.target(self._participant.at.tip.epoch, 1) if self._rules.target_is_each else None
        return part is not None and self._reported >= part

    def _are_enough_here(self) -> bool:
        here = sum(member.contributes for member in self._view.connected())
        return here >= self._rules.least(self._participant.at.contributed)

    def haste(self) -> float:
        """See `Deadlines.haste`, for this peer as the coordinator."""
        return self._deadlines.haste(self._me, len(self._participant.at.deposed))

    # -- doubts of this peer and of others

    def doubt(self, coordinator: bytes) -> None:
        """Doubt that coordinator of this tip: this peer has lost it, or has waited for it in vain."""
        if coordinator not in self._participant.at.doubted:
            self._participant.at.doubted[coordinator] = None
            doubt = msg.Doubt(self._participant.at.tip, coordinator, self._me)
            self._said[coordinator, self._me] = self._participant.signer.sign(doubt)

    @property
    def own(self) -> list[msg.Doubt]:
        """All of this peer's doubts."""
        return [self._said[of, self._me] for of in self._participant.at.doubted]

    @property
    def evidence(self) -> tuple[msg.Doubt, ...]:
        """The doubts for which coordinators of this tip were deposed; the newest ones if not all fit in a message."""
        doubts = [doubt for (of, _), doubt in self._said.items() if of in self._participant.at.deposed]
        return tuple(doubts[-msg.MAX_DOUBTS :])

    def hear(self, doubts: Iterable[msg.Doubt]) -> None:
        """Keep the doubts about this tip that members have signed. Others are dropped: peers do not follow a member
        that passes on a forged doubt."""
        for doubt in doubts:
            said = doubt.of, doubt.sender
            is_of_a_member = doubt.tip == self._participant.at.tip and self._view.has_met(doubt.sender)
            if said not in self._said and is_of_a_member and self._participant.signer.is_signed(doubt, doubt.sender):
                self._said[said] = doubt

    def heard(self, doubt: msg.Doubt) -> bool:
        """A member doubts a coordinator. Returns whether that is news. Raises RuleBroken if the member has not signed
        the doubt."""
        if (doubt.of, doubt.sender) in self._said:
            return False
        require(self._participant.is_signed(doubt, doubt.sender), "a doubt without its sender's signature")
        self.hear([doubt])
        return True

    def doubted_by_most(self) -> set[bytes]:
        """The coordinators that most members doubt, and that are not deposed yet."""
        deposed = self._participant.at.deposed
        undecided = [doubt for (of, _), doubt in self._said.items() if of not in deposed]
        return self._participant.deposed_by(undecided) - deposed.keys() if undecided else set()

    def depose(self, keys: Collection[bytes]) -> None:
        """Depose these coordinators of this tip, because most members doubt them."""
        for key in keys:
            self._participant.at.deposed[key] = None
            if self._view.reaches(key):  # a lost one has not failed
                self._has_failed(key)
                self._participant.rejoin(key)

    # -- failures

    def committed(self, coordinator: bytes, *, led: bool) -> None:
        """That coordinator has committed the round of this tip. All others that this peer has doubted have failed, even
        if only the new coordinator knows that most members doubted them. So has this peer if it `led`."""
        over = (coordinator, *self._participant.at.deposed)
        for key in self._participant.at.doubted:
            if key not in over and self._view.reaches(key):
                self._has_failed(key)
        if led and self._me not in over:
            self._deadlines.has_failed(self._me)
        self._deadlines.failed.pop(coordinator, None)

    def _has_failed(self, key: bytes) -> None:
        """That coordinator was replaced. This may happen once to a peer whose process stood still. If it happens again
        before the peer has committed a round, the log warns, once."""
        level = logging.WARNING if self._deadlines.has_failed(key) == 2 else logging.INFO
        who = "this peer" if key == self._me else repr(PeerID(key))
        advice = "The next candidate takes its place. If this happens often, check its machine and its line"
        log.log(level, "%s is replaced as the coordinator, because most members doubt it. %s", who, advice)

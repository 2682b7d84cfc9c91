"""Holds the coordinators of a tip to their deadlines, and knows which of them most members doubt."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable

from shoal.p2p.identity import PeerID
from shoal.swarm.protocol import messages as msg
from shoal.swarm.protocol.book import require
from shoal.swarm.protocol.deadlines import ANSWER_SECONDS, BEGIN_SLACK_SECONDS, CALL_SECONDS, Deadlines, Duty
from shoal.swarm.protocol.history import LEAP, History
from shoal.swarm.protocol.participant import Participant, State
from shoal.swarm.protocol.rules import Rules

log = logging.getLogger(__name__)

# From a time-out of a member until the coordinator knows. A member looks every second: it sees up to a second late that
# something came, and up to a second late that nothing has come since. Then the complaint is sent.
COMPLAINT_SECONDS = 3.0
DECIDE_SLACK_SECONDS = COMPLAINT_SECONDS + 2.0  # and until all have seen what it has decided
MOST_ENDED = 4  # rounds of one tip that a coordinator may end without a result


class Doubts:
    """What one peer, and others, hold against the coordinators of its tip.

    Args:
        participant: the peer as a member; it has lists of those that it doubts and of those that are deposed.
        rules: when a round begins.
        history: what the members brought to earlier commits.
    """

    def __init__(self, participant: Participant, rules: Rules, history: History) -> None:
        self._participant, self._rules, self._history = participant, rules, history
        self._view, self._me = participant.view, participant.me
        self._deadlines = Deadlines()
        self._said: dict[tuple[bytes, bytes], msg.Doubt] = {}  # of whom, and by whom
        self._reported = 0.0  # samples of this peer since the tip

    def new_tip(self) -> None:
        """Nobody owes anything, and nobody is doubted, for the tip before."""
        self._deadlines.new_tip()
        self._said, self._reported = {}, 0.0

    # -- what coordinators owe

    def asked(self, key: bytes, now: float, samples: float | None = None) -> None:
        """This peer has asked its coordinator something, or has reported so many samples to it."""
        self._deadlines.owed(key, Duty.ANSWER, now)
        self._reported = self._reported if samples is None else samples

    def answered(self, key: bytes, *, joined: bool, now: float) -> None:
        """The coordinator has answered what it was asked: it counts this peer's samples, or this peer has `joined`."""
        self._deadlines.done(key, Duty.ANSWER)
        if joined:
            self._deadlines.owed(key, Duty.BEGIN, now)

    def was_asked(self, key: bytes) -> bool:
        """Whether this peer has asked that one anything as the coordinator of this tip."""
        return self._deadlines.owes(key)

    def stood_still(self, now: float) -> None:
        """This peer's process did not run for a while: what others have said meanwhile was not read yet."""
        self._deadlines.forgive(now)

    def look(self, now: float) -> None:
        """Doubt the coordinator of this tip if it has missed a deadline, or held up too many rounds; to be called every
        second."""
        participant, deadlines = self._participant, self._deadlines
        is_in_round = participant.begin is not None
        coordinator = participant.ballot.coordinator if is_in_round else participant.coordinator().key
        if coordinator == self._me or participant.missed is not None:
            return
        for duty in Duty if is_in_round else (Duty.DECIDE,):
            deadlines.done(coordinator, duty)
        stands_since = max(self._begun_at(coordinator, now), participant.progressed_at)
        if now - stands_since > 1.0:
            deadlines.owed(coordinator, Duty.DECIDE, stands_since)
        if not is_in_round and self.is_due() and not participant.called:
            deadlines.owed(coordinator, Duty.CALL, now)
        if not is_in_round and (participant.state is not State.JOINED or not self._are_enough_here()):
            deadlines.done(coordinator, Duty.BEGIN)
        given, rules = participant.input, self._rules
        wait = rules.matchmaking_time if rules.target_samples is not None else given.patience if given else 0
        seconds = {
            Duty.ANSWER: ANSWER_SECONDS,
            Duty.CALL: CALL_SECONDS,
            Duty.BEGIN: wait + BEGIN_SLACK_SECONDS,
            Duty.DECIDE: participant.silence.reducer_timeout + DECIDE_SLACK_SECONDS,
        }
        missed = deadlines.missed(coordinator, seconds, len(participant.deposed), now)
        reason = None if missed is None else missed.value
        if rules.target_samples is not None and not is_in_round:
            if participant.silence.patience.is_over(coordinator, now):
                reason = "has held up too many rounds lately"
            elif participant.ended[coordinator] >= MOST_ENDED:
                reason = f"has ended {participant.ended[coordinator]} rounds of this epoch without a result"
        if reason is not None and coordinator not in participant.doubted:
            log.info("%r doubts the coordinator %r: it %s", self._view.me.peer, PeerID(coordinator), reason)
            self.doubt(coordinator)

    def _begun_at(self, coordinator: bytes, now: float) -> float:
        """Since when that coordinator owes the result of a round; `now` if it does not. Where samples are counted, it
        owes one for all rounds that it begins at this tip: it may end each before that takes too long."""
        participant = self._participant
        if self._rules.target_samples is None or participant.input is None or not self._are_enough_here():
            participant.first_begun.pop(coordinator, None)  # it is not the coordinator that is waited for
        begun = now if participant.begin is None else participant.began
        return participant.first_begun.get(coordinator, begun)

    def is_due(self) -> bool:
        """Whether this peer's samples, by its share of the last commit among those who are still there, say that the
        members have the target twice."""
        target, shares = self._rules.target_samples, self._history.last
        here = sum(share for key, share in shares.items() if self._view.reaches(key))
        mine = shares.get(self._me, 0.0)
        if target is None or not self._reported > 0 < mine:
            return False
        # Its share is small, too, if another has said that it brought very much; and after an epoch that was called
        # late, it has brought very much itself.
        if self._rules.target_is_each:
            return self._reported >= LEAP * target
        usual = max(target * mine, min(target, self._history.brought.get(self._me, 0.0)))
        return self._reported * here >= LEAP * usual

    def _are_enough_here(self) -> bool:
        here = sum(member.contributes for member in self._view.connected())
        return here >= self._rules.least(self._participant.contributed)

    def haste(self) -> float:
        """See `Deadlines.haste`, of this peer as the coordinator."""
        return self._deadlines.haste(self._me, len(self._participant.deposed))

    # -- what is said of them

    def doubt(self, coordinator: bytes) -> None:
        """This peer has lost that coordinator of its tip, or in vain waited for it."""
        if coordinator not in self._participant.doubted:
            self._participant.doubted[coordinator] = None
            doubt = msg.Doubt(self._participant.tip, coordinator, self._me)
            self._said[coordinator, self._me] = self._participant.signer.sign(doubt)

    @property
    def own(self) -> list[msg.Doubt]:
        """All of this peer's doubts."""
        return [self._said[of, self._me] for of in self._participant.doubted]

    @property
    def to_tell(self) -> list[msg.Doubt]:
        """This peer's doubts, for the next candidate."""
        return [doubt for doubt in self.own if doubt.of not in self._participant.deposed]

    @property
    def evidence(self) -> tuple[msg.Doubt, ...]:
        """The doubts for which coordinators of this tip were deposed; the newest, if they do not fit a message."""
        doubts = [doubt for (of, _), doubt in self._said.items() if of in self._participant.deposed]
        return tuple(doubts[-msg.MAX_DOUBTS :])

    def hear(self, doubts: Iterable[msg.Doubt]) -> None:
        """Keep what members have said of this tip, and signed. What somebody has added to that would be passed on, and
        nobody would follow who passes it on."""
        for doubt in doubts:
            said = doubt.of, doubt.sender
            is_of_a_member = doubt.tip == self._participant.tip and self._view.has_met(doubt.sender)
            if said not in self._said and is_of_a_member and self._participant.signer.is_signed(doubt, doubt.sender):
                self._said[said] = doubt

    def heard(self, doubt: msg.Doubt) -> bool:
        """A member doubts a coordinator. Returns whether that is news. Raises RuleBroken if it has not signed that."""
        if (doubt.of, doubt.sender) in self._said:
            return False
        is_signed = self._participant.signer.is_signed(doubt, doubt.sender)
        require(doubt.sender == self._me or is_signed, "a doubt without its sender's signature")
        self.hear([doubt])
        return True

    def doubted_by_most(self) -> set[bytes]:
        """The coordinators that most members doubt by now, and that are not deposed yet."""
        deposed = self._participant.deposed
        undecided = [doubt for (of, _), doubt in self._said.items() if of not in deposed]
        return self._participant.deposed_by(undecided) - deposed.keys() if undecided else set()

    def depose(self, keys: Collection[bytes]) -> None:
        """Most members doubt these: they coordinate this tip no more."""
        for key in keys:
            self._participant.deposed[key] = None
            if self._view.reaches(key):  # otherwise it is lost
                self._has_failed(key)
                self._participant.rejoin(key)

    # -- for how long

    def committed(self, coordinator: bytes, *, led: bool) -> None:
        """The round of this tip was committed by that one: those before it whom this peer has doubted have failed, even
        if only the one that took over knows that most have doubted them; so has this peer, if it `led`."""
        over = (coordinator, *self._participant.deposed)
        for key in self._participant.doubted:
            if key not in over and self._view.reaches(key):
                self._has_failed(key)
        if led and self._me not in over:
            self._deadlines.failed[self._me] += 1
        self._deadlines.failed.pop(coordinator, None)

    def _has_failed(self, key: bytes) -> None:
        """That coordinator was replaced. One whose process stood still may be so once; if it is so again before it has
        done its duty, people hear of it, once."""
        self._deadlines.failed[key] += 1
        level = logging.WARNING if self._deadlines.failed[key] == 2 else logging.INFO
        who = "this peer" if key == self._me else repr(PeerID(key))
        advice = "The next one takes its place. If that goes on, look after its machine and its line"
        log.log(level, "%s does not do what a coordinator has to, as most members see it. %s", who, advice)

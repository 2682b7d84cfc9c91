"""After BEGIN, or after it has taken a round over: the coordinator puts members out, repairs, and commits the result.

[Note: why two coordinators cannot commit two results]
No peer knows which others can reach each other, so two peers may both believe that they coordinate. The rules of
single-decree Paxos prevent them from committing two results of one tip to members that can reach each other:

1. A member follows one ballot at a time, and moves only to a higher one. It answers DONE and HAVE only under the
   ballot that it follows. While it is in a round whose coordinator it still reaches, it refuses every other BEGIN.
2. A coordinator commits only when all members that it has not put out have said DONE under its ballot, with one digest.
3. A successor asks all members what they hold before it decides. If a member has a COMMIT, that is the decision. If
   members were complete (DONE), the chunks of those with the highest such ballot are the decision.

A coordinator that was replaced without knowing it receives no DONE from the members that follow the successor. It can
commit only a result to which all of them had said DONE before, and by rule 3 the successor decides the same. Two
decisions are possible only in a partition, where the two sides have no member in common: then they have two lineages
(`Tip`).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from shoal.swarm.protocol import messages as msg
from shoal.swarm.protocol.actions import Ask, Send
from shoal.swarm.protocol.answers import check_answer, repaired
from shoal.swarm.protocol.book import RuleBroken, require, root_of
from shoal.swarm.protocol.gathering import Gathering
from shoal.swarm.protocol.lifetimes import InRound
from shoal.swarm.protocol.tip import Ballot
from shoal.swarm.protocol.view import Member
from shoal.swarm.protocol.witnesses import Witnesses

NOTICE_SECONDS = 2.0  # within this time, all members notice that one is lost or silent
MAX_REFUSED_REPAIRS = 3  # a member that refuses more repairs, or that more repairs do not help, is put out


class Phase(Enum):
    RUNNING = "running"  # → COMMITTED when all are done, → SURVEYING when one is lost or digests differ
    SURVEYING = "surveying"  # → RUNNING by REPAIR, → COMMITTED if a member has a COMMIT, → ABORTED if outbid
    COMMITTED = "committed"
    ABORTED = "aborted"  # no member is left, time is up, or another peer coordinates


@dataclass(frozen=True, slots=True)
class _Judgement:
    """A pending decision to part two members, which both reach the coordinator and cannot reach each other.

    Attributes:
        at: when to decide. By then all members notice if one of the two is lost.
        complainer, other: the keys of the two.
        reason: the complaint of the first about the other.
    """

    at: float
    complainer: bytes
    other: bytes
    reason: str

    @property
    def pair(self) -> frozenset[bytes]:
        return frozenset((self.complainer, self.other))


@dataclass
class Leading:
    """Coordinates a round that has begun. Events in, actions out; time is an argument, in seconds of any clock.

    Args:
        before: how the round was gathered. It goes on to count the samples that are reported late.
        begin: the BEGIN of the round.
        ballot: the ballot under which this peer coordinates it.
        phase: the phase in which it begins.
        out: members that were put out of the round, each with the reason.
        gathered: the data of its members for all, by key, if this peer has taken the round over.
        took_over: whether it has.
        was_done: whether it was done by then: a result may be decided already.
        doubts: doubts of the coordinators before this one.
        deadline: when the round ends if nothing happens before.
        got_on_at: when the round last made progress, or members were last sent new instructions.
    """

    before: Gathering
    begin: msg.Begin
    ballot: Ballot
    phase: Phase = Phase.RUNNING
    out: dict[bytes, str] = field(default_factory=dict)
    gathered: dict[bytes, bytes] = field(default_factory=dict)
    took_over: bool = False
    was_done: bool = False
    doubts: tuple[msg.Doubt, ...] = ()
    deadline: float = math.inf
    got_on_at: float = math.inf
    done: dict[bytes, bytes] = field(default_factory=dict, init=False)
    have: dict[bytes, msg.Have] = field(default_factory=dict, init=False)
    disputed: dict[bytes, bytes] = field(default_factory=dict, init=False)  # digests of DONE, when they differed
    settled: bytes = field(default=b"", init=False)  # the result's digest, once all have all chunks in some version
    parted: dict[frozenset[bytes], bytes] = field(default_factory=dict, init=False)  # each pair with the blamed member
    # How often each member has said that it lacks only chunks of parted reducers, and the members that have just done
    # so.
    waits: Counter[bytes] = field(default_factory=Counter, init=False)
    waiting: dict[bytes, None] = field(default_factory=dict, init=False)
    refused_repairs: Counter[bytes] = field(default_factory=Counter, init=False)  # by member
    _judgements: deque[_Judgement] = field(default_factory=deque, init=False)  # the next one first

    def __post_init__(self) -> None:
        before = self.before
        self.me, self.at, self.rules, self.signer = before.me, before.at, before.rules, before.signer
        self.witnesses = Witnesses(self.me)
        self.late = dict.fromkeys(key for key in before.joins if key not in self.begin.keys)  # they wait for the next

    @classmethod
    def of(cls, before: Gathering, begin: msg.Begin, now: float) -> Leading:
        """Of the round that has just begun."""
        return cls(before, begin, begin.ballot, deadline=now + begin.timeout, got_on_at=now)

    @classmethod
    def after(cls, before: Gathering, round: InRound, out: dict[bytes, str], doubts: tuple[msg.Doubt, ...]) -> Leading:
        """Of a round whose coordinator is lost. This peer goes on under a higher ballot, after a survey."""
        ballot, was_done = Ballot(before.at.ballot.number, before.me), round.done is not None
        return cls(before, round.begin, ballot, Phase.SURVEYING, out, round.gathered, True, was_done, doubts)

    @property
    def over(self) -> bool:
        """Whether the round has ended, with a result or without."""
        return self.phase in (Phase.COMMITTED, Phase.ABORTED)

    @property
    def heard_from(self) -> dict[bytes, object]:
        """See `Gathering.heard_from`."""
        return self.before.heard_from

    # -- members that come late

    def progress(self, key: bytes, report: msg.Progress, now: float) -> tuple[msg.Count, list[Send | Ask]]:
        """See `Gathering.progress`."""
        return self.before.progress(key, report, now)

    def join(self, key: bytes, join: msg.Join, gathered: bytes, now: float) -> list[Send | Ask]:
        """A member's input is ready. It waits for the next round."""
        self.late[key] = None
        return self._regroup()

    def unjoin(self, key: bytes, now: float) -> list[Send | Ask]:
        """A member withdraws its JOIN."""
        self.late.pop(key, None)
        return []

    # -- the members

    def tick(self, now: float) -> list[Send | Ask]:
        """Do what is due at `now`. Called at `wake_at` and after every event."""
        if self._judgements and self._judgements[0].at <= now:
            return self._judge(self._judgements.popleft(), now)
        if self._is_running and now >= self.deadline:
            return self.abort(f"the round has made no progress for {self.begin.timeout:g} s")
        return []

    def wake_at(self) -> float | None:
        """When to call `tick` if nothing else happens; None if never."""
        judges_at = self._judgements[0].at if self._judgements else math.inf
        at = min(self.deadline if self._is_running else math.inf, judges_at)
        return None if at == math.inf else at

    def wait(self, now: float) -> None:
        """The user of a member makes the others wait, so the round's time-out starts again. If samples are counted,
        nothing happens: users do not control such rounds."""
        if self.rules.target_samples is None:
            self._gets_on(now)

    def _gets_on(self, now: float) -> None:
        if self._is_running:
            self.deadline, self.got_on_at = now + self.begin.timeout, now

    def hurry(self, seconds: Callable[[bytes], float], now: float) -> list[Send | Ask]:
        """Put out members that stay behind: this peer is done and they are not, they have not said what they lack, and
        the round has made no progress for `seconds(key)`. Called every second."""
        if self.phase is not Phase.RUNNING or self.me not in self.done:
            return []
        standing = now - self.got_on_at
        late = [key for key in self.live() if key not in {**self.done, **self.waiting} and standing > seconds(key)]
        for key in late:
            self.out[key] = f"it is not done {standing:.0f} s after the last progress of the round"
        told = [Send((key,), msg.Abort(self.begin.round, self.out[key], alone=True)) for key in late]
        return [*told, *(self._regroup() or self.start_survey(now))] if late else []

    @property
    def _is_running(self) -> bool:
        return self.phase in (Phase.RUNNING, Phase.SURVEYING)

    def saw(self, key: bytes, signs: int, now: float) -> None:
        """A member has seen the round make progress `signs` times. If this is news, the time-out starts again."""
        if self.witnesses.say(key, signs, now):
            self._gets_on(now)

    def broken(self, key: bytes, broken: msg.Broken, reachable: bool, now: float) -> list[Send | Ask]:
        """A member cannot continue with another one.

        The other one is put out if this peer does not reach it either, if the complaint is its own, or if this peer
        complains. (This peer's complaint does not count if the other one has just complained of a third, for which it
        may be waiting.) Otherwise it is one member's word against the other's, and the two are parted.

        Args:
            key: the member that complains.
            broken: the complaint.
            reachable: whether this peer reaches the other member.
            now: the time.

        Raises:
            RuleBroken: if `key` is not in the round.
        """
        require(key in self.live(), "only a member of the round can complain of another")
        if broken.peer == key == self.me and self.took_over:
            self.give_way()  # all members have heard that this peer has left: the next one takes the round over
            return []
        waits_itself = not broken.fault and any(one.complainer == broken.peer for one in self._judgements)
        if key == self.me and reachable and waits_itself:
            return self.tick(now)  # first judge that member's own complaint: it may lack what it complains of
        if broken.peer == key or key == self.me or not reachable:
            return self.put_out(broken.peer, broken.reason, now)
        pair = frozenset((key, broken.peer))
        if broken.peer in self.live() and pair not in self.parted:
            if broken.fault:
                self._judgements.appendleft(_Judgement(now, key, broken.peer, broken.reason))
            elif all(judgement.pair != pair for judgement in self._judgements):
                self._judgements.append(_Judgement(now + NOTICE_SECONDS, key, broken.peer, broken.reason))
        return self.tick(now)

    def _judge(self, judgement: _Judgement, now: float) -> list[Send | Ask]:
        """Part two members, and put out one of them if the round cannot continue with both."""
        live, pair = self.live(), judgement.pair
        if self.over or not pair <= set(live) or pair in self.parted:
            return []
        self.parted[pair] = judgement.other
        worst = self._cut_off()
        return self.start_survey(now) if worst is None else self.put_out(worst, judgement.reason, now)

    def _cut_off(self) -> bytes | None:
        """A member that cannot stay, if there is one: it is parted from more than a third of the remaining members, or
        from a member whose results no third member could pass on."""
        live = self.live()
        pairs = {pair: blamed for pair, blamed in self.parted.items() if pair <= set(live)}
        count = Counter(key for pair in pairs for key in pair)
        for pair, blamed in pairs.items():
            # The one of the two that is parted from more members; of equals, the blamed one.
            worst = max((blamed, *(pair - {blamed})), key=lambda key: count[key])
            if 3 * count[worst] > len(live) or not any(self._passes_on(m, pair) for m in self.begin.members):
                return worst
        return None

    def _passes_on(self, member: Member, pair: frozenset[bytes]) -> bool:
        """Whether that member can pass on what it has received to both members of a parted pair."""
        is_there = member.contributes and member.key not in self.out and member.key not in pair
        return is_there and not any(frozenset((member.key, key)) in self.parted for key in pair)

    def unanswered(self, key: bytes, request: msg.Survey | msg.Repair, reason: str, now: float) -> list[Send | Ask]:
        """A member has not answered a survey, or does not follow a repair."""
        if self.ballot != request.ballot:
            return []
        if isinstance(request, msg.Survey):
            return self.put_out(key, f"no answer to a survey: {reason}", now)
        if self.phase is not Phase.RUNNING:
            return []
        self.refused_repairs[key] += 1
        if self.refused_repairs[key] > MAX_REFUSED_REPAIRS:
            return self.put_out(key, f"it does not follow repairs: {reason}", now)
        return self.start_survey(now)  # it may follow a higher ballot, or have a commit: a survey shows that

    def elsewhere(self, key: bytes, now: float, *, coordinator: bytes | None = None) -> list[Send | Ask]:
        """See `Gathering.elsewhere`. This round can't wait any more, so it ends."""
        if key in self.at.postponed:
            return self.put_out(key, "it is elsewhere, again", now)
        if key not in (self.live() if self._is_running else self.before.expected):
            return []
        self.at.postponed[key] = coordinator in (None, key)
        return self.abort("a member is elsewhere: in another round, or past this one") if self._is_running else []

    def live(self) -> list[bytes]:
        """The keys of the members of the round that are not out, in member order."""
        return [key for key in self.begin.keys if key not in self.out]

    def put_out(self, key: bytes, reason: str, now: float) -> list[Send | Ask]:
        """A member was lost or broke a rule: continue without it."""
        if self.over or key not in self.live():
            return []
        self.out[key] = reason
        told = [Send((key,), msg.Abort(self.begin.round, reason[:256], alone=True))]
        return told + (self._regroup() or self.start_survey(now))

    def _regroup(self) -> list[Send | Ask]:
        """End the round if it has become too small and other members wait that can replace those that left. (Members
        leave when they cancel their steps, for example.)"""
        is_too_small = len(self.live()) < self.rules.min_group and self.rules.target_samples is None
        if not (self._is_running and self.late and is_too_small):
            return []
        return self.abort(f"fewer than {self.rules.min_group} members are left, and others wait: join again")

    def start_survey(self, now: float) -> list[Send | Ask]:
        """Ask the remaining members what they hold, under a new ballot."""
        if not self.live():
            return self.abort("no member is left")
        if (worst := self._cut_off()) is not None:
            return self.put_out(worst, "it is parted from too many of those that are left", now)
        left = sum(member.contributes and member.key not in self.out for member in self.begin.members)
        if self.rules.min_share and left < self.rules.least(self.before.last):
            last = self.before.last
            return self.abort(f"{left} members are left, of {last} in the last epoch: too few for min_peers")
        self.phase = Phase.SURVEYING
        self.deadline = min(self.deadline, now + self.begin.timeout)
        self.ballot = Ballot(self.ballot.number + 1, self.me)
        self.have, self.done, self.waiting = {}, {}, {}
        begin, buffers = None, []
        if self.took_over:  # BEGIN may not have reached all members
            of_members = {key: self.gathered.get(key, b"") for key in self.begin.keys}
            begin, buffers = self.begin, [msgspec.msgpack.encode(of_members)]
        survey = msg.Survey(self.begin.tip, self.begin.round, self.ballot, tuple(self.out), begin, self.doubts)
        return [Ask(tuple(self.live()), self.signer.sign(survey), buffers)]

    def show(self, doubts: tuple[msg.Doubt, ...], now: float) -> list[Send | Ask]:
        """Most members doubt the coordinators before this one by now: show these doubts in another survey."""
        self.doubts = doubts
        return self.start_survey(now)

    def outbid(self, key: bytes, ballot: Ballot, reachable: bool, now: float) -> list[Send | Ask]:
        """A member follows a higher ballot. Give way to the holder of that ballot if it is `reachable`, else start a
        survey under a higher ballot. Each member can make this peer give way once at a tip."""
        if self.phase is not Phase.SURVEYING or ballot <= self.ballot:
            return []
        if reachable and not self.may_give_way(key, own=ballot.coordinator == key):
            return self.put_out(key, "it follows another coordinator, again", now)
        if reachable:
            self.give_way()
            return []
        self.ballot = Ballot(ballot.number, self.me)
        return self.start_survey(now)

    def may_give_way(self, key: bytes, *, own: bool = True) -> bool:
        """Whether this member may make this peer give way: it has not done so, or made it postpone, at this tip.

        Args:
            key: the member.
            own: whether this peer would give way to the member itself, as far as it knows, and not to a third.
        """
        if key in self.at.postponed:
            return False
        self.at.postponed[key] = own
        return True

    def give_way(self) -> None:
        """Stop coordinating the round, which continues under another peer: decide nothing, and tell nobody."""
        self.phase = Phase.ABORTED

    def surveyed(self, key: bytes, ballot: Ballot, have: msg.Have, now: float) -> list[Send | Ask]:
        """A member's answer to the survey of `ballot`."""
        if self.phase is not Phase.SURVEYING or ballot != self.ballot or key not in self.live():
            return []
        if have.commit is not None and (have.commit.tip, have.commit.round) == (self.begin.tip, self.begin.round):
            return self._commit(have.commit)
        member = next(member for member in self.begin.members if member.key == key)
        try:
            check_answer(self.begin, ballot, member, have, self.disputed.get(key))
        except RuleBroken as error:
            return self.put_out(key, str(error), now)
        self.have[key] = have
        if len(self.have) < len(self.live()):
            return []
        if self._hear_of_earlier():
            return self.start_survey(now)
        live = self.live()
        self.phase, self.disputed, self.got_on_at = Phase.RUNNING, {}, now
        sources, self.settled = repaired(self.begin, live, self.have, self.parted)
        pairs = [(min(pair), max(pair)) for pair in self.parted if pair <= set(live)]
        repair = msg.Repair(self.begin.round, ballot, sources, tuple(pairs))
        return [Ask(tuple(live), self.signer.sign(repair))]

    def _hear_of_earlier(self) -> bool:
        """Take over the decisions of an earlier coordinator, as the members' answers report them: the members that it
        has put out, and the pairs that it has parted. Returns whether there is news.

        If a single member says that another one was put out, the two are parted, because reducers do not serve members
        that were put out. But if it shows the earlier coordinator's survey, the other one is out: a result may have
        been decided without it.

        If nobody were left by that, two sides of a partition have put each other out, and have met again. Then those
        that were done under the highest ballot stay: they may hold what was decided. If none of them was done, nothing
        was decided, and the round ends."""
        live = self.live()
        claims = [(by, of) for by, have in self.have.items() for of in have.out if of in live]
        times = Counter(of for _, of in claims)
        shown = {(by, of) for by, have in self.have.items() for of in self._put_out_before(by, have)}
        out = dict.fromkeys(of for by, of in claims if by in (self.me, of) or times[of] > 1 or (by, of) in shown)
        done = {key: have.done for key, have in self.have.items() if have.done is not None and have.digests}
        if done and len(out) == len(live):
            out = {of: None for of in out if done.get(of) != max(done.values())}
        self.out.update((of, "put out by an earlier coordinator") for of in out)
        new = {frozenset((by, of)): by for by, of in claims if of not in out}
        repairs = [have.repair for have in self.have.values() if have.repair is not None]
        for repair in repairs:
            if repair.ballot.coordinator not in live:  # a coordinator that is lost can't sign its repair again
                new |= {frozenset(pair): pair[0] for pair in repair.parted if set(pair) <= set(live)}
        before = len(self.parted)
        self.parted = {**new, **self.parted}
        return bool(out) or len(self.parted) > before

    def _put_out_before(self, key: bytes, have: msg.Have) -> tuple[bytes, ...]:
        """The members that another coordinator of this round had put out, by its survey that this member followed."""
        survey, begin = have.follows, self.begin
        if survey is None or survey.round != begin.round or survey.ballot.coordinator == key:
            return ()
        return survey.out if survey.ballot.coordinator in begin.leaders else ()

    def finished(self, key: bytes, done: msg.Done, view: Collection[Member], now: float) -> list[Send | Ask]:
        """A member has said DONE. `view` are the members that the next round expects."""
        if self.phase is not Phase.RUNNING or done.ballot != self.ballot or key not in self.live():
            return []
        if done.root and self.settled and done.root != self.settled:
            # Without this rule, a member that never follows a repair would make the others repair for ever.
            return self.put_out(key, "it is done with another result than the repair makes", now)
        if done.waits:
            require(any(key in pair for pair in self.parted), "it waits for parted members, and is parted from none")
            self.waiting[key] = None
            self.waits[key] += 1
            if self.waits[key] > MAX_REFUSED_REPAIRS:
                return self.put_out(key, "it still lacks what others have brought to it", now)
        else:
            self.done[key] = done.root
            self.got_on_at = now
        if len(self.done) + len(self.waiting.keys() - self.done.keys()) < len(self.live()):
            return []
        if len(self.done) < len(self.live()):
            return self.start_survey(now)  # by now others hold the chunks that the waiting members lack
        roots = {root for root in self.done.values() if root}
        if len(roots) > 1:
            self.disputed = self.done
            return self.start_survey(now)
        root = roots.pop() if roots else root_of(())  # all members are auxiliary, and average nothing
        begin, kept = self.begin, tuple(member for member in view if member.key not in self.out)
        commit = msg.Commit(begin.tip, begin.round, root, self.rules.samples(begin), begin.keys, kept, self.me)
        return self._commit(self.signer.sign(commit))

    def _commit(self, commit: msg.Commit) -> list[Send | Ask]:
        self.phase = Phase.COMMITTED
        to = dict.fromkeys([*self.begin.keys, *(member.key for member in commit.view)])
        return [Send(tuple(to), commit)]

    def abort(self, reason: str) -> list[Send | Ask]:
        """End the round without a result."""
        self.phase = Phase.ABORTED
        to = tuple(dict.fromkeys([*(self.live() or self.have), *self.late]))
        return [Send(to, msg.Abort(self.begin.round, reason[:256]))]

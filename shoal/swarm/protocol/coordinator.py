"""The coordinator's decisions for one tip: when a round is due, who is in it, whom to put out, what to commit.

[Note: why two coordinators cannot commit two results]
No peer knows which others can reach each other, so two peers may both believe that they coordinate. The rules of
single-decree Paxos keep them from committing two results of one tip to members that can hear each other:

1. A member follows one ballot at a time, and moves only to a higher one. It answers DONE and HAVE only under the
   ballot that it follows. While it is in a round whose coordinator it still reaches, it refuses every other BEGIN.
2. A coordinator commits only when all members that it has not put out have said DONE under its ballot, with one digest.
3. A successor asks all members what they hold before it decides. If a member has a COMMIT, that is the decision. If
   members were complete (DONE), the chunks of those with the highest such ballot are the decision.

A coordinator that was replaced without knowing it receives no DONE from the members that follow the successor. It can
commit only what all of them had said DONE to before, and by rule 3 the successor decides the same. Two decisions are
possible only in a partition, where no member of the one is asked for the other: then they have two lineages (`Tip`).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from shoal.p2p.transport import MAX_BUFFER_BYTES
from shoal.swarm.protocol import messages as msg
from shoal.swarm.protocol.actions import Ask, Send
from shoal.swarm.protocol.answers import check_answer, repaired
from shoal.swarm.protocol.book import RuleBroken, require, root_of
from shoal.swarm.protocol.pace import Pace
from shoal.swarm.protocol.plan import can_divide, chunk_elements, chunk_table, divide
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.tip import NO_BALLOT, Ballot, Tip
from shoal.swarm.protocol.view import MAX_MEMBERS, Member

NOTICE_SECONDS = 0.5  # after which all members have noticed that one is lost
MAX_REFUSED_REPAIRS = 3  # by one member; then it is put out
REMINDER_SECONDS = 0.5  # in which a member may say why it does not join
MAX_GATHERED_BYTES = MAX_BUFFER_BYTES - 64 * MAX_MEMBERS  # of all members together: with their keys, one buffer


class Phase(Enum):
    COUNTING = "counting"  # → GATHERING at the first JOIN, or when the members have enough samples
    GATHERING = "gathering"  # → RUNNING by BEGIN
    RUNNING = "running"  # → COMMITTED when all are done, → SURVEYING when one is lost or digests differ
    SURVEYING = "surveying"  # → RUNNING by REPAIR, → COMMITTED if a member has a COMMIT, → ABORTED if outbid
    COMMITTED = "committed"
    ABORTED = "aborted"  # no member is left, time is up, or another peer coordinates


@dataclass(frozen=True, slots=True)
class _Judgement:
    """Two members that both reach the coordinator cannot reach each other: one of them has to leave.

    Attributes:
        at: when it is made. By then all members notice if one of the two is lost.
        complainer, other: the keys of the two.
        surveyed: whether both were asked what they hold: one may have a commit, or follow another coordinator by now.
    """

    at: float
    complainer: bytes
    other: bytes
    surveyed: bool


@dataclass
class Coordinator:
    """Coordinates the round of one tip. Events in, actions out; time is an argument, in seconds of any clock.

    Args:
        me: the key of the peer that runs this.
        tip: the state that the round starts from.
        rules: see `Rules`.
        veterans: the members of the last round. Where members count samples, BEGIN waits only for veterans and for
            members that have reported since, and not for a newcomer that is still downloading the state.
        settled_at: before this time some members may not have been found yet, so BEGIN waits even if all known members
            have joined.
        all_until: before this time BEGIN waits for all connected members. A peer that has downloaded the state of the
            tip does not know who else is there. If it is its turn to coordinate, the others have to hear of it first.
    """

    me: bytes
    tip: Tip
    rules: Rules
    settled_at: float = 0.0
    all_until: float = 0.0
    veterans: frozenset[bytes] = frozenset()
    phase: Phase = Phase.COUNTING
    expected: dict[bytes, Member] = field(default_factory=dict)  # connected members: BEGIN waits for them
    joins: dict[bytes, msg.Join] = field(default_factory=dict)
    gathered: dict[bytes, bytes] = field(default_factory=dict)
    late: dict[bytes, None] = field(default_factory=dict)  # members that joined after BEGIN; they wait for the COMMIT
    counts: dict[bytes, msg.Progress] = field(default_factory=dict)
    begin: msg.Begin | None = None
    ballot: Ballot = NO_BALLOT
    out: dict[bytes, str] = field(default_factory=dict)  # members put out of the round, and why
    done: dict[bytes, bytes] = field(default_factory=dict)
    have: dict[bytes, msg.Have] = field(default_factory=dict)
    disputed: dict[bytes, bytes] = field(default_factory=dict)  # the digests of DONE, by member, when they differed
    settled: bytes = b""  # the digest of the result, once every member has every chunk in some version
    deadline: float = math.inf  # of the phase
    wait_until: dict[bytes, float] = field(default_factory=dict)  # how long members that joined want to wait
    took_over: bool = False
    reminded: bool = False  # whether members that have not joined were called once more
    pace: Pace = field(init=False)
    complaints: dict[bytes, dict[bytes, str]] = field(default_factory=dict)  # of each member: of whom, and why
    refused_repairs: Counter[bytes] = field(default_factory=Counter)  # how many, by member
    signs_of: Counter[bytes] = field(default_factory=Counter)  # how often each member has seen the round make progress
    last_join_at: float | None = None
    join_to_begin: float | None = None  # seconds from the last JOIN to BEGIN
    _judgements: deque[_Judgement] = field(default_factory=deque)  # the next one first

    def __post_init__(self) -> None:
        self.pace = Pace(math.inf if self.rules.target_samples is None else self.rules.target_samples)

    @classmethod
    def successor(cls, me: bytes, begin: msg.Begin, attempt: int, lost: Iterable[bytes], rules: Rules) -> Coordinator:
        """The coordinator that takes over the round of a lost one. Call `start_survey` first."""
        out, ballot = dict.fromkeys(lost, "lost"), Ballot(attempt, me)
        return cls(me, begin.tip, rules, phase=Phase.SURVEYING, begin=begin, ballot=ballot, out=out, took_over=True)

    # -- before BEGIN

    @property
    def over(self) -> bool:
        """Whether the round has ended, with a result or without."""
        return self.phase in (Phase.COMMITTED, Phase.ABORTED)

    @property
    def is_before_begin(self) -> bool:
        """Whether members can still join and leave."""
        return self.phase in (Phase.COUNTING, Phase.GATHERING)

    def expect(self, members: Iterable[Member], now: float) -> list[Send | Ask]:
        """Exactly these members are connected now."""
        self.expected = {member.key: member for member in members}
        if self.is_before_begin:
            for key in {**self.joins, **self.counts}.keys() - self.expected.keys() - {self.me}:
                self._forget_join(key)
                self.counts.pop(key, None)
                self.pace.lost(key)
        return self.tick(now)

    def progress(self, key: bytes, report: msg.Progress, now: float) -> tuple[msg.Count, list[Send | Ask]]:
        """A member reports its samples. Returns the answer, and what else to send. Only reported samples call the
        round, never estimates."""
        before, target = self.counts.get(key), self.rules.target_samples
        if report.counted:
            self.counts[key] = msgspec.structs.replace(report, asks=False)
        samples = sum(count.samples for count in self.counts.values())
        is_due = self.phase is Phase.COUNTING and target is not None and samples >= target
        actions = self._gather(now + self.rules.matchmaking_time) if is_due else []
        rate = sum(count.rate for count in self.counts.values())
        called, wait = self.phase is not Phase.COUNTING, 0.0
        if report.counted and (report.asks or self.counts[key] != before):  # else it repeats an earlier report
            wait = self.pace.reported(key, report.samples, report.step, report.seconds, report.asks and not called, now)
        others = self.pace.under_way(but=key)
        return msg.Count(self.tip, samples, rate, len(self.counts), called, others, wait), actions

    def join(self, key: bytes, join: msg.Join, gathered: bytes, now: float) -> list[Send | Ask]:
        """A member's input is ready. It may join again (after a lost answer); the last JOIN counts. Raises RuleBroken
        if the members gather more than fits BEGIN."""
        if not self.is_before_begin:
            self.late[key] = None
            return self._regroup()
        others = sum(len(data) for other, data in self.gathered.items() if other != key)
        taken = f"gather takes {len(gathered)} bytes, that of the others {others}; all may take {MAX_GATHERED_BYTES}"
        require(others + len(gathered) <= MAX_GATHERED_BYTES, taken)
        self.joins[key], self.gathered[key], self.wait_until[key] = join, gathered, now + join.patience
        self.last_join_at = now
        if self.phase is Phase.COUNTING:
            return self._gather(now + join.patience) + self.tick(now)
        self._follow_the_first()  # its JOIN may have changed
        return self.tick(now)

    def unjoin(self, key: bytes, now: float) -> list[Send | Ask]:
        """A member withdraws its JOIN."""
        self.late.pop(key, None)
        if self.phase is not Phase.GATHERING:
            return []
        self._forget_join(key)
        self._follow_the_first()
        return self.tick(now)

    def _forget_join(self, key: bytes) -> None:
        for of_members in (self.joins, self.gathered, self.wait_until):
            of_members.pop(key, None)

    def _follow_the_first(self) -> None:
        """Where samples are not counted, the first member that joined says how long all wait."""
        if self.rules.target_samples is None and not self.wait_until:
            self.phase, self.deadline, self.reminded = Phase.COUNTING, math.inf, False
        elif self.rules.target_samples is None and not self.reminded:
            self.deadline = next(iter(self.wait_until.values()))

    def _gather(self, deadline: float) -> list[Send | Ask]:
        self.phase, self.deadline = Phase.GATHERING, deadline
        return [Send(tuple(self.expected), msg.Call(self.tip))]

    def tick(self, now: float) -> list[Send | Ask]:
        """Do what is due at `now`; to be called at `wake_at` and after every event."""
        if self._judgements and self._judgements[0].at <= now:
            return self._judge(self._judgements.popleft(), now)
        if self.phase is Phase.GATHERING and now >= self._begins_at():
            missing = tuple(key for key in self.expected if key not in self.joins and self._waits_for(key))
            if missing and not self._is_full() and not self.reminded:
                # They may be in a round of another coordinator, or past one: without them there could be two results.
                self.reminded, self.deadline = True, now + REMINDER_SECONDS
                return [Send(missing, msg.Call(self.tip))]
            return self._begin(now)
        if self._is_running and now >= self.deadline:
            return self.abort(f"the round has not got on for {self._round.timeout:g} s")
        return []

    def wait(self, now: float) -> None:
        """A member's user lets the others wait, so the time of the round starts again. Not where samples are counted:
        users do not control rounds there."""
        if self.rules.target_samples is None:
            self._gets_on(now)

    def _gets_on(self, now: float) -> None:
        if self._is_running:
            self.deadline = now + self._round.timeout

    def wake_at(self) -> float | None:
        """When `tick` is due if nothing else happens; None if never."""
        times = [judgement.at for judgement in self._judgements]
        if self.phase is Phase.GATHERING or self._is_running:
            times.append(self.deadline if self._is_running else self._begins_at())
        return min((time for time in times if time < math.inf), default=None)

    def _begins_at(self) -> float:
        """When the round begins if nobody else joins or leaves; infinity if it cannot begin."""
        if not self._are_enough():
            return math.inf
        if self._is_full():
            return -math.inf
        if any(self._waits_for(key) and key not in self.joins for key in self.expected):
            return self.deadline
        # Until then some members may not have been found yet.
        all_are_here = all(key in self.joins for key in self.expected)
        return min(self.deadline, self.settled_at if all_are_here else max(self.settled_at, self.all_until))

    def _waits_for(self, key: bytes) -> bool:
        return self.rules.target_samples is None or key in self.counts or key in self.veterans

    def _are_enough(self) -> bool:
        """Whether the members that joined can make a round: they are enough, and one of them can reduce."""
        chosen = [self.joins[key].sender for key in self._chosen()]
        count = sum(self.rules.target_samples is None or sender.contributes for sender in chosen)
        return count >= max(1, self.rules.min_group) and can_divide(chosen)

    def _chosen(self) -> list[bytes]:
        """The first members that joined, as many as a group may have, with one that can reduce if there is any."""
        reducers = [key for key, join in self.joins.items() if join.sender.addresses]
        return list(dict.fromkeys([*reducers[:1], *self.joins]))[: self.rules.target_group]

    def _is_full(self) -> bool:
        return self.rules.target_group is not None and len(self.joins) >= self.rules.target_group

    def _begin(self, now: float) -> list[Send | Ask]:
        chosen = self._chosen()
        self.late = dict.fromkeys(key for key in self.joins if key not in chosen)
        members = tuple(self.joins[key].sender for key in sorted(chosen))
        joins = [self.joins[member.key] for member in members]
        reducers = sum(member.reduces for member in members)
        with_state = self.rules.averages_state(self.tip.epoch, joins)
        sizes = self.rules.vector(self.tip.epoch, with_state)
        elements = chunk_elements(sum(sizes), reducers, self.rules.chunk_elements)
        self.ballot = Ballot(1 + max(join.attempt for join in joins), self.me)
        self.begin = msg.Begin(
            tip=self.tip,
            ballot=self.ballot,
            members=members,
            weights=tuple(join.weight for join in joins),
            machines=tuple(join.machine for join in joins),
            states=tuple(join.state for join in joins),
            chunk_elements=elements,
            starts=divide(len(chunk_table(sizes, elements)), members, self.rules.smallest_span / elements),
            with_state=with_state,
            timeout=self.rules.round_timeout,
            options=self.rules.options(joins),
        )
        self.phase, self.deadline = Phase.RUNNING, now + self.rules.round_timeout
        self.join_to_begin = None if self.last_join_at is None else now - self.last_join_at
        return [Send(tuple(member.key for member in members), self.begin, [self.gathered_of_all()])]

    def gathered_of_all(self) -> bytes:
        """What the members of the round want to tell each other, as one buffer."""
        return msgspec.msgpack.encode({m.key: self.gathered.get(m.key, b"") for m in self._round.members})

    # -- after BEGIN

    @property
    def _round(self) -> msg.Begin:
        """The round that was begun, by this peer or by the one whose round it took over."""
        assert self.begin is not None
        return self.begin

    @property
    def _is_running(self) -> bool:
        return self.phase in (Phase.RUNNING, Phase.SURVEYING)

    def is_of(self, round_id: bytes) -> bool:
        """Whether this coordinates the round of that name."""
        return self.begin is not None and self.begin.round == round_id

    def saw(self, key: bytes, signs: int, now: float) -> None:
        """A member has seen the round make progress so often: the time of the round starts again if that is news."""
        if self.begin is not None and signs > self.signs_of[key]:
            self.signs_of[key] = signs
            self._gets_on(now)

    def broken(self, key: bytes, broken: msg.Broken, reachable: bool, now: float) -> list[Send | Ask]:
        """A member cannot go on with another. The other is put out at once if it broke a rule, if it is not `reachable`
        from here either, or if it speaks of itself; else the two are judged. Raises RuleBroken for a complaint of a
        peer that is not in the round."""
        require(key in self.live(), "only a member of the round can complain of another")
        if broken.fault or broken.peer == key or not reachable:
            return self.put_out(broken.peer, broken.reason, now)
        complaints = self.complaints.setdefault(key, {})
        if broken.peer in self.live() and broken.peer not in complaints:
            complaints[broken.peer] = broken.reason
            self._judgements.append(_Judgement(now + NOTICE_SECONDS, key, broken.peer, False))
        return []

    def _judge(self, judgement: _Judgement, now: float) -> list[Send | Ask]:
        """Of two members that cannot reach each other, put out the one that complains of several, else the other."""
        complainer, other, live = judgement.complainer, judgement.other, self.live()
        if self.over or complainer not in live or other not in live:
            return []
        if not judgement.surveyed:
            self._judgements.append(_Judgement(now + NOTICE_SECONDS, complainer, other, True))
            return self.start_survey(now)
        reasons = self.complaints[complainer]
        key = other if len([k for k in reasons if k in live]) == 1 else complainer
        return self.put_out(key, reasons[other], now)

    def unanswered(self, key: bytes, request: msg.Survey | msg.Repair, reason: str, now: float) -> list[Send | Ask]:
        """A member has not answered a survey in time, or does not follow a repair."""
        if self.ballot != request.ballot:
            return []
        if isinstance(request, msg.Survey):
            return self.put_out(key, f"no answer to a survey: {reason}", now)
        if self.phase is not Phase.RUNNING:
            return []
        self.refused_repairs[key] += 1
        if self.refused_repairs[key] > MAX_REFUSED_REPAIRS:
            return self.put_out(key, f"it does not follow repairs: {reason}", now)
        return self.start_survey(now)  # it may follow a higher ballot, or have a commit: a survey tells

    def elsewhere(self, key: bytes, now: float) -> list[Send | Ask]:
        """A member that was called is in a round of another coordinator. To go on without it might give this tip two
        results, so this round waits or, if it has begun, ends."""
        if self.phase is Phase.GATHERING:
            self.deadline, self.reminded = now + REMINDER_SECONDS, False  # then it is called again
        if self._is_running and key in self.live():
            return self.abort("a member is in a round of another coordinator")
        return []

    def live(self) -> list[bytes]:
        """The keys of the members of the round that are not out, in member order."""
        return [] if self.begin is None else [m.key for m in self.begin.members if m.key not in self.out]

    def put_out(self, key: bytes, reason: str, now: float) -> list[Send | Ask]:
        """A member was lost or broke a rule: continue without it."""
        if self.is_before_begin:
            return self.expect([m for m in self.expected.values() if m.key != key], now)
        if self.over or key not in self.live():
            return []
        self.out[key] = reason
        told = [Send((key,), msg.Abort(self._round.round, reason[:256]))]
        return told + (self._regroup() or self.start_survey(now))

    def _regroup(self) -> list[Send | Ask]:
        """End the round if so many members have left (they cancelled their steps, for example) that the group is too
        small, while others wait that could replace them."""
        is_too_small = len(self.live()) < self.rules.min_group and self.rules.target_samples is None
        if not (self._is_running and self.late and is_too_small):
            return []
        return self.abort(f"fewer than {self.rules.min_group} members are left, and others wait: join again")

    def start_survey(self, now: float) -> list[Send | Ask]:
        """Ask the remaining members what they hold, under a new ballot."""
        if not self.live():
            return self.abort("no member is left")
        self.phase = Phase.SURVEYING
        self.deadline = min(self.deadline, now + self._round.timeout)
        self.ballot = Ballot(self.ballot.number + 1, self.me)
        self.have, self.done = {}, {}
        begin, buffers = (self.begin, [self.gathered_of_all()]) if self.took_over else (None, [])
        survey = msg.Survey(self.tip, self._round.round, self.ballot, tuple(self.out), begin)
        return [Ask(tuple(self.live()), survey, buffers)]

    def outbid(self, ballot: Ballot, reachable: bool, now: float) -> list[Send | Ask]:
        """A member follows a higher ballot: give way to its holder if that is `reachable`, else bid higher."""
        if self.phase is not Phase.SURVEYING or ballot <= self.ballot:
            return []
        if reachable:
            self.phase = Phase.ABORTED
            return []
        self.ballot = Ballot(ballot.number, self.me)
        return self.start_survey(now)

    def surveyed(self, key: bytes, ballot: Ballot, have: msg.Have, now: float) -> list[Send | Ask]:
        """A member's answer to the survey of `ballot`."""
        if self.phase is not Phase.SURVEYING or ballot != self.ballot or key not in self.live():
            return []
        if have.commit is not None and (have.commit.tip, have.commit.round) == (self.tip, self._round.round):
            return self._commit(have.commit)
        member = next(member for member in self._round.members if member.key == key)
        try:
            check_answer(self._round, ballot, member, have, self.disputed.get(key))
        except RuleBroken as error:
            return self.put_out(key, str(error), now)
        self.have[key] = have
        if len(self.have) < len(self.live()):
            return []
        # An earlier coordinator may have put out a member whom we still reach; reducers stopped serving it then.
        live = self.live()
        unknown = [other for answer in self.have.values() for other in answer.out if other in live]
        if unknown:
            self.out.update((other, "put out by an earlier coordinator") for other in unknown)
            return self.start_survey(now)
        self.phase, self.disputed = Phase.RUNNING, {}
        sources, self.settled = repaired(self._round, live, self.have)
        return [Ask(tuple(live), msg.Repair(self._round.round, ballot, sources))]

    def finished(self, key: bytes, done: msg.Done, view: Collection[Member], now: float) -> list[Send | Ask]:
        """A member has all chunks. `view` are the members that the next round expects."""
        if self.phase is not Phase.RUNNING or done.ballot != self.ballot or key not in self.live():
            return []
        if done.root and self.settled and done.root != self.settled:
            # Without this, a member that never follows a repair would make the others repair for ever.
            return self.put_out(key, "it is done with another result than the repair makes", now)
        self.done[key] = done.root
        if len(self.done) < len(self.live()):
            return []
        roots = {root for root in self.done.values() if root}
        if len(roots) > 1:
            self.disputed = self.done
            return self.start_survey(now)
        root = roots.pop() if roots else root_of(())  # all members are auxiliary, and average nothing
        begin, kept = self._round, tuple(member for member in view if member.key not in self.out)
        keys = tuple(member.key for member in begin.members)
        return self._commit(msg.Commit(self.tip, begin.round, root, sum(begin.weights), keys, kept))

    def _commit(self, commit: msg.Commit) -> list[Send | Ask]:
        self.phase = Phase.COMMITTED
        to = dict.fromkeys(member.key for member in (*self._round.members, *commit.view))
        return [Send(tuple(to), commit)]

    def abort(self, reason: str) -> list[Send | Ask]:
        """End the round without a result."""
        self.phase = Phase.ABORTED
        to = tuple(dict.fromkeys([*self.live(), *self.late]))
        return [Send(to, msg.Abort(self.begin.round, reason[:256]))] if self.begin is not None else []

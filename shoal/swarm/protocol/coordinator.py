"""The coordinator's decisions for one tip: when a round begins, who is in it, whom to put out, and what to commit.

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
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum

import msgspec

from shoal.p2p.transport import MAX_BUFFER_BYTES
from shoal.swarm.protocol import messages as msg
from shoal.swarm.protocol.actions import Ask, Send
from shoal.swarm.protocol.answers import check_answer, repaired
from shoal.swarm.protocol.book import RuleBroken, require, root_of
from shoal.swarm.protocol.history import History
from shoal.swarm.protocol.loss import mean_of
from shoal.swarm.protocol.pace import Pace
from shoal.swarm.protocol.patience import Patience
from shoal.swarm.protocol.plan import can_divide, chunk_elements, chunk_table, divide, who_reduce
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.statements import Signer
from shoal.swarm.protocol.tip import MAX_LEAP, NO_BALLOT, Ballot, Tip
from shoal.swarm.protocol.view import MAX_MEMBERS, Member, Role
from shoal.swarm.protocol.witnesses import Witnesses

NOTICE_SECONDS = 2.0  # within this time, all members notice that one is lost or silent
MAX_REFUSED_REPAIRS = 3  # a member that refuses more repairs, or that more repairs do not help, is put out
REST_FACTOR = 10.0  # after waiting for all members in vain, do not do so again for this many times as long
NEWS_SECONDS = 1.0  # members are told how long BEGIN waits for newcomers when that changes by more than this
REMINDER_SECONDS = 0.5  # a member may take this long to say why it does not join
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
class Coordinator:
    """Coordinates the round of one tip. Events in, actions out; time is an argument, in seconds of any clock.

    Args:
        me: the key of this peer.
        tip: the state that the round starts from.
        rules: see `Rules`.
        signer: signs this peer's messages.
        history: the samples that members brought to earlier commits.
        veterans: the members of the last round. Where members count samples, BEGIN waits only for veterans and for
            members that have reported since, and not for a newcomer that is still downloading the state.
        settled_at: before this time some members may not have been found yet, so BEGIN waits even if all known members
            have joined.
        all_until: before this time BEGIN waits for all connected members. A peer that has downloaded the state of the
            tip does not know who else is there. If it is its turn to coordinate, the others have to hear of it first.
        last: how many members contributed to the round that led to this tip; 0 if that is not known.
        haste: the fraction of the usual time that this peer waits before BEGIN, see `Deadlines.haste`.
        patience: how long this peer waits for each member. Where samples are counted, rounds begin without members that
            have held up too many rounds.

    Samples are counted if `rules.target_samples` is given. Otherwise the first JOIN calls the round.
    """

    me: bytes
    tip: Tip
    rules: Rules
    signer: Signer
    history: History = field(default_factory=History)
    settled_at: float = 0.0
    all_until: float = 0.0
    veterans: frozenset[bytes] = frozenset()
    last: int = 0
    haste: float = 1.0
    patience: Patience = field(default_factory=Patience)
    phase: Phase = Phase.COUNTING
    expected: dict[bytes, Member] = field(default_factory=dict)  # connected members: BEGIN waits for them
    joins: dict[bytes, msg.Join] = field(default_factory=dict, init=False)
    gathered: dict[bytes, bytes] = field(default_factory=dict)
    kept_out: dict[bytes, None] = field(default_factory=dict, init=False)  # joined, but have held up too many rounds
    late: dict[bytes, None] = field(default_factory=dict, init=False)  # joined after BEGIN, and wait for the next round
    counts: dict[bytes, msg.Progress] = field(default_factory=dict, init=False)
    lent: dict[bytes, None] = field(default_factory=dict, init=False)  # members whose trainers are elsewhere, but join
    begin: msg.Begin | None = None
    ballot: Ballot = NO_BALLOT
    out: dict[bytes, str] = field(default_factory=dict)  # members that were put out of the round, each with the reason
    done: dict[bytes, bytes] = field(default_factory=dict, init=False)
    have: dict[bytes, msg.Have] = field(default_factory=dict, init=False)
    disputed: dict[bytes, bytes] = field(default_factory=dict, init=False)  # digests of DONE, when they differed
    settled: bytes = b""  # the digest of the result, once every member has every chunk in some version
    deadline: float = math.inf  # when the phase ends if nothing happens before
    called_at: float = math.inf  # when the members were called
    wait_until: dict[bytes, float] = field(default_factory=dict, init=False)  # until when each joined member will wait
    took_over: bool = False
    was_done: bool = False  # whether this peer was done when it took over: then a result may be decided already
    doubts: tuple[msg.Doubt, ...] = ()  # doubts of the coordinators before this one
    # Members for which a round has waited because they were elsewhere. True: only the member itself vouches for that.
    postponed: dict[bytes, bool] = field(default_factory=dict)
    reminded: bool = False  # whether members that have not joined were called once more
    pace: Pace = field(init=False)
    parted: dict[frozenset[bytes], bytes] = field(default_factory=dict, init=False)  # each pair with the blamed member
    # How often each member has said that it lacks only chunks of parted reducers, and the members that have just done
    # so.
    waits: Counter[bytes] = field(default_factory=Counter, init=False)
    waiting: dict[bytes, None] = field(default_factory=dict, init=False)
    refused_repairs: Counter[bytes] = field(default_factory=Counter, init=False)  # by member
    witnesses: Witnesses = field(init=False)
    told_until: float = -math.inf  # until when BEGIN waits for newcomers, as the members were told
    got_on_at: float = math.inf  # when the round last made progress, or members were last sent new instructions
    last_join_at: float | None = None
    join_to_begin: float | None = None  # seconds from the last JOIN to BEGIN
    _judgements: deque[_Judgement] = field(default_factory=deque, init=False)  # the next one first

    def __post_init__(self) -> None:
        target = self.target
        self.pace = Pace(math.inf if target is None else target, self.rules.matchmaking_time, self.history.unreliable)
        self.witnesses = Witnesses(self.me)

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
        if self.rules.target_is_each and self._is_due(now):  # the loss of a member lowers the target
            return self._call(now)
        return self.tick(now)

    def progress(self, key: bytes, report: msg.Progress, now: float) -> tuple[msg.Count, list[Send | Ask]]:
        """A member reports its samples. Returns the answer, and further actions. Only reported samples call the round,
        never estimates."""
        before = self.counts.get(key)
        if report.loading:
            return self._loads(key, report, now)
        if report.presence is not msg.Presence.HERE:
            self._went_elsewhere(key, report.presence)
        elif report.counted:
            self.history.newcomers.has_come(key, now)
            self.counts[key] = msgspec.structs.replace(report, asks=False)
            self.lent.pop(key, None)
        target = self.target
        self.pace.target = math.inf if target is None else target
        most = self._most(now)(key)
        samples = self._samples(now)
        actions = self._call(now) if self._is_due(now) else []
        if self.phase is Phase.COUNTING or report.presence is not msg.Presence.HERE:
            actions += self.tick(now)  # a single JOIN may call the round now, or the last one to wait for is gone
        rate = sum(count.rate for count in self.counts.values())
        called, wait = self.phase is not Phase.COUNTING, 0.0
        if report.counted and (report.asks or self.counts[key] != before):  # otherwise it repeats an earlier report
            has, adds = min(report.samples, most), min(report.step, most)
            wait = self.pace.reported(key, has, adds, report.seconds, report.asks and not called, now)
        others = self.pace.under_way(but=key)
        return msg.Count(self.tip, samples, rate, len(self.counts), called, others, wait, target or 0.0), actions

    def _loads(self, key: bytes, report: msg.Progress, now: float) -> tuple[msg.Count, list[Send | Ask]]:
        """A newcomer says how long it still loads the state of this tip. Returns the answer, and further actions."""
        samples, rate = self._samples(now), sum(count.rate for count in self.counts.values())
        called, target = self.phase is not Phase.COUNTING, self.target or 0.0
        due_in = max(0.0, target - samples) / rate if rate and not called else 0.0
        epoch = self.history.epoch_seconds
        pause = self.history.newcomers.claims(key, report, now, leads=True, due_in=due_in, epoch=epoch)
        count = msg.Count(self.tip, samples, rate, len(self.counts), called, target=target, pause=pause)
        actions = self._tell_until(now)
        if pause.seconds and report.rate and (invited := self.history.newcomers.invited(but=key)):
            actions.append(Send(invited, msg.Call(self.tip, pause.seconds)))
        return count, actions + self.tick(now)

    def waits_for(self, now: float) -> float:
        """For how many more seconds BEGIN waits for newcomers, as far as it is known."""
        return max(0.0, self.history.newcomers.until(self.tip) - now)

    def _tell_until(self, now: float) -> list[Send | Ask]:
        """Tell the members that have joined until when BEGIN waits for newcomers, if that is news."""
        until = self.history.newcomers.until(self.tip)
        if self.phase is not Phase.GATHERING or abs(max(until, now) - max(self.told_until, now)) <= NEWS_SECONDS:
            return []
        self.told_until = until
        return [Send(tuple(self.joins), msg.Call(self.tip, self.waits_for(now)))]

    @property
    def target(self) -> float | None:
        """The number of samples at which the round is called; None if the first JOIN calls it.

        If the target is given for each member, it is multiplied by the number of members that the round would wait for.
        If no members of the last round are known (in the first epoch, for example), these are all that contribute. Of
        them, members without any samples yet count only up to the number of members with samples: they may be waiting
        for their data, or may not exist."""
        if not self.rules.target_is_each:
            return self.rules.target_samples
        return self.rules.target(self.tip.epoch, self._counted_on())

    def _counted_on(self) -> int:
        brought = self.history.brought  # a member that brought nothing last time counts only when it reports samples
        begun = {key for key, count in self.counts.items() if count.samples > 0}
        known = [
            key
            for key in self._contributing()
            if (not self.veterans or self._waits_for(key))
            and (key in begun or brought.get(key, 1.0) > 0)
            and key not in self.lent
        ]
        return min(len(known), 2 * len(begun.intersection(known))) if begun else len(known)

    def _is_due(self, now: float) -> bool:
        """Whether the members have enough samples to call the round."""
        target = self.target
        return self.phase is Phase.COUNTING and target is not None and self._samples(now) >= target

    def _most(self, now: float) -> Callable[[bytes], float]:
        """A function from a member's key to the most samples that count of this member."""
        target = self.target
        if target is None:
            return lambda key: math.inf
        if self.rules.target_is_each:  # a share in the last round was a share among the members of that round
            target = self.rules.target(self.tip.epoch, max(self._counted_on(), len(self.history.last)))
        of_all = target or 0.0
        return lambda key: self.history.most(key, of_all, now)

    def _samples(self, now: float, but: bytes = b"") -> float:
        """The samples of all members except `but`, as far as they count: those in reports and in JOINs."""
        is_each = self.rules.target_is_each
        has = {key: 0.0 if is_each else join.weight for key, join in self.joins.items()}
        for key, count in self.counts.items():
            has[key] = max(has.get(key, 0.0), count.samples)
        has.pop(but, None)
        most = self._most(now)
        return sum(min(samples, most(key)) for key, samples in has.items())

    def _is_called_by_joins(self, now: float) -> bool:
        """Whether the present JOINs call the round. Without counted samples they always do.

        With counted samples, a member that joins before CALL was called by an earlier coordinator, or lies. So the
        round is called if the members have the target, if most members have joined, or if the first one has waited for
        as long as it wants to. If only one has joined, the others must also have half of the target."""
        target, contributing = self.target, self._contributing()
        most_have = 2 * sum(key in self.joins for key in contributing) > len(contributing)
        return target is None or most_have or self._samples(now) >= target or now >= self._calls_at()

    def _contributing(self) -> list[bytes]:
        return [member.key for member in self.expected.values() if member.contributes]

    def _calls_at(self) -> float:
        """When the present JOINs call the round, if nothing else does."""
        target, until, joined = self.target, self._first_waits_until(), next(iter(self.joins), b"")
        is_alone = target is not None and len(self.joins) == 1 and len(self._contributing()) > 2
        return math.inf if is_alone and 2 * self._samples(until, but=joined) < (target or 0.0) else until

    def _first_waits_until(self) -> float:
        """Until when the member that joined first wants to wait. If samples are not counted, all members wait until
        then; but if at least half of them want to wait less, they wait no longer than this peer would."""
        until = next(iter(self.wait_until.values()), math.inf)
        if self.rules.target_samples is not None or not self.wait_until:
            return until
        usual = sorted(self.wait_until.values())[(len(self.wait_until) - 1) // 2]
        return min(until, max(usual, self.called_at + self.haste * self.rules.matchmaking_time))

    def join(self, key: bytes, join: msg.Join, gathered: bytes, now: float) -> list[Send | Ask]:
        """A member's input is ready. It may join again, for example after a lost answer; the last JOIN counts. Raises
        RuleBroken if the gathered data of all members do not fit in BEGIN."""
        if not self.is_before_begin:
            self.late[key] = None
            return self._regroup()
        others = sum(len(data) for other, data in self.gathered.items() if other != key)
        taken = f"gather takes {len(gathered)} bytes, that of the others {others}; all may take {MAX_GATHERED_BYTES}"
        require(others + len(gathered) <= MAX_GATHERED_BYTES, taken)
        until = now + self.haste * join.patience
        self.joins[key], self.gathered[key], self.wait_until[key] = join, gathered, until
        self.last_join_at = now
        self.history.newcomers.gone(key)
        if self.rules.target_samples is not None and key != self.me and self.patience.is_over(key, now):
            self.kept_out[key] = None
        if self.phase is Phase.COUNTING:
            return self.tick(now)
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

    def went_back(self, key: bytes, now: float) -> list[Send | Ask]:
        """A member has gone back from this tip to an earlier state. BEGIN does not wait for it, unless it reports
        samples again."""
        self.veterans -= {key}
        self.counts.pop(key, None)
        self._forget_join(key)
        self.pace.lost(key)
        self._follow_the_first()
        return self.tick(now)

    def _went_elsewhere(self, key: bytes, presence: msg.Presence) -> None:
        """The trainer of a member waits in another run. Nobody waits for its samples until it reports again. If it
        joins no rounds meanwhile, BEGIN does not wait for its JOIN either."""
        self.counts.pop(key, None)
        self.pace.lost(key)
        if presence is msg.Presence.LENT:
            self.lent[key] = None
        else:
            self.lent.pop(key, None)
            self.veterans -= {key}

    def _forget_join(self, key: bytes) -> None:
        for of_members in (self.joins, self.gathered, self.wait_until, self.kept_out):
            of_members.pop(key, None)

    def _follow_the_first(self) -> None:
        """If samples are not counted, let the member that joined first decide how long all wait."""
        if self.rules.target_samples is None and not self.wait_until:
            self.phase, self.deadline, self.reminded = Phase.COUNTING, math.inf, False
        elif self.rules.target_samples is None and not self.reminded:
            self.deadline = self._first_waits_until()

    def _call(self, now: float) -> list[Send | Ask]:
        return self._gather(now + self.haste * self.rules.matchmaking_time, now)

    def _gather(self, deadline: float, now: float) -> list[Send | Ask]:
        self.phase, self.deadline, self.called_at = Phase.GATHERING, deadline, now
        self.told_until = self.history.newcomers.until(self.tip)
        return [Send(tuple(self.expected), msg.Call(self.tip, self.waits_for(now)))]

    def tick(self, now: float) -> list[Send | Ask]:
        """Do what is due at `now`. Called at `wake_at` and after every event."""
        if self._judgements and self._judgements[0].at <= now:
            return self._judge(self._judgements.popleft(), now)
        if self.phase is Phase.COUNTING and self.joins and self._is_called_by_joins(now):
            return self._gather(max(now, self._first_waits_until()), now) + self.tick(now)
        if self.phase is Phase.GATHERING and now >= self._begins_at():
            missing = self._missing()
            if missing and not self._is_full() and not self.reminded:
                # They may be in another coordinator's round of this tip, or past it. A round without them could then
                # give the tip a second result.
                self.reminded, self.deadline = True, now + REMINDER_SECONDS
                return [Send(tuple(missing), msg.Call(self.tip, self.waits_for(now)))]
            return self._begin(now)
        if self._is_running and now >= self.deadline:
            return self.abort(f"the round has made no progress for {self._round.timeout:g} s")
        return []

    def wait(self, now: float) -> None:
        """The user of a member makes the others wait, so the round's time-out starts again. If samples are counted,
        nothing happens: users do not control such rounds."""
        if self.rules.target_samples is None:
            self._gets_on(now)

    def _gets_on(self, now: float) -> None:
        if self._is_running:
            self.deadline, self.got_on_at = now + self._round.timeout, now

    def hurry(self, seconds: Callable[[bytes], float], now: float) -> list[Send | Ask]:
        """Put out members that stay behind: this peer is done and they are not, they have not said what they lack, and
        the round has made no progress for `seconds(key)`. Called every second."""
        if self.phase is not Phase.RUNNING or self.me not in self.done:
            return []
        standing = now - self.got_on_at
        late = [key for key in self.live() if key not in {**self.done, **self.waiting} and standing > seconds(key)]
        for key in late:
            self.out[key] = f"it is not done {standing:.0f} s after the last progress of the round"
        told = [Send((key,), msg.Abort(self._round.round, self.out[key], alone=True)) for key in late]
        return [*told, *(self._regroup() or self.start_survey(now))] if late else []

    def wake_at(self) -> float | None:
        """When to call `tick` if nothing else happens; None if never."""
        judges_at = self._judgements[0].at if self._judgements else math.inf
        match self.phase:
            case Phase.COUNTING:
                at = self._calls_at()
            case Phase.GATHERING:
                at = self._begins_at()
            case Phase.RUNNING | Phase.SURVEYING:
                at = self.deadline
            case _:
                at = math.inf
        return None if (at := min(at, judges_at)) == math.inf else at

    def _begins_at(self) -> float:
        """When the round begins if nobody else joins or leaves; infinity if it cannot begin."""
        if not self._are_enough():
            return math.inf
        if self._is_full():
            return -math.inf
        return max(self._may_begin_at(), self.history.newcomers.until(self.tip))

    def _may_begin_at(self) -> float:
        """The same, without the newcomers that load the state."""
        if missing := self._missing():
            if self._are_few():
                return self.deadline + (0.0 if self.reminded else self.haste * self.rules.own_rounds)
            is_final = self.reminded or self.rules.target_samples is None
            return self.deadline if is_final else max(map(self._is_awaited_until, missing))
        # Until then some members may not have been found yet.
        all_are_here = all(key in self.joins for key in self.expected)
        return min(self.deadline, self.settled_at if all_are_here else max(self.settled_at, self.all_until))

    def _missing(self) -> list[bytes]:
        """The members that have not joined and that BEGIN waits for."""
        late = [key for key in self.expected if key not in self.joins]
        return [key for key in late if self._waits_for(key) or (key in self.counts and self._are_few())]

    def _are_few(self) -> bool:
        """Whether less than half of the members that have reported samples have joined. Then BEGIN waits for all of
        them, as long as it may. Without this rule, a peer that coordinates all rounds, and has lost its patience with
        the others once, could exclude them for ever. If they do not join, such a wait is not repeated soon: these
        members may not exist."""
        may_wait = self.rules.target_samples is not None and self.called_at >= self.history.hurries_until
        return may_wait and 2 * len(self.joins.keys() & self.counts) < len(self.counts)

    def _rest_from_waiting(self, now: float) -> None:
        """BEGIN has waited for all members in vain. It does so again only after a pause. The pause is so long that all
        peers that take turns to coordinate spend less than a tenth of the time in such waits. Where members have rounds
        of their own, a single stopped member holds up most of the others, so there the pause is as long as the wait."""
        if self.rules.own_rounds:
            self.history.hurries_until = now + (now - self.called_at)
            return
        turns = sum(m.role is not Role.CLIENT and not m.is_relayed for m in self.expected.values())
        self.history.hurries_until = now + REST_FACTOR * max(1, turns) * (now - self.called_at)

    def _is_awaited_until(self, key: bytes) -> float:
        at = min(self.called_at, self.deadline)
        return at + self.history.punctuality.of(key, self.deadline - at, at)

    def _waits_for(self, key: bytes) -> bool:
        has_reported = key in self.counts and self.history.is_awaited(key)
        return self.rules.target_samples is None or has_reported or key in self.veterans or key in self.lent

    def _are_enough(self) -> bool:
        """Whether the members that joined can make a round: there are enough of them, and one of them can reduce."""
        return self._can_go(self._chosen())

    def _can_go(self, keys: list[bytes]) -> bool:
        chosen = [self.joins[key].sender for key in keys]
        count = sum(self.rules.target_samples is None or sender.contributes for sender in chosen)
        return count >= self.rules.least(self.last) and can_divide(chosen) and not self._is_of_nothing(keys)

    def _is_of_nothing(self, keys: list[bytes]) -> bool:
        """Whether a round of these members would end the epoch without any samples, while members that have reported
        some have not joined: theirs would be lost."""
        if self.rules.target_samples is None or any(self.joins[key].weight > 0 for key in keys):
            return False
        return any(count.samples > 0 for key, count in self.counts.items() if key not in self.joins)

    def _chosen(self) -> list[bytes]:
        """The members of the round: the first that joined, as many as a group may have. One that can reduce is among
        them if any has joined, if possible one that is not relayed. Members that are kept out are left out if the
        others can make a round."""
        if self.kept_out and self._can_go(others := [key for key in self.joins if key not in self.kept_out]):
            return others
        able = [key for key, join in self.joins.items() if join.sender.addresses]
        reducers = sorted(able, key=lambda key: self.joins[key].sender.is_relayed)
        return list(dict.fromkeys([*reducers[:1], *self.joins]))[: self.rules.target_group]

    def _is_full(self) -> bool:
        return self.rules.target_group is not None and len(self.joins) >= self.rules.target_group

    def _begin(self, now: float) -> list[Send | Ask]:
        chosen = self._chosen()
        self.late = dict.fromkeys(key for key in self.joins if key not in chosen)
        if self._are_few():
            self._rest_from_waiting(now)
        if self.rules.target_samples is not None and self.reminded:
            for key in self._missing():
                if key not in self.postponed:  # a postponed one has said why
                    self.history.punctuality.held_up(key, now)
        self.history.missed(key for key in self.expected if key in self.counts and key not in self.joins)
        members = tuple(self.joins[key].sender for key in sorted(chosen))
        joins = [self.joins[member.key] for member in members]
        reducers = sum(who_reduce(members))
        with_state = self.rules.averages_state(self.tip.epoch, joins)
        sizes = self.rules.vector(self.tip.epoch, with_state)
        elements = chunk_elements(sum(sizes), reducers, self.rules.chunk_elements)
        own = [] if self.me in self.joins else [self.ballot.number]
        attempts = sorted([*own, *(join.attempt for join in joins)])
        # Half of the members follow an attempt up to this one. So a member that lies, or that a liar has led to a very
        # high attempt, does not matter. If it alone has joined, this peer's own attempt is the other half.
        usual = attempts[(len(attempts) - 1) // 2]
        known = (attempt for attempt in attempts if attempt <= usual + MAX_LEAP)
        self.ballot = Ballot(1 + max(self.ballot.number, *known), self.me)
        begin = msg.Begin(
            tip=self.tip,
            ballot=self.ballot,
            members=members,
            weights=tuple(join.weight for join in joins),
            machines=tuple(join.machine for join in joins),
            states=tuple(join.state for join in joins),
            chunk_elements=elements,
            starts=divide(
                len(chunk_table(sizes, elements)),
                members,
                self.rules.smallest_span / elements,
                {member.key: self.joins[member.key].rates for member in members},
                self.rules.element_bytes * sum(sizes),
            ),
            with_state=with_state,
            timeout=self.rules.round_timeout,
            options=self.rules.options(joins),
            loss=mean_of((join.loss, join.weight) for join in joins),
        )
        self.begin = self.signer.sign(begin)
        self.phase, self.deadline, self.got_on_at = Phase.RUNNING, now + self.rules.round_timeout, now
        self.join_to_begin = None if self.last_join_at is None else now - self.last_join_at
        return [Send(tuple(member.key for member in members), self.begin, [self.gathered_of_all()])]

    def gathered_of_all(self) -> bytes:
        """The gathered data of the members of the round, as one buffer."""
        return msgspec.msgpack.encode({m.key: self.gathered.get(m.key, b"") for m in self._round.members})

    # -- after BEGIN

    @property
    def _round(self) -> msg.Begin:
        """The round that this peer has begun or taken over."""
        assert self.begin is not None
        return self.begin

    @property
    def _is_running(self) -> bool:
        return self.phase in (Phase.RUNNING, Phase.SURVEYING)

    def is_of(self, round_id: bytes) -> bool:
        """Whether this peer coordinates the round of that name."""
        return self.begin is not None and self.begin.round == round_id

    def saw(self, key: bytes, signs: int, now: float) -> None:
        """A member has seen the round make progress `signs` times. If this is news, the time-out starts again."""
        if self.begin is not None and self.witnesses.say(key, signs, now):
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
            if 3 * count[worst] > len(live) or not any(self._passes_on(m, pair) for m in self._round.members):
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
        """A member that was called is in another coordinator's round, or past this tip. A round without it might give
        this tip a second result. So this round waits or, if it has begun, ends. Each member can cause this once.

        Args:
            key: the member.
            now: the time.
            coordinator: the coordinator of the other round, whose BEGIN the member has shown; None without a BEGIN.
        """
        if key in self.postponed:
            return self.put_out(key, "it is elsewhere, again", now) if self._is_running else []
        if key not in (self.live() if self._is_running else self.expected):
            return []
        self.postponed[key] = coordinator in (None, key)
        if self.phase is Phase.GATHERING:
            # Then it is called again. The deadline never moves to an earlier time: others may need all of it.
            self.deadline, self.reminded = max(self.deadline, now + REMINDER_SECONDS), False
        return self.abort("a member is elsewhere: in another round, or past this one") if self._is_running else []

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
        told = [Send((key,), msg.Abort(self._round.round, reason[:256], alone=True))]
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
        left = sum(member.contributes and member.key not in self.out for member in self._round.members)
        if self.rules.min_share and left < self.rules.least(self.last):
            return self.abort(f"{left} members are left, of {self.last} in the last epoch: too few for min_peers")
        self.phase = Phase.SURVEYING
        self.deadline = min(self.deadline, now + self._round.timeout)
        self.ballot = Ballot(self.ballot.number + 1, self.me)
        self.have, self.done, self.waiting = {}, {}, {}
        begin, buffers = (self.begin, [self.gathered_of_all()]) if self.took_over else (None, [])
        out = tuple(self.out)
        survey = msg.Survey(self.tip, self._round.round, self.ballot, out, begin, self.doubts)
        return [Ask(tuple(self.live()), self.signer.sign(survey), buffers)]

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
        if key in self.postponed:
            return False
        self.postponed[key] = own
        return True

    def give_way(self) -> None:
        """Stop coordinating the round, which continues under another peer: decide nothing, and tell nobody."""
        self.phase = Phase.ABORTED

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
        if self._hear_of_earlier():
            return self.start_survey(now)
        live = self.live()
        self.phase, self.disputed, self.got_on_at = Phase.RUNNING, {}, now
        sources, self.settled = repaired(self._round, live, self.have, self.parted)
        pairs = [(min(pair), max(pair)) for pair in self.parted if pair <= set(live)]
        repair = msg.Repair(self._round.round, ballot, sources, tuple(pairs))
        return [Ask(tuple(live), self.signer.sign(repair))]

    def _hear_of_earlier(self) -> bool:
        """Take over the decisions of an earlier coordinator, as the members' answers report them: the members that it
        has put out, and the pairs that it has parted. Returns whether there is news.

        If a single member says that another one was put out, the two are parted, because reducers do not serve members
        that were put out. But if it shows the earlier coordinator's survey, the other one is out: a result may have
        been decided without it."""
        live = self.live()
        claims = [(by, of) for by, have in self.have.items() for of in have.out if of in live]
        times = Counter(of for _, of in claims)
        shown = {(by, of) for by, have in self.have.items() for of in self._put_out_before(by, have)}
        out = dict.fromkeys(of for by, of in claims if by in (self.me, of) or times[of] > 1 or (by, of) in shown)
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
        survey, begin = have.follows, self._round
        if survey is None or survey.round != begin.round or survey.ballot.coordinator == key:
            return ()
        may_lead = (begin.ballot.coordinator, *(member.key for member in begin.members))
        return survey.out if survey.ballot.coordinator in may_lead else ()

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
        begin, kept = self._round, tuple(member for member in view if member.key not in self.out)
        keys = tuple(member.key for member in begin.members)
        commit = msg.Commit(self.tip, begin.round, root, sum(begin.weights), keys, kept, self.me)
        return self._commit(self.signer.sign(commit))

    def _commit(self, commit: msg.Commit) -> list[Send | Ask]:
        self.phase = Phase.COMMITTED
        to = dict.fromkeys(member.key for member in (*self._round.members, *commit.view))
        return [Send(tuple(to), commit)]

    def abort(self, reason: str) -> list[Send | Ask]:
        """End the round without a result."""
        self.phase = Phase.ABORTED
        to = tuple(dict.fromkeys([*self.live(), *self.late]))
        return [Send(to, msg.Abort(self.begin.round, reason[:256]))] if self.begin is not None else []

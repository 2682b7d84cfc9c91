"""Until BEGIN: the coordinator of a tip counts samples, calls the members, and decides when the round begins, and with
whom."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

import msgspec

from shoal.p2p.transport import MAX_BUFFER_BYTES
from shoal.swarm.protocol import messages as msg
from shoal.swarm.protocol.actions import Ask, Send
from shoal.swarm.protocol.book import require
from shoal.swarm.protocol.history import History
from shoal.swarm.protocol.lifetimes import AtTip
from shoal.swarm.protocol.loss import mean_of
from shoal.swarm.protocol.pace import Pace
from shoal.swarm.protocol.patience import Patience
from shoal.swarm.protocol.plan import can_divide, chunk_elements, chunk_table, divide, who_reduce
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.statements import Signer
from shoal.swarm.protocol.tip import MAX_LEAP, Ballot
from shoal.swarm.protocol.view import MAX_MEMBERS, Member, Role

REST_FACTOR = 10.0  # after waiting for all members in vain, do not do so again for this many times as long
NEWS_SECONDS = 1.0  # members are told how long BEGIN waits for newcomers when that changes by more than this
REMINDER_SECONDS = 0.5  # a member may take this long to say why it does not join
MAX_GATHERED_BYTES = MAX_BUFFER_BYTES - 64 * MAX_MEMBERS  # of all members together: with their keys, one buffer


class Until(Enum):
    """What a `Gathering` waits for."""

    CALL = auto()  # → BEGIN at the first JOIN, or when the members have enough samples
    BEGIN = auto()  # → OVER by BEGIN. → CALL: all that had joined have left.
    OVER = auto()  # It only counts samples that are reported late.


@dataclass
class Gathering:
    """Coordinates a tip until its round begins. Events in, actions out; time is an argument, in seconds of any clock.

    Args:
        me: the key of this peer.
        at: what this peer knows at the tip.
        rules: see `Rules`.
        signer: signs this peer's messages.
        history: the samples that members brought to earlier commits.
        patience: how long this peer waits for each member. Where samples are counted, rounds begin without members that
            have held up too many rounds.
        veterans: the members of the last round. Where members count samples, BEGIN waits only for veterans and for
            members that have reported since, and not for a newcomer that is still downloading the state.
        haste: the fraction of the usual time that this peer waits before BEGIN, see `Deadlines.haste`.
        settled_at: before this time some members may not have been found yet, so BEGIN waits even if all known members
            have joined.
        all_until: before this time BEGIN waits for all connected members. A peer that has downloaded the state of the
            tip does not know who else is there. If it is its turn to coordinate, the others have to hear of it first.
            0 if this peer was in the last round, or made its state.
        phase: what it waits for.

    Attributes:
        begin: the BEGIN of the round, once it has begun; then `Leading` goes on.

    Samples are counted if `rules.target_samples` is given. Otherwise the first JOIN calls the round.
    """

    me: bytes
    at: AtTip
    rules: Rules
    signer: Signer
    history: History = field(default_factory=History)
    patience: Patience = field(default_factory=Patience)
    veterans: frozenset[bytes] = frozenset()
    haste: float = 1.0
    settled_at: float = 0.0
    all_until: float = 0.0
    phase: Until = Until.CALL
    expected: dict[bytes, Member] = field(default_factory=dict, init=False)  # connected members: BEGIN waits for them
    joins: dict[bytes, msg.Join] = field(default_factory=dict, init=False)
    gathered: dict[bytes, bytes] = field(default_factory=dict, init=False)
    wait_until: dict[bytes, float] = field(default_factory=dict, init=False)  # until when each joined member will wait
    kept_out: dict[bytes, None] = field(default_factory=dict, init=False)  # joined, but have held up too many rounds
    counts: dict[bytes, msg.Progress] = field(default_factory=dict, init=False)
    lent: dict[bytes, None] = field(default_factory=dict, init=False)  # members whose trainers are elsewhere, but join

    def __post_init__(self) -> None:
        self.last = self.at.contributed
        self.begin: msg.Begin | None = None
        self.deadline = self.called_at = math.inf  # when BEGIN is due if members are missing; when they were called
        self.reminded = False  # whether members that have not joined were called once more
        self.told_until = -math.inf  # until when BEGIN waits for newcomers, as members know
        self.last_join_at: float | None = None
        self.pace = Pace(math.inf, self.rules.matchmaking_time, self.history.unreliable)

    def expect(self, members: Iterable[Member], now: float) -> list[Send | Ask]:
        """Exactly these members are connected now."""
        self.expected = {member.key: member for member in members}
        for key in self.heard_from.keys() - self.expected.keys() - {self.me}:
            self._forget(key)
        if self.rules.target_is_each and self._is_due(now):  # the loss of a member lowers the target
            return self._call(now)
        return self.tick(now)

    @property
    def heard_from(self) -> dict[bytes, object]:
        """The members that have reported or joined."""
        return {**self.counts, **self.joins}

    def settle(self, until: float) -> None:
        """Until then, some members may not have been found yet."""
        self.settled_at = until

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
        self.pace.aim(math.inf if target is None else target)
        most = self._most(now)(key)
        samples = self._samples(now)
        actions = self._call(now) if self._is_due(now) else []
        if self.phase is Until.CALL or report.presence is not msg.Presence.HERE:
            actions += self.tick(now)  # a single JOIN may call the round now, or the last one to wait for is gone
        rate = sum(count.rate for count in self.counts.values())
        called, wait = self.phase is not Until.CALL, 0.0
        if report.counted and (report.asks or self.counts[key] != before):  # otherwise it repeats an earlier report
            has, adds = min(report.samples, most), min(report.step, most)
            wait = self.pace.reported(key, has, adds, report.seconds, report.asks and not called, now)
        others = self.pace.under_way(but=key)
        return msg.Count(self.at.tip, samples, rate, len(self.counts), called, others, wait, target or 0.0), actions

    def _loads(self, key: bytes, report: msg.Progress, now: float) -> tuple[msg.Count, list[Send | Ask]]:
        """A newcomer says how long it still loads the state of this tip. Returns the answer, and further actions."""
        samples, rate = self._samples(now), sum(count.rate for count in self.counts.values())
        called, target = self.phase is not Until.CALL, self.target or 0.0
        due_in = max(0.0, target - samples) / rate if rate and not called else 0.0
        epoch = self.history.epoch_seconds
        pause = self.history.newcomers.claims(key, report, now, leads=True, due_in=due_in, epoch=epoch)
        count = msg.Count(self.at.tip, samples, rate, len(self.counts), called, target=target, pause=pause)
        actions = self._tell_until(now)
        if pause.seconds and report.rate and (invited := self.history.newcomers.invited(but=key)):
            actions.append(Send(invited, msg.Call(self.at.tip, pause.seconds)))
        return count, actions + self.tick(now)

    def waits_for(self, now: float) -> float:
        """For how many more seconds BEGIN waits for newcomers, as far as it is known."""
        return max(0.0, self.history.newcomers.until(self.at.tip) - now)

    def _tell_until(self, now: float) -> list[Send | Ask]:
        """Tell the members that have joined until when BEGIN waits for newcomers, if that is news."""
        until = self.history.newcomers.until(self.at.tip)
        if self.phase is not Until.BEGIN or abs(max(until, now) - max(self.told_until, now)) <= NEWS_SECONDS:
            return []
        self.told_until = until
        return [Send(tuple(self.joins), msg.Call(self.at.tip, self.waits_for(now)))]

    @property
    def target(self) -> float | None:
        """The number of samples at which the round is called; None if the first JOIN calls it.

        If the target is given for each member, it is multiplied by the number of members that the round would wait for.
        If no members of the last round are known (in the first epoch, for example), these are all that contribute. Of
        them, members without any samples yet count only up to the number of members with samples: they may be waiting
        for their data, or may not exist. A member that has come since the last round brings what it has by then."""
        part = self._part
        if part is None:
            return self.rules.target(self.at.tip.epoch, 0)
        known = self._counted_on()
        whole = self._with_parts(known)
        came = (self.counts[key].samples for key in known if key not in whole and key in self.counts)
        return part * max(1, self._usual_number(whole)) + sum(min(samples, part) for samples in came)

    @property
    def _part(self) -> float | None:
        """The samples of each member at which the round is called, if the target is given for each."""
        return self.rules.target(self.at.tip.epoch, 1) if self.rules.target_is_each else None

    def _counted_on(self) -> list[bytes]:
        brought = self.history.brought  # a member that brought nothing last time counts only when it reports samples
        count = (key for key in self._contributing() if self._has_begun(key) or brought.get(key, 1.0) > 0)
        return [key for key in count if key not in self.lent and (not self.veterans or self._waits_for(key))]

    def _with_parts(self, known: list[bytes]) -> list[bytes]:
        """Those of these members that make whole parts of the epoch, as they are here since the last round. If this
        peer is not, it takes all others for such members."""
        here = self.veterans or set(known).difference([self.me] if self.all_until else [])
        return [key for key in known if key in here] or known

    def _has_begun(self, key: bytes) -> bool:
        return key in self.counts and self.counts[key].samples > 0

    def _usual_number(self, known: list[bytes]) -> int:
        begun = sum(map(self._has_begun, known))
        return min(len(known), 2 * begun) if begun else len(known)

    def _is_due(self, now: float) -> bool:
        """Whether the members have enough samples to call the round."""
        target = self.target
        return self.phase is Until.CALL and target is not None and self._samples(now) >= target

    def _most(self, now: float) -> Callable[[bytes], float]:
        """A function from a member's key to the most samples that count of this member."""
        target = self.target
        if target is None:
            return lambda key: math.inf
        if self.rules.target_is_each:  # a share in the last round was a share among the members of that round
            counted_on = self._usual_number(self._counted_on())
            target = self.rules.target(self.at.tip.epoch, max(counted_on, len(self.history.last)))
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
        others = sum(len(data) for other, data in self.gathered.items() if other != key)
        taken = f"gather takes {len(gathered)} bytes, that of the others {others}; all may take {MAX_GATHERED_BYTES}"
        require(others + len(gathered) <= MAX_GATHERED_BYTES, taken)
        self.expected.setdefault(key, join.sender)
        self.joins[key], self.gathered[key], self.wait_until[key] = join, gathered, now + self.haste * join.patience
        self.last_join_at = now
        self.history.newcomers.gone(key)
        if self.rules.target_samples is not None and key != self.me and self.patience.is_over(key, now):
            self.kept_out[key] = None
        if self.phase is Until.BEGIN:
            self._follow_the_first()  # its JOIN may have changed
        return self.tick(now)

    def unjoin(self, key: bytes, now: float) -> list[Send | Ask]:
        """A member withdraws its JOIN."""
        if self.phase is not Until.BEGIN:
            return []
        self._forget_join(key)
        self._follow_the_first()
        return self.tick(now)

    def went_back(self, key: bytes, now: float) -> list[Send | Ask]:
        """A member has gone back from this tip to an earlier state. BEGIN does not wait for it, unless it reports
        samples again."""
        self.veterans -= {key}
        self._forget(key)
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

    def _forget(self, key: bytes) -> None:
        """That member's JOIN and report are void."""
        self._forget_join(key)
        self.counts.pop(key, None)
        self.pace.lost(key)

    def _forget_join(self, key: bytes) -> None:
        for of_members in (self.joins, self.gathered, self.wait_until, self.kept_out):
            of_members.pop(key, None)

    def _follow_the_first(self) -> None:
        """If samples are not counted, let the member that joined first decide how long all wait."""
        if self.rules.target_samples is None and not self.wait_until:
            self.phase, self.deadline, self.reminded = Until.CALL, math.inf, False
        elif self.rules.target_samples is None and not self.reminded:
            self.deadline = self._first_waits_until()

    def _call(self, now: float) -> list[Send | Ask]:
        return self._gather(now + self.haste * self.rules.matchmaking_time, now)

    def _gather(self, deadline: float, now: float) -> list[Send | Ask]:
        self.phase, self.deadline, self.called_at = Until.BEGIN, deadline, now
        self.told_until = self.history.newcomers.until(self.at.tip)
        return [Send(tuple(self.expected), msg.Call(self.at.tip, self.waits_for(now)))]

    def tick(self, now: float) -> list[Send | Ask]:
        """Do what is due at `now`. Called at `wake_at` and after every event."""
        if self.phase is Until.CALL and self.joins and self._is_called_by_joins(now):
            return self._gather(max(now, self._first_waits_until()), now) + self.tick(now)
        if self.phase is Until.BEGIN and now >= self._begins_at():
            missing = self._missing()
            if missing and not self._is_full() and not self.reminded:
                # They may be in another coordinator's round of this tip, or past it. A round without them could then
                # give the tip a second result.
                self.reminded, self.deadline = True, now + REMINDER_SECONDS
                return [Send(tuple(missing), msg.Call(self.at.tip, self.waits_for(now)))]
            return self._begin(now)
        return []

    def wake_at(self) -> float | None:
        """When to call `tick` if nothing else happens; None if never."""
        at = self._calls_at() if self.phase is Until.CALL else self._begins_at()
        return None if at == math.inf else at

    def elsewhere(self, key: bytes, now: float, *, coordinator: bytes | None = None) -> list[Send | Ask]:
        """A member that was called is in another coordinator's round, or past this tip. A round without it might give
        this tip a second result, so this round waits. Each member can cause this once.

        Args:
            key: the member.
            now: the time.
            coordinator: the coordinator of the other round, whose BEGIN the member has shown; None without a BEGIN.
        """
        if key in self.expected and key not in self.at.postponed:
            self.at.postponed[key] = coordinator in (None, key)
            if self.phase is Until.BEGIN:
                # It is called again. The deadline never moves to an earlier time: others may need all of it.
                self.deadline, self.reminded = max(self.deadline, now + REMINDER_SECONDS), False
        return []

    def _begins_at(self) -> float:
        """When the round begins if nobody else joins or leaves; infinity if it cannot begin."""
        if not self._can_go(self._chosen()):
            return math.inf
        if self._is_full():
            return -math.inf
        return max(self._may_begin_at(), self.history.newcomers.until(self.at.tip))

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

    def overdue(self, now: float) -> list[bytes]:
        """The members that BEGIN or CALL waits for, except those that are in the midst of a step, as they have
        announced."""
        waited_for = self._missing() if self.phase is Until.BEGIN else self._lacking()
        return [key for key in waited_for if not self.pace.is_in_a_step(key, now)]

    def _lacking(self) -> list[bytes]:
        """The members that lack their parts of the epoch, once others have theirs and wait."""
        part = self._part or math.inf
        have = {key for key, count in self.counts.items() if count.samples >= part}
        return [key for key in self._with_parts(self._counted_on()) if key not in have] if have else []

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
            self.history.rest(now + (now - self.called_at))
            return
        turns = sum(m.role is not Role.CLIENT and not m.is_relayed for m in self.expected.values())
        self.history.rest(now + REST_FACTOR * max(1, turns) * (now - self.called_at))

    def _is_awaited_until(self, key: bytes) -> float:
        at = min(self.called_at, self.deadline)
        return at + self.history.punctuality.of(key, self.deadline - at, at)

    def _waits_for(self, key: bytes) -> bool:
        has_reported = key in self.counts and self.history.is_awaited(key)
        return self.rules.target_samples is None or has_reported or key in self.veterans or key in self.lent

    def _can_go(self, keys: list[bytes]) -> bool:
        """Whether these members can make a round: there are enough of them, and one of them can reduce."""
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
        if self._are_few():
            self._rest_from_waiting(now)
        if self.rules.target_samples is not None and self.reminded:
            for key in self._missing():
                if key not in self.at.postponed:  # a postponed one has said why
                    self.history.punctuality.held_up(key, now)
        self.history.missed(key for key in self.expected if key in self.counts and key not in self.joins)
        members = tuple(self.joins[key].sender for key in sorted(chosen))
        joins = [self.joins[member.key] for member in members]
        with_state = self.rules.averages_state(self.at.tip.epoch, joins)
        sizes = self.rules.vector(self.at.tip.epoch, with_state)
        elements = chunk_elements(sum(sizes), sum(who_reduce(members)), self.rules.chunk_elements)
        span, nbytes = self.rules.smallest_span / elements, self.rules.element_bytes * sum(sizes)
        rates = {member.key: self.joins[member.key].rates for member in members}
        starts = divide(len(chunk_table(sizes, elements)), members, span, rates, nbytes)
        told = ((join.weight, join.machine, join.state, join.average) for join in joins)
        weights, machines, states, averages = zip(*told, strict=True)
        options, loss = self.rules.options(joins), mean_of((join.loss, join.weight) for join in joins)
        begin = msg.Begin(
            self.at.tip, self._next_ballot(joins), members, weights, machines, states, averages, elements, starts,
            with_state, self.rules.round_timeout, options, loss,
        )  # fmt: skip
        self.begin, self.phase = self.signer.sign(begin), Until.OVER
        self.at.join_to_begin = None if self.last_join_at is None else now - self.last_join_at
        gathered = msgspec.msgpack.encode({key: self.gathered.get(key, b"") for key in sorted(chosen)})
        return [Send(self.begin.keys, self.begin, [gathered])]

    def _next_ballot(self, joins: Sequence[msg.Join]) -> Ballot:
        own = [] if self.me in self.joins else [self.at.led.number]
        attempts = sorted([*own, *(join.attempt for join in joins)])
        # Half of the members follow an attempt up to this one. So a member that lies, or that a liar has led to a very
        # high attempt, does not matter. If it alone has joined, this peer's own attempt is the other half.
        usual = attempts[(len(attempts) - 1) // 2]
        known = (attempt for attempt in attempts if attempt <= usual + MAX_LEAP)
        return Ballot(1 + max(self.at.led.number, *known), self.me)

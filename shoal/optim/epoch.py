"""Takes a rank from epoch to epoch: it accumulates, ends the epoch with the others, and catches up if it is late."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum, auto
from types import NoneType
from typing import NamedTuple

import msgspec
import torch

from shoal.averaging.exchange import Exchange, Vector
from shoal.cluster.question import Question
from shoal.cluster.team import Team
from shoal.health.record import FaultKind
from shoal.interrupts import finished, unbroken
from shoal.membership.pin import Pin
from shoal.optim.accumulator import factor_of
from shoal.optim.division import in_order
from shoal.optim.eval_mode import Mode
from shoal.optim.kept import Kept, read_kept
from shoal.optim.pilot import Brought, Ended, Next, Pilot, Whereabouts
from shoal.optim.reports import DownloadReport
from shoal.optim.result import StepResult
from shoal.optim.rounds import Rounds
from shoal.optim.settings import Settings
from shoal.optim.state import AS_OBJECT, State
from shoal.optim.transfers import Transfers
from shoal.optim.turns import are_several
from shoal.optim.work import Batch, Work
from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.book import RuleBroken
from shoal.swarm.protocol.contribution import Fault, SendTo
from shoal.swarm.protocol.errors import AveragingError, Behind, Rejected
from shoal.swarm.protocol.messages import Begin
from shoal.swarm.protocol.sparing import Sparing
from shoal.swarm.protocol.tip import Tip
from shoal.transfer.transfer import Downloaded, DownloadFailed, NoMemoryForState, NothingWanted

log = logging.getLogger(__name__)

KEPT_AGAIN_SECONDS = 60.0  # the time until this peer tries again to load a kept state for which it had no memory
TOLD, TOLD_SECONDS = 8, 60.0  # warnings of gradients that are not finite: at most so many in so many seconds


class EpochState(Enum):
    """The state of a rank with respect to the end of an epoch. The trainer's thread makes every transition, within its
    calls; or the background thread on its behalf, while it waits in another optimizer (`end_on_loan`).

    A round or a download that the trainer waits for begins and ends within one call, in ACCUMULATING.
    """

    ACCUMULATING = auto()
    """This rank accumulates, and nothing is under way in the background.

    To AVERAGING: the round of the epoch is due, and this peer averages in the background.
    To STEPPING: the round is over, and this peer steps in the background.
    To CLOSED: the optimizer is shut down. (From every state.)
    """
    AVERAGING = auto()
    """The background thread averages, while this peer accumulates for the next epoch, whose tip is not known yet. (In
    the modes without a background, this peer is on loan: it accumulates nothing until it has applied the result.)

    To STEPPING: the average is there, and with it the tip of the next epoch.
    To FAILED: there was no average, or the thread raised an error.
    To ACCUMULATING: the same, on loan; this peer has still accumulated what it brought.
    To ACCUMULATING: other peers have ended the epoch, so this peer downloads their state.
    """
    STEPPING = auto()
    """The round is over. The background thread steps, while this peer accumulates for the next epoch.

    To ACCUMULATING: the trainer's thread applies the step.
    To FAILED: the step raised an error.
    """
    FAILED = auto()
    """The end of the epoch in the background has failed. This peer keeps what it brought to the round.

    To AVERAGING: the next call of `step` tries again.
    To ACCUMULATING: another state is downloaded or loaded.
    """
    CLOSED = auto()
    """The optimizer was shut down."""


class Background(NamedTuple):
    """What goes on in the background at the end of an epoch, while the trainer continues.

    Attributes:
        averages: the round.
        steps: the step.
        may_lend: whether this optimizer may be lent. The trainer then leaves a round in which another one waits for it.
    """

    averages: bool = False
    steps: bool = False
    may_lend: bool = False


@dataclass(frozen=True, slots=True)
class _Ending:
    """The end of an epoch in the background.

    Attributes:
        tip: a future of the tip of the next epoch.
        result: a future of the result; it is done when the thread is done.
        on_loan: whether this peer averages in the background only because its trainer waited in another optimizer. What
            it has brought stays accumulated until the result is applied, and nothing is added to it.
    """

    tip: Future[Tip]
    result: Future[Ended | None]
    on_loan: bool = False


# -- what ranks ask rank 0, and tell each other


class Advance(msgspec.Struct, array_like=True, frozen=True):
    """What all ranks do with the batches of a step.

    Attributes:
        tip: the name of the state.
        is_used: whether the batches are used.
        then: what follows.
    """

    tip: Tip
    is_used: bool
    then: Next


class Begins(msgspec.Struct, array_like=True, frozen=True):
    """What a rank brings to the end of an epoch.

    Attributes:
        has_begun: whether it has begun the rounds before the run's, in a try that has failed.
        digest: the digest of its parts of the state.
    """

    has_begun: bool
    digest: bytes


class Keeps(msgspec.Struct, array_like=True, frozen=True):
    """What becomes of this peer's contribution when it loads another state.

    Attributes:
        is_in_theirs: whether the other state may have it already.
        can_be_kept: whether it means something on the other state.
    """

    is_in_theirs: bool
    can_be_kept: bool


class Rounded(msgspec.Struct, array_like=True, frozen=True):
    """What the round of the run has come to: the result, or None; or why this peer is behind."""

    ended: Ended | None = None
    behind: str = ""


ADVANCE = Question("batch", NoneType, Advance, may_wait=True)
COUNT = Question("count", NoneType, Next)
UNUSED = Question[None, Ended | None]("unused round", NoneType, Ended | None, may_wait=True)
MAY_ENTER = Question("may enter rounds", NoneType, bool)
MAY_END = Question("may end", NoneType, bool)
AT_START = Question("at the start", NoneType, bool, may_wait=True)
BEGIN_ROUNDS = Question[Begins, bool | None]("begin rounds", Begins, bool | None)
FINITE = Question[bool, float | None]("finite", bool, float | None)
NAMES = Question("names of averages", bytes, list[bytes])
ROUND = Question("round", NoneType, Rounded)
NORMS = Question("norms", list[float], list[list[float]])
DIGESTS = Question("digests", bytes, list[bytes])
RESTS = Question("rests", NoneType, bool)
REPLAY = Question("replay", NoneType, bool)
TIP = Question[None, Tip | None]("tip", NoneType, Tip | None)
PAUSE = Question("pause", NoneType, bool)
KEEPS = Question("keeps", bool, Keeps)
MAY_LOAD = Question("may load", NoneType, bool)
HAS_FAILED = Question("has failed to load", NoneType, bool)


class Epoch:
    """Each epoch of a rank, from the first batch to the step that ends it. All ranks of a cluster that have a part of
    the state run the same code. What depends on the run, or on the time, `Pilot` decides at rank 0.

    The trainer's thread calls all methods, but for these: the reactor asks `can_end`, `needs_trainer` and `is_behind`,
    and calls `on_own_thread`; the background thread calls `end_on_loan`, while the trainer waits in another optimizer;
    and any thread may call `close`.

    Args:
        settings: the settings of the optimizer.
        team: the ranks.
        state: this rank's part of the state.
        rounds: in which rounds the work of this rank is averaged.
        pilot: asks the run, at rank 0.
        transfers: sends newcomers this rank's parts of the state, and fetches those of another state.
        background: what the trainer does not wait for.

    Attributes:
        state: see `EpochState`.
        applied: the tip of the model's parameters.
        digest: the hash of the state.
    """

    def __init__(
        self,
        settings: Settings,
        team: Team,
        state: State,
        rounds: Rounds,
        pilot: Pilot,
        transfers: Transfers,
        background: Background,
    ) -> None:
        self._settings, self._team, self._state, self._rounds, self._pilot = settings, team, state, rounds, pilot
        self._transfers = transfers
        self._work: Work = rounds.work
        self._background = background
        # If the round was called during a step, that step's samples may begin the next epoch. So the epoch ends before
        # they are added.
        self._ends_before_adding = (background.averages or background.steps) and not self._work.holds_every_batch
        self.state = EpochState.ACCUMULATING
        self._ending: _Ending | None = None  # in AVERAGING and STEPPING; in CLOSED, if it took longer than `close`
        self._brought = 0.0  # samples that this peer brought to that end of an epoch
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-update")
        self.applied = self._counted_from = state.tip  # the second one begins the epoch for which it accumulates
        self.digest = state.state_digest
        self._vote = b""  # this peer's options of the parameter groups, for the next round
        self._told_of_state = False  # whether a warning has told that newcomers can't be sent this peer's state
        self._step_seconds = 0.0  # of the last step
        self._kept_again_at = 0.0  # when to look for a kept state again, after there was no memory for it
        self._sparing = Sparing(TOLD, TOLD_SECONDS)

    @property
    def is_busy(self) -> bool:
        """Whether the end of an epoch is under way in the background, or not applied yet."""
        return self.state in (EpochState.AVERAGING, EpochState.STEPPING)

    def _standing(self) -> Whereabouts:
        return Whereabouts(self._state.tip, self._state.line, self.is_busy)

    @property
    def is_behind(self) -> bool:
        """At rank 0: whether others hold a state that outranks this peer's."""
        return self._pilot.is_behind(self._standing())

    def begin(self) -> None:
        """From now on the coordinator waits for this peer.

        Raises:
            Rejected: if the run has other terms.
        """
        if self._team.decided(MAY_ENTER, lambda _: not self.is_behind):
            self._rounds.enter(self._is_called)
        self._team.at_first(lambda: self._pilot.begin())

    def _is_called(self) -> bool:
        return self._pilot.is_called(self._state.tip)

    def take_over_at_start(self) -> None:
        """If the model is still the anchor that all have, continue from it as the user has written it."""
        may_be = self._work.has_anchor and not self._state.tip.epoch and self.state is not EpochState.CLOSED
        # By rank 0, since an error may have kept another rank from a step.
        if may_be and self._team.decided(AT_START, lambda _: self._work.is_at_start):
            self.take_over()

    # -- within an epoch

    def advance(self, batch: Batch) -> None:
        """Use the parameters' `.grad`, and end the epoch if its round is due. If others have ended the epoch without
        this peer, download their state instead. Raises as `Optimizer.step`.

        Args:
            batch: that of this step; in a cluster it has the samples of all ranks.
        """
        self.take_over_at_start()
        then = self._team.decided(
            ADVANCE, lambda _: self._lead(batch), then=lambda lead: self._follow(lead, batch)
        ).then
        if then is Next.BEHIND:
            self._synchronise()
            self._work.skip()
            then = self._team.decided(COUNT, lambda _: self._count())
        if then is Next.END:
            self._end()
        elif then is Next.LATE:
            self._catch_up()

    def _lead(self, batch: Batch) -> Advance:
        """At rank 0: use the batch, unless this peer is behind, and say what follows."""
        then, is_used = self._where_to(), False
        if then is Next.WAIT:
            self._work.skip()
        elif then is Next.BEHIND:
            # What inner steps have done outlasts the download.
            is_used = self._work.has_moved and batch.samples > 0
            if is_used:
                self._add(batch)
        else:
            computed_at = self.applied
            if batch.samples:
                is_full = self._ends_before_adding and self._work.samples and self.state is EpochState.ACCUMULATING
                if is_full and self._pilot.is_due:
                    self._end()
                is_used = self.applied == computed_at  # otherwise another state was downloaded meanwhile
                if is_used:
                    self._add(batch)
            then = self._count()
        return Advance(self._state.tip, is_used, then)

    def _follow(self, lead: Advance, batch: Batch) -> None:
        """At other ranks: do what rank 0 has done with the batches."""
        if self._state.tip != lead.tip:
            self._move(lead.tip)
        if lead.is_used:
            self._add(batch)

    def _add(self, batch: Batch) -> None:
        self._rounds.enter(self._is_called)
        self._work.add(batch)

    def _where_to(self) -> Next:
        """At rank 0: what the run asks of this peer, after it has followed the newest pin as far as it can without a
        download."""
        while (pin := self._pilot.pin_due(at := self._standing())) is not None:
            if self.is_busy:
                self.take_result(wait=True)
            elif (tip := self._pilot.name_after(pin, at)) is not None:
                self._move(tip)
                self._pilot.follow(tip)
            elif not self._recall(pin):
                return self._pilot.without(pin, at)
        return self._pilot.next(at)

    def _count(self) -> Next:
        """At rank 0: report what this peer has accumulated. Returns what follows."""
        if self.state is not EpochState.ACCUMULATING and not self._counts_on():
            return Next.GO_ON
        work = self._work
        return self._pilot.count(self._state.tip, work.progress, work.samples, has_its_part=work.has_its_part)

    def _counts_on(self) -> bool:
        """Whether this peer counts for an epoch while the end of another one is under way, has failed or is not applied
        yet."""
        if self.state is EpochState.FAILED:
            self.take_over()  # the user may have written since
            self._name_state()
            self._end_in_background(self._checked(*self._work.again(self._brought)))
        if self.is_busy and self._work.result_may_wait and self._work.result_is_due:
            self.take_result(wait=True)
            if self._has_failed:
                return False  # the next step tries again
        if self.state is EpochState.AVERAGING and not self._knows_next_tip():
            if not self._has_its_part:
                return False  # it accumulates for an epoch whose tip is not known yet
            self.take_result(wait=True)  # it has its part of that epoch, too: it may be one epoch late at most
        return not self._has_failed

    @property
    def _has_failed(self) -> bool:
        return self.state is EpochState.FAILED

    def _knows_next_tip(self) -> bool:
        """Whether the round in the background is over. Then this peer counts for the next epoch."""
        assert self._ending is not None
        if self._ending.tip.done():
            self.state = EpochState.STEPPING
            self._count_from(self._ending.tip.result())
        return self._ending.tip.done()

    @property
    def _has_its_part(self) -> bool:
        """Whether this peer has accumulated as much as it brought to the epoch before."""
        if self._work.steps_per_epoch is not None and not self._brought:
            return self._work.has_its_part
        return self._work.samples >= (self._brought or self._settings.target)

    # -- the end of an epoch

    def _end(self) -> None:
        """End the epoch, or begin to end it in the background."""
        try:
            if self.is_busy:
                self.take_result(wait=True)  # one epoch late at most
            with self._paused():
                self._end_epoch()
        except Behind as error:
            log.info("%s", error)
            self._catch_up()

    def _catch_up(self) -> None:
        if self.is_busy:
            self.take_result(wait=True)
        self._synchronise()

    @contextlib.contextmanager
    def _paused(self) -> Iterator[None]:
        """See `RunProgress.paused`."""
        with contextlib.ExitStack() as paused:
            self._team.at_first(lambda: paused.enter_context(self._pilot.paused()))
            yield

    def _end_epoch(self) -> None:
        ended, samples = self._team.decided(UNUSED, lambda _: self._unused()), self._work.samples
        if ended is None:
            self._state.pieces.check_groups()
            if not self._team.decided(MAY_END, lambda _: self._may_end()):
                return
            samples = self._freeze()
            if self._background.averages:
                self._end_in_background(samples)
                return
            if self._background.may_lend and are_several():
                self._end_in_background(samples, on_loan=True)
                if self._ending is not None and not self._pilot.is_called_away(self._ending.result):
                    self.take_result(wait=True)
                return
            ended = self._average(samples)
        if ended is None:
            return
        if self._background.steps and not ended.is_unlike:
            self._work.reset()
            self._end_in_background(samples, ended)
            self._count_from(ended.tip)
            return
        if not ended.is_unlike:
            self._step(ended)
        self._apply(ended)

    def _unused(self) -> Ended | None:
        ended = self._pilot.unused(self._bring(0.0))
        if ended is not None:
            self._settle_round()
        return ended

    def _may_end(self) -> bool:
        self._choose()  # first: it refuses options, and then nothing has changed
        return not self._pilot.few_are_here()

    def _choose(self) -> None:
        """At rank 0: read this peer's options of the parameter groups, for the next round.

        Raises:
            ValueError: with the name of an option that has no plain value.
        """
        self._vote = self._state.options.own(self._state.tip.epoch)

    def _freeze(self) -> float:
        """Bring what this rank has accumulated to the rounds of the epoch. Returns the samples of all ranks behind it;
        0 if an element is not finite at some rank.

        Raises:
            Behind: if the others have ended the epoch, and rounds before the run's come too late.
            ValueError: if gradients that are accumulated in `.grad` were cleared.
        """
        tip = self._state.tip
        self.take_over()
        mine = Begins(self._rounds.held, self._state.state_digest)
        begun = self._team.decided(BEGIN_ROUNDS, lambda by_rank: self._have_begun(tip, by_rank), mine)
        if begun is None:
            raise Behind("the epoch has ended before this peer's gradients were averaged")
        samples = self._rounds.brought
        if not begun:  # else a try before this one has begun them
            if self._rounds.held:  # at this rank, and an error has kept another one from it
                self._rounds.leave()
                self._rounds.enter(self._is_called)
            samples = self._checked(self._work.samples, self._work.freeze())
            self._rounds.begin(tip.epoch, samples)
        self._team.at_first(lambda: self._state.take(self._pilot.rules))
        if self._background.averages:
            self._work.go_on()
        return samples

    def _have_begun(self, tip: Tip, by_rank: Sequence[Begins]) -> bool | None:
        """At rank 0: whether all ranks have begun the rounds before the run's; None if it is too late for these."""
        if not tip.epoch:  # later on, it is the hash of what the last step has made
            self.digest = self._state.named([each.digest for each in by_rank])
        if all(each.has_begun for each in by_rank):
            return True
        return False if self._rounds.may_begin(is_past=self._pilot.is_past(tip)) else None

    def take_over(self) -> None:
        """Continue from the model as the user has written it."""
        with self._team.collectives():
            self._state.take_over(whole=self._work.follows_model)

    def _name_state(self) -> None:
        """Hash the parts of all ranks."""
        self.digest = self._state.named(self._team.all(DIGESTS, self._state.state_digest))

    def _checked(self, samples: float, is_finite: bool) -> float:
        """The samples of rank 0 behind what each rank has taken. If that is not finite at some rank, all drop it."""
        found = self._team.decided(FINITE, lambda each: samples if all(each) else None, is_finite)
        if found is not None:
            return found
        self._work.drop()
        what, then = self._work.called
        if samples:
            loudly = self._sparing.allows(what.encode(), time.monotonic())
            self._team.at_first(lambda: self._pilot.tell_not_finite(what, then, loudly=loudly))
        return 0.0

    def _average(self, samples: float) -> Ended | None:
        """Average with the other peers. Returns None if there was no round and this peer can't continue alone.

        Raises:
            Behind: if others have ended this epoch without this peer.
            Rejected: if the run has other terms.
        """
        average = self._average_before() if self._rounds.precede else b""
        found = self._team.decided(ROUND, lambda _: self._join(samples, average))
        if found.behind:
            raise Behind(found.behind)
        return found.ended

    def _average_before(self) -> bytes:
        """Wait for the rounds before the run's, at all ranks. Returns the name of their averages."""
        tip, mine = self._state.tip, b""
        with self._team.ends(lambda: self._pilot.past(tip)) as ended:
            with contextlib.suppress(Behind):
                mine = self._rounds.average(self._settings.averaging_timeout, ended)
            by_rank = self._team.all(NAMES, mine)
        if not all(by_rank):
            raise Behind("others have ended the epoch before the averages of this peer were there")
        return self._rounds.name(by_rank)

    def _bring(self, samples: float, average: bytes = b"") -> Brought:
        """At rank 0: what this peer brings to the round of the run."""
        state, shares = self._state, self._work.shares_state
        return Brought(
            samples,
            state.tip,
            average,
            self.digest if shares else b"",
            self._vote if shares else b"",
            self._work.loss,
            state.options.unknown_of,
        )

    def _join(self, samples: float, average: bytes) -> Rounded:
        """At rank 0: join the round of the run."""
        try:
            ended = self._pilot.round(self._bring(samples, average), self._open)
        except Behind as error:
            return Rounded(behind=str(error))
        if ended is not None:
            self._settle_round()
        return Rounded(ended)

    def _settle_round(self) -> None:
        outcome = self._pilot.averaged.outcome
        if outcome is None:
            self._rounds.use_local()
        else:
            self._rounds.settle(outcome)

    def _open(self, begin: Begin, send: SendTo, fault: Fault) -> Exchange:
        """Make the exchange of a round: gradients, extra tensors and state, in the order of `Rules.vector`. Runs on the
        reactor.

        Raises:
            RuleBroken: if BEGIN averages the state where that is not due, or has options that no step can have.
        """
        epoch, rules, state = begin.tip.epoch, self._pilot.rules, self._state
        stepped = not rules.state_always and any(member.contributes for member in begin.members)
        if stepped and (misfit := state.options.misfit(begin.options)):
            raise RuleBroken(f"the round's step needs options that this peer's parameter groups can't have: {misfit}")
        if begin.with_state and not rules.may_average_state(epoch):
            raise RuleBroken(f"BEGIN averages the state at the end of epoch {epoch}, where that is not due")
        parts: list[Vector] = [*self._rounds.vectors(epoch), *state.vectors(begin, rules)]
        return Exchange(parts, self._pilot.me, begin, send, fault)

    @torch.no_grad()
    def _step(self, ended: Ended) -> None:
        """Step the state with the averages; with local updates, take over the averaged state instead."""
        began = time.perf_counter()
        if not ended.used:
            self._work.remember()
        norm = self._norm()
        factor = 1.0 if norm is None else factor_of(norm, self._settings.max_grad_norm or 0.0)
        self._rounds.used()
        result = StepResult(ended.tip, ended.options, ended.loss, ended.with_state, norm, factor)
        self._work.step(self._state, result)
        self._step_seconds = time.perf_counter() - began
        self._name_state()
        self._team.at_first(lambda: self._pilot.state_changed())

    def _norm(self) -> float | None:
        """The norm of the averages of all ranks; None if it is not limited. In the order of the parts, so that all
        peers get the same bits."""
        if self._settings.max_grad_norm is None:
            return None
        by_rank = self._team.all(NORMS, self._work.norms())
        norms = in_order(self._state.division.carriers, by_rank)
        return norms[0] if len(norms) == 1 else float(sum(norm**2 for norm in norms)) ** 0.5

    def _apply(self, ended: Ended, *, is_accumulating: bool = False) -> None:
        """Continue from the state after the step. With `is_accumulating`, this rank already accumulates for the next
        epoch."""
        if ended.is_unlike:
            self._work.abandon(used=ended.used)
            if self._team.decided(RESTS, lambda _: self._pilot.hidden.rests(time.monotonic())):
                self._leave_round()
            else:
                self._synchronise(self._team.at_first(lambda: self._pilot.averaged.donors))
            return
        self._team.at_first(lambda: self._state.put(self._pilot.rules, ended.tip, is_averaged=not ended.is_alone))
        self._work.apply(used=ended.used, is_accumulating=is_accumulating)
        self.applied = ended.tip
        self._count_from(ended.tip)
        self._team.at_first(lambda: self._tell_end(ended))

    def _tell_end(self, ended: Ended) -> None:
        self._look_at_state()
        state, pilot = self._state, self._pilot
        if ended.with_state:
            pilot.machine.has_averaged_state(ended.tip.epoch, whole=state.is_averaged_whole)
        pilot.ended(self.digest, step_seconds=self._step_seconds, norm=state.grad_norm, cost=self._rounds.cost)

    def _look_at_state(self) -> None:
        """Tell once if something in this peer's state can't be sent to newcomers."""
        if not self._told_of_state and (what := self._state.why_it_cannot_travel()):
            self._told_of_state = True
            fields = self._pilot.run.faults.add(FaultKind.STATE, what)
            log.warning(
                "newcomers can't join this run: %s, which they can't be sent. %s", what, AS_OBJECT, extra=fields
            )

    def _count_from(self, tip: Tip) -> None:
        """From now on, accumulate for the epoch that begins with the state `tip`."""
        if self._counted_from != tip:
            self._counted_from = tip
            self._work.begin(tip.epoch)
            self._team.at_first(lambda: self._pilot.count_from(tip))

    # -- in the background, in a process alone

    @property
    def can_end(self) -> bool:
        """Whether the round of this epoch is called, and nothing keeps this peer from it."""
        if self.state is not EpochState.ACCUMULATING or self._state.is_in_eval:
            return False
        return self._pilot.can_end(self._standing(), self._counted_from)

    @property
    def needs_trainer(self) -> bool:
        """Whether a round is called which this peer can't join before the trainer's thread has applied the last one."""
        ending = self._ending
        is_over = ending is not None and (ending.tip.done() or ending.result.done())
        return is_over and self._pilot.run.swarm.called

    def on_own_thread(self, act: Callable[[], None]) -> None:
        """Let the background thread do this, unless the optimizer is shut down."""
        with contextlib.suppress(RuntimeError):
            self._thread.submit(act).add_done_callback(_tell_failure)

    @torch.no_grad()
    def end_on_loan(self) -> None:
        """End the epoch on the background thread, which calls this while the trainer's thread waits in another
        optimizer. The next call of `take_result` applies the result, or raises what went wrong."""
        if not self.can_end:
            return
        try:
            self._state.pieces.check_groups()
            self._choose()
            if not self._pilot.are_enough_here():
                return
            samples = self._freeze()
        except Exception as error:  # noqa: BLE001 (the trainer hears of it)
            failed: Future[Ended | None] = Future()
            failed.set_exception(error)
            self._ending, self.state = _Ending(Future(), failed, True), EpochState.AVERAGING
        else:
            self._end_in_background(samples, on_loan=not self._background.averages)

    def _end_in_background(self, samples: float, ended: Ended | None = None, *, on_loan: bool = False) -> None:
        """Average and step on the background thread. If `ended` is given, only step.

        Args:
            samples: what this peer has brought.
            ended: the result of the round.
            on_loan: see `_Ending`.
        """
        tip: Future[Tip] = Future()

        def end() -> Ended | None:
            result = self._average(samples) if ended is None else ended
            if result is not None and not result.is_unlike:
                tip.set_result(result.tip)
                if self._background.steps:
                    self._step(result)
            return result

        self._brought, self._ending = samples, _Ending(tip, self._thread.submit(end), on_loan)
        self.state = EpochState.AVERAGING if ended is None else EpochState.STEPPING

    def wait(self) -> None:
        """Wait until the background thread is done, and leave its result where it is."""
        if self._ending is not None:
            finished(self._ending.result)

    def take_result(self, *, wait: bool) -> None:
        """Apply the result of the background thread, if there is one. Raises what the thread raised, but if others have
        ended the epoch without this peer, follow them.

        Args:
            wait: wait until the thread is done.
        """
        try:
            self._take_result(wait)
        except Behind as error:
            log.info("%s", error)
            self._synchronise()

    def _take_result(self, wait: bool) -> None:
        ending = self._ending
        if ending is None:
            return
        on_loan = ending.on_loan and self.state is not EpochState.CLOSED
        if not (ending.result.done() and self._work.result_is_due) and not (wait or on_loan):
            return
        if self.state is EpochState.CLOSED:
            self._apply_last()
            return
        try:
            with self._paused():
                ended = self._result()
        except Behind:
            self._work.take_back()
            raise
        if ended is not None:
            if not self._background.steps and not ended.is_unlike:
                if on_loan:
                    self.take_over()  # what the user has written since the epoch was closed
                self._step(ended)  # in this thread, because it changes the parameters that the trainer uses
            self._apply(ended, is_accumulating=not on_loan)

    def _result(self) -> Ended | None:
        """Wait for the result of the background thread. It is None if the thread found no average, or if another thread
        shuts the optimizer down and has taken the result."""
        ending = self._ending
        if ending is None:
            return None
        result = ending.result
        self._pilot.wait(result)
        if self._ending is not ending:
            return None  # a signal handler that ran meanwhile has taken it, by a call of its own
        has_failed = True
        try:
            ended = result.result()
            has_failed = ended is None
        except Behind:
            has_failed = False
            raise
        finally:
            self._ending = None
            if self.state is not EpochState.CLOSED:
                tries_again = has_failed and not ending.on_loan
                self.state = EpochState.FAILED if tries_again else EpochState.ACCUMULATING
        return ended

    def close(self, timeout: float) -> None:
        """Wait at most `timeout` seconds for the background thread, and apply its step. If the step takes longer, a
        later call of `state_dict` waits for the step and applies it."""
        self._rounds.stop()
        ending = self._ending  # the trainer may be waiting for it, too
        if ending is not None:
            finished(ending.result, timeout)
        self._thread.shutdown(wait=ending is None or ending.result.done())
        self.state = EpochState.CLOSED
        self.take_result(wait=False)

    def _apply_last(self) -> None:
        """Apply the result of a background thread that was at work when the optimizer was shut down."""
        ended: Ended | None = None
        on_loan = self._ending is not None and self._ending.on_loan
        try:
            ended = self._result()
        except AveragingError as error:
            log.info("the end of an epoch was given up: %s", error)
        if ended is not None and on_loan and not self._background.steps and not ended.is_unlike:
            self._step(ended)
        self._work.apply_last(used=None if ended is None or ended.is_unlike else ended.used)
        self.applied = self._state.tip

    # -- another state, for this peer

    def settle(self) -> None:
        """Wait for the background, and apply its result. A checkpoint that was loaded into the model alone is refused,
        because the result belongs to the model before."""
        if self.is_busy:
            self._work.refuse_load()
        self.take_result(wait=True)

    def end(self) -> None:
        """Apply the last result. A model that was loaded meanwhile, to evaluate it for example, stays."""
        with self._state.keeping_model(self.is_busy and self._work.was_loaded):
            self.take_result(wait=True)

    def to_mode(self, mode: Mode) -> None:
        """Call the wrapped optimizer's own `train` or `eval`, see `EvalMode`.

        Raises:
            RuntimeError: as `Work.refuse_load`.
        """
        self.settle()
        before = self._state.tip
        self._to_mode(mode)
        if self._state.tip != before:
            self.continue_from(lambda: None)

    def _to_mode(self, mode: Mode) -> None:
        self._work.refuse_load()
        if not self._state.is_in_eval:
            self.take_over()
        self._state.to_mode(mode, self._work.of_wrapped)

    @contextlib.contextmanager
    def in_train_mode(self) -> Iterator[None]:
        """Within, the wrapped optimizer is in train mode. Afterwards it is in the mode in which it was."""
        was_in_eval = self._state.is_in_eval
        if was_in_eval:
            self._to_mode("train")
        try:
            yield
        finally:
            if was_in_eval:
                self._to_mode("eval")

    def continue_from(self, load: Callable[[], None]) -> None:
        """Continue from another state, which `load` sets."""
        self.take_result(wait=True)
        if self.state is EpochState.CLOSED:
            load()
            self.applied = self._state.tip
            return
        self._rounds.leave()
        with unbroken():
            load()
            tip = self._team.decided(TIP, lambda _: self._pilot.believed(self._state.tip))
            if tip is not None and tip != self._state.tip:
                self._state.tip = tip
            self._team.at_first(lambda: self._pilot.follow(self._state.tip))
            self._name_state()
            self._restart(keeps=True)

    def load_state(self, timeout: float) -> bool:
        """Download the state that most peers hold, and continue from it.

        Args:
            timeout: the time in seconds without any progress after which the download fails.

        Returns:
            Whether this peer took over a state. It did not if there was nobody to ask.

        Raises:
            AveragingError: if nobody could send the state.
            Rejected: if the state does not fit.
        """
        with self._state.keeping_model(self.is_busy and self._work.was_loaded):
            self.take_result(wait=True)
        donors = self._team.at_first(lambda: self._pilot.donors())
        try:
            return self._download(donors, timeout, to_join=False)
        except DownloadFailed as error:
            lacks_memory = error.lacks_memory
            if self._team.decided(HAS_FAILED, lambda _: bool(self._pilot.donors()) or lacks_memory):
                raise
            return False  # all peers that were asked have left meanwhile

    def _replay(self) -> None:
        """End the epochs that others have ended, one after another, each like an epoch whose round was missed."""
        first = self._state.tip
        try:
            while self._team.decided(REPLAY, lambda _: self._pilot.replays(self._standing())):
                before = self._state.tip
                if self.state is EpochState.FAILED:
                    self.state = EpochState.ACCUMULATING
                    self._work.take_back()
                with self._paused():
                    self._end_epoch()
                self._take_result(wait=True)
                if self._state.tip == before:
                    break
                self._where_to()  # the others may have followed a pin
        except Behind as error:
            log.info("%s", error)
        if self._state.tip != first:
            # As after a download: the schedulers of frameworks have not stepped this peer's options.
            self._state.options.adopt(self._pilot.last_options)

    def _synchronise(self, donors: Sequence[PeerID] = ()) -> None:
        """Replay the rounds that this peer lacks, or download the state. If that fails, keep this peer's own, and try
        again after a while.

        Raises:
            Rejected: if the state does not fit this peer, and this peer is a newcomer.
        """
        began, mine = time.monotonic(), self._state.tip
        self._team.at_first(lambda: self._where_to())
        if self._team.decided(REPLAY, lambda _: not donors and self._pilot.may_replay(self._standing())):
            with self._pilot.replaying():
                self._replay()
        tip = self._team.decided(TIP, lambda _: None if self._has_arrived(mine, donors) else self._state.tip)
        if tip is None:
            return
        if tip != self._state.tip:
            self._move(tip)
        donors = self._team.at_first(lambda: donors or self._pilot.donors())
        failed: AveragingError | None = None
        try:
            if self._download(donors, self._settings.load_state_timeout, to_join=True):
                return
        except AveragingError as error:
            failed = error
        try:
            if self._team.decided(PAUSE, lambda _: self._pause(began, failed)):
                self._leave_round()
        finally:
            failed = None  # it would keep this call's objects, and the state that has arrived

    def _has_arrived(self, before: Tip, donors: Sequence[PeerID]) -> bool:
        """At rank 0: whether this peer is where the others are, because it has replayed, or followed their pin."""
        return not donors and self._state.tip != before and not self.is_behind

    def _pause(self, began: float, error: AveragingError | None) -> bool:
        """At rank 0: a download has brought no state."""
        if isinstance(error, Rejected) and not self._pilot.is_made:
            raise error
        return self._pilot.pause(self._state.tip, began, error)

    def _leave_round(self) -> None:
        """Stay at this peer's own state: it does not follow the members of the last round, which must not wait."""
        self._rounds.leave()
        self._team.at_first(lambda: self._pilot.follow(self._state.tip))

    def _download(self, donors: Sequence[PeerID], timeout: float, *, to_join: bool) -> bool:
        """Set the state to the one that most of the donors hold, among those that are not behind this peer's, and
        follow the run from there. Returns whether there was such a state. If it raises, the state has not changed.

        Args:
            donors, timeout: as `load_state`.
            to_join: give up a state that comes too late to take part in the run's rounds.
        """
        if not self._team.decided(MAY_LOAD, lambda _: bool(donors)):
            return False
        with contextlib.ExitStack() as loading:
            self._team.at_first(lambda: loading.enter_context(self._pilot.run.loading()))
            return self._load_from(donors, timeout, to_join=to_join)

    def _load_from(self, donors: Sequence[PeerID], timeout: float, *, to_join: bool) -> bool:
        self._rounds.leave()
        mine = self._state.tip
        try:
            parts = self._transfers.fetch(self._standing(), donors, timeout, to_join=to_join)
        except NothingWanted as error:
            log.info("%s", error)
            return False
        state, work = parts[0], self._work
        tip = state.manifest.tip
        # What this peer has done in inner steps is kept on the new state, unless that state has it already, the owner
        # has pinned another line of states, or a checkpoint was loaded into the model at some rank.
        keeps = self._team.decided(
            KEEPS,
            lambda loaded: Keeps(self._pilot.may_be_in(mine), tip.pin == mine.pin and not any(loaded)),
            work.was_loaded,
        )
        can_be_kept = keeps.can_be_kept
        load, kept = self._transfers.make_ready(parts, copies=can_be_kept and (work.has_moved or keeps.is_in_theirs))
        givers = [donor.key for donor in state.chunks_from]
        fork = self._team.at_first(lambda: self._pilot.leave(mine, tip, state.line, givers, self._state.keep))
        with unbroken():
            if keeps.is_in_theirs:
                work.use_theirs()
            is_kept = can_be_kept and work.has_moved
            if is_kept:
                work.remember(kept)
            self._load(load)
            apart = self._team.at_first(lambda: self._arrived(state))
            self._restart(keeps=is_kept)
        report = DownloadReport(tip.epoch, state.seconds, state.nbytes, len(state.chunks_from), self.digest.hex())
        self._team.at_first(lambda: self._pilot.tell_arrival(mine, report, tip, fork, givers, apart=apart))
        return True

    def _arrived(self, state: Downloaded) -> bool:
        whole = self._state.was_taken_whole
        return self._pilot.arrived(state.manifest.tip, list(state.chunks_from), whole=whole, lossy=state.lossy)

    def _load(self, load: Callable[[], None]) -> None:
        """Take over another state, which was made ready."""
        load()
        self._work.publish()
        self._work.settle_load()
        self._name_state()

    # -- a state that this peer has kept

    def _recall(self, pin: Pin) -> bool:
        """Continue from the state that this peer has kept, if `pin` allows it. Returns whether it did."""
        if time.monotonic() < self._kept_again_at:
            return False
        try:
            kept = self._state.keeper.find(pin)
            if kept is not None:
                self._continue_from_kept(kept, pin.number)
        except NoMemoryForState as error:
            self._kept_again_at = time.monotonic() + KEPT_AGAIN_SECONDS
            self._pilot.could_not_recall(pin, error, KEPT_AGAIN_SECONDS)
            return False
        return kept is not None

    def _continue_from_kept(self, kept: Kept, pin: int) -> None:
        """Continue from a state that a peer has left and kept.

        Args:
            kept: the state.
            pin: the number of its pin.

        Raises:
            ValueError: if the state does not fit this model. Then nothing has changed.
            NoMemoryForState: if there is no memory for it. Then nothing has changed.
        """
        state = kept.as_downloaded(pin)
        tip = state.manifest.tip
        load = self._state.make_ready([state])
        fork = self._pilot.leave(self._state.tip, tip, state.line, [], self._state.keep)
        self._rounds.leave()
        with unbroken():
            self._load(load)  # with an outer optimizer, the model becomes the anchor
            self._pilot.recalled(tip)
            self._restart()
        log.warning("this peer continues from the state that it had left: epoch %d, tip %s", tip.epoch, tip)
        if fork is not None:
            self._pilot.forks.left(fork)

    def load_kept(self, path: str | os.PathLike[str] | None) -> None:
        """See `Optimizer.load_kept_state`."""
        self.take_result(wait=True)
        kept = self._state.keeper.in_memory if path is None else read_kept(path)
        if kept is None:
            raise ValueError("this peer has kept no state in its memory: give the file")
        self._continue_from_kept(kept, self._pilot.believed(kept.snapshot.tip).pin)

    def _restart(self, *, keeps: bool = False) -> None:
        """Begin an epoch from a state that is not the result of the last round.

        Args:
            keeps: whether what this rank has done in inner steps stays.
        """
        tip = self._state.tip
        self._team.at_first(lambda: self._pilot.state_changed())
        if self.state is EpochState.FAILED:
            self.state = EpochState.ACCUMULATING
        self._work.restart(keeps=keeps)
        self.applied = self._counted_from = tip
        self._work.begin(tip.epoch)
        self._rounds.enter(self._is_called)
        self._team.at_first(lambda: self._pilot.begin_again(tip))

    # -- an auxiliary peer

    def assist(self) -> None:
        """Make the step of an auxiliary peer, which trains nothing and holds no state. It helps in the next round, if
        one is called within `matchmaking_time`.

        Raises:
            Rejected: if the run has other terms.
        """
        tip = self._pilot.catch_up()
        if tip is not None:
            self._move(tip)
            tip = self._pilot.assist(self._open)
        if tip is not None:
            self._move(tip)
            self._pilot.tell_round(self.digest)

    def _move(self, tip: Tip) -> None:
        self.applied = self._state.tip = tip
        self._count_from(tip)


def _tell_failure(done: Future[None]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        log.error("an epoch could not be closed while its trainer waited in another run", exc_info=error)

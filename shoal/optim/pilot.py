"""Asks the run, and decides what this peer does next: go on, end the epoch, load another state."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import msgspec
from blake3 import blake3
from msgspec.structs import replace

from shoal.health.record import FaultKind
from shoal.membership.pin import Pin
from shoal.optim.forks import Forks
from shoal.optim.hidden_state import HiddenState
from shoal.optim.machine import Machine
from shoal.optim.progress import RunProgress
from shoal.optim.reports import DownloadReport, EpochReport, Event, ForkReport
from shoal.optim.result import Cost
from shoal.optim.run import Run
from shoal.optim.turns import is_called_away, wait_for
from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.contribution import BytesExchange, Contribution, Fault, Outcome, SendTo
from shoal.swarm.protocol.errors import AveragingError, Behind, Rejected, Unusable
from shoal.swarm.protocol.line import Line
from shoal.swarm.protocol.loss import Loss
from shoal.swarm.protocol.messages import Begin
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.tip import Tip

log = logging.getLogger(__name__)

Open = Callable[[Begin, SendTo, Fault], BytesExchange]
"""Makes the exchange of a round."""

LONGEST_REST = 600.0  # seconds after which a newcomer that does not fit into the run asks again at the latest


class Whereabouts(msgspec.Struct, frozen=True, gc=False):
    """Where this peer stands in the run.

    Attributes:
        tip: the name of its state.
        line: the lineages behind its state.
        is_busy: whether the end of an epoch is under way in the background, or not applied yet.
    """

    tip: Tip
    line: Line
    is_busy: bool = False


# -- what a peer does next


class Next(Enum):
    """What a peer does next."""

    GO_ON = 0
    """Use the batch, or begin the next one."""
    WAIT = 1
    """Use no batch and end no epoch for now, so that nobody waits for this peer."""
    BEHIND = 2
    """Others hold a state that outranks this peer's: replay their rounds, or download it, then count what is left."""
    LATE = 3
    """Others have ended the epoch for which this peer has just counted: the same, and count with the next batch."""
    END = 4
    """The round of the epoch is due: end the epoch."""


@dataclass(frozen=True, slots=True)
class Brought:
    """What this peer brings to the round of the run.

    Attributes:
        samples: the weight of its contribution.
        tip: the name of its state.
        average: the name of its average, if rounds before the run's have made it; else b"".
        digest: the hash of its state; b"" if like peers need not have the same state.
        options: its options of the parameter groups.
        loss: the loss behind its samples, or None.
        unknown_of: returns the name of an option of the round that is known by a hash only and differs here, or "".
    """

    samples: float
    tip: Tip
    average: bytes
    digest: bytes
    options: bytes
    loss: Loss | None
    unknown_of: Callable[[bytes], str]


@dataclass(frozen=True, slots=True)
class Averaged:
    """The result of the round of an epoch, before the step.

    Attributes:
        tip: the name of the state after the step.
        outcome: the outcome of the round; None if this peer continues alone.
        options: the options of the parameter groups with which the step is made; b"": those in the groups.
        donors: empty, unless this peer's state, average or options differ from the others' where they must not. Then
            this peer downloads the state from these members, and makes no step.
        loss: the run's loss, which the step gets from its closure; None if there is none.
    """

    tip: Tip
    outcome: Outcome | None
    options: bytes = b""
    donors: tuple[PeerID, ...] = ()
    loss: Loss | None = None

    def as_ended(self, me: bytes) -> Ended:
        """What the ranks of the peer with the key `me` need of it."""
        tip, options, loss, outcome = self.tip, self.options, self.loss, self.outcome
        if outcome is None:
            return Ended(tip, options, loss, with_state=False, used=True, is_unlike=False, is_alone=True)
        begin = outcome.begin
        used = any(m.key == me and weight > 0 for m, weight in zip(begin.members, begin.weights, strict=True))
        return Ended(tip, options, loss, begin.with_state, used, is_unlike=bool(self.donors), is_alone=False)


class Ended(msgspec.Struct, array_like=True, frozen=True):
    """What all ranks need of the result of a round, see `Averaged`.

    Attributes:
        with_state: whether the state itself was averaged.
        used: whether the average has this peer's contribution.
        is_unlike: whether there are `donors`.
        is_alone: whether there was no round.
    """

    tip: Tip
    options: bytes
    loss: Loss | None
    with_state: bool
    used: bool
    is_unlike: bool
    is_alone: bool


class Waits(Protocol):
    """For whom and how long a peer waits. See `Settings`."""

    @property
    def matchmaking_time(self) -> float: ...
    @property
    def averaging_timeout(self) -> float: ...
    @property
    def min_peers(self) -> float: ...


class Pilot:
    """All that asks the run, for one peer. It holds no tensors, and changes no state: it says what to do next.

    The trainer's thread calls all methods; or the thread that ends an epoch in the background, `round` and `past`; or
    the thread of an optimizer on loan, `can_end` and what the end of an epoch asks.

    Args:
        settings: the settings of the optimizer, as far as they count here.
        run: this peer's part in the run.
        tracker: counts the samples of all peers.
        machine: names everything on which the bits of this peer's step depend.
        what: the class of the user's optimizer, for messages.
        tell: called with each event.

    Attributes:
        run, tracker, machine: as given.
        hidden: suspects that the optimizer keeps something outside of its state dict.
        forks: reports forks, and knows what the owner has pinned.
        averaged: the result of the last round.
    """

    averaged: Averaged

    def __init__(
        self,
        settings: Waits,
        run: Run,
        tracker: RunProgress,
        machine: Machine,
        what: str,
        tell: Callable[[Event], None],
    ) -> None:
        self._settings, self.run, self.tracker, self.machine = settings, run, tracker, machine
        self._what, self._tell, self._rules = what, tell, run.rules
        self.hidden = HiddenState()
        self.forks = Forks(run, tell)
        self._made_with: frozenset[bytes] = frozenset()  # the peers that made its state with it, or sent it the state
        self._waited_with = (b"", "")  # the names of average and machine with which `round` waited last
        self._waited_at: Tip | None = None  # the tip at which this peer has waited for the inner steps of others
        self._opened: Begin | None = None  # the BEGIN of the last round that this peer was in
        self._told_cost = self._told_unusable = False
        self._told_pin = 0  # the last pin for which a warning has said that nobody has its state

    @property
    def me(self) -> bytes:
        """This peer's key."""
        return self.run.me

    @property
    def rules(self) -> Rules:
        """The rules of the run's rounds."""
        return self.run.rules

    # -- what a peer does next

    def next(self, at: Whereabouts) -> Next:
        """What this peer does before it uses a batch, once `pin_due` returns None."""
        if self.rests(at):
            return Next.WAIT
        return Next.BEHIND if self.is_behind(at) else Next.GO_ON

    def pin_due(self, at: Whereabouts) -> Pin | None:
        """Report forks, and return the newest pin of the owner if this peer's state has not followed it yet."""
        self.forks.look(at.tip, at.line, self._made_with)
        return self.forks.due(at.tip)

    def name_after(self, pin: Pin, at: Whereabouts) -> Tip | None:
        """The name of this peer's state after a pin; None if the state does not lead on from the pinned one."""
        if not self.forks.follows_from(pin, at.tip, at.line):
            return None
        tip = replace(at.tip, pin=pin.number)
        log.info("the owner has pinned %s (pin %d): this peer's state %s leads on from it", pin.tip, pin.number, tip)
        return tip

    def without(self, pin: Pin, at: Whereabouts) -> Next:
        """As `next`, if no state of this peer leads on from the pin. A newcomer may begin only from the pinned state or
        its descendants."""
        is_new = at.tip.epoch == 0 < pin.epoch
        if is_new:
            self.run.wait_for_pin(pin.number, self._settings.matchmaking_time)
        if self.run.swarm.behind_pin >= pin.number:
            return self.next(at)  # this peer is behind, and downloads the pinned state
        if self._told_pin != pin.number:
            self._told_pin = pin.number
            log.warning(
                "the owner has pinned %s (pin %d), and nobody in reach holds that state or one that leads on from it: "
                "this peer %s until somebody does",
                pin.tip, pin.number, "waits" if is_new else "goes on from its own",
            )  # fmt: skip
        return Next.WAIT if is_new else self.next(at)

    def is_behind(self, at: Whereabouts) -> bool:
        """Whether others hold a state that outranks this peer's, and this peer is not about to reach it by itself."""
        behind = self.run.swarm.behind
        return behind is not None and not at.is_busy and behind.outranks(at.tip)

    def rests(self, at: Whereabouts) -> bool:
        """Whether this peer could not download the state that others hold, or a download did not help (see
        `HiddenState`), and it waits before it tries again. Meanwhile it keeps its state, brings no samples and ends no
        epoch, so nobody waits for it."""
        is_suspected = self.hidden.rests(time.monotonic()) and bool(self.run.donors())
        return not at.is_busy and (is_suspected or self.run.swarm.rests(at.tip))

    def count(self, tip: Tip, progress: float, samples: float, *, has_its_part: bool = False) -> Next:
        """What this peer does after it has used a batch: report its progress, and wait if that saves samples.

        Args:
            tip: the name of its state.
            progress: its progress in this epoch: inner steps if they are counted, else samples.
            samples: the samples that it has accumulated in this epoch.
            has_its_part: whether inner steps are counted and it has made its own. Then it waits for those of the
                others, once in an epoch, at most for `matchmaking_time`.

        Raises:
            Rejected: if the run has other terms.
        """
        rests = has_its_part and self._waited_at != tip
        try:
            self.tracker.report(progress, behind=samples, rests=rests)
        except Behind as error:
            log.info("%s", error)
            return Next.LATE
        if rests and not self.is_due:
            self._waited_at = tip
            with self.tracker.waiting():
                self.run.wait_for_round(tip, self._settings.matchmaking_time)
        return Next.END if self.is_due else Next.GO_ON

    @property
    def is_due(self) -> bool:
        """Whether the round of the epoch is due."""
        return self.tracker.ready_to_update_epoch

    def can_end(self, at: Whereabouts, counted_from: Tip) -> bool:
        """Whether the round of this epoch is called, and nothing keeps this peer from it."""
        swarm = self.run.swarm
        is_called = swarm.called and swarm.tip == at.tip == counted_from
        return is_called and not self.is_behind(at) and not self.rests(at) and self.forks.due(at.tip) is None

    def is_past(self, tip: Tip) -> bool:
        """Whether the swarm is not at `tip` any more."""
        return self.run.swarm.tip != tip

    def is_called(self, tip: Tip) -> bool:
        """Whether the end of the epoch that begins with `tip` has begun."""
        return self.run.swarm.called or self.run.swarm.tip != tip

    def begin(self) -> None:
        """From now on the coordinator counts on this peer.

        Raises:
            Rejected: if the run has other terms.
        """
        try:
            self.tracker.report(0.0)
        except Behind:
            log.info("the run has begun: the first step downloads the state")

    def count_from(self, tip: Tip) -> None:
        """From now on this peer accumulates for the epoch that begins with the state `tip`."""
        self.tracker.start_epoch(tip)

    def paused(self) -> AbstractContextManager[None]:
        """See `RunProgress.paused`."""
        return self.tracker.paused()

    def wait(self, future: Future[Any]) -> None:
        """Wait until a future is done. Meanwhile the other optimizers of this thread are lent."""
        wait_for(future)

    def is_called_away(self, future: Future[Any]) -> bool:
        """See `shoal.optim.turns`."""
        return is_called_away(future)

    # -- the round

    def few_are_here(self) -> bool:
        """Wait for `min_peers`, at most for `matchmaking_time`. Returns whether there are still fewer."""
        least = self._least()
        if least == 1:
            return False
        found = self.run.wait_for_contributors(least, self._settings.matchmaking_time)
        if found < least:
            wanted, last = self._settings.min_peers, self.run.swarm.peer.participant.at.contributed
            of_last = "" if isinstance(wanted, int) else f" of {last} in the last epoch, which is {least}"
            fields = self.run.faults.add(FaultKind.TOO_FEW, f"{found} peers are here, and min_peers={wanted}{of_last}")
            log.warning(
                "%d peers are here, and min_peers=%s%s: the next step tries again", found, wanted, of_last, extra=fields
            )
        return found < least

    def are_enough_here(self) -> bool:
        """Whether `min_peers` are here now."""
        least = self._least()
        return least == 1 or self.run.wait_for_contributors(least, 0.0) >= least

    def _least(self) -> int:
        """The number of peers that must contribute to the next round."""
        return self._rules.least(self.run.swarm.peer.participant.at.contributed)

    def past(self, tip: Tip) -> Future[None]:
        """See `Run.past`."""
        return self.run.past(tip)

    def catch_up(self) -> Tip | None:
        """At an auxiliary peer: follow the run, and wait for its next round, at most for `matchmaking_time`. Returns
        the tip of the round; None if none is called.

        Raises:
            Rejected: if the run has other terms.
        """
        try:
            tip = self.run.call(self.run.swarm.catch_up)
            self.tracker.start_epoch(tip)
            self.tracker.report(0.0)
            return tip if self.run.wait_for_call(self._settings.matchmaking_time) else None
        except Rejected:
            raise
        except AveragingError as error:
            log.info("no round to assist in: %s", error)
            return None

    def assist(self, open: Open) -> Tip | None:
        """At an auxiliary peer: join the next round, and bring nothing to average. Returns the tip after it; None if it
        failed.

        Raises:
            Rejected: if the run has other terms.
        """
        contribution = Contribution(
            0.0, self._opening(open), self._settings.matchmaking_time, machine=self.machine.name
        )
        try:
            outcome = self.run.average(contribution, self._settings.averaging_timeout)
        except Rejected:
            raise
        except AveragingError as error:
            log.info("no round to assist in: %s", error)
            return None
        self.averaged = Averaged(outcome.commit.next_tip, outcome)
        return self.averaged.tip

    def _opening(self, open: Open) -> Open:
        def opened(begin: Begin, send: SendTo, fault: Fault) -> BytesExchange:
            exchange = open(begin, send, fault)
            self._opened = begin
            return exchange

        return opened

    def may_be_in(self, tip: Tip) -> bool:
        """Whether the state that follows `tip` may have this peer's contribution without its knowledge. That is so if
        this peer was in a round from `tip` and has not heard of its end."""
        begin = self._opened
        return begin is not None and begin.tip == tip and begin.round != self.run.swarm.peer.participant.over

    @property
    def last_options(self) -> bytes:
        """The options of the last round's step."""
        return b"" if self._opened is None else self._opened.options

    def round(self, mine: Brought, open: Open) -> Ended | None:
        """Join the round of this epoch.

        Args:
            mine: what this peer brings.
            open: makes the exchange of the round.

        Returns:
            The result; None if there was no round and this peer can't continue alone. Then the next call tries again.

        Raises:
            Behind: if others have ended this epoch without this peer.
            Rejected: if the run has other terms.
        """
        self._waited_with = (mine.average, self.machine.name)
        patience = self._settings.averaging_timeout
        until = time.monotonic() + patience
        contribution = Contribution(
            weight=mine.samples,
            open=self._opening(open),
            patience=self._settings.matchmaking_time,
            tip=mine.tip,
            machine=self.machine.name,
            state=mine.digest,
            options=mine.options,
            loss=mine.loss,
            average=mine.average,
        )
        while True:
            try:
                outcome = self.run.average(contribution, until - time.monotonic())
            except (Behind, Rejected):
                raise
            except Unusable as error:
                return self._alone(mine, error, with_options=True)
            except AveragingError as error:
                if self.run.is_over:
                    return None
                # The round failed, but it may have made progress before.
                until = max(until, self.run.swarm.got_on_at + patience)
                if time.monotonic() >= until:
                    return self._alone(mine, error)
                # A peer that was put out of a round gets the result of the round like a peer that missed it.
                fields = self.run.faults.add(FaultKind.ROUND, str(error))
                log.warning("%s: trying again", error, extra=fields)
                continue
            return self._averaged(outcome, mine)

    def unused(self, mine: Brought) -> Ended | None:
        """The result of the round of this epoch, if a signal handler has ended `round` before it could return that;
        else None."""
        outcome = self.run.unused_outcome(mine.tip)
        return None if outcome is None else self._averaged(outcome, mine)

    def _averaged(self, outcome: Outcome, mine: Brought) -> Ended:
        """What the outcome of a round means for this peer."""
        self._tell_cost(outcome)
        keys = [member.key for member in outcome.begin.members]
        if self.me in keys:  # else this peer has missed the round
            self.hidden.took_part(outcome.begin.tip.epoch, keys)
        donors = (
            self._of_other_averages(outcome)
            or self._disagrees_with(outcome, mine)
            or self._of_unknown_options(outcome, mine)
        )
        begin = outcome.begin
        return self._ended(Averaged(outcome.commit.next_tip, outcome, begin.options, donors, begin.loss))

    def _ended(self, averaged: Averaged) -> Ended:
        self.averaged = averaged
        return averaged.as_ended(self.me)

    def _tell_cost(self, outcome: Outcome) -> None:
        """Warn once of a round that took longer than `averaging_timeout`. (A peer waits for a round while it makes
        progress.)"""
        if self._told_cost or outcome.allreduce_seconds < self._settings.averaging_timeout:
            return
        self._told_cost = True
        log.warning(
            "a round of %d peers took %.0f s: this peer sent %.0f MB and received %.0f MB. To spend less time on that, "
            "compress what is sent (grad_compression=shoal.compression.Float16Compression(), or an 8-bit codec), make "
            "fewer epochs of the same samples (a larger target_batch_size), or let each peer go on meanwhile "
            "(use_local_updates=True or delay_grad_averaging=True)",
            len(outcome.begin.members),
            outcome.allreduce_seconds,
            outcome.bytes_sent / 1e6,
            outcome.bytes_received / 1e6,
        )

    def _alone(self, mine: Brought, error: AveragingError, *, with_options: bool = False) -> Ended | None:
        """Continue without a round, with this peer's own contribution. The swarm decides later whose state is kept.

        Args:
            with_options: this peer can't use the rounds that it begins, so it goes on with the options in its groups.
        """
        if not mine.samples or self._least() > 1:
            why = f"min_peers={self._settings.min_peers}" if mine.samples else "this peer has no gradients of its own"
            fields = self.run.faults.add(FaultKind.TOO_FEW, f"{error}, and {why}")
            log.warning("no average (%s), and %s: the next step tries again", error, why, extra=fields)
            return None
        # The name is random, because other peers, or this one a second time, may continue alone from the same state
        # with as many samples.
        tip = mine.tip.after(blake3(b"shoal alone\0" + self.me + os.urandom(32)).digest(), mine.samples)
        if not self.run.follow(tip, after=mine.tip):
            return None
        fields = self.run.faults.add(FaultKind.ALONE, str(error))
        what, options, level = "gradients", mine.options, logging.WARNING
        if with_options:
            what, options = "gradients and options", b""
            level, self._told_unusable = logging.INFO if self._told_unusable else logging.ERROR, True
        log.log(level, "no average (%s): going on with this peer's own %s", error, what, extra=fields)
        return self._ended(Averaged(tip, None, options, loss=mine.loss))

    def _of_other_averages(self, outcome: Outcome) -> tuple[PeerID, ...]:
        """Compare this peer's average, which it had before the round, with those of the others.

        Returns:
            The members with the most common average, if this peer has another one: after their step, it downloads the
            state from them. If two averages are equally common, the one with more samples counts.
        """
        mine, _ = self._waited_with
        if not mine:
            return ()
        begin = outcome.begin
        names = begin.averages
        samples = {name: sum(w for w, one in zip(begin.weights, names, strict=True) if one == name) for name in names}
        # An auxiliary peer has no average.
        common = max(filter(None, names), key=lambda name: (names.count(name), samples[name], name), default=mine)
        if mine == common:
            return ()
        fields = self.run.faults.add(FaultKind.UNLIKE, "this peer's gradients are not the average of the others")
        log.warning(
            "this peer's gradients are not the average that the others have: downloading the state", extra=fields
        )
        return tuple(member.peer for member, name in zip(begin.members, names, strict=True) if name == common)

    def _of_unknown_options(self, outcome: Outcome, mine: Brought) -> tuple[PeerID, ...]:
        """The members from which this peer downloads the state, if it can't know the options of their step. That is so
        if the options of most members differ from its own, and BEGIN has only a hash of them."""
        options = outcome.begin.options  # b"" if no step uses them
        name = mine.unknown_of(options) if options else ""
        if not name:
            return ()
        log.warning(
            "%s of the parameter groups differs from that of most peers of the run, and takes too much to be told in "
            "1 kB: downloading their state, and theirs with it. Set it alike on all peers",
            name,
        )
        return tuple(m.peer for m in outcome.begin.members if m.key != self.me and m.contributes)

    def _disagrees_with(self, outcome: Outcome, mine: Brought) -> tuple[PeerID, ...]:
        """The members from which this peer downloads the state, if its state before this round differs from theirs and
        must not.

        Peers that compute alike disagree only by a fault, or at the start of a run, when each peer has made its own
        parameters. Other peers may round their steps differently, until the state is averaged.
        """
        begin, waited_with = outcome.begin, self._waited_with
        if begin.with_state:
            return ()
        states = {m.key: s for m, s in zip(begin.members, begin.states, strict=True) if s}
        epoch = mine.tip.epoch
        # Who has missed the first round may have begun with parameters of its own, too.
        own = states.get(self.me, b"" if epoch else mine.digest)
        if epoch:
            # The bits of a step also depend on the average of gradients.
            both = zip(begin.averages, begin.machines, strict=True)
            alike = {m.key for m, of_it in zip(begin.members, both, strict=True) if of_it == waited_with}
            states = {k: state for k, state in states.items() if k in alike and not self.hidden.is_new(k)}
        held = list(states.values())
        # Of equally many, those are right that have not loaded their state just now.
        yields = self.hidden.has_just_loaded
        common = max(held, key=lambda s: (held.count(s), s != own if yields else s, s), default=b"")
        if own == common and held.count(own) > 1:
            self.hidden.agrees()
        if not own or own == common:
            return ()
        if epoch:
            self._tell_unlike()
        return tuple(PeerID(key) for key, state in states.items() if state == common)

    def _tell_unlike(self) -> None:
        """Tell that this peer's parameters differ from those of peers that compute alike, and what it does now."""
        fields = self.run.faults.add(FaultKind.UNLIKE, "this peer's parameters differ from those of like peers")
        if seconds := self.hidden.differs(time.monotonic()):
            log.warning(
                "this peer's parameters differ again from those of peers that compute alike, soon after it has loaded "
                "all of their state: %s keeps something outside of its state_dict, or draws random numbers. This peer "
                "takes no part for %.0f s, then it loads the state again. use_local_updates and outer= (DiLoCo) train "
                "well with such a class; so does shoal.travels(), if it says how what is missing is sent",
                self._what,
                seconds,
                extra=fields,
            )
        else:
            log.error(
                "this peer's parameters differ from those of peers that compute alike: downloading the state",
                extra=fields,
            )

    def tell_not_finite(self, what: str, then: str, *, loudly: bool) -> None:
        """Count a contribution that is not finite as a fault, and warn of it."""
        fields = self.run.faults.add(FaultKind.NOT_FINITE, f"this peer's {what} have NaN or infinity")
        if loudly:
            log.warning("this peer's %s are not finite (NaN or infinity): %s", what, then, extra=fields)

    def state_changed(self) -> None:
        """This peer's state has another tip than before."""
        self.run.tell_state_changed()

    def ended(self, digest: bytes, *, step_seconds: float, norm: float | None, cost: Cost) -> None:
        """This peer has applied the step that ends an epoch.

        Args:
            digest: the hash of the state.
            step_seconds: the time of the step.
            norm: the norm of the average; None if it was not measured.
            cost: of the rounds before the round of the run.
        """
        outcome = self.averaged.outcome
        members = [] if outcome is None else outcome.begin.members
        self._made_with = frozenset(member.key for member in members) - {self.me}
        if outcome is not None:
            waiting = self.tracker.take_waited()
            self.tell_round(digest, waiting=waiting, step_seconds=step_seconds, norm=norm, cost=cost)

    def tell_round(
        self,
        digest: bytes,
        *,
        waiting: float = 0.0,
        step_seconds: float = 0.0,
        norm: float | None = None,
        cost: Cost | None = None,
    ) -> None:
        """Report the last round. For the arguments, see `ended`."""
        outcome, cost = self.averaged.outcome, cost or Cost()
        assert outcome is not None
        begin = outcome.begin
        brought = {member.key: weight for member, weight in zip(begin.members, begin.weights, strict=True)}
        self._tell(
            EpochReport(
                epoch=self.averaged.tip.epoch,
                samples=outcome.commit.samples,
                num_peers=len(begin.members),
                coordinator=str(PeerID(begin.ballot.coordinator)),
                round_seconds=cost.seconds + outcome.matchmaking_seconds + outcome.allreduce_seconds,
                matchmaking_seconds=outcome.matchmaking_seconds,
                allreduce_seconds=cost.seconds + outcome.allreduce_seconds,
                bytes_sent=cost.sent + outcome.bytes_sent,
                bytes_received=cost.received + outcome.bytes_received,
                state_digest=digest.hex(),
                tip=str(outcome.commit.next_tip),
                waiting_seconds=waiting,
                step_seconds=step_seconds,
                grad_norm=norm,
                own_samples=brought.get(self.me, 0.0),
            )
        )

    # -- another state

    @property
    def is_made(self) -> bool:
        """Whether this peer has taken part in the run."""
        return self.run.swarm.made

    def donors(self) -> list[PeerID]:
        """The connected peers that may have the state."""
        return self.run.donors()

    def may_replay(self, at: Whereabouts) -> bool:
        """Whether this peer may replay the rounds that it lacks."""
        # The first round of a run is not replayed: each peer may have begun with parameters of its own.
        can_replay = self.run.swarm.can_replay and not self.hidden.is_suspected
        return bool(at.tip.epoch) and can_replay and self.is_behind(at)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """A context in which this peer replays rounds: the members hear how long that takes."""
        with self.run.loading():
            self.run.begin_replay()
            yield

    def replays(self, at: Whereabouts) -> bool:
        """Whether another round is to be replayed. That stops where nobody brings the next round, as after a download
        that has begun long ago."""
        swarm = self.run.swarm
        # Whoever has heard of the last round that it misses does not count as behind any more.
        return (self.is_behind(at) or swarm.missed) and swarm.tip == at.tip and self.run.learn_of_round()

    def wanted(self, at: Whereabouts) -> Callable[[Tip], bool]:
        """Which states would do: a function of their tips."""
        mine, is_behind, swarm, pin = at.tip, self.is_behind(at), self.run.swarm, self.forks.due(at.tip)
        # If somebody holds the state that the owner has pinned, this peer takes no other state.
        least = pin.number if pin is not None and is_behind and swarm.behind_pin >= pin.number else mine.pin

        def wanted(tip: Tip) -> bool:
            if tip.pin < least or not swarm.believes(tip):
                return False
            return tip.outranks(mine) if is_behind else not mine.outranks(tip)

        return wanted

    def follow(self, tip: Tip) -> None:
        """Tell the swarm that this peer's state is `tip` now."""
        self.run.follow(tip)

    def believed(self, tip: Tip) -> Tip:
        """The tip without its pin, if that is of another run."""
        return tip if self.run.swarm.believes(tip) else replace(tip, pin=0)

    def leave(
        self, mine: Tip, tip: Tip, line: Collection[bytes], givers: Collection[bytes], keep: Callable[[], str]
    ) -> ForkReport | None:
        """See `Forks.leave`."""
        return self.forks.leave(mine, tip, line, self._made_with, givers, keep)

    def arrived(self, tip: Tip, givers: Sequence[PeerID], *, whole: bool, lossy: bool) -> bool:
        """This peer has loaded the state `tip`.

        Args:
            givers: the peers that have sent it.
            whole: whether the optimizer holds all of it, to the bit.
            lossy: whether it was sent through a lossy codec.

        Returns:
            Whether the givers had no part in the state before.
        """
        self.run.follow(tip)
        self.hidden.has_loaded(whole=whole and not lossy)
        self.run.ask_where_they_are(givers)  # unless they have waited, they are at a later state by now
        if lossy:
            self.machine.has_lossy_state(tip.epoch)
        keys = frozenset(giver.key for giver in givers)
        was_made_apart, self._made_with = self._made_with.isdisjoint(keys), keys
        return was_made_apart

    def recalled(self, tip: Tip) -> None:
        """This peer continues from a state that it, or another peer, had left and kept."""
        self.run.follow(tip)
        self._made_with = frozenset()

    def tell_arrival(
        self,
        mine: Tip,
        report: DownloadReport,
        tip: Tip,
        fork: ForkReport | None,
        givers: Collection[bytes],
        *,
        apart: bool,
    ) -> None:
        """Tell what the download of a state has meant.

        Args:
            mine: the tip before.
            report: of the download.
            tip: the tip now.
            fork: what `leave` has returned.
            givers: the keys of the peers that have sent it.
            apart: what `arrived` has returned.
        """
        if fork is not None:
            self.forks.left(fork)
        elif mine.epoch and apart and not tip.is_state_of(mine):
            self.forks.caught_up(mine, tip, givers)
        self._tell(report)

    def begin_again(self, tip: Tip) -> None:
        """An epoch begins from a state that is not the result of the last round."""
        self.tracker.start_epoch(tip)
        self.tracker.restart_clock()

    def pause(self, tip: Tip, began: float, error: AveragingError | None) -> bool:
        """A download has brought no state. Do not try again for a while.

        Args:
            tip: this peer's tip.
            began: when the download began, of `time.monotonic`.
            error: why there is none; None if no donor's state was wanted.

        Returns:
            Whether this peer stays at its own state while the swarm has another.
        """
        swarm, cost = self.run.swarm, time.monotonic() - began
        self.run.ask_where_they_are(self.run.donors())  # others may be at this peer's state, and count on it
        stays = error is not None and swarm.tip != tip
        if stays:
            self.run.follow(tip)
        if error is not None and error.again is not None:
            room_in = min(error.again, LONGEST_REST)
            seconds = self.run.call(lambda: swarm.wait_for_room(room_in))
        else:
            seconds = self.run.call(lambda: swarm.forget_behind(cost))
        if error is None:
            return stays
        what = "it brings no samples" if swarm.rests(tip) else "it goes on training with those that hold the same one"
        when = f"in {seconds:.0f} s" if math.isfinite(seconds) else "when others offer one"
        log.warning(
            "could not download the state that others hold: %s. This peer keeps its own; %s, and tries again %s",
            error, what, when, extra=self.run.faults.add(FaultKind.DOWNLOAD, str(error)),
        )  # fmt: skip
        return stays

    def could_not_recall(self, pin: Pin, error: Exception, seconds: float) -> None:
        """There was no memory to continue from the state that this peer had kept, and that the owner has pinned."""
        self._told_pin = pin.number
        log.warning(
            "the owner has pinned %s (pin %d), and this peer can't continue from the state that it had left: %s; "
            "it tries again in %g s", pin.tip, pin.number, error, seconds,
        )  # fmt: skip

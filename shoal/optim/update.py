"""The end of an epoch on one peer: average, fall back to its own gradients if there is no average, step."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from blake3 import blake3

from shoal.optim.gradients import Gradients
from shoal.optim.machine import Machine
from shoal.optim.replica import Replica
from shoal.optim.run import Run
from shoal.optim.settings import Settings
from shoal.optim.vector import EpochVector
from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.contribution import Contribution, Outcome
from shoal.swarm.protocol.errors import AveragingError, Behind, Rejected
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.tip import Tip

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Averaged:
    """How an epoch ended, before the step.

    Attributes:
        tip: the state after it.
        outcome: of the round; None if this peer goes on alone.
        options: with which the step is made.
        donors: if this peer's state was not that of the others: those to download it from. No step is made then.
    """

    tip: Tip
    outcome: Outcome | None
    options: bytes = b""
    donors: tuple[PeerID, ...] = ()

    @property
    def with_state(self) -> bool:
        """Whether the state itself was averaged."""
        return self.outcome is not None and self.outcome.begin.with_state


class EpochEnd:
    """Ends epochs, one at a time.

    Args:
        settings: of the optimizer.
        run: whose rounds are joined.
        rules: of the run.
        replica: is stepped.
        vector: is averaged.
        gradients: those to step with; None where steps are made all along.
        machine: of this peer.

    Attributes:
        stopped: whether nothing is averaged any more.
    """

    def __init__(
        self,
        settings: Settings,
        run: Run,
        rules: Rules,
        replica: Replica,
        vector: EpochVector,
        gradients: Gradients | None,
        machine: Machine,
    ) -> None:
        self._settings, self._run, self._rules, self._replica = settings, run, rules, replica
        self._vector, self._gradients, self._machine = vector, gradients, machine
        self._options = b""  # this peer's own
        self.stopped = self._told_cost = False

    def stop(self) -> None:
        """Average no more: what is under way ends without a result as soon as the run is left."""
        self.stopped = True

    def take(self) -> None:
        """Make what the state is now what this peer brings, where it may be averaged whatever the others hold, and the
        options of the groups what it votes for. In the trainer's thread, which goes on changing both."""
        epoch = self._replica.tip.epoch
        self._options = b"" if self._gradients is None else self._replica.options.own(epoch)
        if self._rules.due_sizes and self._rules.is_due(epoch):
            self._replica.take_buffers()
        if self._rules.state_always and self._rules.may_average_state(epoch):
            self._replica.take_state()

    def put(self, averaged: Averaged) -> None:
        """Set to their average what `take` took beside the state, if it was averaged. In the trainer's thread, too."""
        if averaged.outcome is not None and self._rules.due_sizes and self._rules.is_due(averaged.tip.epoch - 1):
            self._replica.put_buffers()

    def average(self, samples: float) -> Averaged | None:
        """The round of this epoch, with what the vector's parts hold, weighted by `samples`; None if there was none and
        this peer can't go on alone: the next call tries again.

        Raises Behind if others are past this epoch, Rejected if the run goes by other terms.
        """
        before, gradients = self._replica.tip, b""
        if self._gradients is not None:
            gradients = self._gradients.average(self._settings.averaging_timeout, lambda: self._run.past(before))
        # What they were averaged to is one more thing on which the bits of the step depend.
        machine = f"{gradients.hex()} {self._machine.name}"[:256] if gradients else self._machine.name
        patience = self._settings.averaging_timeout
        until = time.monotonic() + patience
        contribution = Contribution(
            weight=samples,
            open=self._vector.open,
            patience=self._settings.matchmaking_time,
            tip=self._replica.tip,
            machine=machine,
            state=b"" if self._gradients is None else self._replica.digest,
            options=self._options,
        )
        while True:
            try:
                outcome = self._run.average(contribution, until - time.monotonic())
            except (Behind, Rejected):
                raise
            except AveragingError as error:
                if self.stopped or not self._run.dht.is_alive():
                    return None
                until = max(until, self._run.got_on_at + patience)  # it failed, but it had got on until then
                if time.monotonic() >= until:
                    return self._alone(samples, error)
                # Whoever is put out of a round gets its result as one who missed it.
                log.warning("%s: trying again", error)
                continue
            self._tell_cost(outcome)
            donors = self._of_other_gradients(outcome, gradients.hex()) or self._disagrees_with(outcome, machine)
            donors = donors or self._of_unknown_options(outcome)
            return Averaged(outcome.commit.next_tip, outcome, outcome.begin.options, donors)

    def _tell_cost(self, outcome: Outcome) -> None:
        """A round that gets on is waited for, however long it takes; what that costs is said once."""
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

    def few_are_here(self) -> bool:
        """Wait for `min_peers`, at most for `matchmaking_time`; whether they have not come."""
        if self._settings.min_peers == 1:
            return False
        found = self._run.wait_for_contributors(self._settings.min_peers, self._settings.matchmaking_time)
        if found < self._settings.min_peers:
            log.warning(
                "%d peers are here, and min_peers=%d: the next step tries again", found, self._settings.min_peers
            )
        return found < self._settings.min_peers

    @torch.no_grad()
    def step(self, averaged: Averaged) -> None:
        """Make the wrapped optimizer's step with the averaged gradients; where steps were made all along, take over
        the averaged state."""
        if self._gradients is None:
            self._replica.end_epoch(averaged.tip, with_state=averaged.with_state)
        else:
            self._replica.step(
                self._gradients,
                averaged.tip,
                averaged.options,
                with_state=averaged.with_state,
                max_norm=self._settings.max_grad_norm,
            )
        self._run.tell_state_changed()

    def _alone(self, samples: float, error: AveragingError) -> Averaged | None:
        """No round could be had: go on with what this peer has, and let the swarm decide later whose state is kept."""
        if not samples:
            log.warning("no average (%s), and this peer has no gradients of its own: the next step tries again", error)
            return None
        if self._settings.min_peers > 1:
            log.warning("no average (%s), and min_peers=%d: the next step tries again", error, self._settings.min_peers)
            return None
        before = self._replica.tip
        # Others may go on alone from the same state with as many samples, and so may this peer, a second time.
        tip = before.after(blake3(b"shoal alone\0" + self._run.me + os.urandom(32)).digest(), samples)
        if not self._run.follow(tip, after=before):
            return None
        log.warning("no average (%s): going on with this peer's own gradients", error)
        if self._gradients is not None:
            self._gradients.use_local()
        return Averaged(tip, None, self._options)

    def _of_other_gradients(self, outcome: Outcome, mine: str) -> tuple[PeerID, ...]:
        """If this peer's average (`mine` names it), which was had before the round, is not that of the most: the
        members to download the state from, after the step that they make. Of averages that equally many have, the one
        of more samples counts."""
        if not mine:
            return ()
        begin = outcome.begin
        names = [machine[: len(mine)] for machine in begin.machines]
        samples = {name: sum(w for w, one in zip(begin.weights, names, strict=True) if one == name) for name in names}
        common = max(names, key=lambda name: (names.count(name), samples[name], name))
        if mine == common:
            return ()
        log.warning("this peer's gradients are not the average that the others have: downloading the state")
        return tuple(member.peer for member, name in zip(begin.members, names, strict=True) if name == common)

    def _of_unknown_options(self, outcome: Outcome) -> tuple[PeerID, ...]:
        """If most members step with other options than this peer's, of which BEGIN has only a hash: all other members,
        to download the state from after the step that they make."""
        name = "" if self._gradients is None else self._replica.options.unknown_of(outcome.begin.options)
        if not name:
            return ()
        log.warning(
            "%s of the parameter groups differs from that of most peers of the run, and takes too much to be told in "
            "1 kB: downloading their state, and theirs with it. Set it alike on all peers",
            name,
        )
        return tuple(m.peer for m in outcome.begin.members if m.key != self._run.me and m.contributes)

    def _disagrees_with(self, outcome: Outcome, machine: str) -> tuple[PeerID, ...]:
        """If the state from which this round began is another here than it must be: the members to download it from.

        Peers that compute alike only ever disagree at the start of a run (they made their parameters each for
        themselves) or by a fault; others may round their steps differently, until the state is averaged.
        """
        begin = outcome.begin
        if begin.with_state:
            return ()
        states = {m.key: s for m, s in zip(begin.members, begin.states, strict=True) if s}
        mine = states.get(self._run.me, b"")
        if self._replica.tip.epoch:
            alike = {m.key for m, name in zip(begin.members, begin.machines, strict=True) if name == machine}
            states = {key: state for key, state in states.items() if key in alike}
        held = list(states.values())
        common = max(held, key=lambda state: (held.count(state), state), default=b"")
        if not mine or mine == common:
            return ()
        if self._replica.tip.epoch:
            log.error("this peer's parameters differ from those of peers that compute alike: downloading the state")
        return tuple(PeerID(key) for key, state in states.items() if state == common)


class Background:
    """The end of an epoch that goes on while the trainer trains: at most one, on a thread of its own.

    Args:
        end: does it.
        steps: whether the step is made here too.

    Attributes:
        tip: of the state after it, as soon as that is known; None before.
        samples: that this peer brought to it.
        failed: whether the last one found no average, or made no step with it, and is to be begun again with what it
            had.
    """

    def __init__(self, end: EpochEnd, *, steps: bool) -> None:
        self._end, self._steps = end, steps
        self._thread: ThreadPoolExecutor | None = None
        self._future: Future[Averaged | None] | None = None
        self.tip: Tip | None = None
        self.samples = 0.0
        self.failed = False

    @property
    def busy(self) -> bool:
        """Whether one was begun whose result was not taken yet."""
        return self._future is not None

    @property
    def done(self) -> bool:
        """Whether there is a result to take."""
        return self._future is not None and self._future.done()

    def begin(self, samples: float, averaged: Averaged | None = None) -> None:
        """End the epoch: `average` and `step`; the step alone if the average is there already."""
        assert self._future is None
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="shoal-update")
        self.tip = averaged.tip if averaged is not None else None
        self.samples, self.failed = samples, False
        self._future = self._thread.submit(self._run, samples, averaged)

    def _run(self, samples: float, averaged: Averaged | None) -> Averaged | None:
        if averaged is None:
            averaged = self._end.average(samples)
        if averaged is not None and not averaged.donors:
            self.tip = averaged.tip
            if self._steps:
                self._end.step(averaged)
        return averaged

    def take(self) -> Averaged | None:
        """Wait for the result; None if it found no average. Raises what the thread raised: it has `failed` then, unless
        others are past this epoch (Behind)."""
        assert self._future is not None
        future, self._future, self.tip = self._future, None, None
        error = future.exception()
        averaged = None if error is not None else future.result()
        self.failed = averaged is None and not isinstance(error, Behind)
        if error is not None:
            raise error
        return averaged

    def stop(self, timeout: float) -> None:
        """Wait so many seconds for what is under way; then leave it to itself."""
        if self._future is not None:
            wait([self._future], timeout)
        if self._thread is not None:
            self._thread.shutdown(wait=self._future is None or self._future.done())

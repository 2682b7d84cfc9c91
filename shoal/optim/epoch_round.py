"""The round that ends an epoch: what its members must agree on, what they average, and what the result means."""

from __future__ import annotations

import logging
import os
import platform
import time
from dataclasses import dataclass

import torch
from blake3 import blake3
from torch.optim.lr_scheduler import LRScheduler

from shoal.averaging.exchange import Exchange, Vector, encoded_bytes, exchange_of
from shoal.averaging.options import described, term_of
from shoal.compression import TensorRole, plan_codecs
from shoal.dht.dht import DHT
from shoal.flat import Layout, names_of_members
from shoal.health.record import FaultKind
from shoal.optim.accumulator import EpochGradients
from shoal.optim.drift import Drift
from shoal.optim.frozen import described_frozen
from shoal.optim.grad_averager import AveragerGradients
from shoal.optim.group_options import structure
from shoal.optim.hidden_state import HiddenState
from shoal.optim.reports import EpochReport
from shoal.optim.run import Run
from shoal.optim.settings import PLACE_TIMES, Settings, Stepped
from shoal.optim.state import Replica, names_of
from shoal.optim.strand_drift import StrandDrift
from shoal.optim.strand_gradients import StrandGradients
from shoal.optim.strand_replica import StrandReplica
from shoal.optim.strand_rounds import Moved, StrandRounds
from shoal.optim.strands_of import strands_of
from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.book import RuleBroken
from shoal.swarm.protocol.contribution import Contribution, Fault, Outcome, SendTo
from shoal.swarm.protocol.errors import AveragingError, Behind, Rejected, Unusable
from shoal.swarm.protocol.loss import Loss
from shoal.swarm.protocol.messages import Begin, Terms
from shoal.swarm.protocol.plan import largest_chunk
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.tensors import Tensors
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.protocol.view import Role
from shoal.swarm.swarm import Place

log = logging.getLogger(__name__)

EXACT = "exact"

OwnRounds = AveragerGradients | StrandGradients | StrandDrift
"""Gradients that are averaged in rounds of their own, before the round of the run."""

Gradients = EpochGradients | OwnRounds | Drift
"""What peers average: gradients in the round of the run, gradients in rounds of their own, or drift instead."""


def make_gradients(settings: Settings, replica: Replica, inner: Stepped, dht: DHT) -> Gradients | None:
    """Make the object that accumulates and averages the gradients of the trained parameters; None with local updates.

    Args:
        inner: the wrapped optimizer and scheduler. With an outer optimizer, they make the inner steps.

    Raises:
        ValueError: as `AveragerGradients`, for what the factory makes.
    """
    if settings.use_local_updates:
        return None
    if isinstance(replica, StrandReplica):
        return strands_of(settings, replica, Stepped(inner.optimizer, inner.scheduler), dht)
    if settings.outer is not None:
        trained = replica.trained, replica.stepped
        codec, feedback = settings.grad_compression, settings.error_feedback
        copies = {} if inner.host is None else inner.host.stepped()
        on_host = [copies[parameter] for parameter in replica.trained if parameter in copies]
        return Drift(
            settings.outer,
            inner.optimizer,
            inner.scheduler,
            *trained,
            replica.optimizer,
            codec,
            feedback,
            on_host=on_host,
            memory=replica.model_memory if on_host else None,
        )
    parameters = replica.trained
    if settings.grad_averager_factory is None:
        apart, reuse = settings.delay_optimizer_step, settings.reuse_grad_buffers
        codec, feedback = settings.grad_compression, settings.error_feedback
        return EpochGradients(parameters, codec, apart=apart, reuse=reuse, error_feedback=feedback)
    same = ("allreduce_timeout", "next_chunk_timeout", "shutdown_timeout", "client_mode", "reuse_grad_buffers")
    options = {name: getattr(settings, name) for name in same} | {
        "prefix": f"{settings.run_id}/grad",
        "min_group_size": 1,
        "min_matchmaking_time": settings.matchmaking_time,
        "compression": settings.grad_compression,
        "bandwidth": settings.averager_opts.get("bandwidth"),
    }
    options |= {name: value for name, value in settings.averager_opts.items() if name in PLACE_TIMES}
    return AveragerGradients(dht.peer_id.key, settings.grad_averager_factory, parameters, dht=dht, **options)


def make_run(
    settings: Settings,
    dht: DHT,
    replica: Replica,
    gradients: Gradients | None,
    wrapped: torch.optim.Optimizer,
    scheduler: LRScheduler | None,
) -> Run:
    """Make this peer's part in the run, not started.

    Args:
        gradients: from `make_gradients`; None with local updates.
        wrapped, scheduler: the user's optimizer and scheduler.
    """
    optimizer, extras, given = replica.optimizer, replica.extra_tensors, settings.averager_opts
    layouts = [replica.buffers.layout, replica.shared.layout]
    has_strands = isinstance(gradients, StrandRounds)
    state = Layout.of(replica.described) if has_strands else replica.shared.layout
    schemas = [state.schema_hash, Layout.of(extras).schema_hash]
    agreed = settings.agreed() | {
        "optimizer": term_of(names_of_members(wrapped)),
        "scheduler": type(scheduler).__name__,
        "param_groups": term_of(structure(replica.described_groups)),
        "strands": "1",
    }
    compared: list[Tensors] = []
    if replica.frozen and not replica.always_sends_frozen:
        if (how := settings.frozen_parameters) != "sample":
            agreed["frozen_parameters"] = how
        if how in ("sample", "hash"):
            frozen = described_frozen(replica.frozen, names_of(wrapped, replica.frozen), whole=how == "hash")
            compared.append(frozen)
            schemas.append(repr(frozen.shapes).encode())
    sizes: tuple[int, ...] = ()  # stays empty if the gradients have rounds of their own
    in_turn: tuple[tuple[int, ...], ...] = ()
    usual: list[Vector] = [replica.shared]  # the vectors that most rounds average
    if isinstance(gradients, StrandGradients | StrandDrift):
        # Terms are compared in the order of their names. A peer with another number of strands should hear that first.
        agreed |= {"strands": str(gradients.count), "strands' machine": name_of_machine(gradients, optimizer)}
        if isinstance(gradients, StrandDrift):
            agreed["outer optimizer"] = names_of_members(optimizer)
            schemas.append(gradients.schema)
    elif isinstance(gradients, Drift):
        usual = list(gradients.vectors)
        layouts += [vector.layout for vector in gradients.vectors]
        schemas += [vector.layout.schema_hash for vector in gradients.vectors]
        schemas.append(repr(gradients.fragments).encode())
        in_turn = tuple(vector.sizes for vector in gradients.vectors)
        agreed["outer optimizer"] = names_of_members(optimizer)
    elif isinstance(gradients, EpochGradients):
        usual = [gradients]
        layouts.append(gradients.layout)
        schemas.append(gradients.layout.schema_hash)
        sizes = gradients.sizes
    elif gradients is not None:
        agreed["grad_averager_factory"] = term_of(gradients.terms)
    # If all machines make the same bits, there is no state to average.
    is_alike = has_strands or (is_exact(gradients) and not _is_lossy(settings, replica))
    rules = Rules(
        sizes=sizes,
        matchmaking_time=settings.matchmaking_time,
        # Less than `averaging_timeout`, after which those who have joined go on alone.
        own_rounds=settings.averaging_timeout / 3 if isinstance(gradients, OwnRounds) else 0.0,
        round_timeout=settings.allreduce_timeout,
        min_group=settings.min_group,
        min_share=settings.min_share,
        target_samples=settings.target,
        target_is_each=settings.counts_steps,
        ahead=0.0 if settings.outer is None else float(settings.outer.delay),
        in_turn=in_turn,
        wait_for_newcomers=settings.wait_for_newcomers,
        due_sizes=replica.buffers.sizes,
        state_sizes=() if is_alike else replica.shared.sizes,
        state_every=settings.average_state_every,
        state_always=settings.use_local_updates,
        options_fit=replica.options.fits,
        chunk_elements=largest_chunk(spec.dtype.itemsize for layout in layouts for spec in layout.buffers),
        element_bytes=encoded_bytes(usual),
    )
    names = replica.described_names
    trained = [name for name, tensor in zip(names, replica.described, strict=False) if tensor.requires_grad]
    of_model = [tensor for tensor in replica.described if tensor.requires_grad] if has_strands else replica.trained
    place = Place(
        role=Role.CLIENT if settings.client_mode else Role.AUXILIARY if settings.auxiliary else Role.NODE,
        bandwidth=given.get("bandwidth"),
        chunk_timeout=settings.next_chunk_timeout,
        **{name: given.get(name) for name in PLACE_TIMES},
        keeps_state=not settings.auxiliary,
        # Beyond the bytes of a state, a newcomer is better off with a newer state. Nobody can replay rounds whose
        # gradients were averaged elsewhere.
        redo_bytes=0 if isinstance(gradients, OwnRounds) else replica.usual_nbytes,
        tensors=[
            described("parameters", replica.described, names),
            described("trained parameters", of_model, trained),
            described("extra_tensors", extras),
            *compared,
        ],
    )
    return Run(dht, settings.run_id, Terms(agreed, blake3(b"".join(schemas)).digest()), rules, place)


def is_exact(gradients: Gradients | None) -> bool:
    """Whether the step after a round has the same bits on every machine."""
    return isinstance(gradients, Drift) and gradients.is_exact


def _is_lossy(settings: Settings, replica: Replica) -> bool:
    """Whether newcomers get parameters that differ from their donors'. Only an average makes them equal again."""
    return plan_codecs(settings.load_state_compression, replica.shared.layout, TensorRole.PARAMETER).lossy


class Machine:
    """Names everything on which the bits of a peer's step depend. Peers with the same name make bit-identical steps.

    Args:
        me: this peer's key.
        own: the name before any download, by default `this_machine()`; `EXACT` if all machines make the same bits.

    Attributes:
        name: at most 256 characters; may change between epochs.
    """

    def __init__(self, me: bytes, own: str = "") -> None:
        self._me, self._own, self._is_exact = me, own or this_machine(), own == EXACT
        self._lossy_epoch = -1  # the epoch of the last state that was downloaded through a lossy codec
        self.name = self._own

    def has_lossy_state(self, epoch: int) -> None:
        """Note that the state of `epoch` was downloaded through a lossy codec. Until the state is averaged, it may
        differ from the state of peers that compute alike."""
        self._lossy_epoch = epoch
        self.name = f"{self._me.hex()[:16]} after a lossy download, {self._own}"[:256]

    def has_averaged_state(self, epoch: int, *, whole: bool) -> None:
        """Note that the state with which `epoch` begins was averaged. With `whole`, everything in it was averaged."""
        # The rest of the state was downloaded exactly. It still equals the others' if no step was made since. (The
        # state of an exact outer optimizer does not depend on the parameters.)
        if whole or self._is_exact or epoch == self._lossy_epoch + 1:
            self.name = self._own


def name_of_machine(gradients: Gradients | None, optimizer: torch.optim.Optimizer) -> str:
    """The name of this peer's machine before any download; `EXACT` if all machines make the same bits."""
    if is_exact(gradients):
        return EXACT
    if not isinstance(gradients, StrandGradients) or "fused" not in optimizer.defaults:
        return this_machine()
    # torch's fused kernels make the same bits with any number of threads.
    return ", ".join(part for part in this_machine().split(", ") if not part.endswith(" threads"))


def this_machine() -> str:
    """The name of this machine: torch, processor, instruction set, number of threads and GPU."""
    names = [f"torch {torch.__version__}", platform.machine(), torch.backends.cpu.get_cpu_capability()]
    names.append(f"{torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        names.append(torch.cuda.get_device_name())
    return ", ".join(names)[:256]


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

    def used(self, me: bytes) -> bool:
        """Whether the average has the contribution of the peer with the key `me`."""
        if self.outcome is None:
            return True
        begin = self.outcome.begin
        return any(m.key == me and weight > 0 for m, weight in zip(begin.members, begin.weights, strict=True))

    @property
    def with_state(self) -> bool:
        """Whether the state itself was averaged."""
        return self.outcome is not None and self.outcome.begin.with_state


class EpochRound:
    """Averages the gradients and the state of one peer at the end of each epoch.

    Args:
        settings: the settings of the optimizer.
        run: the run whose rounds this peer joins.
        replica: the state to average.
        gradients: the gradients to average; None with local updates.

    Attributes:
        machine: names how this peer computes.
    """

    def __init__(self, settings: Settings, run: Run, replica: Replica, gradients: Gradients | None) -> None:
        self._settings, self._run, self._rules, self._replica = settings, run, run.rules, replica
        self._gradients = gradients
        self.machine = Machine(run.me, name_of_machine(gradients, replica.optimizer))
        self.hidden = HiddenState()
        self._opened: Begin | None = None  # the BEGIN of the last round that this peer was in
        self._options = b""
        self._loss: Loss | None = None  # of what this peer has brought
        self._waited_with = ("", "")  # the names of gradients and machine with which `average` waited last
        self._told_cost = self._told_unusable = False

    @property
    def last_options(self) -> bytes:
        """The options of the last round's step."""
        return b"" if self._opened is None else self._opened.options

    def vote(self) -> None:
        """Read this peer's options of the parameter groups, for the next round. Runs in the trainer's thread.

        Raises:
            ValueError: with the name of an option that has no plain value.
        """
        own = self._replica.options.own(self._replica.tip.epoch)
        self._options = b"" if self._gradients is None else own

    def take(self, loss: Loss | None = None) -> None:
        """Copy for the next round the tensors that the trainer continues to change, and note the loss behind what this
        peer brings. Runs in the trainer's thread."""
        self._loss = loss
        epoch = self._replica.tip.epoch
        if self._rules.due_sizes and self._rules.is_due(epoch):
            self._replica.buffers.take()
        if self._rules.state_always and self._rules.may_average_state(epoch):
            self._replica.shared.take()

    def put(self, averaged: Averaged) -> None:
        """Set the extra tensors to their average, if they were averaged. Runs in the trainer's thread."""
        if averaged.outcome is not None and self._rules.due_sizes and self._rules.is_due(averaged.tip.epoch - 1):
            self._replica.buffers.put(keep_changes=True)

    def few_are_here(self) -> bool:
        """Wait for `min_peers`, at most for `matchmaking_time`. Returns whether there are still fewer."""
        least = self._least()
        if least == 1:
            return False
        found = self._run.wait_for_contributors(least, self._settings.matchmaking_time)
        if found < least:
            wanted, last = self._settings.min_peers, self._run.swarm.peer.last
            of_last = "" if isinstance(wanted, int) else f" of {last} in the last epoch, which is {least}"
            fields = self._run.faults.add(FaultKind.TOO_FEW, f"{found} peers are here, and min_peers={wanted}{of_last}")
            log.warning(
                "%d peers are here, and min_peers=%s%s: the next step tries again", found, wanted, of_last, extra=fields
            )
        return found < least

    def are_enough_here(self) -> bool:
        """Whether `min_peers` are here now."""
        least = self._least()
        return least == 1 or self._run.wait_for_contributors(least, 0.0) >= least

    def _least(self) -> int:
        """The number of peers that must contribute to the next round."""
        return self._rules.least(self._run.swarm.peer.last)

    def assist(self) -> Outcome:
        """Join the next round, and bring nothing to average. Raises the errors of `Run.average`."""
        patience, machine = self._settings.matchmaking_time, self.machine.name
        contribution = Contribution(0.0, self._open, patience, machine=machine)
        return self._run.average(contribution, self._settings.averaging_timeout)

    def average(self, samples: float) -> Averaged | None:
        """Join the round of this epoch.

        Args:
            samples: the weight of this peer's contribution.

        Returns:
            The result; None if there was no round and this peer can't continue alone. Then the next call tries again.

        Raises:
            Behind: if others have ended this epoch without this peer.
            Rejected: if the run has other terms.
        """
        before, gradients = self._replica.tip, b""
        if self._gradients is not None:
            gradients = self._gradients.average(self._settings.averaging_timeout, lambda: self._run.past(before))
        # The bits of this peer's step also depend on its average of gradients.
        machine = f"{gradients.hex()} {self.machine.name}"[:256] if gradients else self.machine.name
        self._waited_with = (gradients.hex(), machine)
        patience = self._settings.averaging_timeout
        until = time.monotonic() + patience
        contribution = Contribution(
            weight=samples,
            open=self._open,
            patience=self._settings.matchmaking_time,
            tip=self._replica.tip,
            machine=machine,
            state=b"" if self._gradients is None else self._replica.state_digest,
            options=self._options,
            loss=self._loss,
        )
        while True:
            try:
                outcome = self._run.average(contribution, until - time.monotonic())
            except (Behind, Rejected):
                raise
            except Unusable as error:
                return self._alone(samples, error)
            except AveragingError as error:
                if self._run.is_over:
                    return None
                # The round failed, but it may have made progress before.
                until = max(until, self._run.swarm.got_on_at + patience)
                if time.monotonic() >= until:
                    return self._alone(samples, error)
                # A peer that was put out of a round gets the result of the round like a peer that missed it.
                fields = self._run.faults.add(FaultKind.ROUND, str(error))
                log.warning("%s: trying again", error, extra=fields)
                continue
            return self._averaged(outcome)

    def unused(self) -> Averaged | None:
        """The result of the round of this epoch, if a signal handler has ended `average` before it could return that;
        else None."""
        outcome = self._run.unused_outcome(self._replica.tip)
        return None if outcome is None else self._averaged(outcome)

    def _averaged(self, outcome: Outcome) -> Averaged:
        """What the outcome of a round means for this peer."""
        gradients, machine = self._waited_with
        self._tell_cost(outcome)
        keys = [member.key for member in outcome.begin.members]
        if self._run.me in keys:  # else this peer has missed the round
            self.hidden.took_part(outcome.begin.tip.epoch, keys)
        if self._gradients is not None and not isinstance(self._gradients, OwnRounds):
            self._gradients.vector(outcome.begin.tip.epoch).settle(outcome)
        donors = (
            self._of_other_gradients(outcome, gradients)
            or self._disagrees_with(outcome, machine)
            or self._of_unknown_options(outcome)
        )
        return Averaged(outcome.commit.next_tip, outcome, outcome.begin.options, donors, outcome.begin.loss)

    def _open(self, begin: Begin, send: SendTo, fault: Fault) -> Exchange:
        """Make the exchange of a round: gradients, extra tensors and state, in the order of `Rules.vector`.

        Raises:
            RuleBroken: if BEGIN averages the state where that is not due, or has options that no step can have.
        """
        epoch = begin.tip.epoch
        stepped = not self._rules.state_always and any(member.contributes for member in begin.members)
        if stepped and (misfit := self._replica.options.misfit(begin.options)):
            raise RuleBroken(f"the round's step needs options that this peer's parameter groups can't have: {misfit}")
        if begin.with_state and not self._rules.may_average_state(epoch):
            raise RuleBroken(f"BEGIN averages the state at the end of epoch {epoch}, where that is not due")
        if begin.with_state and not self._rules.state_always:
            self._replica.shared.take()  # with `state_always`, `take` has copied it before the JOIN
        parts: list[Vector] = []
        if self._gradients is not None and not isinstance(self._gradients, OwnRounds):
            parts.append(self._gradients.vector(epoch))
        if self._rules.due_sizes and self._rules.is_due(epoch):
            parts.append(self._replica.buffers)
        if begin.with_state:
            parts.append(self._replica.shared)
        self._opened = begin
        return exchange_of(parts, self._run.me, begin, send, fault)

    def may_be_in(self, tip: Tip) -> bool:
        """Whether the state that follows `tip` may have this peer's contribution without its knowledge. That is so if
        this peer was in a round from `tip` and has not heard of its end."""
        begin = self._opened
        return begin is not None and begin.tip == tip and begin.round != self._run.swarm.peer.participant.over

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

    def _alone(self, samples: float, error: AveragingError) -> Averaged | None:
        """Continue without a round, with this peer's own contribution. The swarm decides later whose state is kept."""
        if not samples or self._least() > 1:
            why = f"min_peers={self._settings.min_peers}" if samples else "this peer has no gradients of its own"
            fields = self._run.faults.add(FaultKind.TOO_FEW, f"{error}, and {why}")
            log.warning("no average (%s), and %s: the next step tries again", error, why, extra=fields)
            return None
        before = self._replica.tip
        # The name is random, because other peers, or this one a second time, may continue alone from the same state
        # with as many samples.
        tip = before.after(blake3(b"shoal alone\0" + self._run.me + os.urandom(32)).digest(), samples)
        if not self._run.follow(tip, after=before):
            return None
        fields = self._run.faults.add(FaultKind.ALONE, str(error))
        is_unusable, level = isinstance(error, Unusable), logging.WARNING
        if is_unusable:
            level, self._told_unusable = logging.INFO if self._told_unusable else logging.ERROR, True
        what = "gradients and options" if is_unusable else "gradients"
        log.log(level, "no average (%s): going on with this peer's own %s", error, what, extra=fields)
        if self._gradients is not None:
            self._gradients.use_local()
        return Averaged(tip, None, b"" if is_unusable else self._options, loss=self._loss)

    def _of_other_gradients(self, outcome: Outcome, mine: str) -> tuple[PeerID, ...]:
        """Compare this peer's average of gradients, which it had before the round, with those of the others.

        Args:
            mine: the name of this peer's average.

        Returns:
            The members with the most common average, if this peer has another one: after their step, it downloads the
            state from them. If two averages are equally common, the one with more samples counts.
        """
        if not mine:
            return ()
        begin = outcome.begin
        names = [machine[: len(mine)] for machine in begin.machines]
        samples = {name: sum(w for w, one in zip(begin.weights, names, strict=True) if one == name) for name in names}
        common = max(names, key=lambda name: (names.count(name), samples[name], name))
        if mine == common:
            return ()
        fields = self._run.faults.add(FaultKind.UNLIKE, "this peer's gradients are not the average of the others")
        log.warning(
            "this peer's gradients are not the average that the others have: downloading the state", extra=fields
        )
        return tuple(member.peer for member, name in zip(begin.members, names, strict=True) if name == common)

    def _of_unknown_options(self, outcome: Outcome) -> tuple[PeerID, ...]:
        """The members from which this peer downloads the state, if it can't know the options of their step. That is so
        if the options of most members differ from its own, and BEGIN has only a hash of them."""
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
        """The members from which this peer downloads the state, if its state before this round differs from theirs and
        must not.

        Peers that compute alike disagree only by a fault, or at the start of a run, when each peer has made its own
        parameters. Other peers may round their steps differently, until the state is averaged.
        """
        begin = outcome.begin
        if begin.with_state:
            return ()
        states = {m.key: s for m, s in zip(begin.members, begin.states, strict=True) if s}
        mine, epoch = states.get(self._run.me, b""), self._replica.tip.epoch
        if epoch:
            alike = {m.key for m, name in zip(begin.members, begin.machines, strict=True) if name == machine}
            states = {k: state for k, state in states.items() if k in alike and not self.hidden.is_new(k)}
        held = list(states.values())
        # Of equally many, those are right that have not loaded their state just now.
        yields = self.hidden.has_just_loaded
        common = max(held, key=lambda s: (held.count(s), s != mine if yields else s, s), default=b"")
        if mine == common and held.count(mine) > 1:
            self.hidden.agrees()
        if not mine or mine == common:
            return ()
        if epoch:
            self._tell_unlike()
        return tuple(PeerID(key) for key, state in states.items() if state == common)

    def _tell_unlike(self) -> None:
        """Tell that this peer's parameters differ from those of peers that compute alike, and what it does now."""
        fields = self._run.faults.add(FaultKind.UNLIKE, "this peer's parameters differ from those of like peers")
        if seconds := self.hidden.differs(time.monotonic()):
            log.warning(
                "this peer's parameters differ again from those of peers that compute alike, soon after it has loaded "
                "all of their state: %s keeps something outside of its state_dict, or draws random numbers. This peer "
                "takes no part for %.0f s, then it loads the state again. use_local_updates and outer= (DiLoCo) train "
                "well with such a class; so does shoal.travels(), if it says how what is missing is sent",
                type(self._replica.wrapped).__qualname__,
                seconds,
                extra=fields,
            )
        else:
            log.error(
                "this peer's parameters differ from those of peers that compute alike: downloading the state",
                extra=fields,
            )


def report_of(
    outcome: Outcome,
    epoch: int,
    digest: bytes,
    *,
    waiting: float = 0.0,
    stepping: float = 0.0,
    norm: float | None = None,
    before: Moved | None = None,
) -> EpochReport:
    """Make the report of a round.

    Args:
        outcome: the outcome of the round.
        epoch: the epoch that begins after the round.
        digest: the hash of the parameters.
        waiting: the seconds that this peer waited before the round.
        stepping: the seconds of the step after the round.
        norm: the norm of the average; None if it was not measured.
        before: the bytes and seconds of the strands' rounds, which precede the round of the run.
    """
    before = before or Moved()
    return EpochReport(
        epoch=epoch,
        samples=outcome.commit.samples,
        num_peers=len(outcome.begin.members),
        coordinator=str(PeerID(outcome.begin.ballot.coordinator)),
        round_seconds=before.seconds + outcome.matchmaking_seconds + outcome.allreduce_seconds,
        matchmaking_seconds=outcome.matchmaking_seconds,
        allreduce_seconds=before.seconds + outcome.allreduce_seconds,
        bytes_sent=before.sent + outcome.bytes_sent,
        bytes_received=before.received + outcome.bytes_received,
        state_digest=digest.hex(),
        tip=str(outcome.commit.next_tip),
        waiting_seconds=waiting,
        step_seconds=stepping,
        grad_norm=norm,
    )

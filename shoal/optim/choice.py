"""Chooses, from the settings, what one peer's optimizer consists of. No other file asks in which mode it is."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from shoal.averaging.exchange import Vector
from shoal.cluster.cluster import Cluster
from shoal.cluster.shards import Shards, Unsharded
from shoal.cluster.strands import Strands
from shoal.cluster.whole import Whole
from shoal.dht.dht import DHT
from shoal.flat import Shown, holders_of, parameters_of
from shoal.optim.accumulator import EpochGradients
from shoal.optim.alike import check_steps_pieces
from shoal.optim.checkpoint import Checkpoint, OuterCheckpoint, OwnCheckpoint, StrandCheckpoint
from shoal.optim.division import Undivided
from shoal.optim.drift import Anchors, Drift, Inner, fragments_of
from shoal.optim.epoch import Background
from shoal.optim.grad_averager import AveragerSum
from shoal.optim.gradients import Gradients
from shoal.optim.kept import Keeper
from shoal.optim.loads import watch_loads
from shoal.optim.local_steps import LocalSteps
from shoal.optim.pieces import Own, StrandPieces
from shoal.optim.rounds import AveragerRounds, InTheRun, Rounds, Strand, StrandRounds
from shoal.optim.settings import (
    AnyOptimizer,
    AnyScheduler,
    Settings,
    Stepped,
    Use,
    make_outer,
    make_trained,
)
from shoal.optim.shown_copies import shown_of, shown_of_pieces
from shoal.optim.state import State
from shoal.optim.strand_averager import StrandAverager
from shoal.optim.work import Work


class Made(NamedTuple):
    """The torch objects of an optimizer.

    Attributes:
        users: the optimizer and scheduler that the user has given.
        stepped: what the ends of epochs step: the same, or the outer optimizer of the anchors.
    """

    users: Stepped
    stepped: Stepped


def shards_of(cluster: Cluster | None, params: Any) -> Shards:
    """How the model lies at this rank. In a cluster, all ranks call this at once.

    Raises:
        ValueError: for parameters that can't be cut into strands.
    """
    if cluster is None:
        return Unsharded(params)
    if cluster.strands > 1:
        return Strands(cluster, params)
    assert cluster.group is not None
    return Whole(cluster.group, params)


def make_torch(
    settings: Settings, optimizer: AnyOptimizer, scheduler: AnyScheduler | None, shards: Shards, *, is_cluster: bool
) -> Made:
    """Make the torch objects of this rank. Raises ValueError as `make_trained` and `make_outer`."""
    if not shards.are_here:  # rank 0 has the state; here the optimizer only shows its groups
        users = make_trained(optimizer, shards.params, None, Use(in_cluster=True))
        return Made(users, users)
    use = Use(
        on_host=settings.offload_optimizer,
        in_background=settings.delay_optimizer_step,
        in_cluster=is_cluster,
        steps_average=not settings.moves_within_epochs,
        frozen=settings.sends_frozen,
        calls_closure=settings.moves_within_epochs and not is_cluster,
    )
    if settings.outer is None:
        users = make_trained(optimizer, shards.params, scheduler, use)
        return Made(users, users)
    params, pieces = (shards.given, shards.groups) if isinstance(shards, Strands) else (shards.params, None)
    users, anchor, outer = make_outer(settings.outer, optimizer, params, scheduler, use, pieces)
    return Made(users, Stepped(outer, None, anchor))


def make_state(made: Made, extra_tensors: list[Tensor], settings: Settings, shards: Shards, dht: DHT) -> State:
    """Make the state of this rank."""
    keeper = Keeper(settings.kept_state_dir, dht.peer_id.key)
    if not isinstance(shards, Strands):
        division = Undivided(parameters_of(made.stepped.optimizer))
        return State(made.stepped, made.users, extra_tensors, settings, division, Own, keeper)
    check_steps_pieces(made.stepped, shards)
    in_backward = shards.pieces if settings.outer is None else shards.model

    def pieces(model: object, frozen: object, placement: Any) -> StrandPieces:
        return StrandPieces(shards, in_backward, placement)

    return State(made.stepped, made.users, extra_tensors, settings, shards, pieces, keeper)


def shown_by(made: Made, shards: Shards, settings: Settings, wait: Any) -> Shown:
    """What users see of the optimizer."""
    if isinstance(shards, Strands) and settings.outer is None:
        return shown_of_pieces(made.users.optimizer, shards)
    return shown_of(made.users.optimizer, made.users.host, wait)


def make_rounds(optimizer: Optimizer, settings: Settings, state: State, made: Made, shards: Shards, dht: DHT) -> Rounds:
    """Make the work of this rank, and the rounds in which it is averaged.

    Args:
        optimizer: the `shoal.Optimizer`.

    Raises:
        ValueError: as `AveragerSum`, for what the factory makes.
    """
    if isinstance(shards, Strands):
        return _of_strands(optimizer, settings, state, made, shards, dht)
    pieces, codec, feedback = state.pieces, settings.grad_compression, settings.error_feedback
    if settings.use_local_updates:
        return InTheRun(LocalSteps(optimizer, pieces, state.wrapped, state.step_locally))
    if settings.outer is not None:
        return InTheRun(_drift(optimizer, settings, state, made.users))
    reuse = settings.reuse_grad_buffers
    if settings.grad_averager_factory is None:
        apart = settings.delay_optimizer_step
        total = EpochGradients(state.trained, codec, apart=apart, reuse=reuse, error_feedback=feedback)
        return InTheRun(Gradients(optimizer, pieces, [total], [state.stepped], state.wrapped, reuse=reuse))
    options = {"prefix": f"{settings.run_id}/grad", "reuse_grad_buffers": reuse} | settings.for_averager()
    gradients = AveragerSum(settings.grad_averager_factory, state.trained, dht=dht, **options)
    work = Gradients(optimizer, pieces, [gradients], [state.stepped], state.wrapped, reuse=reuse)
    return AveragerRounds(work, dht.peer_id.key, gradients)


def _drift(optimizer: Optimizer, settings: Settings, state: State, users: Stepped) -> Drift:
    assert settings.outer is not None
    copies = {} if users.host is None else users.host.stepped()
    on_host = [copies[parameter] for parameter in state.trained if parameter in copies]
    memory = state.model_memory if on_host else None
    inner = Inner(users.optimizer, users.scheduler, on_host, memory)
    anchors = Anchors(state.stepped, state.optimizer, state.frozen_pairs)
    codec, feedback = settings.grad_compression, settings.error_feedback
    watch_loads(state.of_model.placement.modules)
    return Drift(
        optimizer, state.of_model, settings.outer, inner, state.trained, anchors, codec, feedback, watched=state.trained
    )


def _of_strands(
    optimizer: Optimizer, settings: Settings, state: State, made: Made, strands: Strands, dht: DHT
) -> StrandRounds:
    """The gradients of this rank's strands, or the drift of their pieces, and their rounds."""
    codec, feedback = settings.grad_compression, settings.error_feedback

    def strand(vector: Vector, number: int, fragment: int = 0) -> Strand:
        count = len(strands.carriers)
        return Strand(vector, StrandAverager(vector, number, count, fragment, lambda: state.tip, settings, dht))

    if settings.outer is None:
        trained = [[piece for piece in part.parameters if piece.requires_grad] for part in state.parts]
        sums = [EpochGradients(pieces, codec, error_feedback=feedback) for pieces in trained]
        work = Gradients(optimizer, state.pieces, sums, trained, state.wrapped, is_exact=True)
        turns = [[strand(*each) for each in zip(sums, strands.mine, strict=True)]]
        return StrandRounds(work, turns, strands.carriers)
    model = [parameter for parameter in strands.model if parameter.requires_grad]
    fragments = fragments_of(settings.outer.fragments, model)
    numbers = {id(piece): number for number, piece in enumerate(state.trained)}
    of_strand = [
        [numbers[id(piece)] for piece in map(strands.pieces.__getitem__, places) if piece.requires_grad]
        for places in strands.numbers
    ]  # the number of the piece, for each strand and trained parameter
    watch_loads({holder.module for holder in holders_of(model)})
    drift = Drift(
        optimizer,
        state.of_model,
        settings.outer,
        Inner(made.users.optimizer, made.users.scheduler),
        state.trained,
        Anchors(state.stepped, state.optimizer, state.frozen_pairs),
        codec,
        feedback,
        turns=[[[own[number] for number in fragment] for own in of_strand] for fragment in fragments],
        watched=model,
    )
    turns = [
        [strand(vector, number, fragment) for vector, number in zip(vectors, strands.mine, strict=True)]
        for fragment, vectors in enumerate(drift.all_vectors)
    ]
    return StrandRounds(drift, turns, strands.carriers, repr(fragments).encode())


def make_checkpoint(state: State, work: Work, shards: Shards) -> Checkpoint:
    """Make what saves and loads the state."""
    if isinstance(shards, Strands):
        return OuterCheckpoint(state, shards, work) if isinstance(work, Drift) else StrandCheckpoint(state, shards)
    return OwnCheckpoint(state, work)


def background_of(settings: Settings, *, is_cluster: bool) -> Background:
    """What goes on in the background."""
    may_lend = not (is_cluster or settings.reuse_grad_buffers or settings.in_background)
    return Background(settings.averages_in_background, settings.steps_in_background, may_lend)

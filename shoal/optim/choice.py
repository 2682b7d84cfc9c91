"""Chooses, from the settings, what one peer's optimizer consists of. No other file asks in which mode it is."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from shoal.dht.dht import DHT
from shoal.optim.accumulator import EpochGradients
from shoal.optim.drift import Anchors, Drift, Inner
from shoal.optim.epoch import Background
from shoal.optim.grad_averager import AveragerSum
from shoal.optim.gradients import Gradients
from shoal.optim.kept import Keeper
from shoal.optim.local_steps import LocalSteps
from shoal.optim.rounds import AveragerRounds, InTheRun, Rounds
from shoal.optim.settings import (
    PLACE_TIMES,
    AnyOptimizer,
    AnyScheduler,
    Params,
    Settings,
    Stepped,
    make_outer,
    make_trained,
)
from shoal.optim.state import Replica


class Made(NamedTuple):
    """The torch objects of an optimizer.

    Attributes:
        users: the optimizer and scheduler that the user has given.
        stepped: what the ends of epochs step: the same, or the outer optimizer of the anchors.
    """

    users: Stepped
    stepped: Stepped


def make_torch(
    settings: Settings, optimizer: AnyOptimizer, params: Params | None, scheduler: AnyScheduler | None
) -> Made:
    """Make the torch objects of a process alone. Raises ValueError as `make_trained` and `make_outer`."""
    places: dict[str, Any] = {
        "on_host": settings.offload_optimizer,
        "in_background": settings.delay_optimizer_step,
        "frozen": settings.sends_frozen,
        "calls_closure": settings.moves_within_epochs,
    }
    if settings.outer is None:
        by_average = not settings.use_local_updates
        users = make_trained(optimizer, params, scheduler, **places, steps_average=by_average)
        return Made(users, users)
    users, anchor, outer = make_outer(settings.outer, optimizer, params, scheduler, **places)
    return Made(users, Stepped(outer, None, anchor))


def make_state(made: Made, extra_tensors: list[Tensor], settings: Settings, dht: DHT) -> Replica:
    """Make the state of a process alone."""
    optimizer, scheduler, host = made.stepped
    keeper = Keeper(settings.kept_state_dir, dht.peer_id.key)
    return Replica(optimizer, scheduler, extra_tensors, settings, host, keeper, made.users)


def make_rounds(optimizer: Optimizer, settings: Settings, state: Replica, made: Made, dht: DHT) -> Rounds:
    """Make the work of a process alone, and the rounds in which it is averaged.

    Args:
        optimizer: the `shoal.Optimizer`.

    Raises:
        ValueError: as `AveragerSum`, for what the factory makes.
    """
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
    same = ("allreduce_timeout", "next_chunk_timeout", "shutdown_timeout", "client_mode", "reuse_grad_buffers")
    options = {name: getattr(settings, name) for name in same} | {
        "prefix": f"{settings.run_id}/grad",
        "min_group_size": 1,
        "min_matchmaking_time": settings.matchmaking_time,
        "compression": codec,
        "bandwidth": settings.averager_opts.get("bandwidth"),
    }
    options |= {name: value for name, value in settings.averager_opts.items() if name in PLACE_TIMES}
    gradients = AveragerSum(settings.grad_averager_factory, state.trained, dht=dht, **options)
    work = Gradients(optimizer, pieces, [gradients], [state.stepped], state.wrapped, reuse=reuse)
    return AveragerRounds(work, dht.peer_id.key, gradients)


def _drift(optimizer: Optimizer, settings: Settings, state: Replica, users: Stepped) -> Drift:
    assert settings.outer is not None
    copies = {} if users.host is None else users.host.stepped()
    on_host = [copies[parameter] for parameter in state.trained if parameter in copies]
    memory = state.model_memory if on_host else None
    inner = Inner(users.optimizer, users.scheduler, on_host, memory)
    anchors = Anchors(state.stepped, state.optimizer, state.frozen_pairs, state.take_over)
    codec, feedback = settings.grad_compression, settings.error_feedback
    return Drift(
        optimizer, state.of_model, settings.outer, inner, state.trained, anchors, codec, feedback, watched=state.trained
    )


def background_of(settings: Settings, *, is_cluster: bool) -> Background:
    """What goes on in the background."""
    may_lend = not (is_cluster or settings.reuse_grad_buffers or settings.in_background)
    return Background(settings.averages_in_background, settings.steps_in_background, may_lend)

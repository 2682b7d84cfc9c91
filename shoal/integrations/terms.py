"""What the user of a framework gives to join a run, and what is refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

import shoal

GIVEN_BY_FRAMEWORK = ("optimizer", "params", "scheduler", "batch_size_per_step")
# The framework makes the optimizer, and its loop clears gradients after each step and takes no step without a batch.
OWN_LOOP = ("reuse_grad_buffers", "offload_optimizer", "delay_optimizer_step", "delay_grad_averaging", "auxiliary")


@dataclass(frozen=True, slots=True)
class JoinTerms:
    """How a framework's optimizer joins a run.

    Attributes:
        dht: this peer's place in the DHT, started; None in a process of a cluster that needs none.
        run_id: names the run.
        target_batch_size: samples of all peers per epoch.
        options: further arguments of `shoal.Optimizer`, and `on_event`.

    Raises:
        ValueError: for an option that the framework gives, or that needs a training loop of the user's own.
    """

    dht: shoal.DHT | None
    run_id: str
    target_batch_size: int
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        for name in GIVEN_BY_FRAMEWORK:
            if name in self.options:
                raise ValueError(f"{name}= comes from the training script: leave it out here")
        for name in OWN_LOOP:
            if self.options.get(name):
                raise ValueError(
                    f"{name}=True does not work in a framework's training loop: leave it out, or write the loop "
                    "yourself with a shoal.Optimizer"
                )

    @property
    def clips_locally(self) -> bool:
        """Whether each step of this peer is a step of the optimizer, so that the framework's own clipping is right."""
        return bool(self.options.get("use_local_updates") or self.options.get("outer"))


def refuse_scaler(scaler: Any) -> None:
    """Several processes that are one peer train without a scaler of the loss.

    Raises:
        ValueError: for one that is enabled.
    """
    if scaler is not None and scaler.is_enabled():
        raise ValueError(
            "fp16 needs a scaler of the loss, and cluster= takes none yet: train in bf16, which needs none"
        )


def refuse_many(optimizers: Sequence[Any]) -> None:
    """A run has one optimizer.

    Raises:
        ValueError: with the optimizers' names, for none or more than one, and for a `shoal.Optimizer`.
    """
    names = ", ".join(type(optimizer).__name__ for optimizer in optimizers) or "none"
    if len(optimizers) != 1:
        raise ValueError(
            f"a run has one optimizer, and the script gives {len(optimizers)} ({names}): give one, with a parameter "
            "group for each set of options"
        )
    if isinstance(optimizers[0], shoal.Optimizer):
        raise ValueError("the script makes a shoal.Optimizer itself: let it make the plain torch optimizer instead")


def refuse_plateau(*schedulers: Any) -> None:
    """A schedule follows the epochs of the run.

    Args:
        schedulers: objects, or Transformers' names of them; anything else is passed over.

    Raises:
        ValueError: for one that follows a metric.
    """
    if any(isinstance(given, ReduceLROnPlateau) or given == "reduce_lr_on_plateau" for given in schedulers):
        raise ValueError(
            "ReduceLROnPlateau follows a metric that each peer measures by itself, and a schedule follows the epochs "
            "of the run, alike on all peers: give another of torch's schedulers"
        )


def trained_before(what: str, run_id: str, how_to_go_on: str) -> str:
    """Why a second training of one framework's object is refused, and the ways out.

    Args:
        what: the object.
        run_id: names the run.
        how_to_go_on: the call that continues from a checkpoint.
    """
    return (
        f"this {what} has trained in the run {run_id!r} before, so its model is not what a run begins with: "
        f"{how_to_go_on} goes on from a checkpoint; for another training make a new {what}, with another run_id"
    )

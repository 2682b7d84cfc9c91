"""Advances a torch scheduler once per epoch of the run, although a framework steps it after each batch."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal.flat import members_of
from shoal.optim._torch import StepCounted, mark_as_stepped
from shoal.optim.group_options import put

_wrapped: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def wraps(optimizer: Any, wrapped: torch.optim.Optimizer) -> None:
    """Note that `optimizer` wraps `wrapped`, so that a scheduler of `wrapped`, or of one of its members, counts as one
    of `optimizer`."""
    for one in (wrapped, *members_of(wrapped)):
        _wrapped[one] = weakref.ref(optimizer)


class EpochScheduler(StepCounted, LRScheduler):
    """Advances a scheduler once per epoch of the run, however often its `step` is called.

    Frameworks (Trainer, Lightning, Accelerate) step a scheduler after each batch. Such a scheduler of a
    `shoal.Optimizer` would follow this peer's own batches, and other peers make more or fewer of them. Wrapped in this
    class, the scheduler follows `optimizer.local_epoch`, also on a peer that comes late or has downloaded a state.

    >>> scheduler = shoal.EpochScheduler(torch.optim.lr_scheduler.LambdaLR(optimizer, warmup))
    >>> for batch in data:
    ...     loss(model, batch).backward()
    ...     optimizer.step()
    ...     scheduler.step()
    ...     optimizer.zero_grad()

    If you make the `shoal.Optimizer` yourself, its argument `scheduler=` does the same, and also shares the scheduler's
    state with newcomers.

    Args:
        scheduler: any of torch's schedulers except ReduceLROnPlateau, made on a `shoal.Optimizer` or on the attribute
            `optimizer` of one. With `delay_optimizer_step`, make it on the `shoal.Optimizer`.

    Attributes:
        scheduler: as given. Other attributes of a scheduler (`base_lrs`, `last_epoch`, …) are read from it.
        epoch: the epoch to which the scheduler was advanced.

    Raises:
        ValueError: if `scheduler` is no such scheduler, or if no `shoal.Optimizer` has its optimizer.
    """

    def __init__(self, scheduler: LRScheduler) -> None:  # does not call the base's: there is a scheduler already
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau | EpochScheduler):
            kind = type(scheduler).__name__
            raise ValueError(f"EpochScheduler of a {kind}: give a torch scheduler that needs no metric")
        self.scheduler, self.optimizer = scheduler, scheduler.optimizer
        self._shoal_optimizer = _behind(scheduler.optimizer)
        self.epoch = int(getattr(scheduler, "last_epoch", 0))

    def step(self, epoch: int | None = None) -> None:
        """Advance the scheduler once for each epoch that has passed since the last call. Do nothing within an epoch, or
        if the run has gone back to an earlier epoch.

        Args:
            epoch: accepted without effect, because torch's schedulers take it.
        """
        missing = self._shoal_optimizer.local_epoch - self.epoch
        if missing <= 0:
            return
        # Many schedulers multiply the present rate. It must be the rate that they made, not one from a download.
        for group, rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            put(group, "lr", rate)
        mark_as_stepped(self.optimizer)
        for _ in range(missing):
            self.scheduler.step()
        self.epoch += missing

    def get_last_lr(self) -> list[Any]:
        """The learning rates that the scheduler set last, one for each parameter group."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> list[Any]:
        """What the scheduler's `get_lr` returns."""
        return self.scheduler.get_lr()

    def state_dict(self) -> dict[str, Any]:
        """The state: the epoch, and the scheduler's own state dict."""
        return {"epoch": self.epoch, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned.

        Args:
            state_dict: from another `EpochScheduler`.

        Raises:
            ValueError: if it is the state of another kind of scheduler.
        """
        if set(state_dict) != {"epoch", "scheduler"}:
            raise ValueError(
                f"the state of an EpochScheduler has epoch and scheduler, and this one {', '.join(state_dict)}: load "
                "that of a plain scheduler into it before it is wrapped, or, of a checkpoint that was made outside of "
                "a run, load the model only"
            )
        self.scheduler.load_state_dict(state_dict["scheduler"])
        self.epoch = state_dict["epoch"]

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler":  # copy and pickle ask for methods before it is set, which would recurse without end
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def _behind(optimizer: Any) -> Any:
    """The `shoal.Optimizer` that belongs to `optimizer`: itself, the one that wraps it, or one that it wraps."""
    seen = optimizer
    while seen is not None:
        if hasattr(seen, "local_epoch"):
            return seen
        found = _wrapped.get(seen) if isinstance(seen, torch.optim.Optimizer) else None
        seen = found() if found is not None else getattr(seen, "optimizer", None)
    raise ValueError(
        f"the scheduler is of a {type(optimizer).__name__} that no shoal.Optimizer has: make it of a shoal.Optimizer, "
        "or of its `optimizer`, and wrap it after that was made"
    )

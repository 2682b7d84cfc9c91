"""A scheduler of torch that a framework steps after each batch, advanced once per epoch of the run."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from shoal.optim._torch import StepCounted, mark_as_stepped
from shoal.optim.group_options import put

_wrapped: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def wraps(optimizer: Any, wrapped: torch.optim.Optimizer) -> None:
    """Say that a scheduler of `wrapped` is one of `optimizer`."""
    _wrapped[wrapped] = weakref.ref(optimizer)


class EpochScheduler(StepCounted, LRScheduler):
    """Advances a scheduler once per epoch of the run, however often its `step` is called.

    Frameworks (Trainer, Lightning, Accelerate) step a scheduler after each batch or so. Made on a `shoal.Optimizer`
    it would follow this peer's own batches, of which other peers make more or fewer. Wrapped, it follows
    `optimizer.local_epoch`, also on a peer that comes late or that has downloaded a state.

    >>> scheduler = shoal.EpochScheduler(torch.optim.lr_scheduler.LambdaLR(optimizer, warmup))
    >>> for batch in data:
    ...     loss(model, batch).backward()
    ...     optimizer.step()
    ...     scheduler.step()
    ...     optimizer.zero_grad()

    Where you make the `shoal.Optimizer` yourself, its argument `scheduler=` does the same, and shares the scheduler's
    state with newcomers.

    Args:
        scheduler: any of torch's schedulers but ReduceLROnPlateau, of a `shoal.Optimizer` or of its `optimizer`. Where
            steps are delayed, make it of the former.

    Attributes:
        scheduler: as given. Other attributes of a scheduler (`base_lrs`, `last_epoch`, …) are read from it.
        epoch: the epoch to which it was advanced.

    Raises:
        ValueError: for a scheduler of anything else.
    """

    def __init__(self, scheduler: LRScheduler) -> None:  # does not call the base's: there is a scheduler already
        if not isinstance(scheduler, LRScheduler) or isinstance(scheduler, ReduceLROnPlateau | EpochScheduler):
            kind = type(scheduler).__name__
            raise ValueError(f"EpochScheduler of a {kind}: give a torch scheduler that needs no metric")
        self.scheduler, self.optimizer = scheduler, scheduler.optimizer
        self._shoal_optimizer = _behind(scheduler.optimizer)
        self.epoch = int(getattr(scheduler, "last_epoch", 0))

    def step(self, epoch: int | None = None) -> None:
        """Advance the scheduler as often as epochs have passed. Do nothing within an epoch, or if the run has gone back
        to an earlier one. torch's schedulers take `epoch`; it has no effect here."""
        missing = self._shoal_optimizer.local_epoch - self.epoch
        if missing <= 0:
            return
        # Many schedulers multiply the present rate: it has to be the one that they made, not that of a download.
        for group, rate in zip(self.optimizer.param_groups, self.scheduler.get_last_lr(), strict=True):
            put(group, "lr", rate)
        mark_as_stepped(self.optimizer)
        for _ in range(missing):
            self.scheduler.step()
        self.epoch += missing

    def get_last_lr(self) -> list[Any]:
        """The learning rates that it set last, one for each group."""
        return self.scheduler.get_last_lr()

    def get_lr(self) -> list[Any]:
        """The scheduler's `get_lr`."""
        return self.scheduler.get_lr()

    def state_dict(self) -> dict[str, Any]:
        """The epoch, and the scheduler's state."""
        return {"epoch": self.epoch, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned.

        Raises:
            ValueError: for the state of another scheduler.
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
        if name == "scheduler":  # copy and pickle ask for methods before it is set: without this they recurse
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def _behind(optimizer: Any) -> Any:
    """The `shoal.Optimizer` of this optimizer, which may be the one that it wraps, or one that wraps it."""
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

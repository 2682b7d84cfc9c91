"""What makes no collectives in an iteration, and yet must not stay behind in a `Join`: schedulers, gradient scalers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch.distributed as dist


@runtime_checkable
class Stateful(Protocol):
    """Whatever saves and loads its state, such as `LRScheduler`, `GradScaler`, and optimizers that all ranks have."""

    def state_dict(self) -> dict[str, Any]:
        """The state; it is pickled."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take this state."""
        ...


def hand_over(stateful: Sequence[Stateful], group: dist.ProcessGroup | None, was_last: bool) -> None:
    """When all have joined: all take the states of the first rank that joined last. All ranks call it."""
    answers: list[bool] = [False] * dist.get_world_size(group)
    dist.all_gather_object(answers, was_last, group=group)
    states = [each.state_dict() for each in stateful] if was_last else [{} for _ in stateful]
    dist.broadcast_object_list(states, group=group, group_src=answers.index(True))
    if not was_last:
        for each, state in zip(stateful, states, strict=True):
            each.load_state_dict(state)

"""What a rank without inputs needs to step its share: the options and gradients of those that have some."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.sharding.communication import Communication
from shoal.sharding.memory import flat_like
from shoal.sharding.options import numbers_of, take_numbers
from shoal.sharding.parameters import Parameters
from shoal.sharding.partition import Slice


@dataclass(frozen=True, slots=True)
class Lent:
    """What a joined rank got for one step.

    Attributes:
        gradients: of its slices.
        updated: the buckets that the live ranks will gather.
    """

    gradients: dict[Slice, Tensor | None]
    updated: list[int]


def lend(
    communication: Communication, parameters: Parameters, groups: Sequence[dict[str, Any]], *, live: bool
) -> Lent | None:
    """In a `Join`, before every step: the first live rank sends each joined rank its options and gradients.

    Nothing but a small header is sent while all are live. Gradients must be equal on all live ranks.

    Args:
        communication: of the process group.
        parameters: with the gradients.
        groups: the parameter groups; a joined rank's take the options of the live ones.
        live: whether this rank has inputs of its own.

    Returns:
        What this rank got, if it has joined.
    """
    updated = set(parameters.updated())
    has_gradient = [param.grad is not None for param in parameters.params]
    is_updated = [number in updated for number in range(len(parameters.buckets))]
    facts = torch.tensor([live, *has_gradient, *is_updated], dtype=torch.float64, device="cpu")
    headers = communication.exchange(torch.cat([facts, numbers_of(groups)]))()
    alive = [rank for rank, header in enumerate(headers) if header[0]]
    joined = [rank for rank, header in enumerate(headers) if not header[0]]
    if not joined or not alive:
        return None
    leader, params = headers[alive[0]], len(has_gradient)
    given = leader[1 : params + 1].bool().tolist()
    if communication.rank == alive[0]:
        for rank in joined:
            for part in _of_rank(parameters, rank):
                param = parameters.params[part.tensor]
                if param.grad is not None:
                    communication.send_all(flat_like(param.grad, param)[part.span.slice], rank)
    if live:
        return None
    gradients: dict[Slice, Tensor | None] = {}
    for part in _of_rank(parameters, communication.rank):
        if given[part.tensor]:
            param = parameters.params[part.tensor]
            gradient = torch.empty(len(part.span), dtype=param.dtype, device=param.device)
            communication.receive_all(gradient, alive[0])
            gradients[part] = gradient
    buckets = len(parameters.buckets)
    take_numbers(groups, leader[params + 1 + buckets :])
    chosen = leader[params + 1 : params + 1 + buckets].bool().tolist()
    return Lent(gradients, [number for number, yes in enumerate(chosen) if yes])


def _of_rank(parameters: Parameters, rank: int) -> list[Slice]:
    return [part for bucket in parameters.buckets for part in bucket.shares[rank]]

"""Gives a rank without inputs the options and gradients of a live rank, which it needs to step its share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.sharding.communication import Communication, Finish
from shoal.sharding.flat_views import flat_like
from shoal.sharding.option_numbers import Groups, numbers_of, take_numbers
from shoal.sharding.parameters import Parameters
from shoal.sharding.partition import Slice


@dataclass(frozen=True, slots=True)
class Lent:
    """The gradients that a joined rank got for one step.

    Attributes:
        gradients: the gradients of this rank's slices; None for a slice without one.
        updated: the numbers of the buckets that the live ranks will gather.
    """

    gradients: dict[Slice, Tensor | None]
    updated: list[int]


def lend(
    communication: Communication, parameters: Parameters, groups: Groups, all_live: Callable[[], bool] | None
) -> Finish:
    """In a `Join`, on a live rank before its step: notes the options, and begins to ask which ranks have joined.

    While all ranks are live, this sends a small header at most, and the local optimizer may step before any rank waits.
    Gradients must be equal on all live ranks.

    Args:
        communication: the messages of the process group.
        parameters: the parameters, with their gradients.
        groups: the parameter groups.
        all_live: returns, equally on all ranks, whether no rank has joined, so that no rank need ask. It may wait. None
            to ask.

    Returns:
        A function to call after the local step and before the parameters are gathered. In it, the first live rank sends
        its options and gradients to the ranks that have joined.
    """
    header = _header(parameters, groups, live=True)
    asked = communication.exchange(header) if all_live is None else None

    def finish() -> None:
        if all_live is not None and all_live():
            return
        alive, joined = _alive_and_joined((asked or communication.exchange(header))())
        if communication.rank == alive[0]:
            for rank in joined:
                for part in _of_rank(parameters, rank):
                    param = parameters.params[part.tensor]
                    if param.grad is not None:
                        communication.send_all(flat_like(param.grad, param)[part.span.slice], rank)

    return finish


def borrow(communication: Communication, parameters: Parameters, groups: Groups) -> Lent | None:
    """On a rank that has joined, while the live ranks `lend`: the gradients from the first live rank; None if none is
    live.

    The parameter groups take that rank's options.
    """
    headers = communication.exchange(_header(parameters, groups, live=False))()
    alive, _ = _alive_and_joined(headers)
    if not alive:
        return None
    params, buckets = len(parameters.params), len(parameters.buckets)
    leader = headers[alive[0]]
    given, chosen, options = (
        leader[1 : params + 1],
        leader[params + 1 : params + 1 + buckets],
        leader[params + 1 + buckets :],
    )
    gradients: dict[Slice, Tensor | None] = {}
    for part in _of_rank(parameters, communication.rank):
        if given[part.tensor]:
            param = parameters.params[part.tensor]
            gradient = torch.empty(len(part.span), dtype=param.dtype, device=param.device)
            communication.receive_all(gradient, alive[0])
            gradients[part] = gradient
    take_numbers(groups, options)
    return Lent(gradients, [number for number, yes in enumerate(chosen.tolist()) if yes])


def agree(communication: Communication, groups: Groups, *, was_last: bool) -> None:
    """After a `Join`: all ranks take the options of a rank that joined last.

    A joined rank has the options of the last step, and a scheduler may have changed them on the live ranks after it.
    """
    flag = torch.tensor([was_last], dtype=torch.float64, device="cpu")
    headers = communication.exchange(torch.cat([flag, numbers_of(groups)]))()
    last = next((header for header in headers if header[0]), None)
    if last is not None and not was_last:
        take_numbers(groups, last[1:])


def _header(parameters: Parameters, groups: Groups, *, live: bool) -> Tensor:
    updated = set(parameters.updated())
    has_gradient = [param.grad is not None for param in parameters.params]
    is_updated = [number in updated for number in range(len(parameters.buckets))]
    facts = torch.tensor([live, *has_gradient, *is_updated], dtype=torch.float64, device="cpu")
    return torch.cat([facts, numbers_of(groups)])


def _alive_and_joined(headers: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    alive = [rank for rank, header in enumerate(headers) if header[0]]
    return alive, [rank for rank, header in enumerate(headers) if not header[0]]


def _of_rank(parameters: Parameters, rank: int) -> list[Slice]:
    return [part for bucket in parameters.buckets for part in bucket.shares[rank]]

"""Gives joined ranks the options and gradients of live ranks, for sharded optimizers that are not Shoal's."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from shoal.flat import parameters_of
from shoal.sharding.option_numbers import numbers_of, take_numbers


class Companion:
    """Gives the options and gradients of the first live rank to the ranks that have joined. All ranks call the same
    methods.

    Args:
        optimizer: an optimizer that has all parameters in its groups, on every rank.
        group: the process group.
        device: the device of the messages.
    """

    def __init__(self, optimizer: Optimizer, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._optimizer = optimizer
        self._group = group
        self._device = device

    @torch.no_grad()
    def share_step(self, *, live: bool) -> None:
        """Before a step: a joined rank takes the options, and the gradients in their present state (clipped,
        scaled).
        """
        leader = first_of(live, self._group, self._device)
        if leader is None:
            return
        params = parameters_of(self._optimizer)
        given = torch.tensor([param.grad is not None for param in params], dtype=torch.float64, device=self._device)
        self._broadcast(given, leader)
        self._take_options(leader, take=not live)
        for param, has_gradient in zip(params, given.tolist(), strict=True):
            if not has_gradient:
                param.grad = param.grad if live else None
                continue
            lent = torch.empty(param.shape, dtype=param.dtype, device=param.device)
            if live and param.grad is not None:
                lent.copy_(param.grad.to_dense() if param.grad.is_sparse else param.grad)
            self._broadcast(lent, leader)
            if not live:
                param.grad = torch.empty_like(param).copy_(lent)

    def share_options(self, *, was_last: bool) -> None:
        """After all ranks have joined: all take the options of a rank that joined last."""
        leader = first_of(was_last, self._group, self._device)
        if leader is not None:
            self._take_options(leader, take=not was_last)

    def _take_options(self, leader: int, *, take: bool) -> None:
        options = numbers_of(self._optimizer.param_groups).to(self._device)
        self._broadcast(options, leader)
        if take:
            take_numbers(self._optimizer.param_groups, options)

    def _broadcast(self, tensor: Tensor, leader: int) -> None:
        dist.broadcast(tensor, group=self._group, group_src=leader)


def first_of(mine: bool, group: dist.ProcessGroup | None, device: torch.device) -> int | None:
    """The lowest rank whose ``mine`` is true, or None. All ranks call this."""
    answer = torch.full((1,), float(mine), device=device)
    answers = [torch.empty_like(answer) for _ in range(dist.get_world_size(group))]
    dist.all_gather(answers, answer, group=group)
    return next((rank for rank, yes in enumerate(answers) if yes), None)

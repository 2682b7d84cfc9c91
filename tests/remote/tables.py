"""What the tests optimize: parameters that live in other processes, and a loss that goes through them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from tests.remote.process import FIRST, SECOND

SHAPES = ((4, 3), (3,), (5,))
"""Of the parameters of each owner."""


class Table:
    """Some parameters; the same ones for the same seed."""

    def __init__(self, seed: int = 0, scale: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.params = [(torch.randn(shape, generator=generator) * scale).requires_grad_() for shape in SHAPES]

    def loss(self, factor: float, used: Sequence[int]) -> Tensor:
        """Has the gradient `factor * (param + 1)` for those that are used."""
        return factor * torch.stack([(0.5 * self.params[i] ** 2 + self.params[i]).sum() for i in used]).sum()

    def pushed(self, by: float) -> Tensor:
        """Has the gradient `by` everywhere."""
        return by * torch.stack([param.sum() for param in self.params]).sum()


def loss(table: rpc.RRef[Table], factor: float, used: Sequence[int]) -> Tensor:
    """Runs on the owner."""
    return table.local_value().loss(factor, used)


def pushed(table: rpc.RRef[Table], by: float) -> Tensor:
    """Runs on the owner."""
    return table.local_value().pushed(by)


def param(table: rpc.RRef[Table], index: int) -> rpc.RRef[Tensor]:
    """Runs on the owner."""
    return rpc.RRef(table.local_value().params[index])


def params(tables: Sequence[rpc.RRef[Table]]) -> list[rpc.RRef[Tensor]]:
    """RRefs to all parameters, those of different owners alternating."""
    return [rpc.rpc_sync(table.owner(), param, (table, index)) for index in range(len(SHAPES)) for table in tables]


def make_tables(owners: Sequence[str] = (FIRST, SECOND), scale: float = 1.0) -> list[rpc.RRef[Table]]:
    """One on each owner, seeded by its place."""
    return [rpc.remote(owner, Table, (seed, scale)) for seed, owner in enumerate(owners)]


def local_params(count: int = 2) -> list[Tensor]:
    """The same parameters in this process, in the order of :func:`params`."""
    tables = [Table(seed) for seed in range(count)]
    return [table.params[index] for index in range(len(SHAPES)) for table in tables]


def values(rrefs: Sequence[rpc.RRef[Tensor]]) -> list[Tensor]:
    """What the parameters are now."""
    return [rref.to_here().detach() for rref in rrefs]


def step(
    optimizer: Any, tables: Sequence[rpc.RRef[Table]], factor: float = 1.0, used: Sequence[int] = range(len(SHAPES))
) -> None:
    """A forward and backward pass through all tables, and the optimizer's step."""
    with dist_autograd.context() as context_id:
        # Not `table.rpc_async().loss(...)`: torch makes the first such call outside of the context.
        losses = [rpc.rpc_async(table.owner(), loss, (table, factor, list(used))) for table in tables]
        dist_autograd.backward(context_id, [torch.stack([each.wait() for each in losses]).sum()])
        optimizer.step(context_id)


def local_step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    factor: float = 1.0,
    used: Sequence[int] = range(len(SHAPES)),
) -> None:
    """The same in one process."""
    optimizer.zero_grad()
    owners = len(parameters) // len(SHAPES)
    for i in used:
        for each in parameters[i * owners : (i + 1) * owners]:
            each.grad = factor * (each.detach() + 1)
    optimizer.step()


def assert_close(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Equal to rounding: the gradients come from autograd here and from a formula there, and the kernels are others.

    A few units in the last place (2**-23) of values below 8 in each step, of which no test makes more than 8.
    """
    torch.testing.assert_close(list(ours), [each.detach() for each in theirs], rtol=1e-5, atol=1e-6)

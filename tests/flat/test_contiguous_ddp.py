"""`DistributedDataParallel`, in two real processes: the gradients come home from its buckets.

Both models' gradients are reduced by DDP in the same buckets, so they are equal to the bit; steps are as in `twins`.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed, nn, optim
from torch.nn.parallel import DistributedDataParallel

from shoal.flat import ContiguousParams
from tests.groups import in_group

CASES = [
    {"gradient_as_bucket_view": view, "find_unused_parameters": unused}
    for view in (False, True)
    for unused in (False, True)
]


@pytest.mark.skipif(not distributed.is_available(), reason="torch without distributed")
def test_it_trains_as_without_flat_memory(tmp_path: Path) -> None:
    in_group(2, tmp_path, train_all)


class Layers(nn.Module):
    """Two layers that are always used, and one in between that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor, all_of_them: bool) -> Tensor:
        h = self.first(x).tanh()
        return self.last(self.middle(h).tanh() if all_of_them else h)


def train(rank: int, case: dict[str, bool], wrap_first: bool = False) -> None:
    models = Layers(), Layers()
    if wrap_first:  # as Lightning does, which asks for the optimizers last
        wrapped = [DistributedDataParallel(model, **case) for model in models]
    parameters = ContiguousParams(models[1])
    options = {"foreach": False, "weight_decay": 0.1}
    optimizers = optim.Adam(models[0].parameters(), **options), optim.Adam(parameters.contiguous(), **options)
    if not wrap_first:
        wrapped = [DistributedDataParallel(model, **case) for model in models]
    random = torch.Generator().manual_seed(rank)
    for step in range(12):
        if step == 8:
            wrapped = [DistributedDataParallel(model, **case) for model in models]
        x = torch.randn(4, 5, generator=random)
        # In steps 1 and 7 one rank, then both leave the layer out; 4 and 5 accumulate.
        left_out = case["find_unused_parameters"] and ((step == 1 and rank == 0) or step in (7, 10))
        for ddp in wrapped:
            with ddp.no_sync() if step in (4, 5) else contextlib.nullcontext():
                ddp(x, not left_out).square().sum().backward()
        parameters.assert_buffer_is_valid()
        assert any(parameter.grad is not None for parameter in models[1].parameters())
        for theirs, ours in zip(*(model.parameters() for model in models), strict=True):
            assert (theirs.grad is None) == (ours.grad is None), step
            assert theirs.grad is None or torch.equal(theirs.grad, ours.grad), step
        if step in (4, 5):
            continue
        for optimizer in optimizers:
            optimizer.step()
        if step % 4 != 2:  # else the next backward adds to what is there
            for of_one in optimizers if step % 2 else models:
                of_one.zero_grad()
        assert all(map(torch.equal, *(model.parameters() for model in models))), step
        parameters.assert_buffer_is_valid()


def train_all() -> None:
    for case in CASES:
        train(distributed.get_rank(), case)
    train(distributed.get_rank(), CASES[-1], wrap_first=True)

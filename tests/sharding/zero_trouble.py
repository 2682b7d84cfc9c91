"""One check each, in which a rank goes wrong; the others must name it in time. For `test_zero_failures`."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shoal
from tests.sharding.zero_models import batches, copies, loss_of

BAD = 1
"""The rank that goes wrong."""


def steps(zero: Any) -> None:
    """Steps until an error comes."""
    for _ in range(50):
        for param in zero._all_params:
            param.grad = torch.ones_like(param)
        zero.step()


def survive(zero: Any, words: str, within: float) -> None:
    """Steps until an error, which has to name the bad rank and come in time."""
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=f"rank {BAD} failed while .*{words}"):
        steps(zero)
    assert time.monotonic() - began < within


def check_a_rank_that_is_killed() -> None:
    (network,) = copies(1)
    zero: Any = shoal.ZeroRedundancyOptimizer(network.parameters(), torch.optim.Adam)
    dist.barrier()
    if dist.get_rank() == BAD:
        os.kill(os.getpid(), signal.SIGKILL)
    survive(zero, "", within=9.0)


def check_a_rank_that_raises() -> None:
    class Raising(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            if dist.get_rank() == BAD:
                raise ValueError("out of luck")
            return super().step(closure)

    (network,) = copies(1)
    zero: Any = shoal.ZeroRedundancyOptimizer(network.parameters(), Raising, partition="elements")
    if dist.get_rank() != BAD:
        survive(zero, "it raised ValueError: out of luck", within=9.0)
        return
    with pytest.raises(ValueError, match="out of luck"):
        steps(zero)
    time.sleep(8)  # alive, but it sends nothing


def check_a_rank_that_is_killed_in_backward() -> None:
    (network,) = copies(1)
    zero: Any = shoal.ZeroRedundancyOptimizer(network.parameters(), torch.optim.Adam, reduce_scatter=True)
    data = iter(batches(20))

    def train(count: int) -> None:
        for _ in range(count):
            loss_of(network, next(data)).backward()
            zero.step()

    train(3)
    if dist.get_rank() == BAD:
        network[2].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError, match=f"rank {BAD} failed"):
        train(2)

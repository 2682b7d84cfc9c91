"""One check each, in which a rank goes wrong; the others must name it in time. For `test_zero_failures`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import shoal
from shoal.sharding import Join
from tests.sharding.zero_models import batches, copies, loss_of
from tests.telling import die

BAD = 1
"""The rank that goes wrong."""

SILENCE = 8.0
"""Seconds: the timeout of the process group."""


def make(**options: Any) -> tuple[torch.nn.Module, Any]:
    """A model and its optimizer, in a process group that is soon out of patience."""
    options = {"optimizer_class": torch.optim.Adam, **options}
    dist.barrier()  # all are there: what takes long on a busy machine is over
    group = dist.new_group(timeout=timedelta(seconds=SILENCE))
    (network,) = copies(1)
    zero = shoal.ZeroRedundancyOptimizer(network.parameters(), process_group=group, **options)
    return network, zero


def step(zero: Any) -> None:
    """One step with gradients that are equal on all ranks."""
    for param in zero.sharded_step.parameters.params:
        param.grad = torch.ones_like(param)
    zero.step()


@contextmanager
def naming_the_bad_rank(words: str = "") -> Iterator[None]:
    """Expects an error, in time; tells the rank that is alive, but silent, that it was found out."""
    began = time.monotonic()
    with pytest.raises(RuntimeError, match=f"rank {BAD} failed while .*{words}"):
        yield
    assert time.monotonic() - began < 5 * SILENCE  # the machine may be busy
    dist.distributed_c10d._get_default_store().set(f"done/{dist.get_rank()}", "yes")


def stay_silent() -> None:
    """On the bad rank: until the others know."""
    others = [rank for rank in range(dist.get_world_size()) if rank != BAD]
    store = dist.distributed_c10d._get_default_store()
    store.wait([f"done/{rank}" for rank in others], timedelta(seconds=10 * SILENCE))


def check_killed_between_steps() -> None:
    _, zero = make()
    step(zero)
    if dist.get_rank() == BAD:
        die()
    with naming_the_bad_rank():
        for _ in range(3):
            step(zero)


def check_killed_before_it_gives_its_state() -> None:
    _, zero = make()
    step(zero)
    if dist.get_rank() == BAD:
        die()
    if dist.get_rank() == 0:  # the others have nothing to do with that rank
        with naming_the_bad_rank():
            zero.consolidate_state_dict(to=0)


def check_killed_in_backward() -> None:
    network, zero = make(reduce_scatter=True)
    for number, batch in enumerate(batches(5)):
        if number == 3:
            break
        loss_of(network, batch).backward()
        zero.step()
    if dist.get_rank() == BAD:
        network[2].weight.register_hook(lambda _: die())
    with naming_the_bad_rank():
        for _ in range(2):
            loss_of(network, batch).backward()
            zero.step()


def check_killed_in_join() -> None:
    """One of the others has joined, one is live."""
    network, zero = make(reduce_scatter=True)
    with naming_the_bad_rank(), Join([zero]):
        for number, batch in enumerate(batches((1, 9, 9)[dist.get_rank()])):
            zero.zero_grad()
            loss_of(network, batch).backward()
            if dist.get_rank() == BAD and number == 3:
                die()
            zero.step()


def check_raised_in_the_step() -> None:
    class Raising(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            if dist.get_rank() == BAD:
                raise ValueError("out of luck")
            return super().step(closure)

    _, zero = make(optimizer_class=Raising, partition="elements")
    if dist.get_rank() == BAD:
        with pytest.raises(ValueError, match="out of luck"):
            step(zero)
        stay_silent()
    else:
        with naming_the_bad_rank("it raised ValueError: out of luck"):
            step(zero)


def check_raised_elsewhere() -> None:
    """In the user's code, whose process goes on: there is nothing but silence."""
    network, zero = make(reduce_scatter=True)
    if dist.get_rank() == BAD:
        stay_silent()
    else:
        with naming_the_bad_rank():
            loss_of(network, batches(1)[0]).backward()
            zero.step()

"""Many trainers at once: nothing is lost, contexts do not mix, and who shares nothing does not wait."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed import autograd as dist_autograd
from torch.distributed import rpc

from shoal import DistributedOptimizer
from shoal.remote.locks import ParameterLocks
from tests.remote.process import FIRST, NAMES, SECOND
from tests.remote.tables import Table, make_tables, params, pushed, values

STEPS, THREADS = 10, 2


class Plain(torch.optim.SGD):
    """A class that has no functional form."""


def push(optimizer: DistributedOptimizer, tables: list[rpc.RRef[Table]], by: float, steps: int = STEPS) -> None:
    """Steps whose gradient is `by`, a number of which sums are exact."""
    for _ in range(steps):
        with dist_autograd.context() as context_id:
            losses = [rpc.rpc_async(table.owner(), pushed, (table, by)) for table in tables]
            dist_autograd.backward(context_id, [torch.stack([loss.wait() for loss in losses]).sum()])
            optimizer.step(context_id)


def train(optimizer_class: Any, tables: list[rpc.RRef[Table]], by: float) -> None:
    """Runs in the process of each trainer, in several threads with one optimizer."""
    optimizer = DistributedOptimizer(optimizer_class, params(tables), lr=1.0)
    with ThreadPoolExecutor(THREADS) as pool:
        for done in [pool.submit(push, optimizer, tables, by) for _ in range(THREADS)]:
            done.result()


def loses_no_update(functional: bool) -> None:
    tables = make_tables(scale=0.0)
    chosen = torch.optim.SGD if functional else Plain
    pushes = [1.0, 64.0, 4096.0]
    futures = [rpc.rpc_async(name, train, (chosen, tables, by)) for name, by in zip(NAMES, pushes, strict=True)]
    for future in futures:
        future.wait()
    for value in values(params(tables)):
        assert torch.equal(value, torch.full_like(value, -STEPS * THREADS * sum(pushes))), value


@pytest.mark.parametrize("functional", [True, False])
def test_trainers_of_three_processes_and_six_threads_lose_no_update(trainer, functional) -> None:
    trainer(loses_no_update, functional)


class Watched(torch.optim.SGD):
    """Notes when two steps of one parameter overlap."""

    inside: ClassVar[Counter[int]] = Counter()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        key = id(self.param_groups[0]["params"][0])
        self.inside[key] += 1
        time.sleep(0.002)  # long enough that another one would be seen
        assert self.inside[key] == 1, "two steps of one parameter at the same time"
        self.inside[key] -= 1


class Together(torch.optim.SGD):
    """A step that only ends if another one is made at the same time."""

    barrier = threading.Barrier(2)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        self.barrier.wait(20)


def at_once(first: Callable[[], None], second: Callable[[], None]) -> None:
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(first), pool.submit(second)]:
            done.result()


def steps_shared_parameters_in_turn() -> None:
    tables = make_tables(scale=0.0)
    optimizers = [DistributedOptimizer(Watched, params(tables), lr=1.0) for _ in range(2)]
    at_once(lambda: push(optimizers[0], tables, 1.0), lambda: push(optimizers[1], tables, 1.0))


def test_optimizers_that_share_parameters_take_turns(trainer) -> None:
    trainer(steps_shared_parameters_in_turn)


def steps_others_in_parallel() -> None:
    tables = [make_tables((FIRST,)), make_tables((FIRST,))]
    optimizers = [DistributedOptimizer(Together, params(each), lr=1.0) for each in tables]
    at_once(lambda: push(optimizers[0], tables[0], 1.0), lambda: push(optimizers[1], tables[1], 1.0))


def test_optimizers_that_share_nothing_run_in_parallel(trainer) -> None:
    trainer(steps_others_in_parallel)


def steps_workers_at_once() -> None:
    """Each worker's step ends only when the other's has begun."""
    tables = make_tables((FIRST, SECOND))
    for table in tables:
        rpc.rpc_sync(table.owner(), forget)
    optimizer = DistributedOptimizer(Meeting, params(tables), lr=1.0)
    push(optimizer, tables, 1.0, steps=1)


class Meeting(torch.optim.SGD):
    """A step that only ends when that of the other worker has begun."""

    begun = threading.Event()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        other = SECOND if rpc.get_worker_info().name == FIRST else FIRST
        rpc.rpc_sync(other, begin)
        assert Meeting.begun.wait(20)


def forget() -> None:
    Meeting.begun.clear()


def begin() -> None:
    Meeting.begun.set()


def test_all_workers_are_stepped_at_the_same_time(trainer) -> None:
    trainer(steps_workers_at_once)


def can_enter(locks: ParameterLocks, seconds: float = 60.0) -> bool:
    entered = threading.Event()

    def enter() -> None:
        with locks:
            entered.set()

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    return entered.wait(seconds)


def must_wait(locks: ParameterLocks) -> bool:
    return not can_enter(locks, seconds=0.1)


def test_locks_are_shared_by_parameter() -> None:
    first, second, third = torch.zeros(1), torch.zeros(1), torch.zeros(1)
    both, one, other = ParameterLocks([first, second]), ParameterLocks([second]), ParameterLocks([third])
    across = ParameterLocks([third, first])
    with both:
        assert must_wait(one)
        assert can_enter(other)
        assert must_wait(across)


@pytest.mark.parametrize("reverse", [False, True])
def test_locks_are_taken_in_one_order_so_there_is_no_deadlock(reverse) -> None:
    tensors = [torch.zeros(1) for _ in range(3)]
    alone = [ParameterLocks([tensor]) for tensor in tensors]
    together = ParameterLocks(tensors[::-1] if reverse else tensors)
    with alone[0]:
        assert must_wait(together)  # waits for the first now, and has no later one that another could wait for
        assert can_enter(alone[1])
        assert can_enter(alone[2])
    with alone[1]:
        assert must_wait(together)
        assert must_wait(alone[0])
        assert can_enter(alone[2])
    assert can_enter(together)

"""What each rank of a process group does with `shoal.Join`, and what it then says of itself (as JSON).

A scenario is a function of this module that is called on every rank, in a process group of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZeRO
from torch.nn.parallel import DistributedDataParallel

from shoal import Join, Joinable, JoinHook
from shoal.sharding import partition
from shoal.sharding.join import CountingJoinHook, raise_if_joined
from shoal.sharding.zero import ZeroRedundancyOptimizer

RATE = 0.1


class CounterJoinHook(JoinHook):
    """As in PyTorch's tutorial on Join."""

    def __init__(self, counter: Counter, sync_max_count: bool) -> None:
        self.counter = counter
        self.sync_max_count = sync_max_count

    def main_hook(self) -> None:
        dist.all_reduce(torch.zeros(1))

    def post_hook(self, is_last_joiner: bool) -> None:
        self.counter.was_last = is_last_joiner
        if self.sync_max_count:
            candidate = torch.tensor([dist.get_rank() if is_last_joiner else -1])
            dist.all_reduce(candidate, op=dist.ReduceOp.MAX)
            if candidate == dist.get_rank():
                self.counter.max_count = self.counter.count.clone()
            dist.broadcast(self.counter.max_count, src=int(candidate))


class Counter(Joinable):
    """As in PyTorch's tutorial on Join: counts the inputs of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.max_count = torch.zeros(1), torch.zeros(1)
        self.was_last: bool | None = None

    def __call__(self) -> None:
        Join.notify_join_context(self)
        ones = torch.ones(1)
        dist.all_reduce(ones)
        self.count += ones

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return CounterJoinHook(self, kwargs.get("sync_max_count", False))

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


def count(inputs: Sequence[int], joinables: int = 1, throw: bool = False, torchs: bool = False) -> Any:
    """The tutorial's loop, with as many inputs as the list says for this rank."""
    counters = [Counter() for _ in range(joinables)]
    done, error = 0, ""
    join: type[Any] = TorchJoin if torchs else Join
    try:
        with join(counters, throw_on_early_termination=throw, sync_max_count=True):
            for _ in range(inputs[dist.get_rank()]):
                for counter in counters:
                    counter()
                done += 1
    except RuntimeError as problem:
        error = str(problem)
    counter = counters[-1]
    return {
        "count": int(counter.count),
        "max": int(counter.max_count),
        "last": counter.was_last,
        "done": done,
        "error": error,
    }


# --- models ----------------------------------------------------------------------------------------


def build() -> nn.Module:
    """The same numbers on every rank; double precision, so that sums in another order are as good as equal."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch_of(rank: int, iteration: int) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(100 * rank + iteration), dtype=torch.float64)


def values(module: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).tolist()


def alone(
    inputs: Sequence[int],
    optimizer: Callable[..., torch.optim.Optimizer],
    divide_by_live: bool,
    every: int = 1,
    scheduled: bool = False,
    clip: float = 0.0,
) -> list[float]:
    """The same training in one process: the mean gradient of the ranks that have inputs, step by step.

    Every rank accumulates ``every`` batches per step; what remains at the end of the longest is dropped.
    """
    model = build()
    optimizer_ = optimizer(model.parameters())
    for iteration in range(max(inputs)):
        if (iteration + 1) % every:
            continue
        live = [rank for rank, number in enumerate(inputs) if number > iteration]
        optimizer_.zero_grad()
        for rank in live:
            for past in range(iteration + 1 - every, iteration + 1):
                divisor = len(live) if divide_by_live else len(inputs)
                (model(batch_of(rank, past)).square().sum() / divisor).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if scheduled:
            schedule(optimizer_, iteration)
        optimizer_.step()
    return values(model)


def schedule(optimizer: torch.optim.Optimizer, iteration: int) -> None:
    """A learning rate that is another one in each iteration."""
    for group in optimizer.param_groups:
        group["lr"] = RATE / (1 + iteration)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE / 10, momentum=0.9)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=RATE)


CLASSES: dict[str, Any] = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}


def torch_zero(parameters: Any, optimizer: str = "adam") -> TorchZeRO:
    return TorchZeRO(parameters, CLASSES[optimizer], lr=RATE)


def shoal_zero(parameters: Any, optimizer: str = "adam") -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(parameters, CLASSES[optimizer], lr=RATE)


def train(
    inputs: Sequence[int],
    divide_by_live: bool = False,
    zero_first: bool = False,
    closure: bool = False,
    every: int = 1,
    throw: bool = False,
    zero: str = "torch",
    join: str = "shoal",
    scheduled: bool = False,
    clip: float = 0.0,
    optimizer: str = "adam",
) -> Any:
    """torch's DistributedDataParallel and a ZeroRedundancyOptimizer, each rank with its number of batches."""
    rank = dist.get_rank()
    model = DistributedDataParallel(build())
    stepped: Any = (torch_zero if zero == "torch" else shoal_zero)(model.parameters(), optimizer)
    context: Any = TorchJoin if join == "torch" else Join
    joinables = [stepped, model] if zero_first else [model, stepped]
    done, error = 0, ""
    try:
        with context(joinables, throw_on_early_termination=throw, divide_by_initial_world_size=not divide_by_live):
            for iteration in range(inputs[rank]):

                def evaluate(iteration: int = iteration) -> Tensor:
                    loss: Tensor = model(batch_of(rank, iteration)).square().sum()
                    loss.backward()
                    return loss

                if scheduled:
                    schedule(stepped, iteration)
                last = (iteration + 1) % every == 0
                if closure:
                    stepped.zero_grad()
                    stepped.step(evaluate)
                else:
                    with nullcontext() if last else model.no_sync():
                        evaluate()
                    if clip:
                        nn.utils.clip_grad_norm_(model.parameters(), clip)
                    if last:
                        stepped.step()
                        stepped.zero_grad()
                done += 1
    except RuntimeError as problem:
        error = str(problem)
    return {
        "values": values(model.module),
        "expected": alone(inputs, partial(CLASSES[optimizer], lr=RATE), divide_by_live, every, scheduled, clip),
        "done": done,
        "error": error,
    }


def two_models(inputs: Sequence[int], leader: str = "") -> Any:
    """Two models, each with its optimizer, and the mean of the live ranks; maybe after a joinable of the user's."""
    rank = dist.get_rank()
    models = [DistributedDataParallel(build()) for _ in range(2)]
    optimizers = [shoal_zero(model.parameters()) for model in models]
    counters = [Counter()] if leader else []
    with Join([*counters, *models, *optimizers], divide_by_initial_world_size=False):
        for iteration in range(inputs[rank]):
            for counter in counters:
                counter()
            for model in models:
                model(batch_of(rank, iteration)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    expected = alone(inputs, adam, divide_by_live=True)
    return {"values": [*values(models[0]), *values(models[1])], "expected": [*expected, *expected]}


def rates(inputs: Sequence[int], zero: str, join: str = "shoal") -> Any:
    """A scheduler that is stepped after each batch: the learning rates after the block, and after a step more."""
    rank = dist.get_rank()
    module = build()
    if zero == "reduced":
        model: nn.Module = module
        optimizer: Any = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, reduce_scatter=True, lr=RATE)
    else:
        model = DistributedDataParallel(module)
        optimizer = (torch_zero if zero == "torch" else shoal_zero)(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    context: Any = TorchJoin if join == "torch" else Join
    with context([optimizer] if zero == "reduced" else [model, optimizer]):
        for iteration in range(inputs[rank]):
            optimizer.zero_grad()
            model(batch_of(rank, iteration)).square().sum().backward()
            optimizer.step()
            scheduler.step()
    after = optimizer.param_groups[0]["lr"]
    return {"values": values(module), "rate": after, "expected rate": RATE * 0.5 ** max(inputs)}


def scheduler_of(name: str, optimizer: Any) -> Any:
    """A scheduler of torch's that goes by the number of batches."""
    schedulers = torch.optim.lr_scheduler
    match name:
        case "StepLR":
            return schedulers.StepLR(optimizer, step_size=2, gamma=0.5)
        case "MultiStepLR":
            return schedulers.MultiStepLR(optimizer, [2, 3, 3, 6], gamma=0.5)
        case "LambdaLR":
            return schedulers.LambdaLR(optimizer, lambda batches: 1 / (1 + batches))
        case "OneCycleLR":
            return schedulers.OneCycleLR(optimizer, max_lr=RATE, total_steps=20)
        case "SequentialLR":
            parts = [scheduler_of("LambdaLR", optimizer), scheduler_of("MultiStepLR", optimizer)]
            return schedulers.SequentialLR(optimizer, parts, milestones=[3])
    raise ValueError(name)


def epochs(inputs: Sequence[int], zero: str, name: str) -> Any:
    """Two epochs of a schedule that goes by the number of batches, and what one process makes of the same batches."""
    rank = dist.get_rank()
    module = build()
    model: nn.Module = module if zero == "reduced" else DistributedDataParallel(module)
    if zero == "reduced":
        optimizer: Any = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, reduce_scatter=True, lr=RATE)
    else:
        optimizer = {"torch": torch_zero, "shoal": shoal_zero}[zero](model.parameters())
    scheduler, scaler = (
        scheduler_of(name, optimizer),
        torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3),
    )
    for epoch in range(2):
        joined: Any = [scheduler, optimizer, scaler] if zero == "reduced" else [scaler, model, optimizer, scheduler]
        with Join(joined):
            for iteration in range(inputs[rank]):
                optimizer.zero_grad()
                model(batch_of(rank, 10 * epoch + iteration)).square().sum().backward()
                optimizer.step()
                scheduler.step()
                scaler.scale(torch.zeros(1))  # makes the scale
                scaler.update(scaler.get_scale() + 1.0)

    reference = build()
    reference_optimizer = adam(reference.parameters())
    reference_scheduler = scheduler_of(name, reference_optimizer)
    for epoch in range(2):
        for iteration in range(max(inputs)):
            reference_optimizer.zero_grad()
            for other in [other for other, number in enumerate(inputs) if number > iteration]:
                (reference(batch_of(other, 10 * epoch + iteration)).square().sum() / len(inputs)).backward()
            reference_optimizer.step()
            reference_scheduler.step()
    return {
        "values": values(module),
        "expected": values(reference),
        "schedule": [scheduler.last_epoch, *scheduler.get_last_lr(), optimizer.param_groups[0]["lr"]],
        "expected schedule": [reference_scheduler.last_epoch, *reference_scheduler.get_last_lr() * 2],
        "scale": scaler.get_scale(),
        "expected scale": 2.0**10 + 2 * max(inputs),
    }


def whole_optimizer(inputs: Sequence[int], tensor: bool = False) -> Any:
    """A scheduler of an optimizer that every rank has whole, and that Join therefore does not know."""
    rank = dist.get_rank()
    model = DistributedDataParallel(build())
    rate: Any = torch.tensor(RATE) if tensor else RATE
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    scheduler = scheduler_of("SequentialLR", optimizer)
    for _ in range(2):
        with Join([model, scheduler]):
            for iteration in range(inputs[rank]):
                optimizer.zero_grad()
                model(batch_of(rank, iteration)).square().sum().backward()
                optimizer.step()
                scheduler.step()
    reference = torch.optim.SGD([torch.zeros(1)], lr=torch.tensor(RATE) if tensor else RATE)
    expected = scheduler_of("SequentialLR", reference)
    for _ in range(2 * max(inputs)):
        reference.step()
        expected.step()
    return {
        "values": values(model.module),
        "rates": [float(lr) for lr in (*scheduler.get_last_lr(), optimizer.param_groups[0]["lr"])],
        "expected": [float(lr) for lr in (*expected.get_last_lr(), reference.param_groups[0]["lr"])],
    }


class Collector(torch.optim.lr_scheduler.LRScheduler):
    """Keeps all its rates, as many as there were batches."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.rates: list[Any] = []
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """Takes a note of the rates."""
        rates = [group["lr"] for group in self.optimizer.param_groups]
        self.rates += rates
        return rates


def collecting(inputs: Sequence[int]) -> Any:
    """A scheduler whose state has another size on every rank."""
    rank = dist.get_rank()
    module = build()
    optimizer = shoal_zero(module.parameters())
    scheduler = Collector(optimizer)
    try:
        with Join([optimizer, scheduler]):
            for _ in range(inputs[rank]):
                optimizer.step()
                scheduler.step()
    except ValueError as error:
        return {"error": str(error)}
    return {"error": ""}


def subgroup(inputs: Sequence[int]) -> Any:
    """All ranks but the first train together, and know nothing of it."""
    rank = dist.get_rank()
    group = dist.new_group(range(1, len(inputs)))
    if rank == 0:
        return {}
    assert isinstance(group, dist.ProcessGroup)
    model = DistributedDataParallel(build(), process_group=group)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=group, lr=RATE)
    with Join([model, optimizer], divide_by_initial_world_size=False):
        for iteration in range(inputs[rank]):
            model(batch_of(rank, iteration)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return {"values": values(model.module), "expected": alone(inputs, adam, divide_by_live=True)}


def replicated(inputs: Sequence[int], divide_by_live: bool = False) -> Any:
    """DistributedDataParallel with an optimizer on every rank, which a joined rank does not step."""
    rank = dist.get_rank()
    model = DistributedDataParallel(build())
    optimizer = momentum(model.parameters())
    with Join([model], divide_by_initial_world_size=not divide_by_live):
        for iteration in range(inputs[rank]):
            optimizer.zero_grad()
            model(batch_of(rank, iteration)).square().sum().backward()
            optimizer.step()
        left = values(model.module)
    return {"values": values(model.module), "left": left, "expected": alone(inputs, momentum, divide_by_live)}


def two_optimizers(inputs: Sequence[int]) -> Any:
    """One model, a sharded optimizer for each half; the second is stepped in every other iteration only."""
    rank = dist.get_rank()
    module = build()
    model = DistributedDataParallel(module)
    often, seldom = torch_zero(list(module.parameters())[:2]), torch_zero(list(module.parameters())[2:])
    with Join([model, often, seldom]):
        for iteration in range(inputs[rank]):
            model.zero_grad()
            model(batch_of(rank, iteration)).square().sum().backward()
            often.step()
            if iteration % 2:
                seldom.step()

    reference = build()
    halves = adam(list(reference.parameters())[:2]), adam(list(reference.parameters())[2:])
    for iteration in range(max(inputs)):
        reference.zero_grad()
        for other, number in enumerate(inputs):
            if number > iteration:
                (reference(batch_of(other, iteration)).square().sum() / len(inputs)).backward()
        halves[0].step()
        if iteration % 2:
            halves[1].step()
    return {"values": values(module), "expected": values(reference)}


def only_optimizers(inputs: Sequence[int], throw: bool = False) -> Any:
    """A sharded optimizer alone: nobody sends heartbeats."""
    rank = dist.get_rank()
    module = build()
    optimizer = torch_zero(module.parameters())
    done, error = 0, ""
    try:
        with Join([optimizer], throw_on_early_termination=throw):
            for _ in range(inputs[rank]):
                for parameter in module.parameters():
                    parameter.grad = torch.ones_like(parameter)
                optimizer.step()
                done += 1
    except RuntimeError as problem:
        error = str(problem)
    return {"values": values(module), "done": done, "error": error}


def afterwards(inputs: Sequence[int]) -> Any:
    """What is left of a Join when it is over: gradients of each rank's number, and the messages of a rank alone."""
    model = DistributedDataParallel(build())
    before = model._join_config
    with Join([model], divide_by_initial_world_size=False):
        for iteration in range(inputs[dist.get_rank()]):
            model(batch_of(0, iteration)).square().sum().backward()
    model.zero_grad()
    model(batch_of(dist.get_rank(), 0)).square().sum().backward()
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    own = build()
    own.load_state_dict(model.module.state_dict())
    for rank in range(len(inputs)):
        (own(batch_of(rank, 0)).square().sum() / len(inputs)).backward()
    expected = [parameter.grad.flatten() for parameter in own.parameters() if parameter.grad is not None]
    with messages() as sent, torch.no_grad():
        model(batch_of(0, 0))
    return {
        "restored": model._join_config == before,
        "error": float((torch.cat(gradients) - torch.cat(expected)).abs().max()),
        "messages": len(sent),
    }


def raises(inputs: Sequence[int]) -> Any:
    """An exception of the user's in the block: it comes out, and the hooks do not run."""
    counter = Counter()
    before = counter._join_config
    try:
        with Join([counter], sync_max_count=True):
            for _ in range(inputs[dist.get_rank()]):
                counter()
            raise KeyError("mine")
    except KeyError as problem:
        return {"error": problem.args[0], "last": counter.was_last, "restored": counter._join_config == before}


def not_enabled(inputs: Sequence[int]) -> Any:
    """Even inputs, and Join switched off."""
    counter = Counter()
    with messages() as sent, Join([counter], enable=False):
        for _ in range(inputs[0]):
            counter()
    return {"count": int(counter.count), "messages": len(sent)}


# --- what counts live ranks by itself --------------------------------------------------------------


@contextmanager
def messages() -> Iterator[list[str]]:
    """What is called of `torch.distributed` that communicates, by any thread."""
    names = [
        name
        for name in dir(dist)
        if name.startswith(
            ("all_", "reduce", "broadcast", "gather", "scatter", "isend", "irecv", "send", "recv", "barr")
        )
    ]
    originals = {name: getattr(dist, name) for name in names}
    sent: list[str] = []

    def counting(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            sent.append(name)
            return originals[name](*args, **kwargs)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


class Total(Joinable):
    """Adds the numbers of all ranks up; how many ranks there were is in the same message."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.counts = 0.0, list[int]()

    def __call__(self, number: float) -> None:
        Join.notify_join_context(self)
        total, live = self.reduce(number, 1)
        raise_if_joined(self, live, dist.get_world_size())
        self.add(total, live)

    def reduce(self, number: float, live: int) -> tuple[float, int]:
        message = torch.tensor([number, live])
        dist.all_reduce(message)
        return float(message[0]), int(message[1])

    def add(self, total: float, live: int) -> None:
        self.total += total
        self.counts.append(live)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        return TotalJoinHook(self)

    @property
    def join_device(self) -> torch.device:
        return torch.device("cpu")

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


class TotalJoinHook(CountingJoinHook):
    """Shadows `Total`."""

    def __init__(self, total: Total) -> None:
        self.total = total

    def shadow(self) -> int:
        total, live = self.total.reduce(0.0, 0)
        if live and not self.total._join_config.throw_on_early_termination:
            self.total.add(total, live)
        return live


def add_up(inputs: Sequence[int], joinables: int = 1, throw: bool = False, counter: bool = False) -> Any:
    """Joinables that need no messages; with ``counter`` beside one that does."""
    rank = dist.get_rank()
    totals = [Total() for _ in range(joinables)]
    others = [Counter()] if counter else []
    done, error = 0, ""
    with messages() as sent:
        try:
            with Join([*others, *totals], throw_on_early_termination=throw):
                for iteration in range(inputs[rank]):
                    for other in others:
                        other()
                    for total in totals:
                        total(10.0**iteration)
                    done += 1
        except RuntimeError as problem:
            error = str(problem)
    return {
        "totals": [total.total for total in totals],
        "counts": totals[-1].counts,
        "messages": len(sent),
        "done": done,
        "error": error,
    }


def reduced(
    inputs: Sequence[int],
    divide_by_live: bool = False,
    throw: bool = False,
    join: str = "shoal",
    bucket_bytes: int = partition.BUCKET_BYTES,
) -> Any:
    """Shoal's ZeroRedundancyOptimizer with its own reduction of gradients, and no DistributedDataParallel."""
    rank = dist.get_rank()
    module = build()
    with mock.patch.object(partition, "BUCKET_BYTES", bucket_bytes):
        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.Adam, reduce_scatter=True, lr=RATE)
    context: Any = TorchJoin if join == "torch" else Join

    def step(iteration: int) -> None:
        schedule(optimizer, iteration)
        module(batch_of(rank, iteration)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    done, error = 0, ""
    with messages() as sent:
        try:
            with context(
                [optimizer], throw_on_early_termination=throw, divide_by_initial_world_size=not divide_by_live
            ):
                for iteration in range(inputs[rank]):
                    step(iteration)
                    done += 1
        except RuntimeError as problem:
            error = str(problem)
    after = values(module)
    optimizer.zero_grad()
    with messages() as sent_by_one:
        step(0)
    return {
        "values": after,
        "expected": alone(inputs, adam, divide_by_live, scheduled=True),
        "messages": len(sent),
        "kinds": sorted(set(sent)),
        "messages of a step": len(sent_by_one),
        "a step later": values(module),
        "done": done,
        "error": error,
    }

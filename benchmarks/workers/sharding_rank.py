"""One rank of `benchmarks.sharding`: python -m benchmarks.workers.sharding_rank SIDE MODEL RANK RANKS FOLDER.

Does what the lines of stdin say (``warm``, ``step COUNT``, ``finish``), all ranks at the same time, and answers each
with a line of JSON. It believes the counters of ``lo``, so it wants a network namespace of its own. The model is on the
GPU if there is one, which the ranks share.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join as TorchJoin
from torch.distributed.algorithms.join import _JoinConfig
from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
from torch.nn.parallel import DistributedDataParallel as DDP

import shoal
from benchmarks import shapes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
WARM_UPS = 2
JOINED = ("torch zero, best", "shoal", "shoal, ddp")
JOIN_STEPS = 4
JOIN_PAIRS, JOIN_SECONDS = 40, 40


class Shapes(nn.Module):
    """Parameters of given shapes, and a loss that costs little more than to read them."""

    def __init__(self, given: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.tensors = nn.ParameterList(nn.Parameter(torch.randn(shape) * 0.02) for shape in given)

    def forward(self, batch: Tensor) -> Tensor:
        return torch.stack([tensor.mul(0.5).sum() for tensor in self.tensors]).sum() * batch.mean()


def model_of(name: str) -> tuple[nn.Module, Tensor]:
    """The model and a batch."""
    torch.manual_seed(0)
    if name == "linears":  # the example of the PyTorch 1.10 release
        return nn.Sequential(*(nn.Linear(2000, 2000) for _ in range(20))), torch.randn(20, 2000)
    if name == "small":  # Adam's state is 160 MB
        return nn.Sequential(*(nn.Linear(2000, 2000) for _ in range(5))), torch.randn(20, 2000)
    if name == "tiny":  # 264 k parameters: what a step costs beside its kernels
        return nn.Sequential(*(nn.Linear(128, 128) for _ in range(16))), torch.randn(16, 128)
    if name == "layers":  # many small parameters: what each of them costs
        return nn.Sequential(*(nn.Linear(32, 32) for _ in range(100))), torch.randn(16, 32)
    if name == "gpt2":
        return Shapes(shapes.gpt2()), torch.ones(1)
    if name == "embedding":
        return Shapes([(500_000, 64), *[(64, 64), (64,)] * 20]), torch.ones(1)
    raise SystemExit(f"there is no model {name}")


def make(side: str, model: nn.Module) -> tuple[nn.Module, Any]:
    """The model as it is trained, and its optimizer."""
    if side == "ddp":
        wrapped = DDP(model)
        return wrapped, torch.optim.Adam(wrapped.parameters(), lr=1e-4)
    if side == "ddp, best":
        wrapped = DDP(model, gradient_as_bucket_view=True)
        return wrapped, torch.optim.Adam(wrapped.parameters(), lr=1e-4, fused=True)
    if side == "torch zero":
        wrapped = DDP(model)
        return wrapped, TorchZero(wrapped.parameters(), torch.optim.Adam, lr=1e-4)
    if side == "torch zero, best":
        wrapped = DDP(model, gradient_as_bucket_view=True)
        return wrapped, TorchZero(
            wrapped.parameters(), torch.optim.Adam, parameters_as_bucket_view=True, lr=1e-4, fused=True
        )
    if side == "shoal, ddp":
        wrapped = DDP(model, gradient_as_bucket_view=True)
        return wrapped, shoal.ZeroRedundancyOptimizer(
            wrapped.parameters(), torch.optim.Adam, parameters_as_bucket_view=True, lr=1e-4, fused=True
        )
    if side == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for child in model.children():
            if isinstance(child, nn.Linear):
                fully_shard(child)
        fully_shard(model)
        return model, torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
    if side == "shoal":
        return model, shoal.ZeroRedundancyOptimizer(
            model.parameters(),
            torch.optim.Adam,
            parameters_as_bucket_view=True,
            reduce_scatter=True,
            lr=1e-4,
            fused=True,
        )
    raise SystemExit(f"there is no side {side}")


def sent_bytes() -> int:
    """What all ranks have sent over loopback."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == "lo":
            return int(numbers.split()[8])
    return 0


def peak() -> int:
    """The most memory that this process ever had, in bytes: on the GPU if there is one, where it counts."""
    if DEVICE == "cuda":
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def timed(run: Callable[[], None], count: int) -> list[float]:
    """Seconds of each of some runs that all ranks begin together."""
    seconds = []
    for _ in range(count):
        dist.barrier()
        began = time.perf_counter()
        run()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        dist.barrier()
        seconds.append(time.perf_counter() - began)
    return seconds


def main() -> None:
    """Measure one side on one model."""
    side, name, folder = sys.argv[1], sys.argv[2], sys.argv[5]
    rank, ranks = int(sys.argv[3]), int(sys.argv[4])
    answer({})
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    with torch.device(DEVICE):
        model, batch = model_of(name)
    memory = {"after creating local model": peak()}
    network, optimizer = make(side, model)
    memory["after creating DDP"] = peak()

    def gradients() -> None:
        optimizer.zero_grad()
        network(batch).sum().backward()

    def step() -> None:
        gradients()
        optimizer.step()

    def first_step() -> None:
        gradients()
        memory["before optimizer step()"] = peak()
        optimizer.step()
        memory["after optimizer step()"] = peak()

    for line in sys.stdin:
        what, *count = line.split()
        if what == "warm":
            timed(first_step, 1)
            timed(step, WARM_UPS - 1)
            answer({})
        elif what == "step":
            sent, used = sent_bytes(), time.process_time()
            seconds = timed(step, int(count[0]))
            each = len(seconds)
            used, sent = time.process_time() - used, sent_bytes() - sent
            answer({"steps": seconds, "cpu": used / each, "wire": sent / each / ranks})
        else:
            answer({"memory": memory, **the_rest(side, model, network, optimizer, step)})
            break
    dist.barrier()
    dist.destroy_process_group()


def answer(outcome: dict[str, Any]) -> None:
    """One line to the parent."""
    print(json.dumps(outcome), flush=True)


def the_rest(side: str, model: nn.Module, network: nn.Module, optimizer: Any, step: Callable[[], None]) -> Any:
    """All that is measured once: memory, `Join`, consolidating and loading."""
    local = optimizer.optim if hasattr(optimizer, "optim") else optimizer
    tensors = [value for state in local.state.values() for value in state.values() if isinstance(value, Tensor)]
    result: dict[str, Any] = {
        "state": sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in tensors if tensor.dim()),
        "peak": peak(),
        "model": sum(param.numel() * param.itemsize for param in model.parameters()),
    }
    if side in JOINED:
        join: Any = TorchJoin if side == "torch zero, best" else shoal.Join
        joinables = [optimizer] if side == "shoal" else [network, optimizer]
        # In turn, many steps in one context: what is paid at its end is not paid per step.
        result["pairs"] = _pairs(lambda: _in(_without(joinables), step), lambda: _in(join(joinables), step))
    if side.startswith(("torch zero", "shoal")):
        result["consolidate"] = timed(optimizer.consolidate_state_dict, 1)[0]
        result["consolidate peak"] = peak()
        if dist.get_rank() == 0:
            saved = optimizer.state_dict()
            began = time.perf_counter()
            optimizer.load_state_dict(saved)
            result["load"] = time.perf_counter() - began
    return result


Cost = tuple[float, float]
"""Seconds of a step, and of the CPU in it."""


def _pairs(without: Callable[[], Cost], within: Callable[[], Cost]) -> list[tuple[Cost, Cost]]:
    """Both in turn, and every second time the other one first: what drifts is on neither side."""
    spent = torch.tensor([without()[0] * JOIN_STEPS])
    dist.broadcast(spent, 0)
    pairs = []
    for number in range(max(4, min(JOIN_PAIRS, int(JOIN_SECONDS / 2 / spent.item())))):
        if number % 2:
            first = within()
            pairs.append((without(), first))
        else:
            pairs.append((without(), within()))
    return pairs


@contextmanager
def _without(joinables: list[Any]) -> Iterator[None]:
    """No `Join`, and nothing left of torch's, which goes on sending heartbeats after its block."""
    for joinable in joinables:
        joinable._join_config = _JoinConfig(enable=False, throw_on_early_termination=False, is_first_joinable=False)
    yield


def _in(context: AbstractContextManager[Any], step: Callable[[], None]) -> Cost:
    """Of the steps in a context, without entering and leaving it."""
    with context:
        dist.barrier()
        began, used = time.perf_counter(), time.process_time()
        for _ in range(JOIN_STEPS):
            step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - began) / JOIN_STEPS, (time.process_time() - used) / JOIN_STEPS


if __name__ == "__main__":
    main()

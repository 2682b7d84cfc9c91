"""Train on files of unequal sizes, each rank on its own, with `shoal.Join`.

    torchrun --nproc-per-node 3 join.py

The text is Python's asyncio package. Each rank takes every third module (with three ranks), so the ranks have unequal
numbers of batches. A rank that has run out keeps the others company, and steps its share of the optimizer's state with
their gradients. Without `Join` the first rank to run out would leave the others waiting for it until their time-out.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shoal

CONTEXT, WIDTH = 16, 16
BATCH = 256
CHARACTERS = 256  # bytes


def read_batches(rank: int, ranks: int) -> tuple[Tensor, ...]:
    """This rank's text, cut into windows: int64 [batch, CONTEXT + 1], as many batches as there are."""
    modules = sorted(Path(sysconfig.get_path("stdlib"), "asyncio").glob("*.py"))[rank::ranks]
    text = torch.frombuffer(bytearray(b"".join(module.read_bytes() for module in modules)), dtype=torch.uint8)
    windows = text.long().unfold(0, CONTEXT + 1, CONTEXT // 4)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(rank))
    return torch.split(windows[order], BATCH)


def main() -> None:
    """One pass of this rank over its text."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    batches = read_batches(rank, ranks)
    print(f"rank {rank} has {len(batches)} batches", flush=True)

    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Embedding(CHARACTERS, WIDTH), nn.Flatten(), nn.Linear(CONTEXT * WIDTH, 256), nn.ReLU(), nn.Linear(256, 256)
    )
    model = DistributedDataParallel(module)
    optimizer = shoal.ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=3e-3)

    with shoal.Join([model, optimizer], divide_by_initial_world_size=False):
        for number, batch in enumerate(batches, 1):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if rank == 0 and number % 50 == 0:
                print(f"batch {number}: loss {loss.item():.3f}", flush=True)
        print(f"rank {rank} has run out after {len(batches)} batches", flush=True)

    parameters = torch.cat([parameter.detach().flatten() for parameter in module.parameters()])
    received = [torch.empty_like(parameters) for _ in range(ranks)]
    dist.all_gather(received, parameters)
    if rank == 0:
        same = all(torch.equal(parameters, other) for other in received)
        print("all ranks have the same parameters" if same else "the ranks have different parameters", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

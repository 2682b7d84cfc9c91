"""Train with the optimizer's state divided over all ranks, with `shoal.ZeroRedundancyOptimizer`.

    torchrun --nproc-per-node 2 zero.py

A small character model of Python's asyncio package, trained twice: with DistributedDataParallel as with torch's class,
and with the gradients reduced to their owners, without DDP. Both come to the same loss. In between, the state is saved,
as one file that the plain optimizer loads as well.
"""

from __future__ import annotations

import sysconfig
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import shoal

CONTEXT, WIDTH, BATCH, STEPS = 16, 32, 256, 60


def read_text() -> Tensor:
    """All of the package as windows of bytes: int64 [window, CONTEXT + 1]."""
    modules = sorted(Path(sysconfig.get_path("stdlib"), "asyncio").glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(module.read_bytes() for module in modules)), dtype=torch.uint8)
    return text.long().unfold(0, CONTEXT + 1, 4)


def make_model() -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(256, WIDTH), nn.Flatten(), nn.Linear(CONTEXT * WIDTH, 512), nn.ReLU(), nn.Linear(512, 256)
    )


def train(model: nn.Module, optimizer: shoal.ZeroRedundancyOptimizer, windows: Tensor) -> float:
    """Some steps on this rank's part of every batch; the mean loss of the last ten, over all ranks."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0))
    losses = []
    for step in range(STEPS):
        batch = windows[order[step * BATCH : (step + 1) * BATCH]][rank::ranks]
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[:, :-1]), batch[:, -1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    mean = torch.stack(losses[-10:]).mean()
    dist.all_reduce(mean)
    return mean.item() / ranks


def main() -> None:
    """Both ways, and a checkpoint."""
    dist.init_process_group("gloo")
    windows = read_text()

    model = make_model()
    with_ddp = DistributedDataParallel(model)
    optimizer = shoal.ZeroRedundancyOptimizer(with_ddp.parameters(), torch.optim.Adam, lr=3e-3)
    loss = train(with_ddp, optimizer, windows)
    own = sum(t.nbytes for state in optimizer.optim.state.values() for t in state.values())
    print(f"rank {dist.get_rank()} keeps {own / 1e6:.2f} MB of the optimizer's state; loss {loss:.4f}", flush=True)

    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "optimizer.pt")
            torch.save(optimizer.state_dict(), path)
            plain = torch.optim.Adam(model.parameters())
            plain.load_state_dict(torch.load(path))
            print(f"saved and loaded the state of {len(plain.state)} parameters", flush=True)

    model = make_model()
    optimizer = shoal.ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.Adam, reduce_scatter=True, parameters_as_bucket_view=True, lr=3e-3
    )
    again = train(model, optimizer, windows)
    print(f"rank {dist.get_rank()}: loss {again:.4f} with gradients reduced to their owners", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

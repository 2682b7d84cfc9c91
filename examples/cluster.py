"""Two clusters of two ranks, which are two peers of a run: sharded inside, a swarm outside.

    torchrun --nproc-per-node 2 cluster.py                                     # the first; it prints how others join
    torchrun --nproc-per-node 2 cluster.py --initial-peers /ip4/.../p2p/...    # the second, on any machine

(Two on one machine: give the second torchrun another --master-port.)

Inside a cluster the model is sharded by `fully_shard` (FSDP2), over NCCL where there are GPUs, else over gloo. What is
Shoal's here: `shoal.Cluster`, a DHT of each rank, and `shoal.Optimizer`, which every rank makes and steps. Each rank
sends and receives its own strands of the model. With `--drift` clusters send each other every 16 steps how far they
have moved, instead of every gradient (DiLoCo).
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import shoal

CONTEXT, WIDTH, BATCH = 16, 32, 64


def read_text() -> Tensor:
    """All of the asyncio package as windows of bytes: int64 [window, CONTEXT + 1]."""
    modules = sorted(Path(sysconfig.get_path("stdlib"), "asyncio").glob("*.py"))
    text = torch.frombuffer(bytearray(b"".join(module.read_bytes() for module in modules)), dtype=torch.uint8)
    return text.long().unfold(0, CONTEXT + 1, 4)


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--initial-peers", nargs="*", default=[], help="an address that the first cluster has printed")
    parser.add_argument("--drift", action="store_true", help="average how far the clusters have moved, every 16 steps")
    parser.add_argument("--epochs", type=int, default=1000, help="after which all leave")
    given = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank = dist.get_rank()
    if on_gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    mesh = init_device_mesh("cuda" if on_gpu else "cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(256, WIDTH), nn.Flatten(), nn.Linear(CONTEXT * WIDTH, 512), nn.ReLU(), nn.Linear(512, 256)
    ).to(mesh.device_type)
    fully_shard(model, mesh=mesh)

    dht = shoal.DHT(initial_peers=given.initial_peers, start=True)
    if rank == 0:
        print("join with: --initial-peers", *map(str, dht.get_visible_maddrs()), flush=True)
    how: dict[str, Any] = {"target_batch_size": 4 * BATCH}
    if given.drift:
        how = {"outer": shoal.DiLoCo(inner_steps=16), "grad_compression": shoal.compression.Blockwise4Bit()}
    optimizer = shoal.Optimizer(
        dht=dht,
        run_id="clusters",
        batch_size_per_step=BATCH,
        params=model.parameters(),
        optimizer=lambda params: torch.optim.AdamW(params, lr=2e-3),
        cluster=shoal.Cluster(mesh, strands=8),
        **how,
    )
    torch.seed()  # each rank draws other samples
    windows, epoch = read_text().to(mesh.device_type), 0
    while optimizer.local_epoch < given.epochs:
        batch = windows[torch.randint(len(windows), (BATCH,), device=windows.device)]
        optimizer.zero_grad()
        loss = cross_entropy(model(batch[:, :-1]), batch[:, -1])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if rank == 0 and optimizer.local_epoch >= epoch + 10:
            epoch = optimizer.local_epoch
            print(f"epoch {epoch}: loss {loss.item():.3f}", flush=True)
    optimizer.finish()
    dht.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

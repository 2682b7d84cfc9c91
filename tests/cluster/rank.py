"""One rank of one cluster that trains, told by a JSON object: says what it has, a line of JSON for each epoch.

python -m tests.cluster.rank OPTIONS
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import shoal
from tests.telling import say
from tests.workers.killed import die, die_when_committed, die_when_downloading, die_when_sending, die_when_stepping

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01),
}

# Within the strands of a cluster it is the optimizer that it would make of its share.
OPTIMIZERS["zero"] = lambda params: shoal.ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.01)

MODES: dict[str, Any] = {
    "": {},
    "diloco": {"outer": shoal.DiLoCo(), "grad_compression": shoal.compression.Float16Compression()},
    "local updates": {"use_local_updates": True, "delay_state_averaging": False},
    "delayed": {"delay_grad_averaging": True},
}


class Odd(nn.Module):
    """Rows that no number of ranks divides, a scalar, a tied weight and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 7)
        self.tied = nn.Linear(7, 7, bias=False)
        self.again = nn.Linear(7, 7, bias=False)
        self.again.weight = self.tied.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.frozen = nn.Linear(7, 3).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.frozen(torch.tanh(self.again(torch.tanh(self.tied(x)))) * self.scale)


def batch_of(epoch: int, part: int) -> tuple[Tensor, Tensor]:
    """Four samples."""
    made = torch.Generator().manual_seed(1000 * epoch + part)
    return torch.randn(4, 8, generator=made), torch.randn(4, 3, generator=made)


def whole(model: nn.Module) -> list[Tensor]:
    """All parameters, in one piece; a collective where they are sharded."""
    return [p.full_tensor() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


def digest_of(model: nn.Module) -> str:
    return blake3(b"".join(p.detach().numpy().tobytes() for p in whole(model))).hexdigest()


def wrapped(model: nn.Module, kind: str, size: int) -> Any:
    if kind == "ddp":
        return DistributedDataParallel(model)
    if kind == "fsdp2":
        return fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    if kind == "hsdp":
        return fully_shard(model, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("copies", "shards")))
    if kind == "colwise":  # Shard(0)
        plan: Any = {"first": ColwiseParallel(output_layouts=Replicate())}
        return parallelize_module(model, init_device_mesh("cpu", (size,)), plan)
    if kind == "rowwise":  # Shard(1)
        plan = {"first": RowwiseParallel(input_layouts=Replicate())}
        return parallelize_module(model, init_device_mesh("cpu", (size,)), plan)
    return model


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """For `torch.distributed.checkpoint`."""
    return {"model": get_model_state_dict(model), "optimizer": optimizer.strand_state()}


def main() -> None:
    told = json.loads(sys.argv[1])
    rank, size, folder = told["rank"], told["size"], Path(told["folder"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=size)
    model = Odd()
    kept = torch.load(told["load"]) if "load" in told else None
    if kept is not None:
        model.load_state_dict(kept["model"])
    has_same_samples = told["kind"] in ("colwise", "rowwise")
    module = wrapped(model, told["kind"], size)
    strands = told.get("strands", 1)
    dht = shoal.DHT(initial_peers=told["initial_peers"], start=True) if rank == 0 or strands > 1 else None
    if dht is not None and rank == 0:
        (folder / "address").write_text(str(dht.get_visible_maddrs()[0]))
    optimizer = shoal.Optimizer(
        dht=dht,
        run_id="clusters",
        target_batch_size=told["target"],
        batch_size_per_step=4 // size if has_same_samples else 4,
        params=model.parameters(),
        optimizer=OPTIMIZERS[told["optimizer"]],
        cluster=shoal.Cluster(strands=strands) if told.get("cluster", True) else None,
        **MODES[told.get("mode", "")],
        min_peers=told.get("min_peers", 1),
        matchmaking_time=told.get("matchmaking_time", 5.0),
    )
    if kept is not None:
        optimizer.load_state_dict(kept["optimizer"])
    say(made=True)
    dies = told.get("dies") if told.get("dying") == rank else None
    epochs = 0  # that this rank has made

    def is_time() -> bool:
        return epochs >= 3

    match dies:
        case "in a strand's round" | "in the run's round":
            die_when_sending(dies == "in a strand's round", is_time)
        case "committed":
            die_when_committed(is_time)
        case "stepping":
            die_when_stepping(is_time)
        case "downloading":
            die_when_downloading()
    try:
        if "load_strands" in told:
            dcp.load(state_of(model, optimizer), checkpoint_id=told["load_strands"])
            said = {"loaded": optimizer.local_epoch, "digest": digest_of(model), "time": time.monotonic()}
            say(**said)
        while optimizer.local_epoch < told["epochs"]:
            epoch = optimizer.local_epoch
            if told.get("held") == rank and epoch == 4:
                ctypes.PyDLL(None).sleep(4)  # as a call that does not let go of the GIL: no thread of this process runs
            optimizer.zero_grad()
            inputs, outputs = batch_of(epoch, told["first"] + (0 if has_same_samples else rank))
            nn.functional.mse_loss(module(inputs), outputs).backward()
            began = time.perf_counter()
            optimizer.step()
            if dies == "accumulating" and is_time():
                die()
            took = time.perf_counter() - began
            optimizer.zero_grad()
            time.sleep(told.get("pause", 0.0))
            while told["waits"] and optimizer.local_epoch == epoch:
                optimizer.step(batch_size=0)
                time.sleep(told.get("pause", 0.0))
            epochs += optimizer.local_epoch > epoch
            said = {"epoch": optimizer.local_epoch, "digest": digest_of(model), "step": took, "time": time.monotonic()}
            say(**said)
        if "save" in told:
            tensors = dict(zip([name for name, _ in model.named_parameters()], whole(model), strict=True))
            state = optimizer.state_dict()
            if rank == 0:
                tensors["again.weight"] = tensors["tied.weight"]
                torch.save({"model": tensors, "optimizer": state}, told["save"])
        if "save_strands" in told:
            dcp.save(state_of(model, optimizer), checkpoint_id=told["save_strands"])
        optimizer.finish()
        say(parameters=[p.tolist() for p in whole(model)])
    except (ValueError, RuntimeError, CheckpointException) as error:
        said = {"kind": type(error).__name__, "error": str(error), "time": time.monotonic()}
        say(**said)
        optimizer.shutdown()
        sys.exit(3)
    finally:
        if dht is not None:
            dht.shutdown()


if __name__ == "__main__":
    main()

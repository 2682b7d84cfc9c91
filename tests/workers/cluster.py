"""One rank of one cluster that trains: it says what it has after each epoch."""

from __future__ import annotations

import ctypes
import logging
import sys
import time
from typing import Any

import msgspec
import torch
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
from tests.workers.digests import digest_of
from tests.workers.killed import die, die_in

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


class Options(msgspec.Struct, kw_only=True):
    """What a cluster does.

    Args:
        target: samples of an epoch; `first`: whose part of them the first rank has.
        waits: each rank brings its samples once in an epoch.
        held: the Python of this rank is held for four seconds in an epoch.
        dies, dying: in which phase that rank is killed.
        load, save: files of a checkpoint of the cluster; load_strands, save_strands: folders of one of its strands.
    """

    kind: str
    size: int
    target: int
    first: int
    optimizer: str
    epochs: int
    waits: bool = True
    strands: int = 1
    cluster: bool = True
    mode: str = ""
    min_peers: int | float = 1  # which are not the same
    matchmaking_time: float = 5.0
    pause: float = 0.0
    held: int | None = None
    dies: str = ""
    dying: int | None = None
    load: str = ""
    save: str = ""
    load_strands: str = ""
    save_strands: str = ""


class ClusterRank:
    """One rank.

    Args:
        store: a file through which the ranks find each other.
    """

    def __init__(self, initial_peers: list[str], rank: int, store: str, options: Options) -> None:
        logging.getLogger().handlers[0].setLevel(logging.WARNING)
        self._rank, self._told = rank, options
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.size)
        has_run = rank == 0 or options.strands > 1
        self.dht = shoal.DHT(initial_peers, start=True) if has_run else None

    def train(self) -> None:
        """To the last epoch. Ends the process with 3 if something is raised."""
        self._has_same_samples = self._told.kind in ("colwise", "rowwise")
        self._model = Odd()
        try:
            self._make()
            try:
                self._train()
            except (ValueError, RuntimeError, CheckpointException):
                self._optimizer.shutdown()
                raise
        except (Exception, CheckpointException) as error:  # noqa: BLE001 (the test reads it)
            say(kind=type(error).__name__, error=str(error), time=time.monotonic())
            sys.exit(3)
        finally:
            if self.dht is not None:
                self.dht.shutdown()

    def _make(self) -> None:
        told, model = self._told, self._model
        kept = torch.load(told.load) if told.load else None
        if kept is not None:
            model.load_state_dict(kept["model"])
        self._module = wrapped(model, told.kind, told.size)
        self._optimizer = shoal.Optimizer(
            dht=self.dht,
            run_id="clusters",
            target_batch_size=told.target,
            batch_size_per_step=4 // told.size if self._has_same_samples else 4,
            params=model.parameters(),
            optimizer=OPTIMIZERS[told.optimizer],
            cluster=shoal.Cluster(strands=told.strands) if told.cluster else None,
            **MODES[told.mode],
            min_peers=told.min_peers,
            matchmaking_time=told.matchmaking_time,
        )
        if kept is not None:
            self._optimizer.load_state_dict(kept["optimizer"])
        say(made=True)

    def _train(self) -> None:
        told, model, optimizer = self._told, self._model, self._optimizer
        dies = told.dies if told.dying == self._rank else ""
        epochs = 0  # that this rank has made

        def is_time() -> bool:
            return epochs >= 3

        die_in(dies, is_time)
        if told.load_strands:
            dcp.load(state_of(model, optimizer), checkpoint_id=told.load_strands)
            say(loaded=optimizer.local_epoch, digest=digest_of(whole(model)), time=time.monotonic())
        while optimizer.local_epoch < told.epochs:
            epoch = optimizer.local_epoch
            if told.held == self._rank and epoch == 4:
                ctypes.PyDLL(None).sleep(4)  # as a call that does not let go of the GIL: no thread of this process runs
            optimizer.zero_grad()
            inputs, outputs = batch_of(epoch, told.first + (0 if self._has_same_samples else self._rank))
            nn.functional.mse_loss(self._module(inputs), outputs).backward()
            began = time.perf_counter()
            optimizer.step()
            if dies == "accumulating" and is_time():
                die()
            took = time.perf_counter() - began
            optimizer.zero_grad()
            time.sleep(told.pause)
            while told.waits and optimizer.local_epoch == epoch:
                optimizer.step(batch_size=0)
                time.sleep(told.pause)
            epochs += optimizer.local_epoch > epoch
            say(epoch=optimizer.local_epoch, digest=digest_of(whole(model)), step=took, time=time.monotonic())
        if told.save:
            tensors = dict(zip([name for name, _ in model.named_parameters()], whole(model), strict=True))
            state = optimizer.state_dict()
            if self._rank == 0:
                tensors["again.weight"] = tensors["tied.weight"]
                torch.save({"model": tensors, "optimizer": state}, told.save)
        if told.save_strands:
            dcp.save(state_of(model, optimizer), checkpoint_id=told.save_strands)
        optimizer.finish()
        say(parameters=[p.tolist() for p in whole(model)])

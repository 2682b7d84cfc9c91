"""Steps of an optimizer, whose CPU seconds `benchmarks.steps` compares with another checkout's; one process, or a rank.

The argument is a JSON object: `rank` and `size` of the cluster, the `folder` where its ranks meet, and whether the
messages that ranks send each other are counted (`counts`). Uses nothing of Shoal but what users have.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist

import shoal
from benchmarks.workers.link import answer

BATCH = 4  # samples of a step, of a rank
ENDLESS = 1 << 40  # samples of an epoch that does not end
WARM_UP = 2  # bursts
LOOPBACK = "/ip4/127.0.0.1/tcp/0"


@dataclass(frozen=True)
class Kind:
    """What is measured.

    Attributes:
        label: for people.
        tensors, elements: of the model: how many parameters, of how many elements.
        steps: of a burst.
        ends: whether each step ends an epoch.
        outer: whether each is an inner step of DiLoCo.
        ranks, strands: of the cluster; no cluster with 0 strands.
    """

    label: str
    tensors: int = 20
    elements: int = 1000
    steps: int = 20
    ends: bool = False
    outer: bool = False
    ranks: int = 1
    strands: int = 0


def _of_clusters() -> dict[str, Kind]:
    found = {}
    for ranks, strands in ((2, 1), (2, 8), (4, 8)):
        of = f"a cluster of {ranks} ranks, strands={strands}"
        name = f"{ranks} ranks {strands} strands"
        found[f"{name} step"] = Kind(f"a step of {of} that accumulates", steps=100, ranks=ranks, strands=strands)
        found[f"{name} end"] = Kind(f"the end of an epoch of {of}", ends=True, ranks=ranks, strands=strands)
    return found


KINDS: dict[str, Kind] = {
    "1000 tensors": Kind("a step that accumulates 1,000 tensors of 100", tensors=1000, elements=100, steps=100),
    "20 tensors": Kind("a step that accumulates 20 tensors of 1,000", steps=400),
    "end": Kind("the end of an epoch, alone, 20 tensors", steps=40, ends=True),
    "end 1000": Kind("the end of an epoch, alone, 1,000 tensors", tensors=1000, elements=100, ends=True),
    "inner": Kind("an inner step of DiLoCo, 20 tensors", steps=200, outer=True),
    "inner 1000": Kind("an inner step of DiLoCo, 1,000 tensors", tensors=1000, elements=100, steps=50, outer=True),
    **_of_clusters(),
}


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4)


COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "isend", "recv", "reduce",
    "reduce_scatter", "reduce_scatter_tensor", "scatter", "scatter_object_list", "send", "send_object_list",
)  # fmt: skip


class Counted:
    """What a rank sends to others: messages over sockets that block (the reactor's do not), and collectives of torch,
    whose bytes are not counted."""

    def __init__(self) -> None:
        self.messages = self.bytes = self.collectives = 0

    def install(self) -> None:
        """Count from now on."""
        for name in ("sendall", "send", "sendmsg"):
            setattr(socket.socket, name, self._counting(getattr(socket.socket, name)))
        for name in COLLECTIVES:
            setattr(dist, name, self._counting_calls(getattr(dist, name)))

    def _counting_calls(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            self.collectives += 1
            return act(*given, **named)

        return counted

    def _counting(self, send: Callable[..., Any]) -> Callable[..., Any]:
        def counted(tie: socket.socket, data: Any, *given: Any) -> Any:
            if tie.gettimeout() is None and tie.family in (socket.AF_INET, socket.AF_INET6):
                self.messages += 1
                self.bytes += sum(map(len, data)) if isinstance(data, list | tuple) else len(data)
            return send(tie, data, *given)

        return counted


class Stepping:
    """This process."""

    def __init__(self, told: dict[str, Any]) -> None:
        self._rank, self._size = told["rank"], told["size"]
        cores = sorted(os.sched_getaffinity(0))  # the same one for both sides: what else it does slows both
        os.sched_setaffinity(0, {cores[-1 - self._rank % len(cores)]})
        self._counted = Counted()
        if told["counts"]:
            self._counted.install()
        if self._size > 1:
            store = f"file://{told['folder']}/store"
            dist.init_process_group("gloo", init_method=store, rank=self._rank, world_size=self._size)
        importlib.import_module("torch._dynamo")  # the first step would
        self._dht = shoal.DHT(start=True, host_maddrs=[LOOPBACK])
        self._runs = 0

    def handle(self, command: str, **given: Any) -> Any:
        """The methods below, by name."""
        if command not in ("begin", "burst", "end"):
            raise ValueError(f"no command is named {command!r}")
        return getattr(self, command)(**given)

    def begin(self, name: str) -> None:
        """Make the optimizer of that kind, and warm it up."""
        self._kind = kind = KINDS[name]
        self._runs += 1
        torch.manual_seed(0)
        self._params = [torch.nn.Parameter(torch.randn(kind.elements)) for _ in range(kind.tensors)]
        options: dict[str, Any] = {"target_batch_size": BATCH * kind.ranks if kind.ends else ENDLESS}
        if kind.outer:
            options = {"outer": shoal.DiLoCo(inner_steps=1 << 30)}
        if kind.strands:
            options["cluster"] = shoal.Cluster(strands=kind.strands)
        self._optimizer = shoal.Optimizer(
            dht=self._dht if not (kind.strands == 1 and self._rank) else None,
            run_id=f"steps {self._runs}" + ("" if kind.strands else f" {self._rank}"),
            batch_size_per_step=BATCH,
            params=self._params,
            optimizer=adamw,
            **options,
        )
        for _ in range(WARM_UP):
            self.burst()

    def burst(self) -> dict[str, float]:
        """Some steps: CPU seconds of this process, of all its threads, for each; and what was sent to other ranks."""
        for parameter in self._params:
            parameter.grad = torch.ones_like(parameter)
        if self._kind.strands:
            dist.barrier()
        counted = self._counted
        sent = counted.messages, counted.bytes, counted.collectives
        epoch = self._optimizer.local_epoch
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(self._kind.steps):
            self._optimizer.step()
        cpu, took = time.process_time() - cpu, time.perf_counter() - began
        ended = self._optimizer.local_epoch - epoch
        if ended != (self._kind.steps if self._kind.ends else 0):
            raise RuntimeError(f"{self._kind.steps} steps have ended {ended} epochs")
        steps = self._kind.steps
        return {
            "cpu": cpu / steps,
            "seconds": took / steps,
            "messages": (counted.messages - sent[0]) / steps,
            "bytes": (counted.bytes - sent[1]) / steps,
            "collectives": (counted.collectives - sent[2]) / steps,
        }

    def end(self) -> None:
        """Leave that run."""
        self._optimizer.shutdown()

    def close(self) -> None:
        """Leave everything."""
        self._dht.shutdown()


if __name__ == "__main__":
    torch.set_num_threads(1)
    stepping = Stepping(json.loads(sys.argv[1]))
    answer(stepping.handle, stepping.close)

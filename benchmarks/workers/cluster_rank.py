"""One rank of one cluster, or a peer that is a single process; `benchmarks.clusters` tells it what to do.

Its argument is a JSON object:
    kind: "cluster", or "peer" for a single process without a `Cluster`.
    rank, size: in the cluster.
    strands: of the cluster.
    folder: where its ranks meet.
    address: to listen at.
    line: the network device of that address, whose bytes are counted.
    first: which part of the samples the cluster's rank 0 has.
    ranks: of all peers together: each brings its samples once in an epoch.
    peers: how many make a round.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

import shoal
from benchmarks.workers.link import answer
from shoal.averaging.exchange import Vector

SAMPLES = 4  # of a rank in a step
WIDTHS = (1001, 1999, 1003, 7)  # 4.0 million parameters, in tensors that no number of strands divides
ENDLESS = 1 << 40  # samples of an epoch that does not end


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01)


def layers(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(*pair), nn.Tanh()) for pair in pairwise(widths)))


class Rank:
    """This process."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.rank, self.size, self._told, self._cleanup = told["rank"], told["size"], told, list[Any]()
        if self.size > 1:
            store = f"file://{told['folder']}/store"
            dist.init_process_group("gloo", init_method=store, rank=self.rank, world_size=self.size)
        self._dht: shoal.DHT | None = None
        self._optimizer: Any = None

    def handle(self, command: str, **given: Any) -> Any:
        return getattr(self, command)(**given)

    @property
    def _node(self) -> Any:
        assert self._dht is not None
        return self._dht.node

    def open(self, initial_peers: list[str]) -> list[str]:
        """Be in the DHT; where."""
        self._dht = shoal.DHT(initial_peers, start=True, host_maddrs=[f"/ip4/{self._told['address']}/tcp/0"])
        return [str(at) for at in self._dht.get_visible_maddrs()]

    def make(self) -> None:
        """The model and its optimizer; all ranks at once."""
        self._model = layers(*WIDTHS)
        self._module: Any = DistributedDataParallel(self._model) if self.size > 1 else self._model
        is_cluster = self._told["kind"] == "cluster"
        self._optimizer = shoal.Optimizer(
            dht=self._dht,
            run_id="clusters",
            target_batch_size=SAMPLES * self._told["ranks"],
            batch_size_per_step=SAMPLES,
            params=self._model.parameters(),
            optimizer=adamw,
            cluster=shoal.Cluster(strands=self._told["strands"]) if is_cluster else None,
            min_peers=self._told["peers"],
            matchmaking_time=30.0,
            averaging_timeout=120.0,
        )
        self._cleanup.append(self._optimizer.shutdown)

    def batch(self) -> None:
        """Compute the gradients of the next epoch."""
        epoch = self._optimizer.local_epoch
        made = torch.Generator().manual_seed(1000 * epoch + self._told["first"] + self.rank)
        self._optimizer.zero_grad()
        inputs = torch.randn(SAMPLES, WIDTHS[0], generator=made)
        self._module(inputs).square().mean().backward()

    def epoch(self, at: float) -> dict[str, float]:
        """Step at that moment, and until the epoch has ended: how long that took, and what was sent meanwhile."""
        optimizer, epoch = self._optimizer, self._optimizer.local_epoch
        time.sleep(max(0.0, at - time.monotonic()))
        optimizer.step()
        while optimizer.local_epoch == epoch:
            time.sleep(0.002)
            optimizer.step(batch_size=0)
        return {"seconds": time.monotonic() - at, "epoch": optimizer.local_epoch}

    def download(self) -> dict[str, Any]:
        """Become what the others are; all ranks at once."""
        before, began = self._node.bytes_received, time.monotonic()
        done = self._optimizer.load_state_from_peers()
        return {
            "done": done,
            "received": self._node.bytes_received - before,
            "seconds": time.monotonic() - began,
            "epoch": self._optimizer.local_epoch,
        }

    def traffic(self) -> dict[str, int]:
        """Bytes so far: of buffers to and from other peers, and of all packets that have left on the line."""
        packets = Path("/sys/class/net", self._told["line"], "statistics/tx_bytes").read_text()
        return {"sent": self._node.bytes_sent, "received": self._node.bytes_received, "packets": int(packets)}

    def digest(self) -> str:
        """Of the model's parameters."""
        total = sum(int(p.detach().view(torch.int32).to(torch.int64).sum()) for p in self._model.parameters())
        return f"{total:x}"

    def memory(self) -> dict[str, int]:
        """Bytes of what averages and of what is stepped, beside the model itself: of every such object that lives."""
        gc.collect()
        mine = {p.data_ptr() for p in self._model.parameters()} | {
            p.grad.data_ptr() for p in self._model.parameters() if p.grad is not None
        }
        vectors: dict[int, int] = {}
        pieces: dict[int, int] = {}
        state: dict[int, int] = {}

        def count(into: dict[int, int], tensor: Tensor | None) -> None:
            if tensor is not None and tensor.numel() and tensor.data_ptr() not in mine:
                into[tensor.data_ptr()] = tensor.nbytes

        for each in gc.get_objects():
            with suppress(ReferenceError):
                if isinstance(each, Vector):
                    for name in ("inputs", "outputs"):
                        for flat in each.__dict__[name].flat if name in each.__dict__ else ():
                            count(vectors, flat)
                elif type(each) is torch.optim.AdamW:
                    for group in each.param_groups:
                        for parameter in group["params"]:
                            count(pieces, parameter.detach())
                            count(pieces, parameter.grad)
                    for values in each.state.values():
                        for value in values.values():
                            if isinstance(value, Tensor) and value.numel() > 1:
                                count(state, value)
        return {
            "vectors": sum(vectors.values()),
            "pieces": sum(pieces.values()),
            "state": sum(state.values()),
            "model": sum(p.nbytes for p in self._model.parameters()),
        }

    # -- steps that end no epoch

    def prepare(self, sides: dict[str, int]) -> None:
        """Make a small model for each side, with so many strands; 0: each rank is a peer of its own."""
        self._sides: dict[str, tuple[Any, Any]] = {}
        for name, strands in sides.items():
            model = layers(32, 64, 8)
            optimizer = shoal.Optimizer(
                dht=self._dht,
                run_id=f"steps {name}" if strands else f"steps {name} {self.rank}",
                target_batch_size=ENDLESS,
                batch_size_per_step=SAMPLES,
                params=model.parameters(),
                optimizer=sgd,
                cluster=shoal.Cluster(strands=strands) if strands else None,
            )
            self._cleanup.append(optimizer.shutdown)
            self._sides[name] = DistributedDataParallel(model) if strands else model, optimizer

    def steps(self, side: str, count: int) -> list[float]:
        """The seconds of so many calls of `step`, which all ranks begin together; or, with side "all-reduce", of a
        collective of one number."""
        found = []
        flag, inputs = torch.zeros(1, dtype=torch.int64), torch.randn(SAMPLES, 32)
        module, optimizer = self._sides.get(side, (None, None))
        for _ in range(count):
            if module is not None:
                module(inputs).square().mean().backward()
            dist.barrier()
            began = time.perf_counter()
            optimizer.step() if optimizer is not None else dist.all_reduce(flag, dist.ReduceOp.MAX)
            found.append(time.perf_counter() - began)
            if optimizer is not None:
                optimizer.zero_grad()
        return found

    def close(self) -> None:
        """End all that was begun; all ranks at once."""
        for end in self._cleanup:
            end()
        if self._dht is not None:
            self._dht.shutdown()


def main() -> None:
    """Answers until its input ends."""
    torch.set_num_threads(1)
    if "SHOAL_LOG" in os.environ:
        logging.basicConfig(level=os.environ["SHOAL_LOG"], format="%(asctime)s %(name)s %(message)s")
    rank = Rank(json.loads(sys.argv[1]))
    answer(rank.handle, rank.close)


if __name__ == "__main__":
    main()

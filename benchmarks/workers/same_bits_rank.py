"""One process of a run with a cluster: a rank of it, or the single process that is its other peer.

`benchmarks.same_bits` gives all three the name of a case at once; each answers what it has noted. The argument is a
JSON object: `rank` and `size` of the cluster (rank -1: the single process), and the `folder` where they meet.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import shoal
from benchmarks.workers.link import answer
from benchmarks.workers.same_bits import (
    BATCH,
    COMPRESSION,
    DELAYED,
    EPOCHS,
    FROZEN,
    LOCAL,
    LOCAL_AT_ONCE,
    LOOPBACK,
    NORMALISED,
    Mode,
    Notes,
    Peer,
    buffers,
    momentum,
    outer,
    prepare,
)

PATIENCE = 60.0  # seconds for a file of another process
WRAPS: dict[str, Callable[[nn.Module], Any]] = {
    "ddp": lambda model: DistributedDataParallel(model),
    "fsdp2": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),))),
}
LOSSY = {"grad_compression": COMPRESSION.Float16Compression(), "error_feedback": 1.0}

OF_ANY: dict[str, Mode] = {
    "AdamW, scheduler": Mode(),
    "SGD with momentum": Mode(optimizer=momentum, scheduler=None),
    "max_grad_norm": Mode(options={"max_grad_norm": 0.1}),
    "closure": Mode(how="closure"),
    "Float16, error_feedback": Mode(options=LOSSY),
    "frozen_parameters sample": Mode(make=FROZEN),
    "frozen_parameters send": Mode(make=FROZEN, options={"frozen_parameters": "send"}),
    "DiLoCo": outer(),
    "DiLoCo, target_batch_size": outer(inner_steps=None),
    "DiLoCo, fragments": outer(fragments=2),
    "DiLoCo, max_grad_norm": outer(more={"max_grad_norm": 0.01}),
    "DiLoCo, mix 0.5": outer(mix=0.5),
    "DiLoCo, torch's SGD outside": outer(optimizer=momentum),
    "DiLoCo, Float16, error_feedback": outer(more=LOSSY),
}
"""With any number of strands."""

OF_ONE: dict[str, Mode] = {
    "delay_grad_averaging": Mode(options=DELAYED, settles=True),
    "offload_optimizer": Mode(options={"offload_optimizer": True}),
    "local updates": Mode(options=LOCAL_AT_ONCE),
    "local updates, delayed": Mode(options=LOCAL, settles=True),
    "GradientAverager": Mode(options={"grad_averager_factory": shoal.GradientAverager}),
    "DiLoCo, overlap 1": outer(overlap=1, last=True),
    "DiLoCo, overlap free": outer(inner_steps=None, overlap="free", settles=True),
    "DiLoCo, offload": outer(more={"offload_optimizer": True}),
}
"""With one strand, which rank 0 steps."""

BUFFERS = Mode(make=NORMALISED, options=buffers)  # not with FSDP2, whose ranks have other running statistics


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        mode: how all train.
        strands: of the cluster.
        wrap: of its model, in `WRAPS`.
        how: "together" with the single process; the cluster "alone"; "resumed" from `state_dict()`; "strands resumed"
            from `strand_state()`; or the other "process", or the "cluster", is a newcomer that downloads.
    """

    mode: Mode
    strands: int
    wrap: str = "ddp"
    how: str = "together"


def _cases() -> Mapping[str, Case]:
    found: dict[str, Case] = {}
    for strands in (1, 2, 8):
        given = f"strands={strands}"
        for name, mode in {**OF_ANY, **(OF_ONE if strands == 1 else {})}.items():
            found[f"{given}: {name}"] = Case(mode, strands)
        found[f"{given}: extra_tensors"] = Case(BUFFERS, strands)
        plain, diloco = OF_ANY["AdamW, scheduler"], OF_ANY["DiLoCo"]
        for name, mode in {"AdamW": plain, "max_grad_norm": OF_ANY["max_grad_norm"], "DiLoCo": diloco}.items():
            found[f"{given}, FSDP2: {name}"] = Case(mode, strands, "fsdp2")
        for name, mode in {"AdamW": plain, "DiLoCo": diloco}.items():
            found[f"{given}, no other peer: {name}"] = Case(mode, strands, how="alone")
            found[f"{given}, resumed: {name}"] = Case(mode, strands, how="resumed")
            found[f"{given}, a process joins: {name}"] = Case(mode, strands, how="process")
            found[f"{given}, a cluster joins: {name}"] = Case(mode, strands, how="cluster")
            if strands > 1:
                found[f"{given}, strands resumed: {name}"] = Case(mode, strands, "fsdp2", "strands resumed")
    return found


CASES = {f"cluster, {name}": case for name, case in _cases().items()}


class Rank:
    """This process."""

    def __init__(self, told: dict[str, Any]) -> None:
        self.rank, self.size, self._folder = told["rank"], told["size"], Path(told["folder"])
        self._is_single = self.rank < 0
        if not self._is_single:
            store = f"file://{self._folder / 'store'}"
            dist.init_process_group("gloo", init_method=store, rank=self.rank, world_size=self.size)
        self._number = self.size if self._is_single else self.rank  # which samples it has
        self._dht: shoal.DHT | None = None
        self._runs = 0

    def handle(self, command: str, **given: Any) -> Any:
        """The methods below, by name."""
        if command not in ("names", "open", "case"):
            raise ValueError(f"no command is named {command!r}")
        return getattr(self, command)(**given)

    def names(self) -> list[str]:
        return list(CASES)

    def open(self, initial_peers: list[str], identity: str) -> list[str]:
        """Be in the DHT; where."""
        self._dht = shoal.DHT(initial_peers, start=True, host_maddrs=[LOOPBACK], identity_path=identity)
        return [str(address) for address in self._dht.get_visible_maddrs()]

    def case(self, name: str) -> dict[str, str]:
        """What this process has had."""
        case, notes = CASES[name], Notes()
        self._runs += 1
        self._place = self._folder / f"case {self._runs}"
        self._place.mkdir(exist_ok=True)
        match case.how:
            case "together":
                self._train(self._peer(case), notes, EPOCHS)
            case "alone" if not self._is_single:
                self._train(self._peer(case, alone=True), notes, EPOCHS, alone=True)
            case "resumed" | "strands resumed" if not self._is_single:
                self._resume(case, notes, strands=case.how == "strands resumed")
            case "process" | "cluster":
                if self._is_single == (case.how == "process"):
                    self._join(case, notes)
                else:
                    self._be_joined(case, notes)
        return notes.found

    def _peer(self, case: Case, *, alone: bool = False, run: str = "", seed: int = 0) -> Peer:
        cluster = shoal.Cluster(strands=case.strands)
        peers = 1 if alone else 2
        processes = self.size + 1 if not alone else 1 if case.how in ("process", "cluster") else self.size
        target = None if case.mode.counted else case.mode.steps * BATCH * processes
        is_joined = case.strands == 1 and self.rank > 0  # these ranks need no DHT
        return Peer(
            None if is_joined else self._dht,
            f"run {self._runs}{run}",
            self._number,
            peers,
            case.mode,
            seed=seed,
            wrap=(lambda model: model) if self._is_single else WRAPS[case.wrap],
            cluster=cluster if not self._is_single or case.strands > 1 else None,
            target_batch_size=target,
            averager_opts={"bandwidth": 0.0 if self._is_single else 1.0},
        )

    def _train(self, peer: Peer, notes: Notes, epochs: int, first: int = 0, *, alone: bool = False) -> None:
        for epoch in range(first, first + epochs):
            for step in range(peer.mode.steps):
                if not alone:
                    self._meet(f"epoch {epoch} step {step}")
                peer.train(epoch, step)
                peer.note_step(notes, epoch, step)
        self._note(peer, notes, "at the end")
        peer.optimizer.finish()
        notes.model(f"finished, process {self._number}: model", peer.model)

    def _note(self, peer: Peer, notes: Notes, at: str) -> None:
        """All that it has; where it has strands, in both forms."""
        peer.note(notes, at, with_state=True)
        try:
            state = peer.optimizer.strand_state()
        except ValueError:  # it has no strands
            return
        notes.note(f"{at}, process {self._number}: strands", state.state_dict())

    def _resume(self, case: Case, notes: Notes, *, strands: bool) -> None:
        peer = self._peer(case, alone=True)
        for epoch in range(2):
            for step in range(case.mode.steps):
                peer.train(epoch, step)
        model = {name: value.clone() for name, value in peer.model.state_dict().items()}
        saved = (peer.optimizer.strand_state() if strands else peer.optimizer).state_dict()
        file = self._place / "state"
        if strands:
            file = self._place / f"state {self.rank}"
        if strands or self.rank == 0:
            torch.save(saved, file)
        peer.optimizer.shutdown()
        dist.barrier()
        loaded = torch.load(file, weights_only=False)
        other = self._peer(case, alone=True, run=" resumed")
        with torch.no_grad():
            for name, value in other.model.state_dict().items():
                value.copy_(model[name])
        (other.optimizer.strand_state() if strands else other.optimizer).load_state_dict(loaded)
        self._note(other, notes, "loaded")
        self._train(other, notes, 2, other.optimizer.local_epoch, alone=True)

    def _be_joined(self, case: Case, notes: Notes) -> None:
        """Train alone, then be there for the newcomer."""
        peer = self._peer(case, alone=True)
        for epoch in range(2):
            for step in range(case.mode.steps):
                peer.train(epoch, step)
        self._note(peer, notes, "downloaded")
        if self._number in (0, self.size):
            (self._place / "trained").touch()
        self._wait_for("joined")
        if not self._is_single:
            dist.barrier()
        peer.optimizer.shutdown()

    def _join(self, case: Case, notes: Notes) -> None:
        """Download what the other peer has."""
        self._wait_for("trained")
        peer = self._peer(case, alone=True, seed=5)
        notes.note(f"process {self._number}: downloaded", peer.optimizer.load_state_from_peers())
        self._note(peer, notes, "downloaded")
        if not self._is_single:
            dist.barrier()
        if self._number in (0, self.size):
            (self._place / "joined").touch()
        peer.optimizer.shutdown()

    def _meet(self, when: str) -> None:
        """Wait for all processes: none may be a step ahead."""
        (self._place / f"{when}, {self._number}").touch()
        for number in range(self.size + 1):
            self._wait_for(f"{when}, {number}")

    def _wait_for(self, name: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not (self._place / name).exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {name} in {PATIENCE} s")
            time.sleep(0.001)

    def close(self) -> None:
        """Leave everything."""
        if self._dht is not None:
            self._dht.shutdown()


if __name__ == "__main__":
    prepare()
    here = Rank(json.loads(sys.argv[1]))
    answer(here.handle, here.close)

"""What a replica of `benchmarks.goodput` does in every system: it computes steps that take a fixed time, and writes a
trace of what became of their samples."""

from __future__ import annotations

import hashlib
import json
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.workers.link import bytes_of

BATCH, STEPS = 16, 10  # samples of a step; steps of a replica in an epoch
INPUTS, HIDDEN = 64, 32
RATE = 1e-4


class Replica:
    """One life of a replica: its model, and its trace.

    Its samples are in a step, lost, or *pending*. A file tells how many are pending, also after the process is killed.

    Args:
        given: `replica`, `life`, `mode`, `folder` (of the traces), `width` (of the model), `seconds` (of a step),
            `slowed` (how many times as long a step takes while there is a file `replica`.slow), `forked` (when the
            process began).
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.pending = 0.0
        self._name, self._mode, self._seconds, self._slowed, self._forked = (
            given[key] for key in ("replica", "mode", "seconds", "slowed", "forked")
        )
        folder, life = Path(given["folder"]), f"{self._name}.{given['life']}"
        self._slow, self._contact = folder / f"{self._name}.slow", folder / f"{life}.contact"
        self._trace = (folder / f"{life}.jsonl").open("a", buffering=1)
        self._pending = os.open(folder / f"{life}.pending", os.O_WRONLY | os.O_CREAT)
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model = network(given["width"])
        self._teacher = teacher()
        torch.manual_seed(random.Random(life).getrandbits(62))
        self._losses: list[float] = []

    def tell(self, event: str, **fields: Any) -> None:
        """Write a line of the trace."""
        line = {"time": time.time(), "replica": self._name, "event": event}
        self._trace.write(json.dumps(line | fields) + "\n")

    def contact(self, addresses: list[str]) -> None:
        """Tell where others can reach this replica."""
        part = self._contact.with_suffix(".part")
        part.write_text(json.dumps(addresses))
        part.rename(self._contact)

    def start(self) -> None:
        """The optimizer stands."""
        self.tell("start", seconds=time.time() - self._forked)

    def compute(self) -> None:
        """Make the gradients of a batch, in the time that a step takes."""
        seconds = self._seconds * (self._slowed if self._slow.exists() else 1)
        until = time.monotonic() + seconds
        x = torch.randn(BATCH, INPUTS)
        loss = (self.model(x) - self._teacher(x)).square().mean()
        loss.backward()
        self._losses.append(loss.item())
        time.sleep(max(0.0, until - time.monotonic()))
        self._settle(self.pending + BATCH)

    def count(self, own: float, **fields: Any) -> None:
        """A step was committed, which has so many samples of this replica."""
        loss = statistics.fmean(self._losses) if self._losses else 0.0
        self._losses.clear()
        self._settle(self.pending - own)
        is_apart = self._mode == "DiLoCo" and self.pending > 0  # it was left out, and keeps its own inner steps
        self.tell("step", own=own, loss=loss, digest="" if is_apart else self._digest(), **fields)

    def lose(self, samples: float, reason: str) -> None:
        """So many samples will be in no step."""
        self._settle(self.pending - samples)
        self.tell("lost", samples=samples, reason=reason)

    def span(self, event: str, seconds: float, *, ago: float = 0.0) -> None:
        """Something that took so long has ended, `ago` seconds ago."""
        if seconds > 0:
            self.tell(event, seconds=seconds, time=time.time() - ago)

    def _settle(self, pending: float) -> None:
        self.pending = pending
        os.pwrite(self._pending, f"{pending:16.1f}".encode(), 0)

    def _digest(self) -> str:
        """Names the parameters."""
        digest = hashlib.sha256()
        for parameter in self.model.parameters():
            digest.update(bytes_of(parameter.detach()))
        return digest.hexdigest()[:16]


def network(width: int) -> nn.Module:
    """The model."""
    layers = (nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1))
    return nn.Sequential(*layers)


@torch.no_grad()
def teacher() -> nn.Module:
    """What the model learns: a function with mean 0 and variance 1, so that the loss begins at about 1."""
    last = nn.Linear(HIDDEN, 1)
    found = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), last).requires_grad_(False)
    last.weight.div_(found(torch.randn(4096, INPUTS)).std())
    last.bias.sub_(found(torch.randn(4096, INPUTS)).mean())
    return found

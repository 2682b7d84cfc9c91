"""What the workers of `benchmarks.timeline` share: a model, a loop, and marks that processes append to a file.

Computing is slept through: both libraries then have the cores for themselves, and all peers take equally long.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS = 8  # of each peer in an epoch
BATCH = 16
PEERS = 2
TARGET = STEPS * BATCH * PEERS


def make_model(width: int) -> nn.Module:
    """A small MLP; its size is given by `width`."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


class Marks:
    """Appends to a file what was done from when to when, in seconds of the machine's monotonic clock."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)  # forked children write it, too
        self._lock = threading.Lock()

    def add(self, what: str, start: float, end: float) -> None:
        """One mark."""
        with self._lock:
            os.write(self._file, (json.dumps({"what": what, "start": start, "end": end}) + "\n").encode())

    @contextmanager
    def span(self, what: str) -> Iterator[None]:
        """Marks what passes within."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.add(what, start, time.monotonic())

    def around(self, owner: Any, name: str, what: str) -> None:
        """From now on each call of that method is marked."""
        original: Callable[..., Any] = getattr(owner, name)

        def marked(*args: Any, **kwargs: Any) -> Any:
            with self.span(what):
                return original(*args, **kwargs)

        setattr(owner, name, marked)


def train(model: nn.Module, optimizer: Any, marks: Marks, seconds: float, epochs: int) -> None:
    """Train so many epochs, each of so many seconds of computing."""
    while optimizer.local_epoch < epochs:
        with marks.span("compute"):
            time.sleep(seconds / STEPS)
            for parameter in model.parameters():
                parameter.grad = torch.full_like(parameter, 1e-3)
        epoch, start = optimizer.local_epoch, time.monotonic()
        optimizer.step(batch_size=BATCH)
        marks.add("last step" if optimizer.local_epoch != epoch else "blocked", start, time.monotonic())

"""A trainer of the chaos as a process of its own: an honest one that also says which states it holds, what its process
holds and which forks it has told of, and that writes checkpoints.

Argument: one JSON object with `initial_peers`, `log`, `address` (to listen at), `namespace` (to live in; "" for none),
`identity` (a file), `checkpoints` (what the names of its checkpoints begin with), `load` (a checkpoint; "" for none),
`mode` (one of MODES), `starved` (for so many seconds there is no memory for a download), and `fault` (one of FAULTS; ""
for none).
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import json
import logging
import os
import sys
import threading
import time
from typing import Any

import torch

import shoal
from shoal.optim.reports import Event
from shoal.transfer import transfer
from tests.attacks.honest import Honest, run
from tests.soak.held import process_holds
from tests.soak.modes import MODES

PAUSE = 0.2  # seconds of a step: eight peers reach the target in about a second
HELD_SECONDS = 5.0  # between two lines about what the process holds
CHECKPOINT_SECONDS = 15.0
FAULT_SECONDS = 8.0  # after which a fault begins
_NEW_NETWORK = 0x40000000  # CLONE_NEWNET


class SoakedTrainer(Honest):
    """An honest trainer that says more.

    Args:
        options: the process's argument.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        listen, identity = [f"/ip4/{options['address']}/tcp/0"], options["identity"]
        _starve(options["starved"])
        mode = MODES[options["mode"]]
        super().__init__(options["initial_peers"], pause=PAUSE, mode=mode, host_maddrs=listen, identity_path=identity)
        self._checkpoints, self._fault = options["checkpoints"], options["fault"]
        self._began = self._saved = self._counted = time.monotonic()
        self._said = ""  # the tip whose state it has said last
        logging.getLogger("shoal").addHandler(_Warnings(self))
        if options["load"]:
            saved = torch.load(options["load"], weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.optimizer.load_state_dict(saved["optimizer"])

    def heard(self, event: Event) -> None:
        super().heard(event)
        if isinstance(event, shoal.ForkReport) and not self._is_at("silent about forks"):
            self.say(event="fork", time=time.time(), **dataclasses.asdict(event))

    def stepped(self) -> None:
        now = time.monotonic()
        if self.optimizer.tip != self._said:
            self._said = self.optimizer.tip
            digest = "another" if self._is_at("digest") else self.digest()
            self.say(event="state", time=time.time(), tip=self._said, digest=digest)
        if now - self._counted > HELD_SECONDS:
            self._counted = now
            self.say(event="held", time=time.time(), names=_threads(), **process_holds())
        if now - self._saved > CHECKPOINT_SECONDS and self.optimizer.local_epoch:
            self._saved = now
            self._save()
        if self._is_at("quit"):
            os._exit(3)

    def _save(self) -> None:
        path = f"{self._checkpoints}-{self.optimizer.local_epoch}.pt"
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, f"{path}.part")
        os.replace(f"{path}.part", path)

    def _is_at(self, fault: str) -> bool:
        return self._fault == fault and time.monotonic() - self._began > FAULT_SECONDS


def _starve(seconds: float) -> None:
    """For so many seconds, there is no memory for a download."""
    until, allocate = time.monotonic() + seconds, vars(transfer)["empty"]

    def empty(numel: int, dtype: torch.dtype) -> torch.Tensor:
        if time.monotonic() < until:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
        memory: torch.Tensor = allocate(numel, dtype)
        return memory

    vars(transfer)["empty"] = empty


def _threads() -> list[str]:
    return sorted(thread.name for thread in threading.enumerate())


class _Warnings(logging.Handler):
    """Says what the library warns of."""

    def __init__(self, trainer: SoakedTrainer) -> None:
        super().__init__(logging.WARNING)
        self._trainer = trainer

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()[:1000]
        self._trainer.say(event="log", time=time.time(), level=record.levelname, text=text)


def enter(namespace: str) -> None:
    """Live in that network namespace: this thread, and those that it starts."""
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _NEW_NETWORK):
            raise OSError(ctypes.get_errno(), f"can't enter the network namespace {namespace}")


def main() -> None:
    options = json.loads(sys.argv[1])
    logging.basicConfig(filename=options["log"], level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    torch.set_num_threads(1)
    if options["namespace"]:
        enter(options["namespace"])
    run(SoakedTrainer(options))


if __name__ == "__main__":
    main()

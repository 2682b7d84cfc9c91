"""Runs an example as a process of its own: its arguments are the example's name, the seconds that each linear layer
takes longer, and the example's arguments. What Shoal logs is printed. It begins to train when another one does, whose
temporary folder is the same."""

from __future__ import annotations

import logging
import os
import runpy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import shoal


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    _, name, pause, *arguments = sys.argv
    forward: Any = torch.nn.Linear.forward

    def slow(*args: Any) -> Any:
        time.sleep(float(pause))
        return forward(*args)

    make: Any = shoal.Optimizer.__init__

    def wait_for_both(self: shoal.Optimizer, **arguments: Any) -> None:
        make(self, **arguments)
        folder = Path(tempfile.gettempdir())
        (folder / f"{os.getpid()}.here").touch()
        while len(list(folder.glob("*.here"))) < 2:
            time.sleep(0.01)

    shoal.Optimizer.__init__ = wait_for_both  # type: ignore[method-assign]
    torch.nn.Linear.forward = slow  # type: ignore[assignment, method-assign]
    sys.argv[:] = [name, *arguments]
    runpy.run_path(f"examples/{name}.py", run_name="__main__")


if __name__ == "__main__":
    main()

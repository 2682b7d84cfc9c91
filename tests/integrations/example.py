"""Runs an example as a process of its own: its arguments are the example's name, the seconds that each linear layer
takes longer, and the example's arguments. What Shoal logs is printed."""

from __future__ import annotations

import logging
import os
import runpy
import sys
import time
from typing import Any

import torch


def main() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    _, name, pause, *arguments = sys.argv
    forward: Any = torch.nn.Linear.forward

    def slow(*args: Any) -> Any:
        time.sleep(float(pause))
        return forward(*args)

    torch.nn.Linear.forward = slow  # type: ignore[assignment, method-assign]
    sys.argv[:] = [name, *arguments]
    runpy.run_path(f"examples/{name}.py", run_name="__main__")


if __name__ == "__main__":
    main()

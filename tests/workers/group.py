"""A rank of a process group, which calls functions of test modules when the others do."""

from __future__ import annotations

import logging
import traceback
from datetime import timedelta
from importlib import import_module
from typing import Any

from torch import distributed as dist


class Caller:
    """Who calls functions of test modules."""

    def call(self, module: str, name: str, arguments: list[Any], options: dict[str, Any]) -> Any:
        """What that function returns."""
        try:
            return getattr(import_module(module), name)(*arguments, **options)
        except Exception:
            traceback.print_exc()  # into the log: a test may hear first that another rank has waited in vain
            raise


class GroupRank(Caller):
    """The rank.

    Args:
        store: a file through which the ranks find each other.
    """

    def __init__(self, rank: int, size: int, store: str) -> None:
        logging.getLogger().handlers[0].setLevel(logging.WARNING)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=100)
        )

    def leave(self) -> None:
        """End the group, unless a function has done so. All must have answered."""
        if dist.is_initialized():
            dist.destroy_process_group()

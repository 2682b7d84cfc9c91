"""Functions that are called at all ranks of a process group, which are processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

from tests.peers import Worker, ask_all
from tests.workers.group import GroupRank

Given = ParamSpec("Given")
Answer = TypeVar("Answer")


def meet(ranks: list[Worker[GroupRank]], store: Path) -> None:
    """Have them be a group, and wait until they are."""
    for number, rank in enumerate(ranks):
        rank.begin(GroupRank, number, len(ranks), str(store))
    for rank in ranks:
        rank.started()


def in_group(
    size: int, folder: Path, function: Callable[Given, Answer], *args: Given.args, **kwargs: Given.kwargs
) -> list[Answer]:
    """What the function of a module returns at each rank of a group of that size, with arguments that JSON holds."""
    ranks = [Worker(GroupRank, log=folder / f"log {rank}") for rank in range(size)]
    try:
        meet(ranks, folder / "store")
        found = ask_all(ranks, GroupRank.call, function.__module__, function.__name__, list(args), kwargs)
        ask_all(ranks, GroupRank.leave)
        for rank in ranks:
            rank.leave()  # not how: torch's gloo now and then aborts while the interpreter goes down
        return found
    finally:
        for number, rank in enumerate(ranks):
            rank.end()
            print((folder / f"log {number}").read_text()[-3000:])

"""Scenarios of `join_scenarios` at real ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.groups import meet
from tests.peers import Failed, Worker, ask_all
from tests.workers.group import GroupRank

Call = tuple[str, dict[str, Any]]
"""A scenario's name and arguments; one of these is `inputs`, a list with an entry for each rank that takes part."""


def run_ranks(calls: list[Call], folder: Path) -> list[list[Any]]:
    """Start as many processes as the largest call needs, and make all calls one after the other.

    Returns:
        The answers by call and rank.
    """
    most = max(len(arguments["inputs"]) for _, arguments in calls)
    ranks = [Worker(GroupRank, {"GLOO_SOCKET_IFNAME": "lo"}) for _ in range(most)]
    answers = []
    try:
        for number, (name, arguments) in enumerate(calls):
            mine = ranks[: len(arguments["inputs"])]
            meet(mine, folder / f"store-{number}")  # a group of its own for each: what fails leaves the next alone
            told = [rank.tell(GroupRank.call, "tests.sharding.join_scenarios", name, [], arguments) for rank in mine]
            answers.append([_answer(each) for each in told])
            ask_all(mine, GroupRank.leave)
        return answers
    finally:
        for rank in ranks:
            rank.end()


def _answer(told: Callable[[], Any]) -> Any:
    try:
        return told()
    except Failed as failure:  # which the test shows
        return {"failed": str(failure)}

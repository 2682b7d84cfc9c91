"""Three processes for all tests of this folder: starting them takes longer than the tests.

All tests of this folder passed in 20 of 20 runs (2026-11-21, commit f4e56d9, torch 2.13), two to four at the same time
on 2 cores under a load of 20 to 50.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.peers import Failed, Worker, ask_all
from tests.remote.process import RpcRank

Trainer = Callable[..., None]
"""Runs a function of a test module, with arguments that JSON holds, in the trainer's process."""


@pytest.fixture(scope="session")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    store = tmp_path_factory.mktemp("rpc") / "store"
    ranks = [Worker(RpcRank) for _ in range(3)]

    def check(function: Callable[..., None], *arguments: Any) -> None:
        try:
            ranks[0].ask(RpcRank.call, function.__module__, function.__name__, list(arguments), {})
        except Failed as failure:
            pytest.fail(str(failure), pytrace=False)

    try:
        for number, rank in enumerate(ranks):
            rank.begin(RpcRank, number, str(store))
        for rank in ranks:
            rank.started()
        yield check
        ask_all(ranks, RpcRank.leave)
        assert [rank.leave(100.0) for rank in ranks] == [0] * 3
    finally:
        for rank in ranks:
            rank.end()

"""Three processes for all tests of this folder: starting them takes longer than the tests.

All tests of this folder passed in 20 of 20 runs (2026-11-21, commit f4e56d9, torch 2.13), two to four at the same time
on 2 cores under a load of 20 to 50.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.peers import PeerProcess

Trainer = Callable[..., None]
"""Runs a function of a test module, with arguments that JSON holds, in the trainer's process."""


@pytest.fixture(scope="session")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    store = tmp_path_factory.mktemp("rpc") / "store"
    processes = [PeerProcess("tests.remote.process", {"rank": rank, "store": str(store)}) for rank in range(3)]

    def check(function: Callable[..., None], *arguments: Any) -> None:
        answer = processes[0].ask(timeout=150, module=function.__module__, name=function.__name__, arguments=arguments)
        if answer["failure"]:
            pytest.fail(answer["failure"], pytrace=False)

    try:
        yield check
        processes[0].tell(stop=True)
        for process in processes:
            assert process.process.wait(100) == 0
    finally:
        for process in processes:
            process.end()

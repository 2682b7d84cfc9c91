"""Ctrl-C in a rank that waits for the others ends its wait."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.cluster.question import Question
from shoal.cluster.team import Team
from shoal.cluster.ties import ClusterError
from shoal.interrupts import held
from tests.cluster.threads import gang_of


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Python's own handler of SIGINT. In the background of a script, processes begin with that signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_where_rank_0_is_interrupted_the_others_hear_why() -> None:
    samples: Question[int, list[int]] = Question("samples", int, list[int])
    is_interrupted = threading.Event()

    def step(team: Team) -> None:
        with held(), team.call("step"):
            team.all(samples, 0)
            if team.rank == 1:
                is_interrupted.wait(30.0)
            team.all(samples, 0)

    with gang_of(2) as (mine, other), ThreadPoolExecutor() as threads:
        ended = threads.submit(step, other)
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            step(mine)
        timer.join()
        is_interrupted.set()
        with pytest.raises(ClusterError, match="rank 0 has raised KeyboardInterrupt"):
            ended.result()

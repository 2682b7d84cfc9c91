"""Ranks of one cluster that are threads of this process: no processes, and no torch.distributed."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from shoal.cluster.team import Gang, Team
from shoal.cluster.ties import Ties

HANGS_AFTER = 60.0  # seconds; everything here takes milliseconds


@pytest.fixture(autouse=True)
def threads_take_turns_often() -> Iterator[None]:
    """For the files that import it: a thread may be interrupted between any two lines."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@contextlib.contextmanager
def gang_of(size: int) -> Iterator[list[Gang]]:
    """The teams of `size` ranks, in order."""
    names = [f"rank {rank}" for rank in range(size)]
    pairs = {rank: socket.socketpair() for rank in range(1, size)}
    at_first = Gang(Ties(0, names, {rank: pair[0] for rank, pair in pairs.items()}))
    gang = [at_first, *[Gang(Ties(rank, names, {0: pair[1]})) for rank, pair in pairs.items()]]
    try:
        yield gang
    finally:
        for team in gang:
            team.leave()


def kill(team: Gang) -> None:
    """End the connections of a rank, as the kernel does when the process is killed. The rank says nothing any more."""
    team._ties.has_left = True
    for tie in team._ties._sockets.values():
        tie.shutdown(socket.SHUT_RDWR)
    team._ties._wake.shutdown(socket.SHUT_RDWR)
    team._ties._wake.close()


def at_ranks(gang: Sequence[Team], do: Callable[[Any], Any]) -> list[Any]:
    """Call `do` with the team of each rank, in a thread of its own. Returns what each has returned or raised."""
    ended: list[Any] = [None] * len(gang)

    def run(rank: int, team: Team) -> None:
        try:
            ended[rank] = do(team)
        except BaseException as error:  # noqa: BLE001 (the test looks at it)
            ended[rank] = error

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(gang)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_AFTER)
    hanging = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    assert not hanging, f"ranks {hanging} hang; the others have {ended}"
    return ended

"""What a rank of a team of processes does: it makes calls, leaves with all others, and makes more."""

from __future__ import annotations

from collections.abc import Callable
from types import NoneType
from typing import Any, TypedDict

from torch import distributed as dist

from shoal.cluster.question import Question
from shoal.cluster.team import team_of
from shoal.cluster.ties import ClusterError

VALUES: Question[int, list[int]] = Question("values", int, list[int])
OTHER: Question[int, list[int]] = Question("other", int, list[int])
SUM = Question("sum", int, int)
TOLD = Question("told", NoneType, str)


def spill(_: object) -> int:
    raise ValueError("spilt coffee")


class Found(TypedDict):
    """What the calls have returned or raised, and what was done with a value."""

    found: list[Any]
    done: list[str]


def calls() -> Found:
    rank = dist.get_rank()
    team = team_of(dist.group.WORLD)
    found: list[Any] = []
    done: list[str] = []

    def make(exchange: Callable[[], Any]) -> None:
        try:
            with team.call("state_dict"):
                found.append(exchange())
        except (ClusterError, ValueError) as error:
            found.append(f"{type(error).__name__}: {error}".replace(team.names[0], "R0").replace(team.names[1], "R1"))

    def exchange_all() -> None:
        make(lambda: team.all(VALUES, 10 * rank))
        make(lambda: team.decided(SUM, sum, rank + 1))
        make(lambda: team.decided(TOLD, lambda _: "all", then=done.append))
        make(lambda: team.decided(SUM, spill, rank))
        make(lambda: team.all(OTHER if rank == 1 else VALUES, rank))

    exchange_all()
    team.leave()
    exchange_all()
    dist.destroy_process_group()
    make(lambda: team.all(VALUES, rank))
    return Found(found=found, done=done)

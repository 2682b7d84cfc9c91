"""Where the rank that carries a strand has missed its round, the cluster is behind."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, cast

import pytest
from shoal.optim.crew import Crew
from shoal.optim.strand_rounds import StrandRounds

from shoal.optim.strand_averager import StrandAverager
from shoal.swarm.protocol.errors import Behind


class CrewOfOne:
    """Another rank, whose strands' rounds were made without it: it has no names of averages."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def tell(self, what: str, *given: Any) -> None:
        self.told.append(what)

    def has_answered(self, over: Future[None]) -> bool:
        return True

    def hear(self) -> list[Any]:
        return [b""]


class Rounds(StrandRounds):
    @property
    def averagers(self) -> Sequence[StrandAverager]:
        return []

    def average_here(self, timeout: float, ended: Future[None]) -> bytes:
        return bytes(32)


def test_a_cluster_is_behind_where_the_strand_of_another_rank_is() -> None:
    crew = CrewOfOne()
    with pytest.raises(Behind, match="without the rank"):
        Rounds([0, 1], cast("Crew", crew), None).average(1.0, Future)
    assert crew.told == ["average", "go on"]

"""Ranks that are slow at any place, and errors at any place, leave no rank waiting, and no decision unlike another."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from types import NoneType
from typing import Any

import pytest

from shoal.cluster import calls
from shoal.cluster.question import Question
from shoal.cluster.team import Gang
from shoal.cluster.ties import ClusterError
from tests.cluster.threads import HANGS_AFTER, at_ranks, gang_of, threads_take_turns_often  # noqa: F401
from tests.soaked import only_in_soak

VALUES: Question[int, list[int]] = Question("values", int, list[int])
SUM = Question("sum", int, int)
TOLD = Question("told", NoneType, int)
MOST_SECONDS = 0.001  # of a delay


@dataclass(frozen=True)
class Plan:
    """One call.

    Attributes:
        does: what the ranks do in it, one after the other.
        culprit: the rank that raises an error.
        at: before which of these things; after all of them if there are so many.
        in_then: whether it raises in what it does with a decision.
    """

    does: list[str]
    culprit: int | None = None
    at: int = 0
    in_then: bool = False


def plan_of(chance: random.Random, size: int) -> Plan:
    in_then = chance.random() < 0.5
    fails = chance.random() < 0.4
    # A rank that raises between exchanges is missed in collectives, as it is by those of torch.
    kinds = ["all", "decided", "told", "wait", "ended", *(["together"] if in_then or not fails else [])]
    does = [chance.choice(kinds) for _ in range(chance.randint(0, 4))]
    places = [at for at, what in enumerate(does) if what in ("decided", "told")] if in_then else range(len(does) + 1)
    if not (fails and places):
        return Plan(does)
    return Plan(does, chance.randrange(1 if in_then else 0, size), chance.choice(places), in_then)


@dataclass
class Draw:
    """A few calls of a few ranks, all from one seed."""

    seed: int
    size: int = field(init=False)
    plans: list[Plan] = field(init=False)

    def __post_init__(self) -> None:
        chance = random.Random(self.seed)
        self.size = chance.randint(2, 4)
        self.plans = [*[plan_of(chance, self.size) for _ in range(5)], Plan(["all"]), Plan(["all", "decided"])]
        self.barriers = [[threading.Barrier(self.size) for _ in plan.does] for plan in self.plans]

    def run(self, team: Gang) -> list[Any]:
        """Make all calls at one rank. Returns what each has given or raised."""
        chance = random.Random(f"{self.seed} {team.rank}")
        found: list[Any] = []
        for number, plan in enumerate(self.plans):
            try:
                with team.call("step"):
                    found.append(self._call(team, chance, number, plan))
            except (ClusterError, ValueError) as error:
                found[number:] = [error]
        return found

    def _call(self, team: Gang, chance: random.Random, number: int, plan: Plan) -> list[Any]:
        is_culprit = team.rank == plan.culprit
        given: list[Any] = []
        for at, what in enumerate([*plan.does, "nothing"]):
            if chance.random() < 0.5:
                time.sleep(chance.random() * MOST_SECONDS)
            if is_culprit and at == plan.at and not plan.in_then:
                raise ValueError("spilt coffee")

            def then(_: int, fails: bool = is_culprit and at == plan.at) -> None:
                if fails:
                    raise ValueError("spilt coffee")

            mine = 100 * number + 10 * at + team.rank
            match what:
                case "all":
                    given.append(team.all(VALUES, mine))
                case "decided":
                    given.append(team.decided(SUM, sum, mine, then))
                case "told":
                    given.append(team.decided(TOLD, partial(self._told, mine), then=then))
                case "wait" | "ended":
                    given.append(self._wait(team, chance, mine, is_ended=what == "ended"))
                case "together":
                    with team.collectives():
                        self.barriers[number][at].wait(HANGS_AFTER)
        return given

    def _told(self, mine: int, _: object) -> int:
        return mine

    def _wait(self, team: Gang, chance: random.Random, mine: int, *, is_ended: bool) -> list[int]:
        """Wait for some time, as for an average. If rank 0 ends the wait, the others wait until then."""
        over: Future[None] = Future()

        def end() -> None:
            if over.set_running_or_notify_cancel():
                over.set_result(None)

        timer = threading.Timer(chance.random() * MOST_SECONDS, end)
        if team.rank == 0 and is_ended:
            timer.start()
        with team.ends(lambda: over) as ended:
            wait([ended], HANGS_AFTER if team.rank and is_ended else chance.random() * MOST_SECONDS)
            return team.all(VALUES, mine)

    def expected(self, number: int) -> list[Any]:
        """What a call gives that succeeds."""
        given: list[Any] = []
        for at, what in enumerate(self.plans[number].does):
            of_all = [100 * number + 10 * at + rank for rank in range(self.size)]
            match what:
                case "all" | "wait" | "ended":
                    given.append(of_all)
                case "decided":
                    given.append(sum(of_all))
                case "told":
                    given.append(of_all[0])
        return given


def check(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = Draw(seed)
    # Rank 0 says very often what it waits for; or never, so that this ends no wait that would not end by itself.
    monkeypatch.setattr(calls, "LATE_SECONDS", 0.0 if seed % 2 else 600.0)
    with gang_of(draw.size) as gang:
        found = at_ranks(gang, draw.run)
    for number, plan in enumerate(draw.plans):
        others = [found[rank][number] for rank in range(draw.size) if rank != plan.culprit]
        has_failed = isinstance(others[0], ClusterError)
        assert all(isinstance(each, ClusterError) == has_failed for each in others), (seed, number, found)
        if plan.culprit == 0:
            assert has_failed, (seed, number, found)
        assert has_failed or all(each == draw.expected(number) for each in others), (seed, number, found)
        if plan.culprit is not None and not has_failed:
            assert isinstance(found[plan.culprit][number], ValueError), (seed, number, found)
    assert all(each[-1] == draw.expected(len(draw.plans) - 1) for each in found), (seed, found)


@pytest.mark.parametrize(
    "seeds", [range(30), pytest.param(range(30, 1000), marks=only_in_soak)], ids=["30 draws", "1000 draws"]
)
def test_all_ranks_have_the_same_decisions(seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in seeds:
        check(seed, monkeypatch)

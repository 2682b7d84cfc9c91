"""The schedule of faults of `benchmarks.goodput`, and from traces to its figures: pure functions of their arguments."""

from __future__ import annotations

import random
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

Line = Mapping[str, Any]  # of a trace

LOST = ("killed", "left out", "late", "epoch repeated")  # why samples were computed and are in no step
SLOWED = 4.0  # a slow replica's steps take so many times as long


@dataclass(frozen=True)
class Kind:
    """A kind of faults.

    Attributes:
        act: what is done to the replica.
        seconds: for how long; 0: it has a successor at once.
        every: seconds between two such faults.
    """

    act: Literal["kill", "stop", "slow", "cut"]
    seconds: float
    every: float

    @property
    def missing(self) -> float:
        """The share of its speed that the replica lacks meanwhile. A replica that is cut off computes, but nobody can
        use it before it is back."""
        return 1 - 1 / SLOWED if self.act == "slow" else 1.0


KINDS = {
    "kill": Kind("kill", 0.0, 6.0),
    "stop-3": Kind("stop", 3.0, 6.0),
    "stop-10": Kind("stop", 10.0, 12.0),
    "stop-30": Kind("stop", 30.0, 15.0),
    "slow": Kind("slow", 10.0, 12.0),
    "cut": Kind("cut", 10.0, 12.0),
}
ALL_EVERY = 6.0  # seconds between two faults of all kinds


@dataclass(frozen=True)
class Fault:
    """What happens to a replica; `at` in seconds since the first common step."""

    at: float
    kind: Kind
    replica: int


def schedule(kinds: Sequence[Kind], replicas: int, seconds: float, every: float, seed: int) -> list[Fault]:
    """A fault each `every` seconds, for so many seconds, at a random time within them; kinds and replicas are drawn. A
    replica suffers one fault at a time."""
    rng = random.Random(seed)
    faults: list[Fault] = []
    over = [0.0] * replicas  # when each replica's last fault ends
    for number in range(int(seconds / every)):
        at = (number + rng.random()) * every
        kind = rng.choice(kinds)
        free = [replica for replica in range(replicas) if over[replica] <= at]
        if free:
            replica = rng.choice(free)
            over[replica] = at + kind.seconds
            faults.append(Fault(at, kind, replica))
    return faults


def share_there(faults: Iterable[Fault], replicas: int, seconds: float) -> float:
    """The share of the replicas' time in which they ran. One that is killed has a successor at once: what its start
    takes is not taken off."""
    missing = sum(fault.kind.missing * min(fault.kind.seconds, seconds - fault.at) for fault in faults)
    return 1 - missing / (replicas * seconds)


@dataclass(frozen=True)
class Life:
    """A process of a replica: the successors of one that was killed are its later lives."""

    replica: int
    number: int
    forked: float  # Unix seconds


@dataclass(frozen=True)
class Goodput:
    """What one run has kept.

    Attributes:
        of_ideal: samples in committed steps, of what all replicas would have computed without any fault or overhead. Of
            a step that ends after the run, the share of its time that is in the run counts.
        lost: by reason, samples that were computed and are in no step, of the same.
        longest, median: seconds between two committed steps.
        newcomers: for each replica that was started in the run, seconds from its fork to the first step with samples of
            its own; of those that have made one.
        started: how many were started in the run.
        unlike: committed steps after which their members held unlike parameters.
        forked: committed steps beside which others were made, by replicas that are on their own.
        steps: committed steps.
        curve: for each committed step since the start, samples so far and the mean loss.
    """

    of_ideal: float
    lost: dict[str, float]
    longest: float
    median: float | None
    newcomers: list[float]
    started: int
    unlike: int
    forked: int
    steps: int
    curve: list[tuple[float, float]] = field(repr=False)


def measure(lines: Iterable[Line], lives: Iterable[Life], began: float, seconds: float, per_second: float) -> Goodput:
    """The figures of one run.

    Args:
        lines: of all traces; each also has `life`, the number of the life that wrote it.
        lives: of all replicas.
        began: when the measured time began, and `seconds`: how long it took.
        per_second: samples that all replicas together would compute.
    """
    ended, ideal = began + seconds, per_second * seconds
    lost = dict.fromkeys(LOST, 0.0)
    steps: list[Line] = []
    firsts: dict[tuple[str, int], float] = {}
    for line in sorted(lines, key=lambda line: line["time"]):
        if line["event"] == "step":
            steps.append(line)
            if line["own"]:
                firsts.setdefault((line["replica"], line["life"]), line["time"])
        elif line["event"] == "lost" and began <= line["time"] < ended:
            lost[line["reason"]] += line["samples"]
    made = [step for step in committed(steps) if step.time > began]
    kept = [step for step in made if step.time <= ended]
    last = made[len(kept)] if len(made) > len(kept) else None  # it ends after the run
    lost["left out"] += sum(step.beside for step in kept)
    times = [began, *(step.time for step in kept), last.time if last else ended]
    gaps = [after - before for before, after in pairwise(times)]
    samples = sum(step.samples for step in kept)
    if last:
        samples += last.samples * (ended - times[-2]) / gaps[-1]
    started = [life for life in lives if began <= life.forked < ended]
    waits = [firsts.get((f"r{life.replica}", life.number), float("inf")) - life.forked for life in started]
    return Goodput(
        of_ideal=samples / ideal,
        lost={reason: samples / ideal for reason, samples in lost.items()},
        longest=max(gaps),
        median=statistics.median(gaps[:-1]) if len(gaps) > 1 else None,
        newcomers=[wait for wait in waits if wait < float("inf")],
        started=len(started),
        unlike=sum(step.is_unlike for step in kept),
        forked=sum(step.beside > 0 for step in kept),
        steps=len(kept),
        curve=curve(committed(steps)),
    )


@dataclass(frozen=True)
class Committed:
    """A step that replicas have made together.

    Attributes:
        time: when the first of them had made it.
        samples: of all of them.
        loss: the mean of theirs.
        is_unlike: whether they held unlike parameters after it. One that has inner steps of its own beyond the common
            state is not compared: it has no digest.
        beside: the samples of steps that others have made in its place.
    """

    time: float
    samples: float
    loss: float
    is_unlike: bool
    beside: float


def committed(steps: Iterable[Line]) -> list[Committed]:
    """The steps of the run, in order. A step has the samples that its members say are in it. Where the run has forked,
    the step with more samples counts."""
    epochs: dict[int, dict[str, list[Line]]] = defaultdict(lambda: defaultdict(list))
    for line in steps:
        epochs[line["epoch"]][line["tip"]].append(line)
    found = []
    for _, sides in sorted(epochs.items()):
        members = max(sides.values(), key=own_samples)
        if samples := own_samples(members):
            loss = sum(line["own"] * line["loss"] for line in members if line["own"]) / samples
            beside = sum(map(own_samples, sides.values())) - samples
            is_unlike = len({line["digest"] for line in members if line["digest"]}) > 1
            found.append(Committed(min(line["time"] for line in members), samples, loss, is_unlike, beside))
    return sorted(found, key=lambda step: step.time)


def own_samples(members: Iterable[Line]) -> float:
    """The samples of those members."""
    return float(sum(line["own"] for line in members))


def curve(steps: Iterable[Committed]) -> list[tuple[float, float]]:
    """The samples up to each step, and its loss."""
    points, total = [], 0.0
    for step in steps:
        total += step.samples
        points.append((total, step.loss))
    return points


def loss_at(points: Iterable[tuple[float, float]], samples: float) -> float | None:
    """The mean loss of the steps in the last quarter of so many samples; None if there is none."""
    losses = [loss for total, loss in points if 0.75 * samples < total <= samples]
    return statistics.fmean(losses) if losses else None


def loss_beside(points: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]]) -> float | None:
    """The loss of one run, of another's after as many samples: as many as both have. None if they have too few."""
    samples = min(points[-1][0], others[-1][0]) if points and others else 0.0
    mine, theirs = loss_at(points, samples), loss_at(others, samples)
    return mine / theirs if mine is not None and theirs else None

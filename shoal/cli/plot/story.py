"""What the lines of traces tell: what each replica did when, and what the run came to."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from math import inf
from statistics import fmean

from shoal.health.trace import TraceEvent, TraceLine


class Doing(Enum):
    """What a replica does. Where spans overlap, the later one of this list counts: a replica that is stopped in a round
    is stopped."""

    COMPUTING = "computing"
    STARTING = "starting"
    WAITING = "waiting"
    ROUND = "in a round"
    DOWNLOADING = "downloading"
    STOPPED = "stopped"
    DEAD = "dead"


SPANS = {
    TraceEvent.WAITING: Doing.WAITING,
    TraceEvent.ROUND: Doing.ROUND,
    TraceEvent.DOWNLOADING: Doing.DOWNLOADING,
    TraceEvent.STOPPED: Doing.STOPPED,
    TraceEvent.DEAD: Doing.DEAD,
}
Spans = dict[Doing, list[tuple[float, float]]]
"""What one replica did, from when to when."""


@dataclass(frozen=True, slots=True)
class Story:
    """What the replicas of a run did. Times are those of the traces.

    Attributes:
        begin, end: the first and the last time that a trace tells of.
        replicas: what each replica did, by its name; in the order of the names, where r2 is before r10.
        committed: when each step was committed, and how many samples all steps had by then.
        losses: the mean loss of the replicas that told one for a step, after so many samples.
        lost: how many samples were computed and are in no step, by the reason.
    """

    begin: float
    end: float
    replicas: dict[str, Spans]
    committed: list[tuple[float, float]]
    losses: list[tuple[float, float]]
    lost: dict[str, float]


def story_of(lines: Iterable[TraceLine]) -> Story:
    """What these lines tell, which may be of many replicas and in any order.

    Raises:
        ValueError: if there are none.
    """
    by_replica = defaultdict[str, list[TraceLine]](list)
    steps: dict[int, TraceLine] = {}  # by the epoch, as the first replica has told of it
    losses = defaultdict[int, list[float]](list)
    lost = defaultdict[str, float](float)
    begin, end = inf, -inf
    for line in lines:
        by_replica[line.replica].append(line)
        begin, end = min(begin, line.time - line.seconds), max(end, line.time)
        if line.event is TraceEvent.STEP:
            if line.epoch not in steps or line.time < steps[line.epoch].time:
                steps[line.epoch] = line
            if line.loss is not None:
                losses[line.epoch].append(line.loss)
        elif line.event is TraceEvent.LOST:
            lost[line.reason] += line.samples
    if not by_replica:
        raise ValueError("there are no events in these traces")
    total, committed, by_samples = 0.0, [], []
    for epoch, step in sorted(steps.items()):
        total += step.samples
        committed.append((step.time, total))
        if epoch in losses:
            by_samples.append((total, fmean(losses[epoch])))
    committed.sort()
    # A replica that has written nothing during two epochs of the others is not in the run.
    there_at = committed[-2][0] if len(committed) > 1 else -inf
    replicas = {name: _spans(by_replica[name], there_at, end) for name in sorted(by_replica, key=_in_order)}
    return Story(begin, end, replicas, committed, by_samples, dict(lost))


def _in_order(name: str) -> str:
    return re.sub(r"[0-9]+", lambda number: number[0].zfill(20), name)


def _spans(lines: list[TraceLine], there_at: float, end: float) -> Spans:
    """What a replica did. Between the start of its optimizer and its last line it computes, where nothing else is
    told.

    Args:
        lines: its lines.
        there_at: it is dead at the end if it has written nothing since, not even that it was shut down.
        end: the end of the picture.
    """
    spans: Spans = {doing: [] for doing in Doing}
    began: float | None = None  # the present life
    last = -inf
    for line in sorted(lines, key=_at):
        since = line.time - line.seconds
        if line.event is TraceEvent.START:
            since = max(since, last)
            if began is not None:  # it has not written that it was shut down
                spans[Doing.COMPUTING].append((began, last))
                spans[Doing.DEAD].append((last, since))
            spans[Doing.STARTING].append((since, line.time))
            began = line.time
        elif line.event is TraceEvent.END:
            spans[Doing.COMPUTING].append((line.time if began is None else began, line.time))
            began = None
        else:
            if line.event in SPANS:
                spans[SPANS[line.event]].append((since, line.time))
            if began is None and line.event is not TraceEvent.DEAD:
                began = since
        last = max(last, _at(line))
    if began is not None:
        spans[Doing.COMPUTING].append((began, last))
        if last < there_at:
            spans[Doing.DEAD].append((last, end))
    return spans


def _at(line: TraceLine) -> float:
    """When a life has come to this line: a replica that is killed has lived until then."""
    return line.time - line.seconds if line.event is TraceEvent.DEAD else line.time

"""What trainers have said in a time of chaos, held against what is promised."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

FAULTS = ("digest", "quit", "silent about forks")  # promises that a trainer can be told to break
LEAST_SHARE = 0.7  # of the epochs that the run would have made undisturbed
LONGEST_PAUSE = 30.0  # seconds without an epoch
GROWN_AFTER = 60.0  # seconds that a peer takes to get all that it will hold
LONG_LIFE = 120.0  # seconds after that, for which what it holds must be flat
# What may be held more in the last third of that time than in the first: (of the first, in addition). Connections come
# and go with the peers, each with a lane, which has two threads.
ALLOWED = {"threads": (1.0, 12), "descriptors": (1.0, 24), "rss": (1.05, 16 << 20)}


@dataclass
class Life:
    """A trainer and what it has said.

    Attributes:
        name: of its logs.
        peer: the text form of its peer id; "" until it is known.
        began, ended: when it was ready and when it was no more, in seconds; 0 if it was never.
        asleep: from when until when it was stopped.
        lines: what it said, each with `event` and `time`.
        quit: why it ended, if nobody ended it.
    """

    name: str
    peer: str = ""
    began: float = 0.0
    ended: float = 0.0
    asleep: list[tuple[float, float]] = field(default_factory=list)
    lines: list[dict[str, Any]] = field(default_factory=list)
    quit: str = ""

    def of(self, *events: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] in events]


@dataclass
class Report:
    """What came of it. Times are in seconds.

    Attributes:
        epochs: how many follow one another up to the last state.
        usual: the median time of one.
        share: `epochs` of those that would have been made in the same time at `usual`.
        stood: the time beyond three times `usual` in all pauses.
        pause: the longest time without an epoch.
        slept_in: the longest time in which a trainer that was awake got to no new state, and which.
        downloads: the most downloads of one trainer.
        growth: of each trainer that lived long, what it held more per minute.
        compared: tips whose states at least two trainers have told of.
        forks: the times that a trainer left a state that the other did not follow from.
        unclear: the times that this is not known, since who made the states was killed.
        doubtful: reports of forks whose sides are none, as far as is known.
        broken: each promise that was not kept, in words.
    """

    epochs: int = 0
    usual: float = 0.0
    share: float = 0.0
    stood: float = 0.0
    pause: float = 0.0
    slept_in: tuple[float, str] = (0.0, "")
    downloads: int = 0
    growth: dict[str, dict[str, float]] = field(default_factory=dict)
    compared: int = 0
    forks: int = 0
    unclear: int = 0
    doubtful: int = 0
    broken: list[str] = field(default_factory=list)

    def json(self) -> dict[str, Any]:
        return asdict(self)


class Tree:
    """Which state was made from which, as far as the trainers have told."""

    def __init__(self, lives: list[Life]) -> None:
        self.parents: dict[str, str] = {}
        for life in lives:
            held = ""
            for line in life.of("start", "state", "epoch", "download"):
                if line["event"] == "epoch" and held and held != line["tip"]:
                    self.parents.setdefault(line["tip"], held)
                held = line["tip"]

    def line(self, tip: str) -> Iterator[str]:
        """A state and those before it, as far as is known."""
        while True:
            yield tip
            if tip not in self.parents:
                return
            tip = self.parents[tip]

    def follows(self, tip: str, earlier: str) -> bool | None:
        """Whether `tip` is made from `earlier`; None if that is not known."""
        last = tip
        for last in self.line(tip):
            if last == earlier:
                return True
            if epoch_of(last) <= epoch_of(earlier):
                return False
        return None


def epoch_of(tip: str) -> int:
    return int(tip.split(":")[0])


def judge(lives: list[Life], began: float, stopped: float, ended: float, least_share: float = LEAST_SHARE) -> Report:
    """Hold what was said against what is promised: from `began` to `stopped` trainers were killed, stopped and started,
    from then to `ended` none."""
    report, tree = Report(), Tree(lives)
    report.broken += [f"{life.name} ended by itself: {life.quit}" for life in lives if life.quit]
    last = _meet(report, lives, stopped)
    _pace(report, lives, tree, last, (began, ended), least_share)
    _sleeps(report, lives, ended)
    report.downloads = max((len(life.of("download")) for life in lives), default=0)
    _states(report, lives)
    _forks(report, lives, tree)
    for life in lives:
        _growth(report, life)
    return report


def _meet(report: Report, lives: list[Life], since: float) -> str:
    """The last state that all hold who live in the end."""
    living = [life for life in lives if life.began and not life.ended]
    held = [{line["tip"] for line in life.of("state") if line["time"] > since} for life in living]
    common = set.intersection(*held) if held else set()
    if not common:
        last = {life.name: line["tip"][:24] for life in living for line in life.of("state")}
        report.broken.append(f"those who live in the end have not met at one state, but are at {last}")
        common = {line["tip"] for life in living for line in life.of("state")}
    return max(common, key=epoch_of, default="")


def _pace(
    report: Report, lives: list[Life], tree: Tree, last: str, span: tuple[float, float], least_share: float
) -> None:
    first: dict[str, float] = {}
    for life in lives:
        for line in life.of("epoch"):
            first[line["tip"]] = min(line["time"], first.get(line["tip"], line["time"]))
    tips = [tip for tip in tree.line(last) if tip in first] if last else []
    if tips and epoch_of(tips[-1]) > 1:
        # Whoever made the states before was killed before it could say so: all epochs count, of whatever side.
        tips = list({epoch_of(tip): tip for tip in sorted(first, key=lambda tip: -first[tip])}.values())
    times = sorted(first[tip] for tip in tips if span[0] <= first[tip] <= span[1])
    if len(times) < 3:
        report.broken.append(f"the run made {len(times)} epochs")
        report.pause = span[1] - span[0]
        return
    gaps = [later - earlier for earlier, later in pairwise([*times, span[1]])]
    report.epochs, report.usual = len(times), statistics.median(gaps)
    report.share = min(1.0, len(gaps) * report.usual / (span[1] - times[0]))
    report.stood = sum(max(0.0, gap - 3 * report.usual) for gap in gaps)
    report.pause = max(gaps)
    if report.share < least_share:
        report.broken.append(f"the run made {report.share:.0%} of its epochs; at least {least_share:.0%} are promised")
    if report.pause > LONGEST_PAUSE:
        report.broken.append(f"the run stood for {report.pause:.1f} s; at most {LONGEST_PAUSE:g} s are promised")


def _sleeps(report: Report, lives: list[Life], ended: float) -> None:
    for life in lives:
        if not life.began:
            continue
        times = [life.began, *(line["time"] for line in life.of("state")), life.ended or ended]
        for earlier, later in pairwise(sorted(times)):
            asleep = sum(max(0.0, min(later, until) - max(earlier, since)) for since, until in life.asleep)
            report.slept_in = max(report.slept_in, (later - earlier - asleep, life.name))


def _states(report: Report, lives: list[Life]) -> None:
    """All who tell of one tip must tell of one state, those of the reports and those of the parameters alike."""
    kinds: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for life in lives:
        for line in life.of("epoch", "download", "state"):
            kind = "parameters" if line["event"] == "state" else "reports"
            kinds[kind, line["tip"]][line["digest"]].append(life.name)
    told: set[str] = set()
    for (kind, tip), digests in kinds.items():
        if len({name for names in digests.values() for name in names}) > 1:
            told.add(tip)
        if len(digests) > 1:
            who = "; ".join(f"{digest[:8]} at {', '.join(sorted(set(names)))}" for digest, names in digests.items())
            report.broken.append(f"{kind} of tip {tip[:24]} differ: {who}")
    report.compared = len(told)


def _forks(report: Report, lives: list[Life], tree: Tree) -> None:
    """Each fork must be told of by who leaves its side, and by one of the other side."""
    told = [(life, line) for life in lives for line in life.of("fork")]
    # Of two sides neither follows from the other.
    report.doubtful = sum(
        tree.follows(fork["tip"], fork["other_tip"]) is not False
        or tree.follows(fork["other_tip"], fork["tip"]) is not False
        for _, fork in told
    )
    for life in lives:
        held = ""
        for line in life.of("start", "state", "epoch", "download"):
            left, held = held, line["tip"]
            if line["event"] != "download" or not left or not epoch_of(left) or left == held:
                continue
            follows = tree.follows(held, left)
            report.unclear += follows is None
            mine = [fork for who, fork in told if who is life and not fork["stays"] and fork["tip"] == left]
            if follows is not False:
                continue
            report.forks += 1
            where = f"{life.name} left {left[:24]} for {held[:24]}"
            if not mine:
                report.broken.append(f"a fork was not reported by who left its side: {where}")
            # Whoever stays tells once of a side, when it hears of it: at `left`, or at a state of that side before.
            side = {tip for tip in tree.line(left) if not tree.follows(held, tip)}
            theirs = [fork for who, fork in told if who is not life and fork["stays"] and fork["other_tip"] in side]
            if not theirs:
                report.broken.append(f"a fork was not reported by the side that stays: {where}")


def _growth(report: Report, life: Life) -> None:
    """What a trainer that lived long held more in the end."""
    lines = [line for line in life.of("held") if line["time"] > life.began + GROWN_AFTER]
    if len(lines) < 6 or lines[-1]["time"] - lines[0]["time"] < LONG_LIFE:
        return
    minutes, third = [line["time"] / 60 for line in lines], len(lines) // 3
    report.growth[life.name] = {"minutes": minutes[-1] - minutes[0]}
    for what, (times, more) in ALLOWED.items():
        values = [float(line[what]) for line in lines]
        report.growth[life.name][what] = statistics.linear_regression(minutes, values).slope
        before, after = statistics.median(values[:third]), statistics.median(values[-third:])
        if after > times * before + more:
            report.broken.append(f"{life.name} held {before:g} {what}, and later {after:g}")


def table(report: Report) -> str:
    """As a table in Markdown, with a line for each promise that was not kept."""
    pause, who = report.slept_in
    rows = [
        ("epochs made / due at the usual pace", f"{report.share:.1%} ({report.epochs}, usually {report.usual:.2f} s)"),
        ("the run stood, s", f"{report.stood:.1f}"),
        ("longest pause, s", f"{report.pause:.1f}"),
        ("longest pause of one trainer, s", f"{pause:.1f} ({who})"),
        ("most downloads of one trainer", str(report.downloads)),
        ("tips compared", str(report.compared)),
        ("forks; unclear; told, and perhaps none", f"{report.forks}; {report.unclear}; {report.doubtful}"),
    ]
    for name, growth in report.growth.items():
        slopes = f"{growth['rss'] / (1 << 20):+.2f} MiB, {growth['descriptors']:+.2f}, {growth['threads']:+.2f}"
        rows.append((f"{name}: memory, descriptors, threads per minute", f"{slopes} in {growth['minutes']:.0f} min"))
    rows += [("BROKEN", text) for text in report.broken]
    return "\n".join(f"| {key} | {value} |" for key, value in (("what", "seen"), ("---", "---"), *rows))

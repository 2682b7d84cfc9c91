"""Averages one vector among 4 peers on loopback: Shoal, hivemind, Shoal of before and sealed sockets, in turn.

    python -m benchmarks.averaging --hivemind-python .venv-hivemind/bin/python        (or: make bench)
    python -m benchmarks.averaging --before ../before --codecs none --rounds 15 --busy all

All peers of all sides are alive and idle except in their turn; what that costs (idle CPU) is measured and reported.
Each round's vectors are filled before it and hashed after it, outside the measured time. Memory is measured before,
with one side alive at a time, because its peers would otherwise share pages with another's.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import report
from benchmarks.contenders import Busy, Contender, Result, compare, contenders
from benchmarks.processes import ROOT, WorkerError, add_before, end_on_signals, tree_with
from benchmarks.report import number
from benchmarks.sealed import CHUNK
from benchmarks.swarm import PEERS, Memory, Round, Swarm
from benchmarks.workers.shoal_averager import CODECS

ERRORS = {"none": 0.05, "float16": 0.05}  # largest of an element of about 5; float16 rounds them by 0.004
DEFAULT_CODECS = ("none", "float16", "uniform8bit")
ERROR = 0.5  # of the other codecs, Shoal's
SIDES = ("sealed", "codec", "shoal", "before", "hivemind")
BUSY_PEERS: dict[Busy, Sequence[int]] = {"": (), "one": (0,), "all": range(PEERS)}
WARM_UPS = 2
STARTS = 3  # of a swarm that hangs
RESULTS = Path(__file__).resolve().parent / "results"


class Bench:
    """Starts swarms and runs them in turn; `elements` are the float32 of the vector, `chunk` those that the sealed
    sockets send at a time."""

    def __init__(self, hivemind_python: str | None, before: Path | None, elements: int, chunk: int, logs: Path) -> None:
        self._pythons = {"hivemind": hivemind_python or ""}
        self._trees = {"before": tree_with(before, logs)} if before else {}
        self._elements, self._chunk = elements, chunk
        self._logs = logs

    def _make(self, contender: Contender, codec: str) -> Swarm:
        """The peers of a contender."""
        side, elements = contender.side, self._elements
        match side:
            case "sealed":
                elements = sent_elements(codec, elements)
                arguments = [str(self._chunk), "all-reduce"]
            case "codec":
                arguments = [codec, str(PEERS)]
            case _:
                arguments = [codec, *contender.arguments]
        python, tree = self._pythons.get(side, sys.executable), self._trees.get(side, ROOT)
        module = f"benchmarks.workers.{'shoal' if side == 'before' else side}_averager"
        return Swarm(python, module, elements, arguments, self._logs, tree)

    def _start(self, stack: contextlib.ExitStack, contender: Contender, codec: str) -> tuple[Swarm, float]:
        """A swarm that has averaged a few times, and its largest error; it lives as long as the stack. One that hangs
        (hivemind at times does) is started anew."""
        for attempt in range(1, STARTS + 1):
            with contextlib.ExitStack() as trial:
                swarm = trial.enter_context(self._make(contender, codec))
                try:
                    swarm.warm_up(WARM_UPS)
                    # hivemind's 8 bit change elements by up to 2.3: reported, not judged.
                    is_judged = contender.side != "hivemind" or codec in ERRORS
                    error = swarm.check(ERRORS.get(codec, ERROR) if is_judged else math.inf)
                except WorkerError as hang:
                    if attempt == STARTS:
                        raise
                    say(f"{contender.name} is started anew: {hang}")
                    continue
                stack.push(trial.pop_all())
                return swarm, error
        raise AssertionError("unreachable")

    def _memory(self, contender: Contender, codec: str) -> Memory:
        for _ in range(STARTS):
            with contextlib.ExitStack() as alone:
                swarm, _ = self._start(alone, contender, codec)
                try:
                    return swarm.memory()
                except WorkerError as hang:
                    say(f"{contender.name} is started anew: {hang}")
                    swarm.kill()
        raise WorkerError(f"{contender.name} hangs in every round whose memory is measured")

    def _round(
        self,
        stack: contextlib.ExitStack,
        started: dict[tuple[str, ...], tuple[Swarm, float]],
        contender: Contender,
        codec: str,
    ) -> Round:
        """One round. If a peer hangs in it, it has failed, and other peers take the swarm's place."""
        try:
            return started[contender.swarm][0].round(BUSY_PEERS[contender.busy])
        except WorkerError as hang:
            started[contender.swarm][0].kill()
            started[contender.swarm] = self._start(stack, contender, codec)
            return Round.failed(str(hang).splitlines()[0])

    def run(self, taking_part: Sequence[Contender], codec: str, rounds: int) -> list[Result]:
        """Measures all contenders with one codec."""
        kinds = {contender.swarm: contender for contender in taking_part}
        memory: dict[tuple[str, ...], Memory] = {}
        for kind, contender in kinds.items():
            say(f"{codec}: memory of {' '.join(kind)}")
            memory[kind] = self._memory(contender, codec)
        with contextlib.ExitStack() as together:
            say(f"{codec}: starting all peers")
            started = {kind: self._start(together, contender, codec) for kind, contender in kinds.items()}
            idle = {kind: swarm.idle_cpu(seconds=3.0) for kind, (swarm, _) in started.items()}
            measured: dict[Contender, list[Round]] = {contender: [] for contender in taking_part}
            for index in range(1, rounds + 1):
                for contender in taking_part:
                    a_round = self._round(together, started, contender, codec)
                    measured[contender].append(a_round)
                    outcome = a_round.failure or f"{a_round.seconds:.3f} s"
                    say(f"{codec}: round {index} of {rounds}, {contender.name}: {outcome}")
        return [
            Result(codec, who, measured[who], memory[who.swarm], idle[who.swarm], started[who.swarm][1])
            for who in taking_part
        ]


def sent_elements(codec: str, elements: int) -> int:
    """So many float32 have as many bytes as the vector has on the wire."""
    chunks = (min(CHUNK, elements - start) for start in range(0, elements, CHUNK))
    return -(-sum(CODECS[codec].encoded_nbytes(chunk, torch.float32) for chunk in chunks) // 4)


def say(progress: str) -> None:
    """Progress, apart from the report."""
    print(progress, file=sys.stderr, flush=True)


def time_table(results: Iterable[Result]) -> str:
    """Where the time of a round goes."""
    head = ["codec: who", "round s", "least - most", "matchmaking s", "all-reduce s", "CPU s", "failed", "identical"]
    rows = []
    for result in results:
        good = result.good_rounds
        seconds = [a_round.seconds for a_round in good]
        rows.append(
            [
                f"{result.codec}: {result.contender.name}",
                number(result.median("seconds"), 3),
                f"{min(seconds):.3f} - {max(seconds):.3f}" if seconds else "-",
                number(result.median("matchmaking"), 3),
                number(result.median("allreduce"), 3),
                number(result.median("cpu_seconds"), 3),
                f"{len(result.rounds) - len(good)} of {len(result.rounds)}",
                f"{sum(a_round.identical for a_round in good)} of {len(good)}",
            ]
        )
    return report.table(head, rows)


def resource_table(results: Iterable[Result]) -> str:
    """What the peers hold and move; the same whether a trainer is busy or not."""
    head = ["codec: who", "idle PSS MB", "peak PSS MB", "sent MB", "idle CPU s/s", "largest error"]
    rows = []
    for result in results:
        if not result.contender.busy:
            sent = result.median("bytes_sent")
            rows.append(
                [
                    f"{result.codec}: {result.contender.name}",
                    number(result.memory.idle / PEERS / 1e6, 0),
                    number(result.memory.peak / PEERS / 1e6, 0),
                    number(None if sent is None else sent / PEERS / 1e6, 1),
                    number(result.idle_cpu / PEERS, 3),
                    f"{result.error:.1e}",
                ]
            )
    return report.table(head, rows)


TIME_NOTE = f"""\
Medians of the rounds that did not fail; times are of the slowest of {PEERS} peers, CPU of all peers and all
that they started (hivemind: two servers and a Go daemon each). *Busy*: one or all trainers run pure Python all the
while; their loops are in the CPU column. *Identical*: rounds after which all peers held the same bits. *Sealed
sockets*: the measure, blocking sockets in threads with AES-256-GCM (`benchmarks/sealed.py`); with a codec, for as many
bytes as it sends. *The codec alone*: what all peers encode, decode and add up in a round, at the same time, each in one
thread. hivemind has `min_matchmaking_time=2`; *size known* means `target_group_size=4`."""
FIGURES = "figure (median of the ratios of rounds side by side)"
RESOURCE_NOTE = """\
Per peer, with all that it started. PSS is measured with only this side alive, idle after a round and as the largest of
samples within one; the vector itself is in it. *Largest error*: of an element, against the exact mean."""


def main() -> None:
    """Parses the command line, measures, reports; exit code 1 when Shoal failed a round or its peers disagreed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hivemind-python", metavar="PATH", help="interpreter of a venv with hivemind 1.1.12")
    parser.add_argument("--rounds", type=int, default=7, help="measured rounds of each kind (default: 7)")
    parser.add_argument("--elements", type=int, default=25_000_000, help="float32 in the vector (default: 25 million)")
    parser.add_argument("--chunk", type=int, default=CHUNK, help="float32 that sealed sockets send at a time")
    parser.add_argument("--busy", choices=("one", "all"), default="one", help="trainers in busy rounds (default: one)")
    parser.add_argument(
        "--sides", nargs="+", choices=SIDES, help="default: all of which the interpreter or tree is given"
    )
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=DEFAULT_CODECS, help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for averaging.md and averaging.json")
    add_before(parser)
    options = parser.parse_args()
    given = {"hivemind": options.hivemind_python, "before": options.before}
    sides = options.sides or [side for side in SIDES if given.get(side, True)]
    if "hivemind" in sides and not options.hivemind_python:
        parser.error("hivemind runs in a venv of its own: name its interpreter with --hivemind-python")
    if "before" in sides and not options.before:
        parser.error("name the worktree of before with --before")

    end_on_signals()
    facts = report.environment()
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as logs:
        bench = Bench(options.hivemind_python, options.before, options.elements, options.chunk, Path(logs))
        for codec in options.codecs:
            results += bench.run(contenders(sides, codec, options.busy), codec, options.rounds)

    figures = [figure for codec in options.codecs for figure in compare(codec, options.elements, options.busy, results)]
    parts = [
        f"# Averaging {options.elements / 1e6:g} million float32 among {PEERS} peers on loopback",
        report.describe(facts | {"rounds": options.rounds}),
        time_table(results),
        TIME_NOTE,
        report.figure_table(figures, FIGURES),
        resource_table(results),
        RESOURCE_NOTE,
    ]
    data = {
        "environment": facts,
        "options": {"elements": options.elements, "chunk": options.chunk, "rounds": options.rounds, "peers": PEERS},
        "results": [asdict(result) for result in results],
        "figures": [asdict(figure) | {"met": figure.met} for figure in figures],
    }
    report.publish(options.out, "averaging", "\n\n".join(parts), data)
    ours = [a_round for result in results if result.contender.side == "shoal" for a_round in result.rounds]
    sys.exit(0 if all(a_round.identical and not a_round.failure for a_round in ours) else 1)


if __name__ == "__main__":
    main()

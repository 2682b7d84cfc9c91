"""Averages a vector among 4 peers, of which one has a narrower way out: spans all alike, and spans by bandwidth.

    python -m benchmarks.load_balancing

All four are throttled by token buckets (`workers/throttled_averager.py`), so that the links and not this machine's
cores are what a round waits for. The optimum is the time that the links alone need: the bytes that the slowest peer has
to send, by the best division there is (`shoal.swarm.protocol.plan`), over its bandwidth.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import report
from benchmarks.processes import Worker, end_on_signals
from shoal.swarm.protocol.plan import best_shares

TIMEOUT = 90.0
LEAD = 0.1  # seconds between the command and the moment at which all peers begin
RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Measured:
    """The rounds of four peers. Seconds, from BEGIN until the slowest peer has the mean."""

    name: str
    megabytes_per_second: tuple[float, ...]
    rounds: list[float]
    links: float  # what the links alone need with this division

    @property
    def median(self) -> float:
        """Of the rounds."""
        return statistics.median(self.rounds)


def link_seconds(elements: int, shares: Sequence[float], rates: Sequence[float]) -> float:
    """Until the last link has carried what its peer sends: its input to the others, and its share's mean to them."""
    others = len(shares) - 2
    return max(4 * elements * (1 + others * share) / rate for share, rate in zip(shares, rates, strict=True))


def measure(name: str, elements: int, rates: Sequence[float], declared: Sequence[float], rounds: int) -> Measured:
    """Rounds of peers with these rates (bytes per second) that declare these bandwidths."""
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        workers = []
        for rank, (rate, bandwidth) in enumerate(zip(rates, declared, strict=True)):
            arguments = [str(rank), str(elements), str(rate), str(bandwidth)]
            log = Path(logs) / f"{rank}.log"
            workers.append(Worker(sys.executable, "benchmarks.workers.throttled_averager", arguments, log))
            stack.callback(workers[-1].stop, 5.0)
        addresses = workers[0].ask("open", TIMEOUT, initial_peers=[])
        for worker in workers[1:]:
            worker.ask("open", TIMEOUT, initial_peers=addresses)
        seconds = []
        for number in range(rounds + 1):
            for worker in workers:
                worker.ask("fill", TIMEOUT)
            at = time.monotonic() + LEAD
            for worker in workers:
                worker.send("round", at=at, busy=False)
            answers = [worker.receive(TIMEOUT) for worker in workers]
            failures = [answer["failure"] for answer in answers if "failure" in answer]
            if failures:
                raise RuntimeError(f"{name}: a round failed: {failures[0]}")
            if number:  # the first is a warm-up
                seconds.append(max(answer["allreduce"] for answer in answers))
            print(f"{name}: round {number} of {rounds}", file=sys.stderr, flush=True)
        if any(worker.ask("error", TIMEOUT, size=4) > 1e-5 for worker in workers):
            raise RuntimeError(f"{name}: the result is not the mean")
    links = link_seconds(elements, best_shares(declared), rates)
    return Measured(name, tuple(rate / 1e6 for rate in rates), seconds, links)


def main() -> None:
    """Measures, prints medians and writes the results folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=4_000_000, help="float32 of the vector")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--fast", type=float, default=40.0, help="MB/s of three peers")
    parser.add_argument(
        "--slow", type=float, nargs="+", default=[10.0, 28.0], help="MB/s of the fourth, one or several"
    )
    options = parser.parse_args()
    end_on_signals()
    facts = report.environment()
    measured, figures = [], []
    for slow in options.slow:
        rates = [options.fast * 1e6] * 3 + [slow * 1e6]
        best = link_seconds(options.elements, best_shares(rates), rates)
        equal = measure(f"equal spans, {slow:g} MB/s", options.elements, rates, [1.0] * 4, options.rounds)
        divided = measure(f"by bandwidth, {slow:g} MB/s", options.elements, rates, rates, options.rounds)
        measured += [equal, divided]
        figures += [
            report.Figure(f"{slow:g} MB/s: round with equal spans / by bandwidth", equal.median / divided.median, ""),
            report.Figure(f"{slow:g} MB/s: the same, by the links alone", equal.links / best, ""),
            report.Figure(f"{slow:g} MB/s: round by bandwidth / optimum", divided.median / best, "<= 1.25"),
        ]
    lines = ["| division | median s | least - most | links alone s |", "|---|---|---|---|"]
    for row in measured:
        spread = f"{min(row.rounds):.2f} - {max(row.rounds):.2f}"
        lines.append(f"| {row.name} | {row.median:.2f} | {spread} | {row.links:.2f} |")
    lines += ["", "| ratio | | promised |", "|---|---|---|"]
    lines += [f"| {figure.name} | {figure.value:.2f} | {figure.bound} |" for figure in figures]
    text = (
        f"# Load balancing\n\n4 peers, {options.elements} float32, three with {options.fast:g} MB/s and one with less; "
        f"{options.rounds} rounds each. Load average at the start: {facts['load_average_at_start']}.\n\n"
        + "\n".join(lines)
        + "\n"
    )
    print(text)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "load_balancing.md").write_text(text)


if __name__ == "__main__":
    main()

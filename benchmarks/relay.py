"""What a relay carries, and what it costs: a circuit's throughput, a round with one relayed pair, a round under attack.

    python -m benchmarks.relay [--rounds 9] [--only circuit round attack]

The ends of the circuit are plain sockets, so that only the relay is measured. In the rounds, four peers average on
loopback; of "relayed", the last two are connected through the first. Sides take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.processes import Worker, cpu_seconds, end_on_signals
from benchmarks.swarm import Swarm

RESULTS = Path(__file__).resolve().parent / "results"
TIMEOUT = 60.0
SIZE = 2 << 30  # bytes through the circuit at a time
ELEMENTS = 25_000_000
HALF_OPEN, CIRCUITS = 1000, 100
SETTLE = 1.0  # seconds until an attack is under way, or over


def measure_circuit(logs: Path, times: int) -> list[tuple[float, float]]:
    """(MiB/s, CPU seconds of the relay per GB), several times; the first is left out."""
    with ExitStack() as stack:
        workers = []
        for number, role in enumerate(("relay", "end", "end")):
            workers.append(Worker(sys.executable, "benchmarks.workers.circuit", [role], logs / f"circuit{number}.log"))
            stack.callback(workers[-1].stop, 5.0)
        relay, one, other = workers
        address = relay.ask("open", TIMEOUT)
        peers = [end.ask("reserve", TIMEOUT, relay=address) for end in (one, other)]
        one.ask("dial", TIMEOUT, to=peers[1])
        other.ask("come", TIMEOUT)
        measured = []
        for _ in range(times + 1):
            before = cpu_seconds([relay.session])
            one.send("send", size=SIZE)
            other.send("receive", size=SIZE)
            one.receive(TIMEOUT)
            seconds = other.receive(TIMEOUT)
            measured.append((SIZE / seconds / (1 << 20), (cpu_seconds([relay.session]) - before) / SIZE * 1e9))
        return measured[1:]


def measure_rounds(swarms: Sequence[Swarm], rounds: int) -> list[list[float]]:
    """The seconds of each swarm's rounds, taken in turn."""
    seconds: list[list[float]] = [[] for _ in swarms]
    for _ in range(rounds):
        for swarm, mine in zip(swarms, seconds, strict=True):
            measured = swarm.round()
            if measured.failure or not measured.identical:
                raise RuntimeError(f"a round failed: {measured.failure or 'results differ'}")
            mine.append(measured.seconds)
    return seconds


def swarm_of(stack: ExitStack, how: str, logs: Path) -> Swarm:
    """Four peers that have averaged twice."""
    module = "benchmarks.workers.relayed_averager"
    swarm = stack.enter_context(Swarm(sys.executable, module, ELEMENTS, [how], logs))
    swarm.warm_up(2)
    swarm.check(0.05)
    return swarm


def measure_attack(logs: Path, rounds: int) -> tuple[list[float], list[float], int]:
    """Rounds of a swarm whose first peer relays, in turn in peace and under attack; and how many circuits the attacker
    got."""
    with ExitStack() as stack:
        swarm = swarm_of(stack, "relayed", logs)
        ends = []
        for number in range(2):
            ends.append(Worker(sys.executable, "benchmarks.workers.circuit", ["end"], logs / f"attack{number}.log"))
            stack.callback(ends[-1].stop, 5.0)
        hostile, victim = ends
        target = victim.ask("reserve", TIMEOUT, relay=swarm.addresses[0][0])
        hostile.ask("reserve", TIMEOUT, relay=swarm.addresses[0][0])
        peace: list[float] = []
        attack: list[float] = []
        for _ in range(rounds):
            peace += measure_rounds([swarm], 1)[0]
            got = hostile.ask("flood", TIMEOUT, to=target, circuits=CIRCUITS, connections=HALF_OPEN)
            time.sleep(SETTLE)
            attack += measure_rounds([swarm], 1)[0]
            hostile.ask("calm", TIMEOUT)
            time.sleep(SETTLE)
        return peace, attack, got


def main() -> None:
    """Measures, prints medians and writes the results folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--only", nargs="+", choices=("circuit", "round", "attack"), default=("circuit", "round", "attack")
    )
    options = parser.parse_args()
    end_on_signals()
    facts = report.environment()
    figures: list[report.Figure] = []
    data: dict[str, Any] = {"environment": facts}
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        if "circuit" in options.only:
            data["circuit"] = measured = measure_circuit(logs, 3)
            rate, cost = (statistics.median(column) for column in zip(*measured, strict=True))
            figures.append(report.Figure("circuit: MiB/s", rate, ">= 250"))
            figures.append(report.Figure("circuit: CPU seconds of the relay per GB", cost, "<= 0.6"))
        if "round" in options.only:
            with ExitStack() as stack:
                sides = [swarm_of(stack, how, logs) for how in ("direct", "relayed")]
                direct, relayed = measure_rounds(sides, options.rounds)
            data["round"] = {"direct": direct, "relayed": relayed}
            figures.append(report.Figure("round, direct: seconds", statistics.median(direct), ""))
            figures.append(report.Figure("round, one pair relayed: seconds", statistics.median(relayed), ""))
            ratio = report.paired(relayed, direct)
            assert ratio is not None
            figures.append(report.Figure("round, one pair relayed / direct", ratio, "<= 2"))
        if "attack" in options.only:
            peace, attack, got = measure_attack(logs, options.rounds)
            data["attack"] = {"peace": peace, "attack": attack, "circuits": got}
            speed = report.paired(peace, attack)
            assert speed is not None
            figures.append(report.Figure("round of a relay under attack: its speed / in peace", speed, ">= 0.9"))
    text = (
        f"# Relays\n\n{report.describe(facts)}\n\n4 peers, {ELEMENTS:,} float32, {options.rounds} rounds of each side. "
        f"The attack: {HALF_OPEN} half-open connections, and {CIRCUITS} circuits that one peer asks for.\n\n"
        + report.figure_table(figures)
    )
    report.publish(RESULTS, "relay", text, data)


if __name__ == "__main__":
    main()

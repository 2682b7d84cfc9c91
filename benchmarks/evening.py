"""One evening: three homes behind routers train together by a public node with a small uplink, in a closed run.

    python -m benchmarks.evening [--linkbed FOLDER] [--minutes 3]

Needs root, iproute2, gcc and nft (or its path in NFT), and the folder with `linkbed.py`, which makes the lines: 50
Mbit/s down, 10 up and 20 ms each. Everything is typed as people would: `shoal keys`, `shoal node --relay`,
`examples/train.py`. What each has printed, seconds per round against the bytes' time, and what passed through the relay
are in the report.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.processes import ROOT, end_on_signals
from benchmarks.report import describe, environment, number, publish, table

RESULTS = Path(__file__).resolve().parent / "results"
DELAY_MS, UP_MBIT, DOWN_MBIT, RELAY_MBIT = 20, 10, 50, 20
HOMES = {"anna": "cone", "ben": "cone", "carla": "symmetric"}
NODE, PORT = 0, 31337
ROUND = re.compile(
    r"^epoch (\d+): .* of (\d+) peers?, round ([\d.]+) s .*all-reduce ([\d.]+) s\), "
    r"([\d.]+ \w+) sent, ([\d.]+ \w+) received, state (\w+)"
)


def _megabytes(size: str) -> float:
    number, unit = size.split()
    return float(number) * {"B": 1e-6, "kB": 1e-3, "MB": 1.0}[unit]


@dataclass
class Somebody:
    """A process of one of them, and what it has printed.

    Attributes:
        name: whose it is.
        command: as typed.
        process: that runs it.
        output: where its output goes.
    """

    name: str
    command: list[str]
    process: subprocess.Popen[str]
    output: Path
    seen: int = field(default=0)

    def lines(self) -> list[str]:
        """All that it has printed so far."""
        return self.output.read_text().splitlines()

    def new(self) -> list[str]:
        """What it has printed since this was last asked."""
        lines = self.lines()
        new, self.seen = lines[self.seen :], len(lines)
        return new

    def wait_for(self, text: str, seconds: float = 60.0) -> str:
        """The first line with that text. Ends everything if there is none."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found = [line for line in self.lines() if text in line]
            if found:
                return found[0]
            if self.process.poll() is not None:
                break
            time.sleep(0.1)
        sys.exit(f"{self.name} has not said {text!r}:\n" + "\n".join(self.lines()[-30:]))

    def end(self) -> None:
        """Ctrl-C, as somebody who goes to bed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Evening:
    """The lines, the keys, and who is there.

    Args:
        bed: a `LinkBed` with the public node and three routers.
        folder: for keys and output.
    """

    def __init__(self, bed: Any, folder: Path) -> None:
        self.bed, self.folder = bed, folder
        self.where: dict[str, Any] = {"node": NODE}
        self.here: dict[str, Somebody] = {}
        self.typed: list[str] = []
        bed.set(delay=DELAY_MS)
        bed.set_link(NODE, up=RELAY_MBIT, down=100)
        for number_of_line, (name, kind) in enumerate(HOMES.items(), start=1):
            bed.set_link(number_of_line, up=UP_MBIT, down=DOWN_MBIT)
            self.where[name] = bed.home(number_of_line, kind, os.environ.get("NFT", "nft"))

    def type(self, name: str, command: str) -> list[str]:
        """The lines that a short command prints."""
        self.typed.append(f"{name}$ {command}")
        done = subprocess.run(_argv(command), cwd=self.folder, capture_output=True, text=True, env=_environment())
        if done.returncode:
            sys.exit(f"{command}: {done.stderr}")
        return done.stdout.splitlines()

    def start(self, name: str, command: str) -> Somebody:
        """Somebody starts a long command at home."""
        self.typed.append(f"{name}$ {command}")
        output = self.folder / f"{name}.{len(self.typed)}.txt"
        with output.open("w") as file:
            process = self.bed.popen(
                self.where[name], _argv(command), cwd=self.folder, stdout=file, stderr=subprocess.STDOUT,
                text=True, env=_environment(),
            )  # fmt: skip
        self.here[name] = Somebody(name, _argv(command), process, output)
        return self.here[name]

    def node_bytes(self) -> int:
        """That the public node has sent so far, at its network device."""
        said = subprocess.run(
            ["ip", "-n", self.bed.names[NODE], "-j", "-s", "link", "show", "tun0"],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        sent: int = json.loads(said.stdout)[0]["stats64"]["tx"]["bytes"]
        return sent

    def end(self) -> None:
        """All go to bed."""
        for somebody in self.here.values():
            somebody.end()
        self.here.clear()


def _argv(command: str) -> list[str]:
    first, *rest = shlex.split(command)
    program = [str(Path(sys.executable).with_name("shoal"))] if first == "shoal" else [sys.executable, "-u"]
    return [*program, *(str(ROOT / word) if word.startswith("examples/") else word for word in rest)]


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "COLUMNS": "400"}


def rounds_of(somebody: Somebody) -> list[dict[str, Any]]:
    """The rounds that somebody has reported."""
    found = [match for line in somebody.lines() if (match := ROUND.match(line))]
    return [
        {
            "epoch": int(one[1]), "peers": int(one[2]), "round": float(one[3]), "all_reduce": float(one[4]),
            "sent": _megabytes(one[5]), "received": _megabytes(one[6]), "state": one[7],
        }
        for one in found
    ]  # fmt: skip


def bytes_time(rounds: list[dict[str, Any]]) -> float:
    """Seconds that the bytes of a round take on a line of these homes: the slower of both ways."""
    slower: float = max(
        statistics.median(one["sent"] for one in rounds) * 8 / UP_MBIT,
        statistics.median(one["received"] for one in rounds) * 8 / DOWN_MBIT,
    )
    return slower


def main() -> None:
    """Parses the command line, lives the evening, reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--linkbed", type=Path, default=ROOT.parent / "shared" / "linkbed", help="folder of linkbed.py")
    parser.add_argument("--minutes", type=float, default=3.0, help="of each of the two trainings (default: 3)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for evening.md and evening.json")
    options = parser.parse_args()
    end_on_signals()
    spec = importlib.util.spec_from_file_location("linkbed", options.linkbed / "linkbed.py")
    if spec is None or spec.loader is None:
        sys.exit(f"there is no linkbed.py in {options.linkbed}: give its folder with --linkbed")
    linkbed = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(linkbed)
    with tempfile.TemporaryDirectory(prefix="shoal-evening-") as temporary, linkbed.LinkBed(4) as bed:
        evening = Evening(bed, Path(temporary))
        try:
            text, data = live(evening, 60 * options.minutes)
        finally:
            evening.end()
    facts = environment()
    head = f"# One evening behind routers\n\n{describe(facts)}\n\n" + (__doc__ or "").split("\n\n")[2]
    publish(options.out, "evening", f"{head}\n\n{text}", {"environment": facts} | data)


def live(evening: Evening, seconds: float) -> tuple[str, dict[str, Any]]:
    """From the first key to the last switch."""
    sections: list[str] = []
    data: dict[str, Any] = {}
    run_id = _closed_run(evening)
    node = evening.start("node", f"shoal node --relay --host-maddrs /ip4/0.0.0.0/tcp/{PORT} --identity node.key")
    address = node.wait_for("--initial-peers").split()[-1]
    for send, target, note in (("8-bit", 256, "8-bit gradients"), ("drift", 2048, "DiLoCo in 4 bits")):
        before = evening.node_bytes()
        for name in HOMES:
            evening.start(
                name,
                f"python examples/train.py --run-id {run_id} --membership {name}.txt --identity {name}.key "
                f"--initial-peers {address} --min-peers 2 --send {send} --target-batch-size {target} --epochs 100000",
            )
        began = time.monotonic()
        time.sleep(seconds)
        through, took = evening.node_bytes() - before, time.monotonic() - began
        sections.append(_training(evening, note, through, took, data))
        if send == "8-bit":
            sections.append(_switches(evening, address, data))
        for name in HOMES:
            evening.here.pop(name).end()
    printed = "\n".join(["$ " + line.partition("$ ")[2] + f"    # {line.partition('$')[0]}" for line in evening.typed])
    return "\n\n".join([f"## What was typed\n\n```text\n{printed}\n```", *sections]), data


def _closed_run(evening: Evening) -> str:
    """The owner admits three peers; returns the id of the run."""
    run_id = next(
        word for line in evening.type("owner", "shoal keys run evening --folder keys") for word in line.split()
        if word.startswith("evening@")
    )  # fmt: skip
    for name in HOMES:
        peer = evening.type(name, f"shoal keys peer {name}.key")[0].split()[-1]
        evening.type("owner", f"shoal keys admit {run_id} {peer} --role train --days 1 --out {name}.txt --folder keys")
    return run_id


def _training(evening: Evening, note: str, through: int, took: float, data: dict[str, Any]) -> str:
    """What a training of all three was like."""
    rows, states = [], []
    for name in HOMES:
        rounds = rounds_of(evening.here[name])
        full = [one for one in rounds if one["peers"] == len(HOMES)][2:]
        states.append({one["epoch"]: one["state"] for one in rounds})
        if not full:
            rows.append([name, HOMES[name], "-", "-", "-", "-", "-"])
            continue
        middle = statistics.median(one["all_reduce"] for one in full)
        rows.append([
            name, HOMES[name], str(len(full)), number(middle), number(bytes_time(full)),
            number(middle / bytes_time(full)), number(statistics.median(one["sent"] for one in full), 1),
        ])  # fmt: skip
    common = set.intersection(*(set(one) for one in states))
    equal = sum(len({one[epoch] for one in states}) == 1 for epoch in common)
    payload = sum(one["sent"] for name in HOMES for one in rounds_of(evening.here[name]))
    data[note] = {"rows": rows, "through_node": through, "seconds": took, "equal": equal, "epochs": len(common)}
    head = ["home", "router", "rounds of all", "all-reduce, s", "its bytes' time, s", "times", "MB sent a round"]
    said = "\n".join(f"{name}: {line}" for name in HOMES for line in _notable(evening.here[name].new()))
    return (
        f"## {note}\n\n{table(head, rows)}\n\nOf {len(common)} epochs that all have reported, {equal} ended with equal "
        f"bits. In {took:.0f} s the public node sent {through / 1e6:.1f} MB, of {payload:.1f} MB that the three sent "
        f"each other.\n\n```text\n{said}\n```"
    )


def _notable(lines: list[str], rounds: int = 2) -> list[str]:
    """The lines without most of the rounds and losses, which look alike."""
    kept, seen = [], 0
    for line in lines:
        if line.startswith("epoch"):
            seen += 1
            if seen > 2 * rounds:
                continue
        kept.append(shortened(line))
    return kept


def shortened(line: str) -> str:
    """A line with the beginnings of ids and hashes only."""
    return re.sub(r"\b([a-z2-7]{52,}|[0-9a-f]{64})\b", lambda found: f"{found[0][:6]}…{found[0][-8:]}", line)


def _switches(evening: Evening, address: str, data: dict[str, Any]) -> str:
    """The relay is switched off, comes back, and then a home is switched off."""
    told: list[str] = []
    steps: list[tuple[str, dict[str, int]]] = []

    def epochs() -> dict[str, int]:
        return {n: max((one["epoch"] for one in rounds_of(evening.here[n])), default=0) for n in HOMES}

    def step(what: str, seconds: float) -> None:
        before = epochs()
        time.sleep(seconds)
        steps.append((what, {n: epochs()[n] - before[n] for n in HOMES}))
        told.extend(f"{n}: {line}" for n in HOMES for line in _notable(evening.here[n].new()))
        told.append("")

    step("all are there", 30)
    node = evening.here.pop("node")
    node.process.kill()
    node.process.wait()
    step("the public node is switched off (SIGKILL)", 60)
    evening.start("node", shlex.join(["shoal", *node.command[1:]])).wait_for("--initial-peers")
    step("the public node is on again", 90)
    evening.bed._say("down 2")
    step("ben's line is cut", 60)
    evening.bed.heal()
    step("ben's line is back", 60)
    data["switches"] = steps
    head = ["what happened", *(f"epochs of {name}" for name in HOMES)]
    rows = [[what, *(str(count[name]) for name in HOMES)] for what, count in steps]
    return f"## Switched off\n\n{table(head, rows)}\n\n```text\n" + "\n".join(told) + "\n```"


if __name__ == "__main__":
    main()

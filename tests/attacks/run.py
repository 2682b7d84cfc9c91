"""Runs attacks against honest peers that train, each a process, and reports what the attacks cost.

`python -m tests.attacks --attack 7a --seconds 60`, `--each` (every attack, each with new peers), `--all --seconds 300`
(all in turn, by one identity, with the same peers).
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.attacks.attacks import ATTACKS, POISONS
from tests.peers import PeerProcess

PEERS = 4
NEWCOMERS = {"1", "3", "8", "8b", "11", "17a"}  # during these attacks a newcomer comes, too
IDLE_LIMIT = 1024  # descriptors that a peer may have in attack 13


@dataclass
class Trainer:
    """An honest process and what it has said.

    Attributes:
        process: of `tests.attacks.honest`.
        lines: its lines, with the times at which it said them.
        ended: why it has ended, if it did not have to; "" while it trains.
    """

    process: PeerProcess
    lines: list[dict[str, Any]] = field(default_factory=list)
    ended: str = ""

    def hear(self) -> None:
        """Take what it has said since the last call."""
        while True:
            try:
                line = self.process.hear(0.0)
            except queue.Empty:
                return
            if line is None:
                self.ended = self.ended or "its process ended"
                return
            self.lines.append(line)
            if line["event"] == "ended":
                self.ended = line["error"]

    def epochs(self, start: float, stop: float) -> list[dict[str, Any]]:
        """The epochs that it ended in that time, those included that it downloaded."""
        return [line for line in self.lines if line["event"] in ("epoch", "download") and start <= line["time"] < stop]

    def digests(self, since: float) -> dict[int, str]:
        """What its parameters were after each epoch."""
        return {line["epoch"]: line["digest"] for line in self.lines if line.get("digest") and line["time"] >= since}


class Swarm:
    """Honest peers that train together.

    Args:
        folder: for their logs.
        descriptors: how many each may have; None for as many as this process.
        strands: of their run.
    """

    def __init__(self, folder: Path, descriptors: int | None, strands: int) -> None:
        self._folder, self._told = folder, {"descriptors": descriptors, "strands": strands}
        self.trainers: list[Trainer] = []
        self.addresses: list[str] = []

    def add(self) -> Trainer:
        log = str(self._folder / f"honest-{len(self.trainers)}.log")
        options = {"initial_peers": self.addresses, "log": log, **self._told}
        trainer = Trainer(PeerProcess("tests.attacks.honest", options))
        self.trainers.append(trainer)
        trainer.process.started()
        self.addresses += trainer.process.addresses
        return trainer

    def wait(self, seconds: float) -> None:
        """Let them train, and listen."""
        until = time.time() + seconds
        while time.time() < until:
            time.sleep(0.1)
            for trainer in self.trainers:
                trainer.hear()

    def wait_for_epoch(self, epoch: int, timeout: float = 60.0) -> None:
        until = time.time() + timeout
        while not all(any(line.get("epoch", 0) >= epoch for line in t.lines) for t in self.trainers):
            assert time.time() < until, "the honest peers do not train"
            self.wait(0.1)

    def stop(self) -> None:
        """Have them end, and wait for that."""
        for trainer in self.trainers:
            if not trainer.ended:
                try:
                    trainer.process.tell(do="stop")
                except OSError:
                    trainer.ended = trainer.ended or "its process ended"
        until = time.time() + 40
        while time.time() < until and not all(t.ended or t.lines[-1]["event"] == "end" for t in self.trainers):
            self.wait(0.1)
        self.kill()

    def kill(self) -> None:
        for trainer in self.trainers:
            trainer.process.end()


class Attacker:
    """The process that attacks.

    Args:
        attack: by its number.
        addresses: of those that it attacks.
        folder: for its log.
        strands: of the run.
        identity: the file with its key, made if there is none; None for a key of its own.
    """

    def __init__(
        self, attack: str, addresses: list[str], folder: Path, strands: int, identity: Path | None = None
    ) -> None:
        options = {
            "strands": strands,
            "attack": attack,
            "initial_peers": addresses,
            "log": str(folder / f"attacker-{attack}.log"),
            "identity": None if identity is None else str(identity),
        }
        self.process = PeerProcess("tests.attacks.attacker", options)
        self.process.started()

    def end(self) -> dict[str, float]:
        """Kill it. Returns what it has gained."""
        gained: dict[str, float] = {}
        try:
            while (line := self.process.hear(0.0)) is not None:
                gained = {key: value for key, value in line.items() if key not in ("event", "addresses", "peer")}
        except queue.Empty:
            pass
        self.process.end()
        return gained


@dataclass
class Seen:
    """What an attack did.

    Attributes:
        attack: its number.
        before, during, after: epochs per 10 s of the honest peers.
        pause: the longest time in which an honest peer that has not ended saw no new epoch, in seconds.
        ended: of each trainer that has ended, why.
        forks: the epochs of which two honest peers hold different parameters.
        equal: whether all that train hold equal parameters in the end.
        samples: per epoch, the mean before and during the attack.
        loss: at the end of the time before the attack, and at the end of all.
        cpu: seconds of CPU time per second of all honest peers together, before and during the attack.
        gained: what the attacker got.
        newcomer: the number of peers of a newcomer's last epoch; None if there was no newcomer.
    """

    attack: str
    before: float
    during: float
    after: float
    pause: float
    ended: list[str]
    forks: int
    equal: bool
    samples: tuple[float, float]
    loss: tuple[float, float]
    cpu: tuple[float, float]
    gained: dict[str, float]
    newcomer: int | None = None

    def row(self) -> str:
        """A row of a table in Markdown."""
        notes = [f"{key}: {value:g}" for key, value in self.gained.items() if value]
        notes += [] if self.newcomer is None else [f"newcomer with {self.newcomer} peers"]
        notes += [f"{self.forks} epochs forked"] if self.forks else []
        notes += sorted(set(self.ended))
        cells = [
            self.attack, f"{self.before:.1f}", f"{self.during:.1f}", f"{self.after:.1f}", f"{self.pause:.1f}",
            str(len(self.ended)), "yes" if self.equal else "NO", f"{self.samples[0]:.0f} / {self.samples[1]:.0f}",
            f"{self.loss[0]:.2g} / {self.loss[1]:.2g}", f"{self.cpu[0]:.2f} / {self.cpu[1]:.2f}", "; ".join(notes),
        ]  # fmt: skip
        return f"| {' | '.join(cells)} |"


HEAD = """\
| attack | epochs / 10 s before | during | after | pause, s | ended | equal | samples / epoch | loss | CPU | notes |
|---|---|---|---|---|---|---|---|---|---|---|"""


def measure(trainers: list[Trainer], attack: str, times: tuple[float, float, float, float], **more: Any) -> Seen:
    """What `trainers` have said, with the attack from the second to the third of `times`."""
    start, begin, end, stop = times
    alive = [t for t in trainers if not t.ended]
    rates = []
    for first, until in ((start, begin), (begin, end), (end, stop)):
        counts = [len({line["epoch"] for line in t.epochs(first, until)}) for t in trainers]
        rates.append(10 * sum(counts) / len(counts) / max(0.1, until - first))
    pauses = []
    for trainer in alive:
        at = [begin, *(line["time"] for line in trainer.epochs(begin, stop)), stop]
        pauses += [later - earlier for earlier, later in pairwise(at)]
    every = [t.digests(start) for t in trainers]
    epochs: set[int] = set().union(*every)
    forks = sum(len({digests[e] for digests in every if e in digests}) > 1 for e in epochs)
    last = [t.digests(stop - 8) for t in alive]
    common = [epoch for epoch in epochs if all(epoch in digests for digests in last)]
    equal = bool(last) and bool(common) and len({digests[max(common)] for digests in last}) == 1
    samples, cpu = [], []
    for first, until in ((start, begin), (begin, end)):
        lines = [line for t in trainers for line in t.epochs(first, until) if line["event"] == "epoch"]
        samples.append(sum(line["samples"] for line in lines) / max(1, len(lines)))
        spent = [t.epochs(first, until) for t in trainers]
        spans = [(s[-1]["cpu"] - s[0]["cpu"]) / (s[-1]["time"] - s[0]["time"]) for s in spent if len(s) > 1]
        cpu.append(sum(spans))
    ended = [t.ended for t in trainers if t.ended]
    losses = [
        [line["loss"] for t in trainers for line in t.epochs(until - 5, until) if line["event"] == "epoch"]
        for until in (begin, stop)
    ]
    loss = tuple(sum(values) / len(values) if values else float("nan") for values in losses)
    pause, per_epoch, seconds = max(pauses, default=0.0), (samples[0], samples[1]), (cpu[0], cpu[1])
    before, during, after = rates
    return Seen(
        attack, before, during, after, pause, ended, forks, equal, per_epoch, (loss[0], loss[1]), seconds, **more
    )


def run_one(attack: str, seconds: float, before: float, after: float, folder: Path, strands: int = 1) -> Seen:
    """One attack, with peers of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    swarm = Swarm(folder, IDLE_LIMIT if attack == "13" else None, strands)
    attacker: Attacker | None = None
    try:
        for _ in range(PEERS):
            swarm.add()
        trainers = list(swarm.trainers)
        swarm.wait_for_epoch(2)
        start = time.time()
        swarm.wait(before)
        begin = time.time()
        attacker = Attacker(attack, swarm.addresses, folder, strands)
        newcomer = None
        if attack in NEWCOMERS:
            swarm.wait(seconds / 3)
            starter = threading.Thread(target=lambda: swarm_add_late(swarm))
            starter.start()
            swarm.wait(seconds * 2 / 3)
            starter.join()
            newcomer = swarm.trainers[-1] if len(swarm.trainers) > PEERS else None
        else:
            swarm.wait(seconds)
        gained, end = attacker.end(), time.time()
        attacker = None
        swarm.wait(after)
        stop = time.time()
        seen = measure(trainers, attack, (start, begin, end, stop), gained=gained)
        if attack in NEWCOMERS:
            peers = [line["peers"] for line in newcomer.lines if line["event"] == "epoch"] if newcomer else []
            seen.newcomer = peers[-1] if peers else 0
            seen.ended += [f"newcomer: {newcomer.ended}"] if newcomer is not None and newcomer.ended else []
        swarm.stop()
        return seen
    finally:
        if attacker is not None:
            attacker.end()
        swarm.kill()


def swarm_add_late(swarm: Swarm) -> None:
    """A newcomer, which may not get in."""
    try:
        swarm.add()
    except (AssertionError, queue.Empty):
        trainer = swarm.trainers.pop()
        trainer.process.end()


def run_all(names: list[str], seconds: float, before: float, after: float, folder: Path, strands: int = 1) -> Seen:
    """All attacks in turn, by one identity, with the same peers."""
    folder.mkdir(parents=True, exist_ok=True)
    swarm = Swarm(folder, IDLE_LIMIT, strands)
    attacker: Attacker | None = None
    gained: dict[str, float] = {}
    try:
        for _ in range(PEERS):
            swarm.add()
        swarm.wait_for_epoch(2)
        start = time.time()
        swarm.wait(before)
        begin = time.time()
        for number, name in enumerate(names):
            if all(trainer.ended for trainer in swarm.trainers):
                break  # nobody is left to attack
            attacker = Attacker(name, swarm.addresses, folder, strands, folder / "identity")
            swarm.wait(max(0.0, begin + (number + 1) * seconds / len(names) - time.time()))
            for key, value in attacker.end().items():
                gained[key] = gained.get(key, 0) + value
            attacker = None
            epochs = [max((line.get("epoch", 0) for line in t.lines), default=0) for t in swarm.trainers]
            print(f"{time.time() - begin:6.1f} s: after {name}: epochs {epochs}", file=sys.stderr, flush=True)
        end = time.time()
        swarm.wait(after)
        seen = measure(swarm.trainers, "all", (start, begin, end, time.time()), gained=gained)
        swarm.stop()
        return seen
    finally:
        if attacker is not None:
            attacker.end()
        swarm.kill()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--attack", nargs="+", choices=ATTACKS | POISONS, help="these, each with new peers")
    which.add_argument("--each", action="store_true", help="every attack, each with new peers")
    which.add_argument("--all", action="store_true", help="all attacks in turn, by one identity, with the same peers")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each attack; with --all, of all together")
    parser.add_argument("--before", type=float, default=15.0, help="seconds without an attack")
    parser.add_argument("--after", type=float, default=15.0, help="seconds after the attacker has gone")
    parser.add_argument("--strands", type=int, default=1, help="of the run; with several, the run of one is attacked")
    parser.add_argument("--logs", type=Path, help="folder for the logs of all processes")
    parser.add_argument("--json", type=Path, help="file to which each result is added as a line")
    arguments = parser.parse_args()
    folder = arguments.logs or Path(tempfile.mkdtemp(prefix="attacks-"))
    print(f"logs: {folder}", file=sys.stderr)
    print(HEAD, flush=True)
    names = list(ATTACKS)
    spans, strands = (arguments.seconds, arguments.before, arguments.after), arguments.strands
    for name in ["all"] if arguments.all else names if arguments.each else arguments.attack:
        run = partial(run_all, names) if name == "all" else partial(run_one, name)
        seen = run(*spans, folder / name, strands)
        print(seen.row(), flush=True)
        if arguments.json is not None:
            with arguments.json.open("a") as file:
                file.write(json.dumps(vars(seen)) + "\n")

"""`python -m tests.soak.chaos --minutes 30 --seed 1`: trainers that are killed, stopped and started for as long as one
likes, on lines of 20 to 100 Mbit/s where network namespaces can be made.

Eight peers train a tiny model, with epochs of about a second. Every 10 s one is killed, or stopped for 5 to 40 s, and
one is started: a new one, or one with a checkpoint that may be old, in half of the cases as the peer that wrote it. One
of five has no memory for a download at first. A few times, where there are namespaces, half of them are cut off from
the others, so that the run forks. The first two are stopped, but never killed: they show what a process holds after a
long time. Prints a table and a JSON line; exits with status 1 if a promise is broken (see promises.py).
"""

from __future__ import annotations

import argparse
import json
import queue
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.peers import PeerProcess
from tests.soak.lines import Place, cut, heal, places
from tests.soak.modes import LEAST_SHARES, MODES
from tests.soak.promises import FAULTS, Life, Report, judge, table

PEERS = 8
SPARE = 6  # places beyond those, for who is started while others are stopped
OLD = 2  # that are not killed
BEAT = 10.0  # seconds between two blows
STOPPED = (5.0, 40.0)  # seconds
CUT_SECONDS = 30.0
STARVED, STARVED_FOR = 0.2, (5.0, 30.0)  # the share of those that are started, and seconds
CALM = 20.0  # seconds without blows, in the end
START_SECONDS = 60.0


class Trainer(Life):
    """A trainer's process, and where it is.

    Args:
        number: of all that were started.
        place: where it lives.
        options: what differs of `tests.soak.trainer`.
    """

    def __init__(self, number: int, place: Place, options: dict[str, Any], folder: Path) -> None:
        super().__init__(f"trainer-{number}")
        self.place, self.wakes, self.born, self.stopping = place, 0.0, time.time(), False
        self.addresses: list[str] = []
        self.checkpoints = str(folder / f"checkpoint-{number}")
        self.identity = options.setdefault("identity", str(folder / f"identity-{number}"))
        given = {"address": place.address, "namespace": place.namespace, "log": str(folder / f"{self.name}.log")}
        self.process = PeerProcess("tests.soak.trainer", given | {"checkpoints": self.checkpoints} | options)

    @property
    def lives(self) -> bool:
        return not self.ended and not self.quit

    @property
    def runs(self) -> bool:
        return self.lives and not self.wakes

    def hear(self) -> None:
        """Take what it has said since the last call."""
        while True:
            try:
                line = self.process.hear(0.0)
            except queue.Empty:
                break
            if line is None:
                if not self.stopping and not self.ended:
                    self.quit = self.quit or f"its process ended with {self.process.process.wait(10.0)}"
                self.ended = self.ended or time.time()
                return
            if "addresses" in line:
                self.began, self.addresses, self.peer = time.time(), line["addresses"], line["peer"]
            else:
                self.lines.append(line)
            if line.get("event") == "ended":
                self.quit = line["error"]
        if not self.began and not self.ended and time.time() - self.born > START_SECONDS:
            self.quit = f"it was not ready in {START_SECONDS:g} s"

    def stop(self, seconds: float) -> None:
        """SIGSTOP, for so long."""
        self.process.hang()
        self.wakes = time.time() + seconds
        self.asleep.append((time.time(), self.wakes))

    def wake(self) -> None:
        """SIGCONT."""
        self.asleep[-1] = (self.asleep[-1][0], time.time())
        self.wakes = 0.0
        self.process.go_on()

    def kill(self) -> None:
        """SIGKILL."""
        self.hear()
        self.ended = time.time()
        self.process.kill()
        self.hear()  # its last words
        self.process.end()


class Chaos:
    """One run of it.

    Args:
        rng: draws all that is left to chance. (When what happens, the machine decides.)
        room: where trainers may live.
        folder: for logs, checkpoints and identities.
        fault: of the first trainer, see `tests.soak.trainer`.
        mode: of all trainers, see `tests.soak.modes`.
        kills: the share of blows that kill; the others stop.
    """

    def __init__(
        self, rng: random.Random, room: list[Place], folder: Path, fault: str, mode: str, kills: float
    ) -> None:
        self._kills = kills
        self.rng, self._room, self._folder, self._fault, self._mode = rng, list(room), folder, fault, mode
        self.trainers: list[Trainer] = []
        self.blows: Counter[str] = Counter()
        self.notes: list[dict[str, Any]] = []
        self._began = time.time()
        self._starves_until = 0.0  # later there would not be time enough for a pause after it

    def _living(self) -> list[Trainer]:
        return [trainer for trainer in self.trainers if trainer.lives]

    def _running(self) -> list[Trainer]:
        return [trainer for trainer in self.trainers if trainer.runs]

    def _note(self, text: str) -> None:
        self.notes.append({"name": "chaos", "event": "blow", "time": time.time(), "text": text})
        print(f"{time.time() - self._began:7.1f} s: {text}", file=sys.stderr, flush=True)

    # -- coming

    def start(self, *, new: bool = False) -> Trainer:
        """Start a trainer: a new one, or one with a checkpoint. Some have no memory for a download at first."""
        number = len(self.trainers)
        first = [trainer.addresses[0] for trainer in self._living() if trainer.addresses]
        self.rng.shuffle(first)
        options: dict[str, Any] = {"initial_peers": first, "load": "", "fault": "" if number else self._fault}
        options |= {"mode": self._mode, "starved": 0.0}
        if not new and self.rng.random() < STARVED and time.time() < self._starves_until:
            options["starved"] = self.rng.uniform(*STARVED_FOR)
            self.blows["starved"] += 1
        how = "new"
        if not new and self.rng.random() < 0.5:
            how = self._from_checkpoint(options)
        trainer = Trainer(number, self._room.pop(0), options, self._folder)
        self.trainers.append(trainer)
        self.blows[f"started {how}"] += 1
        without = f", for {options['starved']:.0f} s without memory" if options["starved"] else ""
        self._note(f"{trainer.name} is started, {how} {Path(options['load']).name}{without}")
        return trainer

    def _from_checkpoint(self, options: dict[str, Any]) -> str:
        """Any checkpoint, or the newest; in half of the cases of a dead peer as that peer."""
        saved = sorted(self._folder.glob("checkpoint-*.pt"), key=lambda path: int(path.stem.split("-")[2]))
        if not saved:
            return "new"
        chosen = saved[-1] if self.rng.random() < 0.5 else self.rng.choice(saved)
        options["load"] = str(chosen)
        writer = self.trainers[int(chosen.stem.split("-")[1])]
        taken = {trainer.identity for trainer in self._living()}
        if writer.identity in taken or self.rng.random() < 0.5:
            return "from a checkpoint"
        options["identity"] = writer.identity
        return "as before, from a checkpoint"

    # -- blows

    def blow(self) -> None:
        """One is killed or stopped, and one is started. Where more run than there should, since some that were stopped
        are awake again, one is killed, and none is started."""
        if len(self._running()) > PEERS:
            self._kill()
            return
        if self.rng.random() < self._kills or not self._room:
            self._kill()
        else:
            victim, seconds = self.rng.choice(self._running()), self.rng.uniform(*STOPPED)
            self._note(f"{victim.name} is stopped for {seconds:.0f} s")
            victim.stop(seconds)
            self.blows["stopped"] += 1
        self.start()

    def _kill(self) -> None:
        """One of all, so at times one that is stopped."""
        victim = self.rng.choice([trainer for trainer in self._living() if trainer not in self.trainers[:OLD]])
        self._note(f"{victim.name} is killed")
        victim.kill()
        self._room.append(victim.place)
        self.blows["killed"] += 1

    def part(self) -> None:
        """Half of those who live are cut off from the others for a while."""
        living = self._living()
        some = self.rng.sample(living, len(living) // 2)
        self._note(f"cut off: {', '.join(trainer.name for trainer in some)}")
        cut([trainer.place for trainer in some])
        self.wait(time.time() + CUT_SECONDS)
        heal([trainer.place for trainer in some])
        self._note("all are together again")
        self.blows["cut"] += 1

    # -- time

    def wait(self, until: float) -> None:
        """Listen, and wake who has been stopped for long enough."""
        while time.time() < until:
            time.sleep(0.05)
            for trainer in self._living():
                if trainer.wakes and time.time() > trainer.wakes:
                    trainer.wake()
                    self._note(f"{trainer.name} is awake")
                trainer.hear()
                if trainer.quit:
                    self._note(f"{trainer.name} has ended: {trainer.quit}")

    def wait_until_all_train(self) -> None:
        until = time.time() + 2 * START_SECONDS
        while not all(trainer.of("epoch") for trainer in self._living()):
            if time.time() > until or not self._living():
                raise RuntimeError(f"the trainers do not train: see {self._folder}")
            self.wait(time.time() + 0.2)

    def run(self, seconds: float, calm: float, beat: float, cuts: int) -> Report:
        """All of it."""
        left = sorted(seconds * (number + 1) / (cuts + 1) for number in range(cuts))
        try:
            self.start(new=True)
            while not self.trainers[0].addresses and self.trainers[0].lives:
                self.wait(time.time() + 0.1)
            while len(self.trainers) < PEERS:
                self.start(new=True)
            self.wait_until_all_train()
            began = time.time()
            self._starves_until = began + seconds - calm - 3 * STARVED_FOR[1]
            while time.time() + beat <= began + seconds - calm and self._running():
                self.wait(time.time() + beat)
                if left and time.time() - began > left[0]:
                    del left[0]
                    self.part()
                else:
                    self.blow()
            for trainer in self.trainers:
                if trainer.lives and trainer.wakes:
                    trainer.wake()
            self.wait(time.time() + beat)  # what was started last is there
            stopped = time.time()
            self.wait(stopped + calm)
            report = judge(list(self.trainers), began, stopped, time.time(), LEAST_SHARES[self._mode])
            self._stop()
            stuck = [trainer.name for trainer in self.trainers if self._is_stuck(trainer)]
            report.broken += [f"{name} did not end as it was told to" for name in stuck]
            return report
        finally:
            for trainer in self.trainers:
                trainer.process.end()

    def _stop(self) -> None:
        """Have all end, and wait for that."""
        for trainer in self._living():
            trainer.stopping = True
            trainer.process.tell(do="stop")
        until = time.time() + 40
        while time.time() < until and self._living():
            self.wait(time.time() + 0.1)

    def _is_stuck(self, trainer: Trainer) -> bool:
        return trainer.stopping and (trainer.lives or not trainer.of("end"))


def soak(
    seconds: float,
    seed: int,
    folder: Path,
    *,
    calm: float = CALM,
    beat: float = BEAT,
    cuts: int = 0,
    fault: str = "",
    mode: str = "default",
    kills: float = 0.5,
) -> tuple[Report, dict[str, Any]]:
    """Run it. Returns the report, and all of it for a JSON line."""
    rng = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    with places(PEERS + SPARE, rng) as (room, where):
        print(f"seed {seed}, {mode}, on {where}; logs: {folder}", file=sys.stderr, flush=True)
        chaos = Chaos(rng, room, folder, fault, mode, kills)
        report = chaos.run(seconds, calm, beat, cuts if room[0].port else 0)
    warnings = Counter(line["level"] for trainer in chaos.trainers for line in trainer.of("log"))
    more = {"seed": seed, "mode": mode, "seconds": seconds, "peers": PEERS, "lines": where, "blows": dict(chaos.blows)}
    with (folder / "said.jsonl").open("w") as file:
        for note in chaos.notes:
            file.write(json.dumps(note) + "\n")
        for trainer in chaos.trainers:
            for line in trainer.lines:
                file.write(json.dumps({"name": trainer.name, "peer": trainer.peer, **line}) + "\n")
    return report, more | {"logged": dict(warnings)} | report.json()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--logs", type=Path, help="folder for logs and checkpoints; default: a new one in /tmp")
    parser.add_argument("--fault", choices=FAULTS, default="", help="of the first trainer, to see that it is noticed")
    parser.add_argument("--mode", choices=MODES, default="default", help="how all train")
    parser.add_argument("--beat", type=float, default=BEAT, help="seconds between two blows")
    parser.add_argument("--kills", type=float, default=0.5, help="share of blows that kill; the others stop")
    parser.add_argument("--cuts", type=int, default=3, help="times that half of the trainers are cut off")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that nothing is left behind
    folder = options.logs or Path(tempfile.mkdtemp(prefix="soak-"))
    report, line = soak(
        60 * options.minutes,
        options.seed,
        folder,
        beat=options.beat,
        cuts=options.cuts,
        fault=options.fault,
        mode=options.mode,
        kills=options.kills,
    )
    print(table(report))
    print(json.dumps(line), flush=True)
    if report.broken:
        sys.exit(f"FAILED with seed {options.seed}: {len(report.broken)} promises are broken; logs: {folder}")


if __name__ == "__main__":
    main()

"""`python -m tests.soak.transport --times 2000 --seed 1`: the transport, for as long as one likes.

Two peers exchange rounds of large messages. Visitors exchange large messages with both, and are killed, stopped and
disconnected in the middle of them, both ways, while strangers attack the first of the two. Afterwards nothing may be
left of any of them, no process may have ended that was not ended, and all bytes must have been those that were sent.
Then the rounds go on without visitors, and are counted with and without the strangers.
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.peers import PeerProcess

MEMBER, STRANGERS = "tests.soak.member", "tests.soak.strangers"
VISITORS = 3
WARM_UP = 60  # visitors that came and went before what is held is counted
ENDS = ("kill", "kill", "stop", "stop and kill", "visitor disconnects", "home disconnects", "leave")
LEFT_SECONDS = 25.0  # in which what the transport holds for a while (tokens: 10 s, proofs: 10 s) must be gone
# What may be held more than before: (of the size before, in addition). The allocator's arenas are not a leak's size.
ALLOWED = {
    "threads": (1.0, 0), "descriptors": (1.0, 0), "tasks": (1.0, 0), "links": (1.0, 0), "lanes": (1.0, 0),
    "objects": (1.02, 500), "rss": (1.05, 16 << 20),
}  # fmt: skip
RATE = 20.0  # attacks per second
WINDOW = 2.0  # seconds in which rounds are counted
KEPT_SPEED = 0.9


class Failed(Exception):
    """What the soak is to find."""


class Soak:
    """One run of it.

    Args:
        seed: of all that is drawn by chance. (When what happens, the machine decides.)
    """

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.began = time.monotonic()
        self.ends: Counter[str] = Counter()
        self._all: list[PeerProcess] = []
        self.homes = [self._start(MEMBER, seed=self.rng.getrandbits(32)) for _ in range(2)]
        for home in self.homes:
            home.started()
        self.strangers = self._start(STRANGERS, seed=self.rng.getrandbits(32), address=self.homes[0].addresses[0])
        self.strangers.started()
        self.visitors: list[PeerProcess] = []
        self.coming: list[PeerProcess] = []  # started in advance

    def _start(self, module: str, **options: Any) -> PeerProcess:
        process = PeerProcess(module, options)
        self._all.append(process)
        return process

    def close(self) -> None:
        for process in self._all:
            process.end()

    # -- visitors

    def _visitor(self) -> PeerProcess:
        self.coming.append(self._start(MEMBER, seed=self.rng.getrandbits(32)))
        return self.coming.pop(0)

    def _welcome(self) -> PeerProcess:
        visitor = self._visitor()
        visitor.started()
        visitor.ask(do="visit", addresses=[home.addresses[0] for home in self.homes])
        return visitor

    def cut(self, times: int) -> None:
        """So many kills, stops and disconnections."""
        self.coming = [self._start(MEMBER, seed=self.rng.getrandbits(32)) for _ in range(2)]
        self.visitors = [self._welcome() for _ in range(VISITORS)]
        for number in range(1, times + 1):
            time.sleep(self.rng.uniform(0.0, 0.1))  # it is by chance where in its messages a visitor is met
            self._end_one(self.rng.randrange(VISITORS), self.rng.choice(ENDS))
            self._all_live()
            if number % 100 == 0:
                self._tell(number)
        for process in (*self.visitors, *self.coming):
            self._forget(process)

    def _end_one(self, place: int, how: str) -> None:
        self.ends[how] += 1
        visitor = self.visitors[place]
        match how:
            case "stop":
                visitor.hang()
                time.sleep(self.rng.uniform(0.01, 0.3))
                visitor.go_on()
                return
            case "visitor disconnects":
                visitor.ask(do="disconnect", peer=self.rng.choice(self.homes).peer)
                return
            case "home disconnects":
                self.rng.choice(self.homes).ask(do="disconnect", peer=visitor.peer)
                return
            case "stop and kill":
                visitor.hang()
                time.sleep(self.rng.uniform(0.01, 0.3))
            case "leave":
                visitor.ask(do="leave")
                if visitor.process.wait(20.0) != 0:
                    raise Failed(f"a visitor that left ended with {visitor.process.poll()}")
        self._forget(visitor)
        self.visitors[place] = self._welcome()

    def _forget(self, process: PeerProcess) -> None:
        process.end()
        self._all.remove(process)

    def _all_live(self) -> None:
        for process in self._all:
            if (code := process.process.poll()) is not None:
                raise Failed(f"a process ended that nobody ended: {code}")

    def _tell(self, number: int) -> None:
        state = self.homes[0].ask(do="state")
        ends = ", ".join(f"{count} {how}" for how, count in sorted(self.ends.items()))
        print(
            f"{number} after {time.monotonic() - self.began:.0f} s: {ends}; of {state['lost']} ends at home 0, "
            f"{state['cut']} in the middle; {state['large']} large messages, {state['rounds']} rounds; "
            f"{state['threads']} threads, {state['descriptors']} descriptors, {state['tasks']} tasks, "
            f"{state['objects']} objects, {state['rss'] >> 20} MiB (at most {state['peak'] >> 20})",
            flush=True,
        )

    # -- what is left

    def held(self) -> list[dict[str, Any]]:
        """What both homes hold when nobody is there and their rounds rest."""
        return [home.ask(do="state") for home in self.homes]

    def nothing_left(self, before: list[dict[str, Any]]) -> None:
        """Wait until the homes hold no more than before. Raises Failed if they still do after `LEFT_SECONDS`."""
        deadline = time.monotonic() + LEFT_SECONDS
        while True:
            after = self.held()
            left = [
                f"home {number}: {now[what]} {what}, before {then[what]}"
                for number, (now, then) in enumerate(zip(after, before, strict=True))
                for what, (times, more) in ALLOWED.items()
                if now[what] > times * then[what] + more
            ]
            if not left or time.monotonic() > deadline:
                break
            time.sleep(0.5)
        for number, state in enumerate(after):
            if left:
                left.append(f"home {number}'s threads: {', '.join(state['names'])}")
            left += [f"home {number}: {text}" for text in (*state["errors"], *state["wrong"])]
        if left:
            raise Failed("\n".join(left))

    # -- rounds and strangers

    @contextmanager
    def rounds(self) -> Iterator[None]:
        """The homes exchange rounds meanwhile."""
        for home, other in (self.homes, self.homes[::-1]):
            home.ask(do="rounds", on=True, peer=other.peer)
        yield
        for home in self.homes:
            home.ask(do="rounds", on=False)
        time.sleep(1.0)  # the last round of each ends

    @contextmanager
    def attacked(self) -> Iterator[None]:
        """Strangers attack the first home meanwhile."""
        self.strangers.ask(do="attack", rate=RATE)
        yield
        answer = self.strangers.ask(do="stop")
        if answer["failures"]:
            raise Failed(f"the attackers themselves failed: {answer['failures']}")

    def _speed(self) -> tuple[float, float]:
        """Rounds per second, now, and CPU seconds per second of the first home beyond those of the second, which nobody
        attacks: on a busy machine that says more than the first."""
        began, then = time.monotonic(), [home.ask(do="count") for home in self.homes]
        time.sleep(WINDOW)
        seconds, now = time.monotonic() - began, [home.ask(do="count") for home in self.homes]
        more, other = (b["cpu"] - a["cpu"] for a, b in zip(then, now, strict=True))
        return (now[0]["rounds"] - then[0]["rounds"]) / seconds, (more - other) / seconds

    def kept_speed(self, pairs: int) -> float:
        """Which part of their speed rounds keep while strangers attack."""
        kept = []
        with self.rounds():
            self._speed()
            for _ in range(pairs):
                quiet, own = self._speed()
                with self.attacked():
                    attacked, cpu = self._speed()
                kept.append(attacked / quiet)
                print(
                    f"rounds: {quiet:.1f}/s, while strangers attack {kept[-1]:.2f} of that; they cost the home "
                    f"{cpu - own:.2f} CPU seconds per second",
                    flush=True,
                )
        return statistics.median(kept)

    def flood(self) -> None:
        """A stranger sends a million tiny frames."""
        with self.rounds():
            quiet, own = self._speed()
            self.strangers.tell(do="flood", seconds=120.0)
            flooded, cpu = self._speed()
            began = time.monotonic()
            self.strangers.hear()
        print(
            f"rounds: {quiet:.1f}/s, in a flood of tiny frames {flooded / quiet:.2f} of that; it cost the home "
            f"{cpu - own:.2f} CPU seconds per second, and took {WINDOW + time.monotonic() - began:.0f} s",
            flush=True,
        )


def soak(times: int, seed: int, pairs: int) -> float:
    """Run it; returns which part of their speed rounds keep (1 if `pairs` is 0). Raises Failed."""
    run = Soak(seed)
    try:
        run.homes[1].ask(do="meet", address=run.homes[0].addresses[0])
        with run.rounds(), run.attacked():
            run.cut(min(WARM_UP, times))
        time.sleep(LEFT_SECONDS / 2)  # tokens and unproven connections of the warm-up
        before = run.held()
        print(f"warm after {time.monotonic() - run.began:.0f} s: {before}", flush=True)
        with run.rounds(), run.attacked():
            run.cut(times)
        kept = 1.0
        if pairs:
            run.flood()
            kept = run.kept_speed(pairs)
        run.nothing_left(before)
        counts = run.strangers.ask(do="stop")["counts"]
        print(f"attacks: {sum(counts.values())}: {counts}", flush=True)
        return kept
    finally:
        run.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=2000, help="kills, stops and disconnections")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--pairs", type=int, default=10, help="of windows with and without strangers")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that nothing is left behind
    print(f"seed {options.seed}", flush=True)
    try:
        kept = soak(options.times, options.seed, options.pairs)
    except Failed as failure:
        sys.exit(f"FAILED with seed {options.seed}:\n{failure}")
    print(f"nothing is left; rounds keep {kept:.2f} of their speed under attack")
    if kept < KEPT_SPEED:
        sys.exit(f"FAILED: less than {KEPT_SPEED}")


if __name__ == "__main__":
    main()

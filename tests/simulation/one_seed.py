"""What one seed of a sweep does: a run of 3 to 30 trainers with faults, and whether all that must hold has held."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import logging
import math
import random
import signal
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from shoal.simulation.clock import run
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.view import Role
from tests.simulation.faults import FAULTS, Faulty, Setting
from tests.simulation.liar import Liar
from tests.simulation.trainers import ELEMENTS

MOST_MEMBERS = 30
MOST_FAULTS = 8
MOST_LIES, MOST_WIDE_LIES = 4, 8
FIRST_WIDE = 100_000  # from this seed on a liar knows all lies; those below keep what they have drawn so far
FIRST_RELAYED = 1_000_000  # from this seed on some are reached through relays, and it changes who
FAULTY_SECONDS = 60.0  # in which the faults begin
DEADLINES = 10  # after the last fault, in which all have made an epoch together
REAL_SECONDS = 300  # that a seed may take; then it hangs
ALL_FAULTS = (*FAULTS, "kill half", "newcomer", "all restart", "slow way in", "slow link", "slow one way")

LINES = {
    "fast": {"latency": 0.01, "out": 20e6},
    "20 Mbit/s": {"latency": 0.1, "out": 2.5e6, "into": 2.5e6},
    "uneven": {"latency": 0.2, "out": 12.5e6, "into": 25e6, "spread": 20.0},
}
TIMES = ((15.0, 60.0, 15.0), (5.0, 20.0, 5.0))  # to BEGIN, of a round, and of a chunk


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a seed.

    Attributes:
        seed, lines: which.
        members: how many trainers began.
        faults: how many were done.
        virtual, real, cpu: seconds.
        together: virtual seconds from the last fault to the first epoch of all.
        epochs: of the state with the most.
        forks: how often the run has divided.
        verdict: "ok", or what has not held.
        story: for a seed that failed, what was done to it.
    """

    seed: int
    lines: str
    members: int
    faults: int
    virtual: float
    real: float
    cpu: float
    together: float
    epochs: int
    forks: int
    verdict: str
    story: str = ""


def setting_of(seed: int, lines: str | None = None) -> tuple[str, Setting]:
    """The conditions of a seed; its lines are drawn as well unless they are given."""
    rng = random.Random(f"{seed}/setting")
    members = round(math.exp(rng.uniform(math.log(2.5), math.log(MOST_MEMBERS + 0.5))))  # as many of 3 to 9 as of 10 up
    drawn = rng.choice(list(LINES))
    scale = rng.choice([1, 1, 20, 100])  # at 100, the vector takes 0.3 s over 20 Mbit/s, and up to 1.3 s where uneven
    matchmaking, timeout, chunk = rng.choice(TIMES if scale < 100 else TIMES[:1])
    chunk_elements = rng.choice([ELEMENTS, 50 if members < 10 else 200])
    steps = rng.choice([2, 4])  # of each trainer in an epoch
    batch_seconds = rng.choice([1.5, 3.0]) if members < 10 else 3.0  # many members are dear
    rules = Rules(
        sizes=(ELEMENTS,),
        matchmaking_time=matchmaking,
        round_timeout=timeout,
        target_samples=float(steps * members),
        chunk_elements=chunk_elements,
    )
    name, relayed = lines or drawn, seed >= FIRST_RELAYED
    return name, Setting(
        least=members,
        most=members,
        rules=rules,
        faults=(*ALL_FAULTS, *["other reach"] * 3) if relayed else ALL_FAULTS,
        batch_seconds=batch_seconds,
        payload_scale=scale,
        at_once=rng.random() < 0.8,
        chunk_timeout=chunk,
        remembered=10_000,
        relayed=0.4 if relayed else 0.0,
        **LINES[name],
    )


class Errors(logging.Handler):
    """Keeps what is logged as an error."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[tuple[object, str]] = []  # the first argument, which is mostly whose error it is

    def emit(self, record: logging.LogRecord) -> None:
        whose = record.args[0] if isinstance(record.args, tuple) and record.args else None
        self.found.append((whose, self.format(record)))


class Hangs(SystemExit):
    """A seed has not ended. Of all exceptions, a loop lets only such pass: others would be one callback's, or one
    task's."""


class VirtualTime(logging.Formatter):
    """Says when it was, in the run."""

    def format(self, record: logging.LogRecord) -> str:
        with suppress(RuntimeError):  # no run
            return f"{asyncio.get_running_loop().time():8.2f} {super().format(record)}"
        return super().format(record)


def try_seed(seed: int, lines: str | None = None, *, liar: bool = False, told: bool = False) -> Verdict:
    """Run a seed, with a liar or without, and say what became of it; what the peers log is `told` on stderr."""
    name, setting = setting_of(seed, lines)
    runs: list[Faulty] = []
    began, cpu, verdict = time.perf_counter(), time.process_time(), "ok"
    with _uncollected(), _errors(told) as errors, _bounded(REAL_SECONDS) as hung:
        try:
            together, virtual = run(_scenario(seed, setting, runs, liar), until=100_000.0)
        except (Exception, Hangs) as error:  # noqa: BLE001  # whatever it is, it is this seed's verdict, and the next seed is run
            together = virtual = math.nan
            # What the loop says as it is torn down is no news.
            verdict = f"Hangs: {hung[0]}" if hung else f"{type(error).__name__}: {error}"
            if not isinstance(error, AssertionError):
                verdict += "\n" + "".join(traceback.format_tb(error.__traceback__)[-3:])
    one = runs[0] if runs else None
    lied = one.lied if one is not None else set()
    logged = [text for whose, text in errors if whose not in lied]
    if verdict == "ok" and logged:
        verdict = f"errors were logged: {logged[0]}"
    return Verdict(
        seed=seed,
        lines=name,
        members=setting.most,
        faults=one.faults if one is not None else 0,
        virtual=round(virtual, 1),
        real=round(time.perf_counter() - began, 2),
        cpu=round(time.process_time() - cpu, 2),
        together=round(together, 1),
        epochs=max((tip.epoch for tip in one.history.made), default=0) if one is not None else 0,
        forks=len(one.history.forks()) if one is not None else 0,
        verdict=verdict,
        story="\n".join(one.schedule) if one is not None and verdict != "ok" else "",
    )


async def _scenario(seed: int, setting: Setting, runs: list[Faulty], liar: bool) -> tuple[float, float]:
    swarm = await Faulty.begin(seed, setting)
    runs.append(swarm)
    count = swarm.rng.randint(2, MOST_FAULTS)
    if liar:
        await _suffer_a_liar(seed, swarm, count)
    else:
        await swarm.suffer(count, FAULTY_SECONDS)
    together = await swarm.until_together(DEADLINES * setting.deadline)
    swarm.check_history()
    return together, asyncio.get_running_loop().time()


async def _suffer_a_liar(seed: int, swarm: Faulty, count: int) -> None:
    """Half as many faults, and a member that lies; then it is gone, or honest."""
    rng = random.Random(f"{seed}/liar")
    await asyncio.sleep(rng.uniform(0.0, 20.0))
    trainer = await swarm.spawn(Role.NODE, lies=True)
    swarm.lied.add(trainer.peer.node.peer_id)
    swarm.log(f"{trainer.peer.name} is a liar")
    wide = seed >= FIRST_WIDE
    liar = Liar(trainer, rng, swarm.log, wide=wide)
    lies = rng.randint(1, MOST_WIDE_LIES if wide else MOST_LIES)
    await asyncio.gather(liar.lie(lies, FAULTY_SECONDS), swarm.suffer(count // 2, rng.uniform(10.0, FAULTY_SECONDS)))
    if rng.random() < 0.5:
        swarm.log(f"{trainer.peer.name} is gone")
        swarm.liars.remove(trainer)
        swarm.donors.remove(trainer)
        swarm.world.kill(trainer.peer.node.peer_id)
    else:
        swarm.log(f"{trainer.peer.name} lies no more")


@contextmanager
def _errors(told: bool) -> Iterator[list[tuple[object, str]]]:
    """All that is logged as an error within. Nothing is printed, or all that is logged, with the virtual time."""
    root, handler = logging.getLogger(), Errors()
    before, level = root.handlers[:], root.level
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO if told else logging.ERROR)
    if told:
        printer = logging.StreamHandler()
        printer.setFormatter(VirtualTime("%(message)s"))
        root.addHandler(printer)
    try:
        yield handler.found
    finally:
        root.handlers[:] = before
        root.setLevel(level)


@contextmanager
def _bounded(seconds: int) -> Iterator[list[str]]:
    """Raises `Hangs` in what does not end: virtual time that stands still has no other bound. Yields what it says, once
    that has happened."""
    told: list[str] = []

    def hangs(*_: object) -> None:
        told.append(f"it has not ended after {seconds} real seconds")
        raise Hangs(told[-1])

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(seconds)
    try:
        yield told
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Cyclic garbage is collected once, before: that of the last seed, whose run was still held when it ended."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def as_row(verdict: Verdict) -> dict[str, object]:
    """As one line of a sweep's file."""
    return dataclasses.asdict(verdict)

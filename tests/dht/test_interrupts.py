"""A signal handler that raises within a call of the DHT leaves it as it was, or leaves nothing of it."""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import shoal
from shoal import DHT  # imported before the first alarm

SHOAL = str(Path(shoal.__file__).parent)

# What CPython swallows in destructors is no matter of these tests.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Late(TimeoutError):
    """What an alarm raises."""


@pytest.fixture
def ring() -> Iterator[Callable[[Callable[[], object], float], bool]]:
    """Makes a call, and rings within it: ring(call, longest time until then). Returns whether it has rung."""
    chance, raised = random.Random(0), Late("rung")

    def bell(number: int, frame: object) -> None:
        raise raised.with_traceback(None)

    def make(call: Callable[[], object], within: float) -> bool:
        try:
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + chance.random() * within)
                call()
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        except Late as error:
            return error is raised
        return False

    before = signal.signal(signal.SIGALRM, bell)
    gc.disable()
    yield make
    gc.enable()
    signal.signal(signal.SIGALRM, before)


def reactors() -> set[threading.Thread]:
    """Those of this process; some fixtures live as long as it does."""
    return {thread for thread in threading.enumerate() if thread.name == "shoal-reactor"}


def test_calls_are_interrupted_and_the_dht_goes_on(ring: Callable[[Callable[[], object], float], bool]) -> None:
    with DHT(start=True) as dht:
        calls: list[Callable[[], object]] = [
            lambda: dht.get("key"),
            lambda: dht.store("key", 1, shoal.get_dht_time() + 60),
            dht.get_visible_maddrs,
            lambda: dht.run_coroutine(lambda dht, node: asyncio.sleep(0.001)),
        ]
        rung = sum(ring(call, 0.001) for _ in range(60) for call in calls)
        assert rung > 20
        assert dht.store("key", 2, shoal.get_dht_time() + 90)
        found = dht.get("key")
        assert found is not None
        assert found.value == 2


def test_nothing_is_left_of_an_interrupted_start_or_shutdown(
    ring: Callable[[Callable[[], object], float], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    rung, before = 0, reactors()
    begun: list[DHT] = []
    rung_within: list[Late] = []
    run = DHT.run_in_background

    def recorded(dht: DHT, await_ready: bool = True) -> None:
        begun.append(dht)
        run(dht, await_ready)

    def start() -> None:
        try:
            DHT(start=True)
        except Late as late:
            # A bell between the end of the start and the next instruction is no matter of the DHT's.
            if any(frame.filename.startswith(SHOAL) for frame in traceback.extract_tb(late.__traceback__)):
                rung_within.append(late)
            raise

    monkeypatch.setattr(DHT, "run_in_background", recorded)
    for _ in range(40):
        begun.clear()
        rung_within.clear()
        rung += ring(start, 0.004)
        for dht in begun:
            assert not (rung_within and dht.is_alive())
            if dht.is_alive():
                rung += ring(dht.shutdown, 0.002)
            assert not dht.is_alive()
    assert rung > 3
    assert reactors() <= before


@pytest.mark.parametrize("start", [lambda: DHT(start=True), lambda: DHT().__enter__()], ids=["start", "with"])
def test_one_that_is_interrupted_as_its_start_ends_is_ended(
    start: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody gets it, so nobody else could end it."""
    run, before = DHT.run_in_background, reactors()

    def interrupted(dht: DHT, await_ready: bool = True) -> None:
        run(dht, await_ready)
        raise Late("rung")

    monkeypatch.setattr(DHT, "run_in_background", interrupted)
    with pytest.raises(Late):
        start()
    assert reactors() <= before

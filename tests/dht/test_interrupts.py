"""A signal handler that raises within a call of the DHT leaves it as it was, or leaves nothing of it."""

from __future__ import annotations

import asyncio
import gc
import random
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

import shoal
from shoal import DHT  # imported before the first alarm

# What CPython swallows in destructors is no matter of these tests.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Late(TimeoutError):
    """What an alarm raises."""


@pytest.fixture
def ring() -> Iterator[Callable[[Callable[[], object], float], bool]]:
    """Makes a call, and rings within it: ring(call, longest time until then). Returns whether it has rung."""
    chance, raised = random.Random(0), Late("rung")

    def bell(number: int, frame: object) -> None:
        raise raised

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
    rung, before, lost = 0, reactors(), 0
    begun: list[DHT] = []
    run = DHT.run_in_background

    def recorded(dht: DHT, await_ready: bool = True) -> None:
        begun.append(dht)
        run(dht, await_ready)

    monkeypatch.setattr(DHT, "run_in_background", recorded)
    for _ in range(40):
        begun.clear()
        made: list[DHT] = []
        rung += ring(lambda made=made: made.append(DHT(start=True)), 0.004)  # type: ignore[misc]
        lost += not made and any(dht.is_alive() for dht in begun)
        for dht in begun:
            if dht.is_alive():
                rung += ring(dht.shutdown, 0.002)
            assert not dht.is_alive()
    assert rung > 3
    assert lost <= 1, "nothing can be done about a bell between the end of the start and the call of append"
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

"""The virtual clock: time jumps, nothing blocks, and what can't end says so."""

from __future__ import annotations

import asyncio
import time

import pytest

from shoal.simulation.clock import Deadlock, OutOfTime, run


def test_an_hour_passes_at_once_and_timers_fire_in_order():
    async def scenario() -> tuple[list[int], float]:
        fired: list[int] = []

        async def fire(after: int) -> None:
            await asyncio.sleep(after)
            fired.append(after)

        await asyncio.gather(*(fire(after) for after in (3000, 20, 1)))
        return fired, asyncio.get_running_loop().time()

    start = time.perf_counter()
    fired, now = run(scenario(), until=3600)
    assert fired == [1, 20, 3000]
    assert now == pytest.approx(3000)
    assert time.perf_counter() - start < 60


def test_deadlines_are_virtual():
    async def scenario() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await asyncio.get_running_loop().create_future()
        return asyncio.get_running_loop().time()

    assert run(scenario()) == pytest.approx(60)


def test_a_deadlock_is_an_error_that_names_the_place():
    async def waits_for_ever() -> None:
        await asyncio.Event().wait()

    async def scenario() -> None:
        await waits_for_ever()

    with pytest.raises(Deadlock, match=r"Event\.wait"):
        run(scenario())


def test_virtual_time_is_bounded():
    async def scenario() -> None:
        for _ in range(1000):
            await asyncio.sleep(7)

    with pytest.raises(OutOfTime, match="not done after 100 s of virtual time"):
        run(scenario(), until=100)


def test_threads_are_refused():
    async def scenario() -> None:
        await asyncio.to_thread(time.sleep, 1)

    with pytest.raises(RuntimeError, match="simulation refuses"):
        run(scenario())


def test_sets_of_tasks_keep_their_order():
    async def scenario() -> list[str]:
        async def nothing() -> None:
            await asyncio.sleep(0)

        done, _ = await asyncio.wait([asyncio.create_task(nothing(), name=str(i)) for i in range(50)])
        return [task.get_name() for task in done]

    assert run(scenario()) == run(scenario())

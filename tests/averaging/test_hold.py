"""A lock that other threads hold is waited for without holding up the loop, and never lost."""

from __future__ import annotations

import asyncio
import threading

from shoal.averaging.control import Hold


def test_a_free_lock_is_taken_and_given_back() -> None:
    lock = threading.Lock()

    async def scenario() -> None:
        hold = Hold(lock)
        assert await hold.take()
        assert await hold.take(), "it is taken once"
        assert lock.locked()
        hold.release()
        assert not lock.locked()
        assert not await hold.take(), "nobody would give it back"
        assert not lock.locked()

    asyncio.run(scenario())


def test_the_loop_goes_on_while_another_thread_has_the_lock() -> None:
    lock = threading.Lock()
    lock.acquire()

    async def scenario() -> None:
        hold = Hold(lock)
        takes = [asyncio.create_task(hold.take()) for _ in range(2)]
        await asyncio.sleep(0.01)
        takes[0].cancel()  # one of two that wait
        await asyncio.sleep(0.01)
        assert not takes[1].done()
        lock.release()
        assert await takes[1]
        hold.release()

    asyncio.run(scenario())
    assert not lock.locked()


def test_a_lock_that_comes_too_late_is_given_back() -> None:
    lock = threading.Lock()
    lock.acquire()

    async def scenario() -> None:
        hold = Hold(lock)
        take = asyncio.create_task(hold.take())
        await asyncio.sleep(0.01)
        hold.release()
        lock.release()
        assert not await take

    asyncio.run(scenario())
    assert lock.acquire(timeout=60.0)

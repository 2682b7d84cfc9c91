"""Trying several ways to the same end at once, a little apart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

HEAD_START = 0.25  # seconds, as RFC 8305 ("Happy Eyeballs") recommends


async def first_to_succeed(attempts: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    """Start one attempt after the other, each when all before it failed or had HEAD_START seconds, until one succeeds.

    The others are then cancelled. Raises the last error if all fail; there must be at least one.
    """
    waiting = list(attempts)
    running: list[asyncio.Task[None]] = []
    error: BaseException | None = None
    try:
        while waiting or running:
            if waiting:
                running.append(asyncio.create_task(waiting.pop(0)()))
            timeout = HEAD_START if waiting else None
            await asyncio.wait(running, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            for attempt in [attempt for attempt in running if attempt.done()]:
                running.remove(attempt)
                error = attempt.exception()
                if error is None:
                    return
    finally:
        for attempt in running:
            attempt.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    assert error is not None
    raise error

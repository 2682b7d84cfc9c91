"""Runs several attempts at the same goal, started a little apart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

HEAD_START = 0.25  # seconds, as RFC 8305 ("Happy Eyeballs") recommends


async def first_to_succeed(attempts: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    """Start the attempts in order until one succeeds. Each starts when all earlier ones have failed, or after
    HEAD_START seconds.

    When one succeeds, the others are cancelled. If all fail, the last error is raised. There must be at least one
    attempt.
    """
    waiting = list(attempts)
    running: set[asyncio.Task[None]] = set()
    failures: list[BaseException] = []
    try:
        while waiting or running:
            if waiting:
                running.add(asyncio.create_task(waiting.pop(0)()))
            timeout = HEAD_START if waiting else None
            ended, running = await asyncio.wait(running, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            failed = [error for attempt in ended if (error := attempt.exception()) is not None]
            if len(failed) < len(ended):
                return
            failures += failed
    finally:
        for attempt in running:
            attempt.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    raise failures[-1]

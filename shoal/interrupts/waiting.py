"""Waits for the work of other threads, in calls that hold signal handlers back.

A wait is a call of `acquire` of a lock that nobody else uses, and handlers run within it. `Future.result` and
`concurrent.futures.wait` hold the future's own lock meanwhile. An exception of a handler can leave it locked, and then
the thread that brings the result hangs.

What the work has raised and what a handler has raised are apart: `finished` raises only the latter.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from shoal.interrupts.hold import present_hold

T = TypeVar("T")


def has_rung(bell: threading.Lock, timeout: float | None = None) -> bool:
    """Wait until another thread releases a lock that this thread has acquired.

    Args:
        bell: the lock.
        timeout: the longest time to wait, in seconds; None: no limit.

    Returns:
        Whether it was released in that time.
    """
    seconds = -1 if timeout is None else min(max(0.0, timeout), threading.TIMEOUT_MAX)
    hold = present_hold()
    if hold is None or hold.is_unbroken:
        return bell.acquire(timeout=seconds)
    hold.is_open = True  # first: a signal that arrives after the next line runs its handler itself
    hold.run_pending()
    rung = bell.acquire(timeout=seconds)
    hold.is_open = False
    return rung


def finished(future: Future[Any], timeout: float | None = None) -> bool:
    """Wait until a future is done, at most for `timeout` seconds. Returns whether it is."""
    return any_finished((future,), timeout)


def any_finished(futures: Iterable[Future[Any]], timeout: float | None = None) -> bool:
    """Wait until one of these futures is done, at most for `timeout` seconds. Returns whether one is."""
    bell = threading.Lock()
    bell.acquire()
    first = threading.Lock()  # the first one rings

    def ring(_: object) -> None:
        if first.acquire(blocking=False):
            bell.release()

    for future in futures:
        future.add_done_callback(ring)
    return has_rung(bell, timeout)


def result_of(future: Future[T], timeout: float | None = None) -> T:
    """Wait for the result of a future, as `future.result(timeout)` does. If a handler raises meanwhile, cancel it.

    Raises:
        TimeoutError: after `timeout`.
        CancelledError: if the future was cancelled.
        Exception: what the work has raised.
    """
    try:
        is_done = finished(future, timeout)
    except BaseException:  # nobody waits for the result any more
        future.cancel()
        raise
    if not is_done:
        raise TimeoutError
    return future.result()

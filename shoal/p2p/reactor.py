"""The one background thread of a process. It runs the asyncio loop on which all network communication lives."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

SWITCH_INTERVAL = 0.0005
"""Seconds for which another thread may keep the GIL when the reactor wants it back, as long as there is a reactor.

After every call into torch, OpenSSL or the kernel that releases the GIL, the reactor may have to wait this long for the
GIL. With Python's default of 5 ms a round beside a trainer in pure Python took up to ten times as long (25M float32,
float16, 4 peers on 2 cores, over ZeroMQ: 0.45 to 4.6 s instead of 0.31; with this 0.38 to 0.49 s). The trainer notices
no difference.
"""


class Reactor:
    """A daemon thread with an asyncio loop. Work crosses over as coroutines in and futures out.

    Use `Reactor.acquire()` and `release()`: all users in a process share one reactor, which ends with its last user.
    """

    _lock = threading.Lock()
    _shared: Reactor | None = None

    def __init__(self) -> None:
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self.loop = self._runner.get_loop()
        self._users, self._process, self._has_ended = 0, os.getpid(), False
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(min(SWITCH_INTERVAL, self._switch_interval))
        self._thread = threading.Thread(target=self._run, name="shoal-reactor", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(cls) -> Reactor:
        """The process's reactor, started if nobody uses it yet. Each caller must call `release()` once."""
        with cls._lock:
            if cls._shared is None or not cls._shared.is_alive():
                cls._shared = cls()
            cls._shared._users += 1
            return cls._shared

    def release(self) -> None:
        """End this user's use. The last user stops the loop and joins the thread."""
        with Reactor._lock:
            self._users -= 1
            if self._users:
                return
            if Reactor._shared is self:
                Reactor._shared = None
                sys.setswitchinterval(self._switch_interval)
        self.loop.call_soon_threadsafe(self.loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def is_alive(self) -> bool:
        """Whether its thread runs in this process."""
        # `Thread.is_alive` of Python 3.11 says False for good of a living thread, once a signal handler has raised in
        # that call.
        return not self._has_ended and self._process == os.getpid()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run `coroutine` on the loop. The future gets its result or error; cancelling the future cancels the
        coroutine.

        Raises:
            RuntimeError: in a forked child of the reactor's process, where the future would never be done.
        """
        if not self.is_alive():
            coroutine.close()
            raise RuntimeError(
                "the reactor does not run in this process: threads are not forked. Make a DHT of its own in the child"
            )
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run `coroutine` on the loop and wait for its result. Raises RuntimeError on the reactor's own thread."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("a call that waits for the reactor was made on the reactor's thread: it would never end")
        return self.submit(coroutine).result()

    def _run(self) -> None:
        try:
            with self._runner:  # the runner cancels the remaining tasks
                self.loop.run_forever()
        finally:
            self._has_ended = True

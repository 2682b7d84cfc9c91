"""One background thread that runs what it is given, one after the other."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

Job = tuple[Callable[[], None], "Future[None]"]


class Worker:
    """Starts its thread with the first job, and ends it when it is garbage.

    The thread is a daemon: a process that ends because of an error does not wait for messages that will never come.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._started = False

    def submit(self, run: Callable[[], None]) -> Future[None]:
        """Runs it after all that was submitted before; the future gets what it raises."""
        if not self._started:
            threading.Thread(target=_work, args=(self._jobs,), name="shoal-gradients", daemon=True).start()
            # Not at the end of the process: a thread that wakes up while the interpreter goes down may abort it.
            weakref.finalize(self, self._jobs.put, None).atexit = False
            self._started = True
        future: Future[None] = Future()
        self._jobs.put((run, future))
        return future


def _work(jobs: SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        run, future = job
        try:
            run()
        except BaseException as error:  # noqa: BLE001 (it is raised where the future is waited for)
            future.set_exception(error)
        else:
            future.set_result(None)
        del job, run, future  # so that what they hold is not kept while the thread waits

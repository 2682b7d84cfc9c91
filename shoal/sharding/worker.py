"""One background thread that runs functions one after the other."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue

Job = tuple[Callable[[], None], "Future[None]"]


class Worker:
    """Starts its thread with the first job, and ends it when the worker is garbage-collected.

    The thread is a daemon: a process that ends because of an error does not wait for messages that will never come.
    """

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._started = False

    def submit(self, run: Callable[[], None]) -> Future[None]:
        """Runs a function after all that were submitted before. If it raises, the future gets the error."""
        if not self._started:
            threading.Thread(target=_work, args=(self._jobs,), name="shoal-gradients", daemon=True).start()
            # Not at exit: a thread that wakes up while the interpreter shuts down may abort the process.
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
        except BaseException as error:  # noqa: BLE001 (whoever waits for the future gets it raised)
            future.set_exception(error)
        else:
            future.set_result(None)
        del job, run, future  # frees the objects that they hold while the thread waits

"""The threads that send on lanes: a few for all of them, so that one that takes nothing holds up no other."""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from typing import Final

log = logging.getLogger(__name__)

THREADS: Final = 4


class Writers:
    """Calls a connection's turn whenever it has asked for one and its socket takes bytes: in the order of asking, and
    of one connection one at a time."""

    def __init__(self) -> None:
        self._turns: dict[int, Callable[[], bool]] = {}
        self._lock = threading.Lock()
        self._epoll = select.epoll()
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._epoll.register(self._end, select.EPOLLIN)
        self._threads: list[threading.Thread] = []

    def add(self, fd: int, turn: Callable[[], bool]) -> None:
        """A connection. `turn` sends something, and returns whether to ask for another turn."""
        with self._lock:
            self._turns[fd] = turn
            self._epoll.register(fd, select.EPOLLONESHOT)
            while len(self._threads) < THREADS:
                self._threads.append(threading.Thread(target=self._run, name="shoal-writer", daemon=True))
                self._threads[-1].start()

    def ask(self, fd: int) -> None:
        """A turn for this connection."""
        with self._lock:
            if fd in self._turns:
                self._epoll.modify(fd, select.EPOLLOUT | select.EPOLLONESHOT)

    def remove(self, fd: int) -> None:
        """The connection is about to be closed, by which the kernel forgets what it has asked for."""
        with self._lock:
            self._turns.pop(fd, None)

    def close(self) -> None:
        """End the threads. There are no connections any more."""
        os.eventfd_write(self._end, 1)
        for thread in self._threads:
            thread.join()
        self._epoll.close()
        os.close(self._end)

    def _run(self) -> None:
        while True:
            for fd, _ in self._epoll.poll(maxevents=1):
                if fd == self._end:
                    return
                turn = self._turns.get(fd)
                try:
                    if turn is not None and turn():
                        self.ask(fd)
                except Exception:  # a defect of one must not keep all others from sending
                    log.exception("sending on a lane failed")

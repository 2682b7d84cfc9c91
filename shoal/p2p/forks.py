"""Keeps a forked child from holding its parent's connections open.

A child such as a DataLoader's worker has a copy of every descriptor, and TCP tells the other side of an end only when
the last copy is closed: if the parent died, its peers would not notice before the heartbeats are missed, and its port
would stay taken. So the child closes its copies, first thing. Of ZeroMQ it has no more than memory then: its threads
are not in the child, and pyzmq leaves sockets of another process alone.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from weakref import WeakSet


class Sockets:
    """Descriptors that a forked child has to close.

    A connection that is made, or lost, and not noted yet escapes: the heartbeats are for it.
    """

    def __init__(self) -> None:
        self._inodes: dict[int, int] = {}
        _all.add(self)

    def add(self, fd: int) -> None:
        """The socket that has this number now."""
        with suppress(OSError):  # closed already
            self._inodes[fd] = os.fstat(fd).st_ino

    def discard(self, fd: int) -> None:
        """The socket with this number was closed, or is about to be."""
        self._inodes.pop(fd, None)

    def close(self) -> None:
        """Close them, but for a number that another file has by now: news of an end may come late."""
        for fd, inode in self._inodes.items():
            with suppress(OSError):
                if os.fstat(fd).st_ino == inode:
                    os.close(fd)
        self._inodes.clear()


_all: WeakSet[Sockets] = WeakSet()
_open: WeakSet[socket.socket] = WeakSet()


def close_in_children(opened: socket.socket) -> None:
    """Have a forked child close its copy of this socket."""
    _open.add(opened)


def _close_copies() -> None:
    for sockets in list(_all):
        sockets.close()
    for copy in list(_open):
        copy.close()


os.register_at_fork(after_in_child=_close_copies)

"""Prevents a forked child from keeping its parent's connections open.

A child, such as a DataLoader's worker, has a copy of every file descriptor. TCP reports the end of a connection to the
other side only when the last copy is closed. So if the parent died, its peers would not notice, and its port would stay
taken. Therefore the child closes its copies as its first action. It never shuts them down, because that would end the
parent's connections.
"""

from __future__ import annotations

import os
import socket
from weakref import WeakSet

_open: WeakSet[socket.socket] = WeakSet()


def close_in_children(opened: socket.socket) -> None:
    """Close this socket's copy in each forked child.

    A socket that was accepted, but not registered here when another thread forks, is missed.
    """
    _open.add(opened)


def _close_copies() -> None:
    for copy in list(_open):
        copy.close()


os.register_at_fork(after_in_child=_close_copies)

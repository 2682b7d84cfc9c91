"""Keeps a forked child from holding its parent's connections open.

A child such as a DataLoader's worker has a copy of every descriptor, and TCP tells the other side of an end only when
the last copy is closed: if the parent died, its peers would not notice, and its port would stay taken. So the child
closes its copies, first thing. It never shuts them down, which would end the parent's connections.
"""

from __future__ import annotations

import os
import socket
from weakref import WeakSet

_open: WeakSet[socket.socket] = WeakSet()


def close_in_children(opened: socket.socket) -> None:
    """Have a forked child close its copy of this socket.

    One that is accepted, and not noted yet when another thread forks, escapes.
    """
    _open.add(opened)


def _close_copies() -> None:
    for copy in list(_open):
        copy.close()


os.register_at_fork(after_in_child=_close_copies)

"""What a forked child closes, and what it leaves alone. Real processes are in `test_lost_process.py`."""

from __future__ import annotations

import os
import socket

from shoal.p2p.forks import close_in_children


def test_a_forked_child_closes_its_copies_and_the_parent_keeps_its_own():
    near, far = socket.socketpair()
    with near, far:
        close_in_children(near)
        number = near.fileno()
        child = os.fork()
        if child == 0:
            try:
                os.fstat(number)
            except OSError:
                os.fstat(far.fileno())
                os._exit(near.fileno() != -1)  # nothing that this socket does later reaches another file
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        near.sendall(b"still here")
        assert far.recv(10) == b"still here"


def test_a_number_that_another_file_has_by_now_is_left_alone():
    near, far = socket.socketpair()
    close_in_children(near)
    number = near.fileno()
    near.close()
    os.dup2(far.fileno(), number)
    child = os.fork()
    if child == 0:
        os.fstat(number)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(number)
    far.close()

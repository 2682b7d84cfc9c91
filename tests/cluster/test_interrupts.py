"""Ctrl-C in a rank that waits for the others leaves what they have said for the next call."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Iterator

import pytest

from shoal.cluster.gang import Gang
from shoal.cluster.messages import Report
from shoal.interrupts import held


def interrupted_waiting(gang: Gang) -> None:
    timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt), held():
        gang.hear_reports()
    timer.join()


@pytest.fixture
def interrupts() -> Iterator[None]:
    """Python's own handler of SIGINT. In the background of a script, processes begin with that signal ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupts")
def test_reports_stay_for_the_next_call() -> None:
    gang = Gang(None)
    pairs = [socket.socketpair() for _ in range(2)]
    gang._sockets = {rank: ours for rank, (ours, _) in enumerate(pairs, 1)}
    first, second = Report("step", 1), Report("step", 2)
    gang._inbox |= {1: deque([first]), 2: deque()}
    interrupted_waiting(gang)
    with gang._changed:
        gang._inbox[2].append(second)
        gang._tell_waiting()
    assert gang.hear_reports() == [first, second]
    gang.leave()
    for _, theirs in pairs:
        theirs.close()

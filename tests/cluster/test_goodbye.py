"""Rank 0 names the rank that is lost before it says goodbye."""

from __future__ import annotations

import socket

from shoal.cluster.gang import Gang, _receive
from shoal.cluster.messages import Bye, Lost


def test_others_hear_who_is_lost_before_rank_0_says_goodbye() -> None:
    """The thread that has seen the loss may come to tell them later than the trainer's thread to its end."""
    gang = Gang(None)
    ours, theirs = socket.socketpair()
    with theirs:
        gang._sockets = {1: ours}
        gang._lost = Lost(2, "killed")
        gang.leave()
        assert [_receive(theirs), _receive(theirs)] == [Lost(2, "killed"), Bye()]


def test_others_hear_that_a_rank_was_interrupted() -> None:
    """A framework leaves the run in its `finally:` when Ctrl-C ends the training of one rank."""
    gang = Gang(None)
    ours, theirs = socket.socketpair()
    with theirs:
        gang._sockets = {1: ours}
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            gang.leave()
        assert _receive(theirs) == Bye("KeyboardInterrupt")

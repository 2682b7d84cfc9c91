"""Rank 0 names the rank that is lost before it says goodbye."""

from __future__ import annotations

import socket

from shoal.cluster.messages import Bye, Lost
from shoal.cluster.ties import Ties, receive


def ties_of(ours: socket.socket) -> Ties:
    return Ties(0, ["rank 0", "rank 1", "rank 2"], {1: ours})


def test_others_hear_who_is_lost_before_rank_0_says_goodbye() -> None:
    """The thread that has seen the loss may come to tell them later than the trainer's thread to its end."""
    ours, theirs = socket.socketpair()
    with theirs:
        ties = ties_of(ours)
        ties._lost = Lost(2, "killed")
        ties.leave()
        assert [receive(theirs), receive(theirs)] == [Lost(2, "killed"), Bye()]


def test_others_hear_that_a_rank_was_interrupted() -> None:
    """A framework leaves the run in its `finally:` when Ctrl-C ends the training of one rank."""
    ours, theirs = socket.socketpair()
    with theirs:
        ties = ties_of(ours)
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            ties.leave()
        assert receive(theirs) == Bye("KeyboardInterrupt")


def test_others_hear_that_a_rank_has_ended_within_a_call() -> None:
    """As a script does that ends by `sys.exit()` within a callback."""
    ours, theirs = socket.socketpair()
    with theirs:
        ties = ties_of(ours)
        ties.in_call = True
        ties.leave(SystemExit())
        assert receive(theirs) == Bye("", in_call=True)

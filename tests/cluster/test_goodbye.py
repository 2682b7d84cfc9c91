"""What the others hear of a rank that leaves, or is lost."""

from __future__ import annotations

import socket
import threading

import pytest

from shoal.cluster.messages import Bye, LostRank
from shoal.cluster.ties import ClusterError, Ties, framed, receive


def ties_of(ours: socket.socket) -> Ties:
    return Ties(0, ["rank 0", "rank 1", "rank 2"], {1: ours})


def test_others_hear_who_is_lost_before_rank_0_says_goodbye() -> None:
    """The thread that has seen the loss may come to tell them later than the trainer's thread to its end."""
    ours, theirs = socket.socketpair()
    with theirs:
        ties = ties_of(ours)
        ties._lost = LostRank(2, "killed")
        ties.leave()
        assert [receive(theirs), receive(theirs)] == [LostRank(2, "killed"), Bye()]


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


@pytest.mark.parametrize(
    ("goodbye", "is_whole", "why"),
    [(Bye("KeyError: 1"), False, "it has raised KeyError: 1"), (Bye(), True, "rank 1 has shut its optimizer down")],
)
def test_a_goodbye_counts_that_was_not_read_when_a_message_could_not_be_sent(
    monkeypatch: pytest.MonkeyPatch, goodbye: Bye, is_whole: bool, why: str
) -> None:
    has_failed, read = threading.Event(), Ties._read

    def late(self: Ties, rank: int, arrived: bytearray) -> bool:
        has_failed.wait(30.0)
        return read(self, rank, arrived)

    monkeypatch.setattr(Ties, "_read", late)
    ours, theirs = socket.socketpair()
    ties = ties_of(ours)
    theirs.sendall(framed(goodbye))
    theirs.close()
    timer = threading.Timer(0.05, has_failed.set)  # nothing says that it has failed; if not, the test is only easier
    timer.start()

    def exchange() -> None:
        ties.send(framed(LostRank(2, "")))
        ties.hear(1)

    with pytest.raises(ClusterError, match=why):
        exchange()
    assert ties.is_whole == is_whole
    timer.join()
    ties.leave()

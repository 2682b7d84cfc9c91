"""The errors of averaging."""

from __future__ import annotations


class AveragingError(Exception):
    """A round gave no result. Its inputs have not changed. The message says why.

    Attributes:
        again: the number of seconds after which it makes sense to try again, if the run has told that; else None.
    """

    again: float | None = None


class Rejected(AveragingError):
    """The run does not accept this peer with its options. The message says which differ. A retry does not help."""


class ResultLost(AveragingError):
    """A round was committed, and no member that can be reached has its result."""


class Unusable(AveragingError):
    """This peer itself can't use the rounds that it begins at this state. The message says why. A retry does not
    help."""


class Behind(AveragingError):
    """The swarm is at another state than this peer. The peer must download that state before it joins a round."""

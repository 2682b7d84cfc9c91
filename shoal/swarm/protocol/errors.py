"""How averaging fails."""

from __future__ import annotations


class AveragingError(Exception):
    """A round gave no result; nothing that was handed in has changed. The text says why."""


class Rejected(AveragingError):
    """The run does not take this peer as it is configured; the text names what differs. Trying again does not help."""


class ResultLost(AveragingError):
    """A round was committed, and nobody who can be reached has its result."""


class Behind(AveragingError):
    """The swarm is at another state than this peer: download it before joining a round."""

"""How averaging fails."""

from __future__ import annotations


class AveragingError(Exception):
    """A round gave no result; nothing that was handed in has changed. The text says why."""


class Behind(AveragingError):
    """The swarm is at another state than this peer: download it before joining a round."""

"""Evaluates what the members of a round say about its progress."""

from __future__ import annotations

ASKED_AT_A_TIME = 16  # members of a round that are asked in one second, in turn
REMEMBERED_SECONDS = 2.5  # an answer counts for so long, and until each member could be asked again


class Witnesses:
    """Collects what the members of one round say about its progress.

    The word of one member alone does not count: a member that withholds what it owes could claim progress for ever. If
    a member really waits for a slow one, the slow one, whose bytes pass, is a second witness.

    Args:
        me: the key of this peer, which needs no second witness.
    """

    def __init__(self, me: bytes) -> None:
        self._me = me
        self._signs: dict[bytes, int] = {}
        self._grew: dict[bytes, float] = {}  # by member: when its number of signs last grew

    def say(self, key: bytes, signs: int, now: float, *, alone: bool = False) -> bool:
        """A member has seen the round make progress `signs` times. Returns whether this is credible news: the number
        has grown, and another member says the same, or this one needs no second witness (`alone`)."""
        before = self._signs.get(key, signs)  # the first answer is no news
        self._signs[key] = signs
        if signs <= before:
            return False
        self._grew[key] = now
        since = now - REMEMBERED_SECONDS - len(self._signs) / ASKED_AT_A_TIME
        return alone or key == self._me or any(at >= since for other, at in self._grew.items() if other != key)

"""Whether a round gets on, as its members say."""

from __future__ import annotations

ASKED_AT_A_TIME = 16  # members of a round that are asked in a second, in turn
REMEMBERED_SECONDS = 2.5  # and as long as it takes until each was asked again


class Witnesses:
    """What the members of one round say of its progress.

    What one says alone counts for nothing: a member that keeps back what it owes could say for ever that it gets on.
    One that in fact waits for a slow member has that one, whose bytes pass, as a second witness.

    Args:
        me: the key of this peer, which needs no witness.
    """

    def __init__(self, me: bytes) -> None:
        self._me = me
        self._signs: dict[bytes, int] = {}
        self._grew: dict[bytes, float] = {}  # when

    def say(self, key: bytes, signs: int, now: float, *, alone: bool = False) -> bool:
        """That member has seen the round get on so often. Returns whether this is news to be believed: it stands
        `alone`, or another says so, too."""
        before = self._signs.get(key, signs)  # the first answer is no news
        self._signs[key] = signs
        if signs <= before:
            return False
        self._grew[key] = now
        since = now - REMEMBERED_SECONDS - len(self._signs) / ASKED_AT_A_TIME
        return alone or key == self._me or any(at >= since for other, at in self._grew.items() if other != key)

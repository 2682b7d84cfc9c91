"""What a member waits for from the coordinator of its tip, and for how long."""

from __future__ import annotations

from collections import Counter
from enum import Enum

ANSWER_SECONDS = CALL_SECONDS = 5.0
BEGIN_SLACK_SECONDS = 2.0  # beyond the matchmaking time
SHORTEST, LONGEST = 1.0, 60.0


class Duty(Enum):
    """What a coordinator owes its members; the value completes the sentence "it …"."""

    ANSWER = "does not answer"
    CALL = "does not call a round that is due"
    BEGIN = "does not begin the round"
    DECIDE = "does not end the round"


class Deadlines:
    """Since when the coordinators of one tip owe what.

    Attributes:
        failed: how often each peer was deposed since it last did its duty.
    """

    def __init__(self) -> None:
        self.failed: Counter[bytes] = Counter()
        self._since: dict[tuple[bytes, Duty], float] = {}
        self._asked: set[bytes] = set()

    def new_tip(self) -> None:
        """Nobody owes anything for the tip before."""
        self._since.clear()
        self._asked.clear()

    def forgive(self, now: float) -> None:
        """This peer stood still itself: what has come meanwhile was not read yet."""
        self._since = dict.fromkeys(self._since, now)

    def owes(self, by: bytes) -> bool:
        """Whether that peer was asked for anything as the coordinator of this tip."""
        return by in self._asked

    def owed(self, by: bytes, duty: Duty, now: float) -> None:
        """That coordinator owes this, now or since an earlier call."""
        self._since.setdefault((by, duty), now)
        self._asked.add(by)

    def done(self, by: bytes, duty: Duty) -> None:
        """It owes this no more."""
        self._since.pop((by, duty), None)

    def missed(self, by: bytes, seconds: dict[Duty, float], attempt: int, now: float) -> Duty | None:
        """The duty of that coordinator whose time is over, if there is one.

        Args:
            seconds: for each duty.
            attempt: how many coordinators this tip has had before: the times double with each, and halve with each
                time that this one has failed before.
        """
        for duty, limit in seconds.items():
            most = min(max(LONGEST, limit), max(SHORTEST, limit * 2.0 ** (attempt - self.failed[by])))
            if now - self._since.get((by, duty), now) > most:
                return duty
        return None

    def haste(self, me: bytes, attempt: int) -> float:
        """What part of its time for BEGIN a coordinator takes. Others wait half as long for one with each time that it
        has failed, and would depose it at each of its turns if it waited for slow members as long as others do."""
        behind = self.failed[me] - attempt
        return 0.5 ** (behind + 1) if behind > 0 else 1.0

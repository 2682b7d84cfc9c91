"""The duties of the coordinator of a tip, and how long a member waits for each."""

from __future__ import annotations

from collections import Counter
from enum import Enum

ANSWER_SECONDS = CALL_SECONDS = 5.0
BEGIN_SLACK_SECONDS = 2.0  # beyond the matchmaking time
SHORTEST, LONGEST = 1.0, 60.0


class Duty(Enum):
    """What a coordinator must do for its members. The value completes the sentence "it …" about one that fails."""

    ANSWER = "does not answer"
    CALL = "does not call a round that is due"
    BEGIN = "does not begin the round"
    DECIDE = "does not end the round"


class Deadlines:
    """Records which duties the coordinators of one tip owe, and since when.

    Attributes:
        failed: how often each peer was replaced as coordinator since a round of its was last committed.
    """

    def __init__(self) -> None:
        self.failed: Counter[bytes] = Counter()
        self._since: dict[tuple[bytes, Duty], float] = {}
        self._asked: set[bytes] = set()

    def new_tip(self) -> None:
        """Forget all duties, because there is a new tip."""
        self._since.clear()
        self._asked.clear()

    def forgive(self, now: float) -> None:
        """Let all times start again. This peer itself stood still, so it has not read what has arrived."""
        self._since = dict.fromkeys(self._since, now)

    def owes(self, by: bytes) -> bool:
        """Whether this peer has asked that one for anything as the coordinator of this tip."""
        return by in self._asked

    def owed(self, by: bytes, duty: Duty, now: float) -> None:
        """That coordinator owes this duty from now on, or since an earlier call."""
        self._since.setdefault((by, duty), now)
        self._asked.add(by)

    def done(self, by: bytes, duty: Duty) -> None:
        """That coordinator does not owe this duty any more."""
        self._since.pop((by, duty), None)

    def missed(self, by: bytes, seconds: dict[Duty, float], attempt: int, now: float) -> Duty | None:
        """A duty of that coordinator whose time is over; None if there is none.

        Args:
            by: the coordinator.
            seconds: the time for each duty.
            attempt: how many coordinators of this tip were deposed before. The times double with each of them, and
                halve with each time that this one has failed before.
            now: the time.
        """
        for duty, limit in seconds.items():
            most = min(max(LONGEST, limit), max(SHORTEST, limit * 2.0 ** (attempt - self.failed[by])))
            if now - self._since.get((by, duty), now) > most:
                return duty
        return None

    def has_failed(self, by: bytes) -> int:
        """That peer was replaced as coordinator. Returns how often since a round of its was last committed."""
        self.failed[by] += 1
        return self.failed[by]

    def haste(self, me: bytes, attempt: int) -> float:
        """The fraction of the usual time that a coordinator waits before BEGIN. With each time that it has failed,
        others wait half as long for it. So it must hurry as well: otherwise they would depose it at each of its
        turns."""
        behind = self.failed[me] - attempt
        return 0.5 ** (behind + 1) if behind > 0 else 1.0

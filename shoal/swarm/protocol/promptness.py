"""How long a peer may be silent before it counts as lost."""

from __future__ import annotations

from typing import Any

MAX_KEPT = 4096  # peers that are remembered
LEAST_SECONDS = 0.75  # in which two lost packets in a row are sent again
FACTOR = 3.0  # a peer may be silent for this many times the latest of its last answers longer
LATEST = 1.0  # seconds: a later answer came over a line that was cut, or a machine was stopped
UNKNOWN_SECONDS = 4.0  # for a peer that has answered nothing yet; half of that with each answer
KNOWN = 3  # a peer that has answered so often is known
EPOCHS = 200  # for so many epochs it is remembered how late an answer was


class Promptness:
    """How late the answers of each peer were, and so how long it may be silent after it was asked.

    A peer that has answered within milliseconds is lost soon after it stops to answer. A peer whose trainer keeps its
    interpreter busy answers late, and says so (`held`): it is given the time that it needs. Whoever says too much is
    given no more than everybody was given without this rule (`most`).

    Args:
        most: the longest that any peer may be silent, in seconds.
    """

    def __init__(self, most: float) -> None:
        self._most = most
        self._latest: dict[bytes, tuple[float, int]] = {}  # by peer: the latest of its answers, and in which epoch
        self._answers: dict[bytes, int] = {}  # by peer: how many there were

    def answered(self, key: bytes, seconds: float, epoch: int) -> None:
        """That peer has answered so late, in seconds."""
        self.may_be_late(key, min(seconds, LATEST), epoch)
        self._answers[key] = self._answers.pop(key, 0) + 1
        _forget_first(self._answers)

    def may_be_late(self, key: bytes, seconds: float, epoch: int) -> None:
        """That peer may answer so late, in seconds: its trainer has kept it busy for so long, as it says."""
        latest, at = self._latest.get(key, (0.0, epoch))
        if seconds >= latest or epoch - at >= EPOCHS:
            self._latest.pop(key, None)
            self._latest[key] = seconds, epoch
            _forget_first(self._latest)

    def knows(self, key: bytes) -> bool:
        """Whether that peer has answered a few times."""
        return self._answers.get(key, 0) >= KNOWN

    def limit(self, key: bytes, cost: float) -> float:
        """The seconds for which that peer may be silent after it was asked.

        Args:
            key: the peer.
            cost: the seconds that each of those that wait for it may wait: what it costs the peer to be left out, by
                how many wait.
        """
        latest, _ = self._latest.get(key, (0.0, 0))
        unknown = UNKNOWN_SECONDS * 0.5 ** self._answers.get(key, 0)
        return min(self._most, max(LEAST_SECONDS + FACTOR * latest, unknown, cost))


def _forget_first(of_peers: dict[bytes, Any]) -> None:
    if len(of_peers) > MAX_KEPT:
        del of_peers[next(iter(of_peers))]

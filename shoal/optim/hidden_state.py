"""Suspects that an optimizer keeps something outside of its state dict, from what that does to a newcomer."""

from __future__ import annotations

from collections.abc import Collection

SOON = 2  # rounds after a download, within which a difference is not chance
FIRST_REST, LONGEST_REST = 60.0, 3600.0  # seconds until the next download


class HiddenState:
    """Knows when this peer has loaded the state of others, and how long it waits before it does so again.

    A peer that has loaded all of the state of peers that compute alike makes the same steps as they do. If its
    parameters differ soon afterwards, then the step depends on something that was not in the state: an attribute of the
    optimizer, or random numbers. Another download does not help, so this peer takes no part for a while, which grows.

    Attributes:
        is_suspected: whether the last difference came too soon after a download.
    """

    def __init__(self) -> None:
        self._agreed: int | None = None  # rounds since the last load in which the others had the same state
        self._began: int | None = None  # the epoch of this peer's first round
        self._met: dict[bytes, tuple[int, int]] = {}  # by member: the epoch of its first round with this peer; how many
        self._next_rest = FIRST_REST
        self._until = 0.0
        self.is_suspected = False

    def has_loaded(self, *, whole: bool) -> None:
        """This peer has loaded the state of others. `whole`: its optimizer holds all of it, to the bit."""
        self._agreed = 0 if whole else None

    def took_part(self, epoch: int, members: Collection[bytes]) -> None:
        """This peer was in the round of that epoch, with these members."""
        self._began = epoch if self._began is None else self._began
        for key in members:
            first, rounds = self._met.get(key, (epoch, 0))
            self._met[key] = first, rounds + 1
        if len(self._met) > 4 * len(members):  # forget those that have left
            self._met = {key: self._met[key] for key in members}

    def is_new(self, key: bytes) -> bool:
        """Whether that member has joined only now, and after this peer. If the states of the two differ, the fault is
        with that one."""
        first, rounds = self._met.get(key, (0, 0))
        return self._began is not None and self._began < first and rounds <= SOON + 1

    @property
    def has_just_loaded(self) -> bool:
        """Whether this peer has loaded the state so shortly before that a difference is not chance."""
        return self._agreed is not None and self._agreed <= SOON

    def agrees(self) -> None:
        """In a round, others that compute alike had the same state as this peer."""
        if self._agreed is not None:
            self._agreed += 1

    def differs(self, now: float) -> float:
        """This peer's parameters differ from those of peers that compute alike.

        Returns:
            The number of seconds before the next download; 0 if nothing is suspected.
        """
        self.is_suspected = self.has_just_loaded
        if not self.is_suspected:
            self._next_rest = FIRST_REST
            return 0.0
        seconds, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)
        self._until = now + seconds
        return seconds

    def rests(self, now: float) -> bool:
        """Whether this peer takes no part at present."""
        return now < self._until

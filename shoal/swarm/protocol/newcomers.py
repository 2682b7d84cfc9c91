"""May the run wait for a newcomer that loads the state, and until when?

[Note: the budget]
A newcomer that loads the state of a tip comes too late if the round of that tip begins before. So BEGIN waits for it,
and all members with it. Keys are free, and anybody can claim to load. So a run has one budget for the waits of all
newcomers together: a share of its time. It grows by `share` seconds in each second, up to LONGEST_SECONDS, the longest
single wait. A run begins with FIRST_SECONDS, so that a young run takes newcomers as well.

Every member keeps the budget, by what it sees: the time between the answer to its JOIN and BEGIN, while the coordinator
says that the round waits for newcomers. So a new coordinator knows what was spent, and a coordinator that lies does not
hold the members for longer than their own budgets allow. A newcomer takes over the budget that it is told.

The claim of a newcomer holds BEGIN only while the donors see its bytes move, at half of the rate that it says at least.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass

from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.messages import Pause, Progress
from shoal.swarm.protocol.tip import Tip

FIRST_SECONDS = 120.0
LONGEST_SECONDS = 600.0
TOLERANCE, TOLERANCE_SECONDS = 1.25, 5.0  # members have seen slightly different times, so they bear so much more
IDLE_SECONDS = 10.0  # a newcomer whose bytes do not move (it asks, or writes what it has to memory) may take so long
JOIN_SECONDS = 10.0  # and so long from its arrival at the tip to its JOIN
SPARE, SPARE_SECONDS = 1.1, 5.0  # estimates are a little short, and the next report comes two seconds later
GATHER_SECONDS = 10.0  # newcomers that wait for room may come so much later than the first of them
WATCH_SECONDS = 6.0  # over such times the rate that donors see is compared with the one that is claimed
LEAST_SHARE = 0.5  # of the rate that is claimed
MAX_TOLD, QUIET_SECONDS = 1024, 60.0  # newcomers for whom a warning was logged; the time without another one

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Claim:
    """What a newcomer says of its loading.

    Attributes:
        tip: the state that it will be at.
        until: when the run stops waiting for it.
        rate: the bytes per second that it says it receives; 0 if it receives nothing at present.
        holds: whether BEGIN waits for it.
        is_true: whether donors have seen about the rate that it says.
        moved_at: when bytes last moved between it and a donor, as far as this peer knows.
        watched_at, seen: since when donors' bytes are counted, and how many there were.
    """

    tip: Tip
    until: float
    rate: float
    holds: bool
    is_true: bool
    moved_at: float
    watched_at: float
    seen: float = 0.0


class Newcomers:
    """Decides whether a run waits for newcomers, and until when. Time is an argument, in seconds of any clock.

    Args:
        share: the share of the run's time that it may wait for newcomers, from 0 to 1; with 0 it never waits.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._saved, self._saved_at = FIRST_SECONDS if share else 0.0, math.nan  # the budget at that time
        self._claims: dict[bytes, _Claim] = {}
        self._moved: dict[bytes, int] = {}  # by newcomer: the bytes that have passed between it and this peer
        self._paused_at: float | None = None
        self._denied: dict[bytes, float] = {}  # newcomers that wait for room, each with the budget that it needs
        self._has_invited = False  # at this tip
        self._told: dict[bytes, None] = {}
        self._quiet_until = -math.inf
        self.told_until = -math.inf

    # -- the budget

    def budget(self, now: float) -> float:
        """For how many more seconds the run may wait."""
        if self._paused_at is not None:
            return max(0.0, self._saved - (now - self._paused_at))
        grown = self._share * (now - self._saved_at) if self._saved_at == self._saved_at else 0.0
        return min(LONGEST_SECONDS, self._saved + grown) if self._share else 0.0

    def adopt(self, budget: float, now: float) -> None:
        """A coordinator has told this peer, which is new, the run's budget."""
        self._saved, self._saved_at = min(budget, LONGEST_SECONDS), now

    def told(self, seconds: float, now: float) -> None:
        """The coordinator that has this peer's JOIN says that the round waits for newcomers for so long."""
        if seconds and self._paused_at is None:
            self._saved, self._paused_at = self.budget(now), now
        began = now if self._paused_at is None else self._paused_at
        self.told_until = max(now, min(now + seconds, began + TOLERANCE * self._saved + TOLERANCE_SECONDS))

    def is_over(self, now: float) -> None:
        """The round has begun, or this peer has left its tip: what it has waited is spent."""
        if self._paused_at is not None:
            self._saved, self._saved_at, self._paused_at = self.budget(now), now, None
        elif self._saved_at != self._saved_at:
            self._saved_at = now
        self.told_until = -math.inf

    # -- the claims

    def until(self, tip: Tip) -> float:
        """Until when BEGIN of the round of that tip waits for newcomers; minus infinity if it does not."""
        return max((c.until for c in self._claims.values() if c.holds and c.tip == tip), default=-math.inf)

    def claims(
        self, key: bytes, report: Progress, now: float, *, leads: bool = False, due_in: float = 0.0, epoch: float = 0.0
    ) -> Pause:
        """A newcomer says how long it still loads.

        Args:
            key: the newcomer.
            report: what it says.
            now: the time.
            leads: whether this peer coordinates the round. Then donors tell it what they see.
            due_in: in how many seconds the round will be called; 0 if it was.
            epoch: how many seconds an epoch of the run takes; 0 if that is not known.

        Returns:
            The answer to it.
        """
        budget, claim = self.budget(now), self._claims.get(key)
        if claim is None or claim.tip != report.tip:
            claim = self._claims[key] = _Claim(report.tip, now, 0.0, False, True, now, now)
        if not (claim.rate and leads):
            claim.watched_at, claim.seen = now, 0.0
        elif now - claim.watched_at >= WATCH_SECONDS:
            claim.is_true = claim.seen >= LEAST_SHARE * claim.rate * (now - claim.watched_at)
            claim.watched_at, claim.seen = now, 0.0
        claim.rate = report.rate
        takes = SPARE * report.seconds + SPARE_SECONDS if report.rate else claim.moved_at + IDLE_SECONDS - now
        least = max(takes, min(self._denied.values(), default=0.0)) if not report.rate else takes
        fits = (report.seconds if claim.holds else least) - due_in <= budget
        claim.until = now + min(takes, budget + due_in)
        claim.holds = report.asks and fits and claim.is_true and claim.until > now
        if report.asks and report.rate and not (fits or report.replays):
            self._deny(key, report.seconds, takes - due_in, now)
        return Pause(claim.until - now if claim.holds else 0.0, budget, self._share, epoch)

    def _deny(self, key: bytes, seconds: float, least: float, now: float) -> None:
        """A newcomer does not fit into the budget, which would have to be `least`. From now on the run saves for the
        newcomers that need the least of those: the first seconds of others, who do not know their rates yet, would use
        up what it saves."""
        if least < LONGEST_SECONDS and len(self._denied) < MAX_TOLD:
            self._denied[key] = least + GATHER_SECONDS
        if key in self._told or len(self._told) >= MAX_TOLD or now < self._quiet_until:
            return
        self._told[key], self._quiet_until = None, now + QUIET_SECONDS
        log.warning(
            "%r needs %.0f s to load the state over its line, and the run may wait at most %.0f s for newcomers now "
            "(wait_for_newcomers=%g of its time, %.0f s at once): it takes part later, or never. A larger "
            "wait_for_newcomers, a larger target_batch_size, DiLoCo or load_state_compression would let it in",
            PeerID(key), seconds, self.budget(now), self._share, LONGEST_SECONDS,
        )  # fmt: skip

    def invited(self, but: bytes) -> tuple[bytes, ...]:
        """The round of this tip waits for the newcomer `but`: those that were denied before and can come now, as well.
        Each tip invites them once."""
        if self._has_invited:
            return ()
        invited, self._denied, self._has_invited = self._denied, {}, True
        return tuple(key for key in invited if key != but)

    def has_come(self, key: bytes, now: float) -> None:
        """A newcomer is at the tip, and is about to join."""
        claim = self._claims.get(key)
        if claim is not None:
            claim.until = min(now + JOIN_SECONDS, max(claim.until, now + self.budget(now)))

    def gone(self, key: bytes) -> None:
        """Nobody waits for that newcomer any more: it has joined, or was lost."""
        for of_newcomers in (self._claims, self._moved, self._denied):
            of_newcomers.pop(key, None)

    def new_tip(self, tip: Tip, now: float) -> None:
        """This peer is at that tip now. Claims of other tips are void until their newcomers repeat them."""
        self.is_over(now)
        self._has_invited = False
        self._claims = {key: claim for key, claim in self._claims.items() if claim.tip == tip}
        self._moved = {key: passed for key, passed in self._moved.items() if key in self._claims}

    def stood_still(self, now: float) -> None:
        """This peer's process did not run for a while, so it has not read what newcomers and donors have said."""
        for claim in self._claims.values():
            claim.until, claim.moved_at = max(claim.until, now + IDLE_SECONDS), now
            claim.watched_at, claim.seen = now, 0.0

    # -- what donors see

    def look(self, moved: Callable[[bytes], int], now: float) -> list[tuple[bytes, int]]:
        """Count the bytes that have passed between this peer and each newcomer since the last call.

        Args:
            moved: returns how many have passed between this peer and another one, in all.
            now: the time.

        Returns:
            (newcomer, bytes) of each that has moved any, for the coordinator.
        """
        news = []
        for key in self._claims:
            passed = moved(key)
            if (new := passed - self._moved.setdefault(key, passed)) > 0:
                news.append((key, new))
                self.moved(key, new, now)
            self._moved[key] = passed
        return news

    def moved(self, key: bytes, nbytes: float, now: float) -> None:
        """A donor says that so many bytes have passed between it and a newcomer."""
        claim = self._claims.get(key)
        if claim is not None and nbytes:
            claim.seen += nbytes
            claim.moved_at = now

"""What the links of a peer carry, as its rounds have shown. No I/O, no clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Annotated

import msgspec

from shoal.swarm.protocol.tip import Digest

MAX_SLOW = 8
LEAST_BYTES = 1 << 18  # over a link in a round, to say anything of its rate: less takes as long as its latency
LEAST_SECONDS = 1e-3
MOST_UNMEASURED = 0.125  # of the bytes of a round
SLOWER = 3.0  # times than the usual link of this peer: what shares its line with more others is no slow path
KEPT_ROUNDS = 3  # the best of them counts: other programs, or a lost packet, only ever make a round slower
KEPT_SECONDS = 600.0  # then a rate is forgotten: a slow link is spared, so nothing might show that it is mended

Rate = Annotated[float, msgspec.Meta(ge=1, le=1e18)]
Flow = tuple[int, float]  # see `Transport.delivered`


class Rates(msgspec.Struct, array_like=True, frozen=True):
    """What a member says of its links, in bytes per second.

    Attributes:
        own: what it can send over all of them together; None if that is not known.
        slow: the members to which its links carry much less than to the others, and how much; the slowest ones.
    """

    own: Rate | None = None
    slow: Annotated[tuple[tuple[Digest, Rate], ...], msgspec.Meta(max_length=MAX_SLOW)] = ()


class Measured:
    """The rates of one peer's links, from what passed over them in its last rounds.

    A link is measured while something is under way on it, so a peer that waits for others most of a round is not taken
    for a slow one. What a reducer sends to all goes over all links at once, so together they carry the sum of what each
    carries.
    """

    def __init__(self) -> None:
        self._own: deque[tuple[float, float]] = deque(maxlen=KEPT_ROUNDS)  # each with its time
        self._links: dict[bytes, deque[tuple[float, float]]] = {}

    def add(self, before: Mapping[bytes, Flow], after: Mapping[bytes, Flow], now: float) -> None:
        """A round has ended.

        Args:
            before: what had been delivered to each of its other members when it began.
            after: the same now.
        """
        together, passed, unmeasured = 0.0, 0, 0
        for key, (nbytes_before, seconds_before) in before.items():
            nbytes, seconds = after.get(key, (0, 0.0))
            if nbytes < nbytes_before or seconds < seconds_before:
                continue  # it is another connection, which counts from 0
            passed += nbytes - nbytes_before
            if nbytes - nbytes_before < LEAST_BYTES:
                unmeasured += nbytes - nbytes_before
                continue
            rate = (nbytes - nbytes_before) / max(seconds - seconds_before, LEAST_SECONDS)
            self._links.setdefault(key, deque(maxlen=KEPT_ROUNDS)).append((rate, now))
            together += rate
        # What a link that was not measured has taken of the way out is missing in the sum: who sends little would be
        # taken for slow, get less to reduce, and send still less.
        if together and unmeasured <= MOST_UNMEASURED * passed:
            self._own.append((together, now))

    def rates(self, limit: float, now: float) -> Rates:
        """What to say of it.

        Args:
            limit: bytes per second that the user allows, infinity for no limit.
        """
        if not self._links and limit == math.inf:
            return Rates()
        best = {key: rate for key, rates in self._links.items() if (rate := _best(rates, now))}
        self._links = {key: self._links[key] for key in best}
        own = min(limit, _best(self._own, now) or math.inf)
        usual = sorted(best.values())[len(best) // 2] if best else 0.0
        slow = sorted((rate, key) for key, rate in best.items() if SLOWER * rate < usual)[:MAX_SLOW]
        return Rates(None if own == math.inf else max(1.0, own), tuple((key, max(1.0, rate)) for rate, key in slow))


def _best(rates: deque[tuple[float, float]], now: float) -> float:
    """The highest of those that are not forgotten; 0 if there is none."""
    return max((rate for rate, at in rates if now - at <= KEPT_SECONDS), default=0.0)

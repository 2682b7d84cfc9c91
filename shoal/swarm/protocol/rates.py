"""The rates of a peer's links, measured in its rounds. No I/O, no clock."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import Annotated

import msgspec

from shoal.swarm.protocol.tip import Digest

MAX_SLOW = 8
LEAST_BYTES = 1 << 18  # a link is measured only with more bytes in a round: for fewer, latency is most of the time
LEAST_SECONDS = 1e-3
MOST_UNMEASURED = 0.125  # fraction of the bytes of a round
# A link is slow if it is slower than this peer's usual link by this factor. A smaller difference may only mean that the
# link shares a line with more others.
SLOWER = 3.0
KEPT_ROUNDS = 3  # the highest rate of these rounds counts: other programs and lost packets only make a round slower
KEPT_SECONDS = 600.0  # then a rate is forgotten: slow links are used less, so nothing may show that one has recovered

Rate = Annotated[float, msgspec.Meta(ge=1, le=1e18)]
Flow = tuple[int, float]  # see `Transport.delivered`


class Rates(msgspec.Struct, array_like=True, frozen=True):
    """The rates of a member's links, in bytes per second.

    Attributes:
        own: how much it can send over all links together; None if that is not known.
        slow: the members to which its links are much slower than to others, each with the rate; the slowest ones.
    """

    own: Rate | None = None
    slow: Annotated[tuple[tuple[Digest, Rate], ...], msgspec.Meta(max_length=MAX_SLOW)] = ()


class Measured:
    """Measures the rates of one peer's links in its last rounds.

    The time of a link counts only while bytes are under way on it, so a peer that mostly waits for others does not look
    slow. A reducer sends to all members at the same time, so the rate of all links together is the sum of their rates.
    """

    def __init__(self) -> None:
        self._own: deque[tuple[float, float]] = deque(maxlen=KEPT_ROUNDS)  # (rate, when it was measured)
        self._links: dict[bytes, deque[tuple[float, float]]] = {}

    def add(self, before: Mapping[bytes, Flow], after: Mapping[bytes, Flow], now: float) -> None:
        """A round has ended.

        Args:
            before: what had been delivered to each of the other members when the round began.
            after: the same now.
            now: the time.
        """
        together, passed, unmeasured = 0.0, 0, 0
        for key, (nbytes_before, seconds_before) in before.items():
            nbytes, seconds = after.get(key, (0, 0.0))
            if nbytes < nbytes_before or seconds < seconds_before:
                continue  # there is another connection now, which counts from 0
            passed += nbytes - nbytes_before
            if nbytes - nbytes_before < LEAST_BYTES:
                unmeasured += nbytes - nbytes_before
                continue
            rate = (nbytes - nbytes_before) / max(seconds - seconds_before, LEAST_SECONDS)
            self._links.setdefault(key, deque(maxlen=KEPT_ROUNDS)).append((rate, now))
            together += rate
        # The sum lacks the links that were not measured. If these carry much of a round, the peer would look too slow.
        # So it would get less to reduce, and then send still less.
        if together and unmeasured <= MOST_UNMEASURED * passed:
            self._own.append((together, now))

    def rates(self, limit: float, now: float) -> Rates:
        """The rates to report to others.

        Args:
            limit: bytes per second that the user allows; infinity for no limit.
            now: the time.
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
    """The highest of the rates that are not too old; 0 if there is none."""
    return max((rate for rate, at in rates if now - at <= KEPT_SECONDS), default=0.0)

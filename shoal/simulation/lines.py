"""How long messages take: the rates of each peer's ways out and in, and what single links add."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from shoal.p2p.identity import PeerID
from shoal.p2p.transport import LARGE_BYTES

# Between arrivals over one link: far more than a float's rounding, so that timers never tie, far less than a latency.
GAP = 1e-9


@dataclass(slots=True)
class Link:
    """The way from one peer to another.

    Attributes:
        latency: seconds.
        bandwidth: bytes per second of this way alone.
    """

    latency: float
    bandwidth: float = math.inf


def way(source: PeerID, target: PeerID) -> bytes:
    """The name of the way from one peer to another."""
    return source.key + target.key


@dataclass
class Lines:
    """The lines of all peers. A message passes its sender's way out, the link, and its receiver's way in; each carries
    one large message after the other, and a message may be on all three at once. Small messages pass between the
    packets of large ones of other links, as they do on real lines. What was sent keeps the pace that its line then had.

    Args:
        delays: draws the jitter.
        latency: seconds of a link that has none of its own.
        jitter: at most so many seconds more, drawn evenly.
        out, into: bytes per second of the ways of peers that have none of their own.

    Attributes:
        links: those that have a latency and a rate of their own, by `way`.
    """

    delays: random.Random
    latency: float
    jitter: float
    out: float
    into: float = math.inf
    links: dict[bytes, Link] = field(default_factory=dict)
    _out_free: dict[PeerID, float] = field(default_factory=dict)  # when the last message has passed
    _in_free: dict[PeerID, float] = field(default_factory=dict)
    _own: dict[PeerID, tuple[float | None, float | None]] = field(default_factory=dict)  # rates of single peers
    _link_free: dict[bytes, float] = field(default_factory=dict)
    _last_arrival: dict[bytes, float] = field(default_factory=dict)
    _last_passed: dict[bytes, float] = field(default_factory=dict)

    def set_rates(self, peer: PeerID, out: float | None, into: float | None) -> None:
        """From now on the peer has ways of these rates; None: as peers have that have none of their own."""
        self._own[peer] = (out, into)

    def rates(self, peer: PeerID) -> tuple[float, float]:
        """Bytes per second of a peer's way out and way in."""
        if not self._own:
            return self.out, self.into
        out, into = self._own.get(peer, (None, None))
        return self.out if out is None else out, self.into if into is None else into

    def travel(self, source: PeerID, target: PeerID, size: int, now: float) -> float:
        """Seconds until the last byte of a message that is sent now comes to the target's way in."""
        pair = way(source, target)
        link, rate = self.links.get(pair) if self.links else None, self.rates(source)[0]
        if size < LARGE_BYTES:
            left = now + size / rate
        else:
            left = self._out_free[source] = max(now, self._out_free.get(source, 0.0)) + size / rate
        latency = self.latency
        if link is not None:
            latency = link.latency
            if link.bandwidth < rate:
                left = max(left - size / rate, self._link_free.get(pair, 0.0)) + size / link.bandwidth
                self._link_free[pair] = left
        jitter = self.delays.uniform(0.0, self.jitter)
        arrival = max(left + latency + jitter, self._last_arrival.get(pair, 0.0) + GAP)
        self._last_arrival[pair] = arrival
        return arrival - now

    def enter(self, source: PeerID, target: PeerID, size: int, now: float) -> float:
        """Seconds until a message has passed the target's way in, whose last byte comes there now."""
        rate = self.rates(target)[1]
        if rate == math.inf and not self._in_free:
            return 0.0
        pair, passed = way(source, target), now + size / rate
        if size >= LARGE_BYTES:
            link = self.links.get(pair)
            slowest = min(self.rates(source)[0], math.inf if link is None else link.bandwidth)
            first = now - size / slowest  # about when its first byte came
            passed = self._in_free[target] = max(now, max(first, self._in_free.get(target, 0.0)) + size / rate)
        if passed <= now and self._last_passed.get(pair, 0.0) < now:
            return 0.0
        passed = self._last_passed[pair] = max(passed, self._last_passed.get(pair, 0.0) + GAP)
        return passed - now

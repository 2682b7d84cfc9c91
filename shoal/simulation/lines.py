"""How long messages take: the rates of each peer's upload and download, and the latencies of links."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

from shoal.p2p.identity import PeerID
from shoal.p2p.transport import LARGE_BYTES

# The least time between arrivals over one link. It is far more than the rounding of floats, so that timers never tie,
# and far less than a latency.
GAP = 1e-9


@dataclass(slots=True)
class OneWayLink:
    """The link from one peer to another, in one direction.

    Attributes:
        latency: in seconds.
        bandwidth: in bytes per second, for this link alone.
    """

    latency: float
    bandwidth: float = math.inf


def way(source: PeerID, target: PeerID) -> bytes:
    """The name of the link from one peer to another."""
    return source.key + target.key


@dataclass
class Lines:
    """The lines of all peers.

    A message passes its sender's upload, the link, and its receiver's download. Each of these carries one large message
    after the other, and a message may be on all three at the same time. Small messages pass between the packets of
    large ones of other links, as on real lines. A change of rates does not affect messages that were sent before.

    Args:
        delays: draws the jitter.
        latency: the latency, in seconds, of links without a latency of their own.
        jitter: the maximum of the additional random latency, in seconds, which is uniform.
        out, into: the rates of upload and download, in bytes per second, of peers without rates of their own.

    Attributes:
        links: links with a latency and a rate of their own, by `way`.
    """

    delays: random.Random
    latency: float
    jitter: float
    out: float
    into: float = math.inf
    links: dict[bytes, OneWayLink] = field(default_factory=dict)
    _out_free: dict[PeerID, float] = field(default_factory=dict)  # when the last large message has passed
    _in_free: dict[PeerID, float] = field(default_factory=dict)
    _own: dict[PeerID, tuple[float | None, float | None]] = field(default_factory=dict)  # rates of single peers
    _link_free: dict[bytes, float] = field(default_factory=dict)
    _last_arrival: dict[bytes, float] = field(default_factory=dict)
    _last_passed: dict[bytes, float] = field(default_factory=dict)

    def set_rates(self, peer: PeerID, out: float | None, into: float | None) -> None:
        """Set the rates of a peer's upload and download, in bytes per second. None: those of the other peers."""
        self._own[peer] = (out, into)

    def rates(self, peer: PeerID) -> tuple[float, float]:
        """The rates of a peer's upload and download, in bytes per second."""
        if not self._own:
            return self.out, self.into
        out, into = self._own.get(peer, (None, None))
        return self.out if out is None else out, self.into if into is None else into

    def travel(self, source: PeerID, target: PeerID, size: int, now: float) -> float:
        """The seconds until the last byte of a message that is sent now reaches the target's download."""
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
        """The seconds until a message has passed the target's download. Its last byte reaches it now."""
        rate = self.rates(target)[1]
        if rate == math.inf and not self._in_free:
            return 0.0
        pair, passed = way(source, target), now + size / rate
        if size >= LARGE_BYTES:
            link = self.links.get(pair)
            slowest = min(self.rates(source)[0], math.inf if link is None else link.bandwidth)
            first = now - size / slowest  # about when its first byte arrived
            passed = self._in_free[target] = max(now, max(first, self._in_free.get(target, 0.0)) + size / rate)
        if passed <= now and self._last_passed.get(pair, 0.0) < now:
            return 0.0
        passed = self._last_passed[pair] = max(passed, self._last_passed.get(pair, 0.0) + GAP)
        return passed - now

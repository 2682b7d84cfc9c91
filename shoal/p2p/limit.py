"""A hard cap on the bytes per second that this peer sends, or receives."""

from __future__ import annotations

import threading
import time

LEAST_PIECE, PIECES_PER_SECOND = 16 << 10, 20


class Bucket:
    """The tokens of a rate: counts when what has passed is paid for. It saves nothing up. No clock.

    Args:
        rate: bytes per second.
    """

    def __init__(self, rate: float) -> None:
        if not rate > 0:
            raise ValueError(f"a limit of {rate:g} bytes per second lets nothing pass")
        self.rate = rate
        self._paid_at = float("-inf")

    def charge(self, nbytes: int, now: float) -> float:
        """So many bytes have passed now; returns the seconds after which the next may pass."""
        self._paid_at = max(self._paid_at, now) + nbytes / self.rate
        return self._paid_at - now


class Limit:
    """A `Bucket` by the clock, for any thread: charge what has passed, wait as long as it says, then go on.

    Args:
        rate: bytes per second; None for no limit.

    Attributes:
        rate: as given.
        piece: how many bytes to send or receive at a time, so that others have their turn and the rate is even.
    """

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self._bucket = Bucket(rate) if rate is not None else None
        self.piece = max(LEAST_PIECE, int(rate / PIECES_PER_SECOND)) if rate is not None else 1 << 30
        self._lock = threading.Lock()

    def charge(self, nbytes: int) -> float:
        """See `Bucket.charge`."""
        if self._bucket is None:
            return 0.0
        with self._lock:
            return self._bucket.charge(nbytes, time.monotonic())

"""A hard limit on the bytes per second that this peer sends or receives."""

from __future__ import annotations

import threading
import time

LEAST_PIECE, PIECES_PER_SECOND = 4 << 10, 20
LEAST_RATE = 10_000  # bytes per second; with less, messages come too late to be of use


class Limit:
    """A rate limit for any thread: charge the bytes that have passed, and wait as long as it returns. Unused time is
    not saved up.

    Args:
        rate: bytes per second; None for no limit.

    Attributes:
        rate: the rate, as given.
        piece: the number of bytes to send or receive at a time, so that others get their turn and the rate is even.
    """

    def __init__(self, rate: float | None) -> None:
        self.rate = rate
        self.piece = max(LEAST_PIECE, int(rate / PIECES_PER_SECOND)) if rate is not None else 1 << 30
        self._paid_at = self._urgent_paid_at = float("-inf")
        self._lock = threading.Lock()

    def charge(self, nbytes: int, *, urgent: bool = False) -> float:
        """This many bytes have passed now. Returns the seconds after which the next may pass. Urgent bytes wait only
        for urgent ones, all others for all.
        """
        if self.rate is None:
            return 0.0
        with self._lock:
            now = time.monotonic()
            self._paid_at = max(self._paid_at, now) + nbytes / self.rate
            if not urgent:
                return self._paid_at - now
            self._urgent_paid_at = max(self._urgent_paid_at, now) + nbytes / self.rate
            return self._urgent_paid_at - now

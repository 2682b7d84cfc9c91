"""Whether large messages pass over a connection: what comes late on a slow line is not lost."""

from __future__ import annotations

LARGE_BYTES = 16 << 10
"""Messages of so many bytes are large: on a slow line others wait behind them."""


class Movement:
    """Looks at how many bytes have passed between two peers, now and then.

    Args:
        moved: `Transport.moved` at the beginning.
    """

    def __init__(self, moved: int) -> None:
        self._moved = moved

    def goes_on(self, moved: int) -> bool:
        """Whether at least LARGE_BYTES of them have passed since the beginning, or since this last said so."""
        if moved < self._moved:  # another connection, which counts from its own beginning
            self._moved = 0
        if moved - self._moved < LARGE_BYTES:
            return False
        self._moved = moved
        return True

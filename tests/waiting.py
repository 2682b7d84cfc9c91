"""For what does not report by itself: processes, and threads of other people."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], timeout: float = 150.0, every: float = 0.02) -> float:
    """Poll each `every` seconds until `condition` holds. Returns how many seconds that took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() < began + timeout, "it did not happen"
        time.sleep(every)
    return time.monotonic() - began

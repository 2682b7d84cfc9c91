"""What has gone wrong for a peer since it started, for whoever watches the run."""

from __future__ import annotations

import threading
from collections import Counter

from shoal.dht.records import get_dht_time
from shoal.health.record import MAX_REASON, Fault, FaultKind, printable


class Faults:
    """Counts faults by kind, and keeps the last. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[FaultKind] = Counter()
        self._last: Fault | None = None

    def add(self, kind: FaultKind, reason: str) -> dict[str, object]:
        """Count one.

        Returns:
            The fields of the log record that tells of it.
        """
        short = printable(reason, MAX_REASON)
        with self._lock:
            self._counts[kind] += 1
            self._last = Fault(kind, short, get_dht_time())
        return {"shoal": {"event": "fault", "kind": kind.value, "reason": short}}

    def so_far(self) -> tuple[dict[FaultKind, int], Fault | None]:
        """How many of each kind, and the last."""
        with self._lock:
            return dict(self._counts), self._last

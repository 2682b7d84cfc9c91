"""Counts the faults of a peer since its start, for users who watch the run."""

from __future__ import annotations

import threading
from collections import Counter

from shoal.dht.records import get_dht_time
from shoal.health.record import MAX_REASON, Fault, FaultKind, printable


class Faults:
    """Counts faults by kind, and keeps the last one. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[FaultKind] = Counter()
        self._last: Fault | None = None

    def add(self, kind: FaultKind, reason: str) -> dict[str, object]:
        """Count a fault.

        Returns:
            The fields of the fault's log record, as `extra=` of `logging`.
        """
        short = printable(reason, MAX_REASON)
        with self._lock:
            self._counts[kind] += 1
            self._last = Fault(kind, short, get_dht_time())
        return {"shoal": {"event": "fault", "kind": kind.value, "reason": short}}

    def so_far(self) -> tuple[dict[FaultKind, int], Fault | None]:
        """The number of faults of each kind, and the last fault."""
        with self._lock:
            return dict(self._counts), self._last

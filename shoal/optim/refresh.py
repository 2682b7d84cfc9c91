"""How often a peer asks what the others have; made of the reference's options of a progress tracker."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Options of the reference's tracker that have nothing to do here: a peer counts while it is connected, the DHT's
# identity signs, and no thread or process is started.
WITHOUT_USE = ("metadata_expiration", "private_key", "daemon")


@dataclass(frozen=True, slots=True)
class Refresh:
    """How often a peer that has nothing to report asks what all have.

    While nothing is known: every `default_refresh_period`. Else in the time that is left of the epoch; sooner where
    peers may come and end it earlier, in that time times the number of peers over the number that there may be; but
    between `min_refresh_period` and `max_refresh_period`.

    Attributes:
        min_refresh_period, max_refresh_period, default_refresh_period: seconds, over 0 and at most a day.
        expected_drift_peers: so many peers may come in an epoch.
        expected_drift_rate: or this part of those that are there.
        status_loglevel: of the log lines that say what was answered.

    Raises ValueError for values that make no sense.
    """

    min_refresh_period: float = 0.5
    max_refresh_period: float = 10.0
    default_refresh_period: float = 3.0
    expected_drift_peers: float = 3.0
    expected_drift_rate: float = 0.2
    status_loglevel: int = logging.DEBUG

    def __post_init__(self) -> None:
        for name in ("min_refresh_period", "max_refresh_period", "default_refresh_period"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value <= 86400:
                raise ValueError(f"{name}={value!r}: give a positive number of seconds, at most a day (86400)")
        for name in ("expected_drift_peers", "expected_drift_rate"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value < float("inf"):
                raise ValueError(f"{name}={value!r}: give a number, at least 0")
        if self.min_refresh_period > self.max_refresh_period:
            raise ValueError(
                f"min_refresh_period={self.min_refresh_period:g} is more than max_refresh_period="
                f"{self.max_refresh_period:g}: lower the one or raise the other"
            )
        if not isinstance(self.status_loglevel, int):
            raise ValueError(f"status_loglevel={self.status_loglevel!r}: give a level of logging, as logging.INFO")

    def seconds(self, eta: float, peers: int) -> float:
        """Until the next question, when the epoch ends in `eta` seconds."""
        if peers == 0:
            return self.default_refresh_period
        expected = max(peers + self.expected_drift_peers, peers * (1 + self.expected_drift_rate))
        return min(max(eta * peers / expected, self.min_refresh_period), self.max_refresh_period)


def refresh_of(tracker_opts: Mapping[str, Any] | None) -> Refresh:
    """What `tracker_opts` of an Optimizer say. Raises ValueError that names options that a tracker does not have, and
    those that are arguments of the Optimizer itself."""
    given = dict(tracker_opts or {})
    for name in WITHOUT_USE:
        given.pop(name, None)
    unknown = sorted(set(given) - set(Refresh.__dataclass_fields__))
    own = [name for name in unknown if name in ("client_mode", "performance_ema_alpha", "target_batch_size")]
    if own:
        raise ValueError(
            f"tracker_opts has {', '.join(own)}: that is an argument of the optimizer itself, give it there"
        )
    if unknown:
        known = ", ".join((*Refresh.__dataclass_fields__, *WITHOUT_USE))
        raise ValueError(f"tracker_opts has no option {', '.join(unknown)}; there are {known}")
    return Refresh(**given)

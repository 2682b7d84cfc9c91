"""A member's own membership, and how it is renewed."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from shoal.membership.membership import MEMBERSHIP, Membership, Part
from shoal.membership.run import ClosedRun
from shoal.p2p.identity import PeerID

Source = str | os.PathLike[str] | Callable[[], str]
"""A membership's line of text, the name of a file that contains it, or a function that returns either."""


class Holder:
    """The membership of one peer in one closed run.

    Args:
        source: see `Source`. A function or a file is read again before the membership expires.
        run: the closed run.
        peer: this peer.
        now: the time, in seconds since 1970.

    Attributes:
        text, membership: the present membership, as text and decoded.
        renewable: whether reading the source again may give another membership.

    Raises:
        ValueError: if the source has no membership of this peer and run that is valid now. The message says what to do.
            (Errors that a function raises pass through.)
    """

    def __init__(self, source: Source, run: ClosedRun, peer: PeerID, now: float) -> None:
        self._source, self._run, self._peer = source, run, peer
        self.renewable = callable(source) or not MEMBERSHIP.is_one(os.fspath(source))
        self.text, self.membership = self.fetch(now)
        self._since = now

    def fetch(self, now: float) -> tuple[str, Membership]:
        """Read the source, which may take long. Raises as the class says."""
        given = self._source() if callable(self._source) else self._source
        if not isinstance(given, str | os.PathLike):
            raise ValueError(f"membership= returned a {type(given).__name__}: return the line of text, or a file name")
        text = os.fspath(given).strip()
        if not MEMBERSHIP.is_one(text):
            try:
                text = Path(text).read_text().strip()
            except (OSError, UnicodeDecodeError, ValueError) as error:
                raise ValueError(
                    f"membership={text[:100]!r} is neither a membership nor a file that can be read ({error})"
                ) from error
        membership = MEMBERSHIP.read(text, self._run)
        if membership.peer != self._peer.key:
            raise ValueError(
                f"the membership is of the peer {membership.peer_id}, and this one is {self._peer}: make the DHT with "
                f"identity_path= of that peer's file, or {self.advice}"
            )
        if not membership.is_valid(now):
            raise ValueError(f"the membership has expired ({when(membership.expires)}): {self.advice}")
        return text, membership

    def take(self, text: str, membership: Membership, now: float) -> bool:
        """Hold this membership from now on. Returns whether it differs from the last one."""
        is_new = membership != self.membership
        self.text, self.membership, self._since = text, membership, now
        return is_new

    def require(self, *parts: Part) -> None:
        """Raises ValueError if the membership permits none of these parts."""
        if not any(self.membership.permits(part) for part in parts):
            given, wanted = (", ".join(part.value for part in some) for some in (self.membership.parts, parts))
            raise ValueError(
                f"the membership of {self._run.run_id} permits this peer to {given}, not to {wanted}: with client it "
                f"needs client_mode=True, with auxiliary auxiliary=True; or {self.advice} --role {parts[0].value}"
            )

    @property
    def renew_at(self) -> float:
        """When to read the source again: when a quarter of the time between taking this membership and its expiration
        is left.
        """
        return self.membership.expires - (self.membership.expires - self._since) / 4

    @property
    def advice(self) -> str:
        """How to get another membership."""
        return f"ask the run's owner for `shoal keys admit {self._run.run_id} {self._peer}`"


def when(seconds: float) -> str:
    """A time as people read it."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")

"""What a command that watches is told of the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Watched:
    """A run to be watched.

    Attributes:
        run_id: its id.
        initial_peers: addresses of its peers.
        identity, membership: of who watches, for a closed run.
    """

    run_id: str
    initial_peers: list[str]
    identity: Path | None
    membership: str | None

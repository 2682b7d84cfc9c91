"""The arguments of commands that watch a run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Watched:
    """A run to watch.

    Attributes:
        run_id: the name of the run.
        initial_peers: addresses of its peers.
        identity, membership: for a closed run: the key file and the membership of the watcher.
    """

    run_id: str
    initial_peers: list[str]
    identity: Path | None
    membership: str | None

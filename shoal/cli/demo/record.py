"""Everything that the parent has heard of a demo run."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum

from shoal.cli.demo.messages import (
    Baseline,
    Committed,
    Downloaded,
    Evaluated,
    Finished,
    Listening,
    Message,
    Progress,
    Ready,
)


class PeerState(StrEnum):
    """Where a peer process is in its life."""

    STARTING = "starting"  # until it has text, model and optimizer
    TRAINING = "training"
    FINISHED = "finished"  # it reached the last epoch
    KILLED = "killed"  # by the demo, on purpose
    FAILED = "failed"


@dataclass(slots=True)
class PeerRecord:
    """Everything that one peer process has told. Times are in seconds of ``time.monotonic()``."""

    index: int
    pid: int
    started_at: float
    state: PeerState = PeerState.STARTING
    peer_id: str = ""
    addresses: list[str] = field(default_factory=list)
    ready_at: float | None = None
    killed_at: float | None = None
    committed: dict[int, Committed] = field(default_factory=dict)
    progress: dict[int, Progress] = field(default_factory=dict)
    downloads: list[Downloaded] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name of the peer in the view and the report."""
        return f"peer {self.index}"

    @property
    def digests(self) -> dict[int, str]:
        """The digests of the peer's parameters at the beginning of each epoch that it stepped to or downloaded."""
        downloaded = {download.epoch: download.state_digest for download in self.downloads}
        return downloaded | {epoch: commit.state_digest for epoch, commit in self.committed.items()}

    @property
    def last_commit(self) -> Committed | None:
        """The commit of the highest epoch that the peer has committed; None if there is none."""
        return self.committed[max(self.committed)] if self.committed else None

    def hear(self, message: Message) -> None:
        """Record a message of the peer."""
        match message:
            case Listening():
                self.peer_id, self.addresses = message.peer_id, message.addresses
            case Ready():
                self.state, self.ready_at = PeerState.TRAINING, message.at
            case Progress():
                self.progress[message.epoch] = message
            case Committed():
                self.committed[message.epoch] = message
            case Downloaded():
                self.downloads.append(message)
            case Finished():
                self.state = PeerState.FINISHED


@dataclass(slots=True)
class Record:
    """The whole run."""

    started_at: float = field(default_factory=time.monotonic)
    ended_at: float | None = None
    peers: dict[int, PeerRecord] = field(default_factory=dict)
    newcomer: int | None = None
    baseline: Baseline | None = None
    evaluations: list[Evaluated] = field(default_factory=list)
    sample: str = ""
    failures: list[str] = field(default_factory=list)

    def hear(self, index: int, message: Message) -> None:
        """Record a message of peer ``index``."""
        match message:
            case Baseline():
                self.baseline = message
            case Evaluated():
                self.evaluations.append(message)
            case Finished(sample=sample) if sample:
                self.sample = sample
        self.peers[index].hear(message)

    @property
    def epoch(self) -> int:
        """The highest epoch that any peer committed; -1 before the first."""
        return max((max(peer.committed) for peer in self.peers.values() if peer.committed), default=-1)

    def commits(self) -> dict[int, list[Committed]]:
        """The peers' commits of each epoch, in the order of epochs."""
        epochs = sorted({epoch for peer in self.peers.values() for epoch in peer.committed})
        peers = self.peers.values()
        return {epoch: [peer.committed[epoch] for peer in peers if epoch in peer.committed] for epoch in epochs}

    def digests(self) -> dict[int, list[str]]:
        """The digests of the peers' parameters at the beginning of each epoch, in the order of epochs."""
        found = [peer.digests for peer in self.peers.values()]
        epochs = sorted({epoch for digests in found for epoch in digests})
        return {epoch: [digests[epoch] for digests in found if epoch in digests] for epoch in epochs}

    def name_of(self, peer_id: str) -> str:
        """The name of the peer with this id."""
        return next((peer.name for peer in self.peers.values() if peer.peer_id == peer_id), peer_id[:12])

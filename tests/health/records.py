"""Health records as tests make them."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from shoal.health.board import Posted
from shoal.health.record import Health, Mark, Round, Totals
from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.view import Role

START = 1_000_000.0


def mark(epoch: int, digest: bytes = b"same", lineage: bytes = b"line") -> Mark:
    return Mark(epoch, lineage.ljust(8, b"-"), digest.ljust(8, b"-"))


WELL = Health(
    started=START,
    number=0,
    at=START,
    left=False,
    version="0.1.0",
    torch="2.13.0+cpu",
    device="x86_64, AVX2, 1 threads",
    role=Role.NODE,
    terms=b"terms---",
    machine=b"machine-",
    epoch=16,
    samples_behind=1600.0,
    newest=16,
    marks=(mark(16),),
    loss=0.5,
    samples=30.0,
    all_samples=90.0,
    target=100.0,
    samples_per_second=50.0,
    step_seconds=0.2,
    epoch_seconds=2.0,
    last=Round(16, 100.0, 3, 0.1, 0.02, 0.3, 0.05, 4_000_000, 4_000_001),
    totals=Totals(16, 80, 640.0, 1.6, 0.32, 4.8, 0.8, 64_000_000, 64_000_016, 0),
    faults={},
    fault=None,
    members=3,
    unreached=(),
    refused=None,
    cpu_seconds=12.5,
    memory=300_000_000,
)


def health(**differing: Any) -> Health:
    """A record of a peer that is well, but for this."""
    return replace(WELL, **differing)


def posted(peer: PeerID, at: float = START, **differing: Any) -> Posted:
    """That record, published at a time."""
    return Posted(peer, health(at=at, **differing), at)

"""The resources of a peer that all its connections share: the one place that says who may hold how much of what."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from shoal.p2p.budget import Budget
from shoal.p2p.buffers import Buffers
from shoal.p2p.leases import Leases
from shoal.p2p.limit import Limit

UNFINISHED_BYTES: Final = 256 << 20  # of all links: large messages that have come in part
MEMORY_BYTES: Final = 4 << 30  # of all lanes: bytes of chunks under way, and scratch


@dataclass
class Shared:
    """The resources that the links and lanes of a peer share.

    Attributes:
        leases: registered targets of chunks.
        upload, download: the rate limits.
        unfinished: memory for large messages over links; each link holds that of one message at most.
        buffers: memory for chunks under way over lanes.
    """

    leases: Leases
    upload: Limit
    download: Limit
    unfinished: Budget = field(default_factory=lambda: Budget(UNFINISHED_BYTES))
    buffers: Buffers = field(default_factory=lambda: Buffers(MEMORY_BYTES))

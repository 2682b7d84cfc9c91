"""How far a newcomer is, as it counts the bytes that have passed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from shoal.p2p.identity import PeerID
from shoal.swarm.loading import Loading

DONOR = PeerID(bytes(32))


def test_what_a_donor_that_was_lost_has_sent_counts() -> None:
    async def scenario() -> None:
        moved = {DONOR: 700}  # before the download
        channel: Any = SimpleNamespace(node=SimpleNamespace(transport=SimpleNamespace(moved=moved.__getitem__)))
        loading = Loading(channel, SimpleNamespace(), SimpleNamespace(), None, 0.0, 1.0)  # type: ignore[arg-type]
        loading._holders = [DONOR]
        counted = []
        for moved[DONOR] in (700, 800, 0, 50):  # the connection is lost, and made anew
            counted.append(loading._count())
        assert counted == [0, 100, 100, 150]

    asyncio.run(scenario())

"""How far a newcomer is, as it counts the bytes that have passed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from shoal.p2p.identity import PeerID
from shoal.swarm.loading import Loading
from shoal.swarm.protocol.messages import Progress
from shoal.swarm.protocol.tip import Tip

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


def test_one_that_replays_says_when_it_will_be_where_the_others_are() -> None:
    """It fetches the result of the first of three rounds, and receives a result in two seconds."""

    async def scenario() -> None:
        here, told = Tip.genesis("run"), []
        there = here.after(b"1", 1.0).after(b"2", 1.0).after(b"3", 1.0)

        async def ask(key: bytes, report: Progress, timeout: float) -> Any:
            told.append(report)
            raise TimeoutError

        node = SimpleNamespace(transport=SimpleNamespace(moved=lambda peer: 0), spawn=asyncio.ensure_future)
        contacts = SimpleNamespace(losses=SimpleNamespace(news=asyncio.Event()))
        peer = SimpleNamespace(tip=here, view=SimpleNamespace(best=lambda now: there))
        loading = Loading(SimpleNamespace(node=node, ask=ask), contacts, peer, 2e6, 1e6, 1.0)  # type: ignore[arg-type]
        loading.replay([DONOR])
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        loading.close()
        [report] = told
        assert (report.tip, report.seconds, report.rate, report.loading) == (there, 6.0, 1e6, True)

    asyncio.run(scenario())


def test_one_that_gives_up_says_that_nobody_has_to_wait() -> None:
    async def scenario() -> None:
        here, told = Tip.genesis("run"), []
        there = here.after(b"1", 1.0)

        async def ask(key: bytes, report: Progress, timeout: float) -> Any:
            told.append(report)
            raise TimeoutError

        node = SimpleNamespace(transport=SimpleNamespace(moved=lambda peer: 0), spawn=asyncio.ensure_future)
        contacts = SimpleNamespace(losses=SimpleNamespace(news=asyncio.Event()))
        peer = SimpleNamespace(tip=here, view=SimpleNamespace(best=lambda now: there))
        loading = Loading(SimpleNamespace(node=node, ask=ask), contacts, peer, None, 0.0, 1.0)  # type: ignore[arg-type]
        await loading.reserve(there, [DONOR], 100)
        peer.tip = there
        loading.close()
        await asyncio.sleep(0)
        assert [(report.tip, report.asks) for report in told] == [(there, True)], "it has arrived"
        peer.tip = here
        loading.close()
        await asyncio.sleep(0.01)
        assert (told[-1].tip, told[-1].asks, told[-1].loading) == (there, False, True)

    asyncio.run(scenario())

"""How far a newcomer is, as it counts the bytes that have passed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from shoal.p2p.identity import PeerID
from shoal.swarm.loading import Loading
from shoal.swarm.protocol.messages import Progress
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.swarm import Swarm

DONOR, HERE = PeerID(bytes(32)), Tip.genesis("run")


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


class Newcomer:
    """One whose reports nobody answers. `told` has them; `there` is where the others are."""

    def __init__(self, there: Tip, result_bytes: float | None = None, rate: float = 0.0) -> None:
        self.told: list[Progress] = []
        self.has_told = asyncio.Event()
        self._tasks: list[asyncio.Future[Any]] = []
        view = SimpleNamespace(best=lambda now: there, said=lambda key: None, newest=lambda key, tip, asked: tip)
        self.peer = SimpleNamespace(tip=HERE, view=view)
        node = SimpleNamespace(transport=SimpleNamespace(moved=lambda peer: 0), spawn=self._spawn)
        channel: Any = SimpleNamespace(node=node, ask=self._ask)
        contacts: Any = SimpleNamespace(losses=SimpleNamespace(news=asyncio.Event()))
        self.loading = Loading(channel, contacts, cast(Any, self.peer), result_bytes, rate, 1.0)

    async def _ask(self, key: bytes, report: Progress, timeout: float) -> Any:
        self.told.append(report)
        self.has_told.set()
        raise TimeoutError

    def _spawn(self, coroutine: Any) -> asyncio.Future[Any]:
        self._tasks.append(asyncio.ensure_future(coroutine))
        return self._tasks[-1]

    async def close(self) -> None:
        """Close it, and wait until it has said what it has to say."""
        self.loading.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def test_one_that_replays_says_when_it_will_be_where_the_others_are() -> None:
    """It fetches the result of the first of three rounds, and receives a result in two seconds."""

    async def scenario() -> None:
        there = HERE.after(b"1", 1.0).after(b"2", 1.0).after(b"3", 1.0)
        newcomer = Newcomer(there, result_bytes=2e6, rate=1e6)
        newcomer.loading.replay([DONOR])
        await newcomer.has_told.wait()
        newcomer.peer.tip = there
        await newcomer.close()
        [report] = newcomer.told
        assert (report.tip, report.seconds, report.rate, report.loading) == (there, 6.0, 1e6, True)

    asyncio.run(scenario())


def test_one_that_gives_up_says_that_nobody_has_to_wait() -> None:
    async def scenario() -> None:
        there = HERE.after(b"1", 1.0)
        newcomer = Newcomer(there)
        await newcomer.loading.reserve(there, [DONOR], 100)
        newcomer.peer.tip = there
        await newcomer.close()
        assert [(report.tip, report.asks) for report in newcomer.told] == [(there, True)], "it has arrived"
        newcomer.peer.tip = HERE
        await newcomer.close()
        assert (newcomer.told[-1].tip, newcomer.told[-1].asks, newcomer.told[-1].loading) == (there, False, True)

    asyncio.run(scenario())


def test_one_that_comes_too_late_waits_for_the_end_of_the_round_while_a_holder_is_there() -> None:
    async def scenario() -> None:
        there, is_there, news = HERE.after(b"1", 1.0), True, asyncio.Event()
        best = there

        async def is_too_late(*_: object) -> bool:
            return False

        view = SimpleNamespace(best=lambda now: best, reaches=lambda key: is_there)
        swarm: Any = SimpleNamespace(
            loading=SimpleNamespace(reserve=is_too_late), tip=HERE, peer=SimpleNamespace(view=view), news=news.wait,
            _now=lambda: 0.0,
        )  # fmt: skip
        swarm._are_past = lambda state: Swarm._are_past(swarm, state)
        waiting = asyncio.ensure_future(Swarm.reserve(swarm, there, [DONOR], 100))
        await asyncio.sleep(0)
        assert not waiting.done()
        best = there.after(b"2", 1.0)
        news.set()
        assert not await waiting, "offers are asked for again"
        best, is_there = there, False
        assert not await Swarm.reserve(swarm, there, [DONOR], 100), "at once: nobody is there to end the round"
        assert await Swarm.reserve(swarm, HERE, [DONOR], 100), "it counts as a member of that round"

    asyncio.run(scenario())

"""Whatever happens to a run, its trainers find each other again, and never hold two states under one name."""

from __future__ import annotations

import asyncio

import pytest

from shoal.p2p.identity import PeerID
from shoal.simulation.clock import run
from shoal.simulation.world import World
from tests.simulation.faults import Faulty
from tests.simulation.swarms import seeds

TOGETHER_SECONDS = 90.0  # after the last fault


@pytest.mark.parametrize("seed", seeds(4))
def test_trainers_come_together_again(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        swarm = await Faulty.begin(seed)
        try:
            await swarm.suffer(swarm.rng.randint(2, 8), 60.0)
            await swarm.until_together(TOGETHER_SECONDS)
            swarm.check_history()
        except BaseException:
            print("\n".join(swarm.schedule))
            raise

    run(scenario(), until=2000.0)
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_peer_that_stands_still_does_afterwards_what_was_due() -> None:
    async def scenario() -> None:
        world, loop = World(1), asyncio.get_running_loop()
        node = await world.spawn_node()
        done: list[float] = []

        async def work() -> None:
            await asyncio.sleep(2.0)
            done.append(loop.time())

        node.spawn(work())
        await asyncio.sleep(1.0)
        world.hold(node.peer_id, 5.0)
        await asyncio.sleep(4.9)
        assert done == []
        await asyncio.sleep(0.2)
        assert done == [6.0]

    run(scenario(), until=100.0)


def test_what_is_cut_one_way_still_comes_the_other_way() -> None:
    async def scenario() -> None:
        world = World(1)
        one, other = [await world.spawn_node() for _ in range(2)]
        one.learn(other.peer_id, other.addresses)
        await one.connect(other.peer_id)
        world.cut(one.peer_id, other.peer_id, one_way=True)
        heard: list[PeerID] = []
        for node in (one, other):
            node.transport.start(lambda peer, *_: heard.append(peer), lambda *_: None)
        one.transport.send([other.peer_id], b"lost")
        other.transport.send([one.peer_id], b"comes")
        await asyncio.sleep(1.0)
        assert heard == [other.peer_id]

    run(scenario(), until=100.0)

"""The directory of a run's peers, which is kept in the DHT: what it warns of."""

from __future__ import annotations

import pytest

from shoal.averaging.directory import DHTDirectory
from shoal.averaging.member import Member, Role
from shoal.dht.node import DHTNode
from shoal.simulation.clock import run
from shoal.simulation.world import World
from tests.dht.swarms import join


def member(dht: DHTNode) -> Member:
    return Member(dht.peer_id.key, (), Role.NODE)


def test_a_peer_that_can_not_be_listed_is_told_so_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        world = World(1)
        first = await join(world)
        late = await join(world, initial=[first], client_mode=True)
        directory = DHTDirectory(late, "run", lambda: world.wall_clock() - 61)
        for _ in range(2):
            await directory.publish(member(late))
        assert caplog.text.count("keeps the record by which others find this peer") == 1
        assert await DHTDirectory(first, "run", world.wall_clock).read() == []

    run(scenario())


def test_a_clock_that_is_behind_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        world = World(2)
        first = await join(world)
        second = await join(world, initial=[first])
        on_time = DHTDirectory(first, "run", world.wall_clock)
        behind = DHTDirectory(second, "run", lambda: world.wall_clock() - 20)
        await on_time.publish(member(first))
        await behind.publish(member(second))
        for directory in (on_time, behind, behind):
            assert len(await directory.read()) == 2
        assert [record.getMessage()[:45] for record in caplog.records if record.levelname == "WARNING"] == [
            "this machine's clock is at least 20 s behind "
        ]

    run(scenario())

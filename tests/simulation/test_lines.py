"""The rates of simulated lines: ways in, ways out, single links, one way or both."""

from __future__ import annotations

import asyncio

import pytest

from shoal.p2p.node import Node
from shoal.simulation.clock import run
from shoal.simulation.world import World
from tests.simulation.test_network import SERVICE, Note, now, record

LARGE = bytes(1_000_000)


async def three(world: World) -> list[Node]:
    """Nodes that are connected to each other."""
    nodes = [await world.spawn_node() for _ in range(3)]
    world.introduce()
    for one in nodes:
        for other in nodes:
            await one.connect(other.peer_id)
    return nodes


def test_what_comes_from_two_peers_shares_the_way_in() -> None:
    async def scenario() -> None:
        world = World(0, latency=0.1, jitter=0.0, bandwidth=1e9, bandwidth_in=1e6)
        one, other, target = await three(world)
        notes, start = record(target), now()
        for source in (one, other):
            source.notify([target.peer_id], SERVICE, Note(1), buffers=[LARGE])
        await asyncio.sleep(10)
        assert [at - start for at, *_ in notes] == pytest.approx([1.1, 2.1], rel=1e-2)

    run(scenario())


def test_a_message_is_on_the_way_out_and_in_at_the_same_time() -> None:
    async def scenario() -> None:
        world = World(0, latency=0.1, jitter=0.0, bandwidth=1e6, bandwidth_in=1e6)
        one, other, _ = await three(world)
        notes, start = record(other), now()
        one.notify([other.peer_id], SERVICE, Note(1), buffers=[LARGE])
        await asyncio.sleep(10)
        assert [at - start for at, *_ in notes] == pytest.approx([1.1], rel=1e-2)

    run(scenario())


def test_a_small_message_passes_large_ones_of_others_but_none_of_its_own_link() -> None:
    async def scenario() -> None:
        world = World(0, latency=0.1, jitter=0.0, bandwidth=1e6, bandwidth_in=1e6)
        one, other, target = await three(world)
        notes, start = record(target), now()
        one.notify([target.peer_id], SERVICE, Note(1), buffers=[LARGE])
        one.notify([target.peer_id], SERVICE, Note(2))
        other.notify([target.peer_id], SERVICE, Note(3))
        await asyncio.sleep(10)
        assert [number for *_, number in notes] == [3, 1, 2]
        assert notes[0][0] - start == pytest.approx(0.1, rel=1e-2)

    run(scenario())


def test_rates_of_one_peer_and_of_one_link_one_way() -> None:
    async def scenario() -> None:
        world = World(0, latency=0.1, jitter=0.0, bandwidth=1e9)
        one, other, third = await three(world)
        world.set_rates(third.peer_id, into=0.5e6)
        world.set_link(one.peer_id, other.peer_id, latency=0.5, bandwidth=1e6, one_way=True)
        times = {}
        for source, target in ((one, other), (other, one), (one, third), (third, one)):
            notes, start = record(target), now()
            source.notify([target.peer_id], SERVICE, Note(1), buffers=[LARGE])
            await asyncio.sleep(10)
            target.stop_serving(SERVICE)
            times[source is one, target is third] = notes[0][0] - start
            if source is other:
                assert notes[0][0] - start == pytest.approx(0.1, rel=2e-2), "the other way is as it was"
        assert times[True, False] == pytest.approx(1.5, rel=1e-2)
        assert times[True, True] == pytest.approx(2.1, rel=1e-2)
        world.unset_link(one.peer_id, other.peer_id)
        notes, start = record(other), now()
        one.notify([other.peer_id], SERVICE, Note(1), buffers=[LARGE])
        await asyncio.sleep(10)
        assert notes[0][0] - start == pytest.approx(0.1, rel=2e-2)

    run(scenario())


def test_what_a_tensor_stands_for_takes_the_time() -> None:
    async def scenario() -> None:
        world = World(0, latency=0.1, jitter=0.0, bandwidth=1e6)
        world.network.payload_scale = 10
        one, other, _ = await three(world)
        notes, start = record(other), now()
        one.notify([other.peer_id], SERVICE, Note(1), buffers=[bytes(100_000)])
        await asyncio.sleep(10)
        assert notes[0][0] - start == pytest.approx(1.1, rel=1e-2)

    run(scenario())

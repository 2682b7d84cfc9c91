"""State transfer in a swarm of 64: many newcomers, many donors, kills and a partition; and it replays."""

from __future__ import annotations

import asyncio
import random

import pytest
import torch

from shoal.p2p.node import Node
from shoal.simulation.clock import run
from shoal.simulation.world import World
from shoal.swarm.protocol.tip import Tip
from shoal.transfer.donor import EncodedState, FrozenState, StateDonor, encoded
from shoal.transfer.manifest import CHUNK_ELEMENTS
from shoal.transfer.transfer import Downloaded, download_state
from tests.codecs import codecs_of

NAME = "state/swarm"
BUFFERS = [torch.randint(127, (12 * CHUNK_ELEMENTS,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))]
STATE = FrozenState(Tip(5, bytes(32), 160.0), b"layout", BUFFERS, b"scalars", codecs_of(BUFFERS))


async def scenario(seed: int) -> tuple[list[Downloaded], str]:
    """48 donors, 16 newcomers; while these download, 16 donors die and 8 are cut off from everybody for a while."""
    world = World(seed, bandwidth=1e6, lost_after=3.0)
    nodes = [await world.spawn_node() for _ in range(64)]
    world.introduce()
    donors, newcomers = nodes[:48], nodes[48:]

    async def take() -> EncodedState:
        await asyncio.sleep(world.rng.random())
        return encoded(STATE)

    async def downloads(newcomer: Node, number: int) -> Downloaded:
        peers = [donor.peer_id for donor in donors]
        return await download_state(newcomer, NAME, peers, timeout=300, rng=random.Random(number))

    for donor in donors:
        StateDonor(donor, NAME, take, lambda: STATE.tip)
    tasks = [newcomer.spawn(downloads(newcomer, number)) for number, newcomer in enumerate(newcomers)]
    await asyncio.sleep(1.5)
    world.partition([[node.peer_id for node in donors[:8]], [node.peer_id for node in nodes[8:]]])
    for donor in donors[8:24]:
        await asyncio.sleep(0.1)
        world.kill(donor.peer_id)
    await asyncio.sleep(1)
    world.heal()
    return await asyncio.gather(*tasks), world.digest()


@pytest.mark.long
def test_sixteen_newcomers_get_the_state_from_a_swarm_that_loses_donors_meanwhile():
    results, digest = run(scenario(1))
    for result in results:
        assert torch.equal(result.buffers[0], STATE.buffers[0])
        assert result.scalars == STATE.scalars
        assert len(result.chunks_from) > 4
    assert any(result.dropped for result in results), "nobody noticed the kills: the scenario tests nothing"
    assert run(scenario(1))[1] == digest
    assert run(scenario(2))[1] != digest

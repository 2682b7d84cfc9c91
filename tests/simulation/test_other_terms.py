"""Two peers alone with other terms: one ends, and the other is told why it is alone, and nothing else."""

from __future__ import annotations

import asyncio
import logging

import pytest

from shoal.simulation.clock import run
from shoal.simulation.world import World
from shoal.swarm.protocol.errors import Rejected
from shoal.swarm.protocol.messages import Terms
from tests.simulation.swarms import TERMS, Board, Peer, spawn_peer

OTHER = Terms({"target_batch_size": "64"}, TERMS.schema)


async def two_that_differ(world: World) -> list[Peer]:
    """The one with the smaller key first."""
    board = Board()
    peers = [await spawn_peer(world, board, terms=terms, keeps_state=True) for terms in (TERMS, OTHER)]
    return sorted(peers, key=lambda peer: peer.key)


def test_the_one_that_stays_repeats_the_difference_and_advises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        stays, ends = await two_that_differ(World(1))
        with pytest.raises(Rejected, match="target_batch_size"):
            await ends.swarm.contacts.check_terms()
        ends.swarm.stop()
        await ends.node.close()
        caplog.clear()
        await asyncio.sleep(200.0)
        assert stays.alive

    with caplog.at_level(logging.WARNING, "shoal"):
        run(scenario())
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if "is in the run with other terms: target_batch_size" in line]) == 3
    assert not [line for line in lines if "can't be reached" in line], lines


def test_one_with_company_repeats_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        board, world = Board(), World(2)
        for terms in (TERMS, TERMS, OTHER):
            await spawn_peer(world, board, terms=terms)
        await asyncio.sleep(1.0)
        caplog.clear()
        await asyncio.sleep(130.0)

    with caplog.at_level(logging.WARNING, "shoal"):
        run(scenario())
    assert caplog.messages, "the one that is alone repeats it"
    assert all("target_batch_size is 64 here" in line for line in caplog.messages), "the two repeat nothing"

"""Newcomers whose download takes longer than an epoch: the run waits for them, within its budget."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
import torch

from shoal.simulation.clock import run
from shoal.simulation.world import World
from shoal.swarm.protocol.newcomers import FIRST_SECONDS
from tests.simulation.swarms import Board, spawn_peer, spawn_swarm
from tests.simulation.trainers import BALLAST, ELEMENTS, RULES, Trainer

LARGE = 8 * BALLAST
STATE_BYTES = LARGE + 4 * ELEMENTS


async def _veterans(world: World, board: Board, count: int) -> list[Trainer]:
    peers = await spawn_swarm(world, count, board, elements=ELEMENTS, rules=RULES, keeps_state=True)
    veterans = [Trainer(peer, ballast=torch.zeros(LARGE, dtype=torch.int8)) for peer in peers]
    for trainer in veterans:
        trainer.donate()
    return veterans


async def _newcomer(world: World, board: Board, seconds: float) -> Trainer:
    """A newcomer whose line carries the state in so many seconds."""
    newcomer = Trainer(await spawn_peer(world, board, elements=ELEMENTS, rules=RULES, keeps_state=True))
    world.lines.set_rates(newcomer.peer.node.peer_id, None, STATE_BYTES / seconds)
    return newcomer


def _pauses(trainer: Trainer, usual: float = 5.0) -> list[float]:
    return [after - before for before, after in pairwise(trainer.ended) if after - before > usual]


@pytest.mark.parametrize("seed", range(3))
def test_a_download_that_takes_a_hundred_epochs_is_awaited_once(seed: int) -> None:
    """It takes longer than `averaging_timeout` and `matchmaking_time`: nobody doubts, and nobody goes on alone."""

    async def scenario() -> None:
        world, board = World(seed, latency=0.06, jitter=0.03), Board()
        veterans = await _veterans(world, board, 3)
        epochs = 20
        tasks = [asyncio.create_task(trainer.train(epochs)) for trainer in veterans]
        await veterans[0].reached(5)
        newcomer = await _newcomer(world, board, 60.0)
        await asyncio.gather(newcomer.arrive(veterans, epochs, awaited=True), *tasks)

        everybody = [*veterans, newcomer]
        assert len(newcomer.downloaded) == 1
        assert newcomer.outcomes[0].begin.tip == newcomer.downloaded[0]
        assert len(_pauses(veterans[0])) == 1 and 50 < _pauses(veterans[0])[0] < 75, _pauses(veterans[0])
        assert not any(trainer.peer.swarm.peer.participant.deposed for trainer in everybody)
        assert not any(outcome.missed for trainer in everybody for outcome in trainer.outcomes)
        assert all(torch.equal(trainer.state, newcomer.state) for trainer in veterans)

    run(scenario(), until=300.0)


def test_newcomers_that_come_together_are_awaited_together() -> None:
    async def scenario() -> None:
        world, board = World(5), Board()
        veterans = await _veterans(world, board, 4)
        epochs = 20
        tasks = [asyncio.create_task(trainer.train(epochs)) for trainer in veterans]
        await veterans[0].reached(5)
        newcomers = [await _newcomer(world, board, 30.0) for _ in range(4)]
        await asyncio.gather(*(each.arrive(veterans, epochs, awaited=True) for each in newcomers), *tasks)

        assert [len(each.downloaded) for each in newcomers] == [1] * 4
        assert len(_pauses(veterans[0])) == 1 and _pauses(veterans[0])[0] < 45, _pauses(veterans[0])
        assert len({trainer.tip for trainer in [*veterans, *newcomers]}) == 1

    run(scenario(), until=300.0)



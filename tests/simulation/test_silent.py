"""What a member that stops to answer costs the others, at whatever moment, and what it costs the member itself."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from shoal.simulation.clock import run
from shoal.simulation.world import World
from tests.simulation.swarms import Board, seeds, spawn_swarm
from tests.simulation.test_replay import OPTIONS, assert_alike
from tests.simulation.trainers import Trainer

BATCH_SECONDS = 0.1  # an epoch of five takes 0.8 s
EPOCHS = 30
PAUSE = 2.5 + 1.0  # a member that is silent in a round is out of it in 2.5 s, and then comes an epoch without its samples
COORDINATOR_PAUSE = 5.0 + 1.0


def longest_pause(trainers: list[Trainer]) -> float:
    """The longest time in which none of them ended an epoch."""
    ends = sorted(trainer.ended[number] for trainer in trainers for number in range(len(trainer.ended)))
    return max(after - before for before, after in itertools.pairwise(ends))


@pytest.mark.parametrize("seconds", [1.0, 3.0, 10.0, 30.0])
@pytest.mark.parametrize("seed", seeds(4))
def test_a_member_that_is_stopped_holds_up_nobody_for_long(seed: int, seconds: float) -> None:
    async def scenario() -> None:
        world = World(seed)
        stopped, *others = trainers = [
            Trainer(peer) for peer in await spawn_swarm(world, 5, Board(), **OPTIONS)
        ]
        for trainer in trainers:
            trainer.donate()
            trainer.batch_seconds = BATCH_SECONDS
        tasks = [asyncio.create_task(trainer.train_on(trainers, EPOCHS)) for trainer in trainers]
        await others[0].reached(8)
        await asyncio.sleep(world.rng.uniform(0.0, 4.0))
        leads = others[0].peer.swarm.peer.participant.coordinator().key == stopped.peer.key
        world.hold(stopped.peer.node.peer_id, seconds)
        began = world._loop.time()
        await asyncio.gather(*tasks)
        pause = longest_pause(others)
        print(f"seed {seed} {seconds:g} s leads {leads} at {began:.2f} pause {pause:.2f} downloads {len(stopped.downloaded)}")
        assert pause < (COORDINATOR_PAUSE if leads else PAUSE)
        assert_alike(trainers)

    run(scenario(), until=300.0)

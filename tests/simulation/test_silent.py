"""What a member that stops to answer costs the others, at whatever moment, and what it costs the member itself."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random

import pytest

from shoal.p2p.errors import P2PError
from shoal.simulation.clock import run
from shoal.simulation.world import World
from shoal.swarm.protocol.messages import Progress
from tests.simulation.swarms import Board, seeds, spawn_swarm
from tests.simulation.test_replay import OPTIONS, assert_alike
from tests.simulation.trainers import Trainer

BATCH_SECONDS = 0.1  # an epoch of five takes 0.8 s
EPOCHS = 30
PAUSE = 2.5 + 1.0  # a member that is silent in a round is out of it in 2.5 s, and then comes an epoch without its samples
COORDINATOR_PAUSE = 5.0 + 1.0


class Computing(Trainer):
    """It computes on while a report is on its way, as the progress tracker does."""

    async def count(self) -> float:
        swarm, samples = self.peer.swarm, 0.0
        reporting: asyncio.Task[None] | None = None
        while swarm.tip == self.tip and not swarm.called:
            if reporting is None or reporting.done():
                reporting = self.peer.node.spawn(self._report(samples))
            await asyncio.sleep(self.batch_seconds)
            samples += 1.0
        return samples

    async def _report(self, samples: float) -> None:
        with contextlib.suppress(P2PError, TimeoutError):
            await self.peer.swarm.report(Progress(self.peer.swarm.tip, samples, 1.0 / self.batch_seconds))


async def spawn_trainers(world: World, count: int = 5) -> list[Trainer]:
    trainers: list[Trainer] = [Computing(peer) for peer in await spawn_swarm(world, count, Board(), **OPTIONS)]
    for trainer in trainers:
        trainer.donate()
        trainer.batch_seconds = BATCH_SECONDS
    return trainers


def longest_pause(trainers: list[Trainer]) -> float:
    """The longest time in which none of them ended an epoch."""
    ends = sorted(trainer.ended[number] for trainer in trainers for number in range(len(trainer.ended)))
    return max(after - before for before, after in itertools.pairwise(ends))


def put_out(trainers: list[Trainer]) -> int:
    """The connections that any of them ended because a member was silent."""
    return sum(len(trainer.ended_for_silence) for trainer in trainers)


@pytest.mark.parametrize("seconds", [1.0, 3.0, 10.0, 30.0, 60.0])
@pytest.mark.parametrize("seed", seeds(4))
def test_a_member_that_is_stopped_holds_up_nobody_for_long(seed: int, seconds: float) -> None:
    async def scenario() -> None:
        world = World(seed)
        stopped, *others = trainers = await spawn_trainers(world)
        tasks = [asyncio.create_task(trainer.train_on(trainers, EPOCHS)) for trainer in trainers]
        await others[0].reached(8)
        await asyncio.sleep(world.rng.uniform(0.0, 4.0))
        leads = others[0].peer.swarm.peer.participant.coordinator().key == stopped.peer.key
        world.hold(stopped.peer.node.peer_id, seconds)
        await asyncio.gather(*tasks)
        assert longest_pause(others) < (COORDINATOR_PAUSE if leads else PAUSE)
        assert_alike(trainers)

    run(scenario(), until=300.0)


@pytest.mark.parametrize("seconds", [2.0, 5.0, 20.0])
@pytest.mark.parametrize("seed", seeds(2))
def test_a_trainer_that_keeps_the_interpreter_is_left_out_once(seed: int, seconds: float) -> None:
    async def scenario() -> None:
        world = World(seed)
        busy, *others = trainers = await spawn_trainers(world)
        tasks = [asyncio.create_task(trainer.train_on(trainers, 200)) for trainer in trainers]
        for epoch in (8, 40, 80):  # it compiles, and saves
            await others[0].reached(epoch)
            await asyncio.sleep(world.rng.uniform(0.0, 1.0))
            lost = others[0].peer.swarm.contacts.losses.count
            world.hold(busy.peer.node.peer_id, seconds)
            await asyncio.sleep(seconds + 0.01)
            busy.peer.swarm.peer.was_held(seconds)
            if epoch > 8 and 3 * seconds < 15.0:
                assert others[0].peer.swarm.contacts.losses.count == lost
        await asyncio.gather(*tasks)
        assert_alike(trainers)

    run(scenario(), until=900.0)

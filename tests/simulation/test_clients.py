"""Clients whose only node is lost in the middle of a round go on at once, each for itself."""

from __future__ import annotations

import asyncio

import torch

from shoal.simulation.clock import run
from shoal.simulation.world import World
from shoal.swarm.protocol.view import Role
from tests.simulation.swarms import Board, spawn_peer
from tests.simulation.trainers import ELEMENTS, RULES, Trainer


def test_a_round_that_nobody_can_take_over_is_left() -> None:
    async def scenario() -> None:
        world, board = World(3), Board()
        node, *clients = [
            Trainer(await spawn_peer(world, board, elements=ELEMENTS, rules=RULES, keeps_state=True, role=role))
            for role in (Role.NODE, Role.CLIENT, Role.CLIENT)
        ]
        trainers = [node, *clients]
        await asyncio.gather(*(trainer.train(2) for trainer in trainers))
        assert all(torch.equal(trainer.state, node.state) for trainer in trainers)
        tasks = [asyncio.create_task(trainer.train_on(trainers, 4)) for trainer in trainers]
        while not all(client.peer.swarm.peer.participant.begin is not None for client in clients):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        world.kill(node.peer.node.peer_id)
        began = asyncio.get_running_loop().time()
        await asyncio.gather(*tasks[1:])
        assert asyncio.get_running_loop().time() - began < 10.0, "the round of a lost node was waited for"
        tasks[0].cancel()

    run(scenario(), until=500.0)

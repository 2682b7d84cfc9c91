"""Peers die at any moment of a lossy round: what is repaired is the same, in all bits, at all that are left."""

from __future__ import annotations

import asyncio

import pytest
import torch

from shoal.compression import PerTensorCompression, TensorRole, plan_codecs
from shoal.flat import Layout
from shoal.simulation.clock import run
from shoal.simulation.world import World
from shoal.swarm.protocol.contribution import Outcome
from tests.averaging.compressions import COMPRESSIONS
from tests.simulation.swarms import results_by_tip, seeds, spawn_swarm

SIZES = [20_000, 48, 10_000, 9_952]  # whole multiples of 16: together 40000 elements without padding
PIECEWISE = PerTensorCompression([COMPRESSIONS[name] for name in ("uniform", "none", "quantile", "blockwise")])


@pytest.mark.parametrize("seed", seeds(4))
def test_a_kill_at_any_moment_of_a_lossy_round(seed: int) -> None:
    compression = PIECEWISE if seed % 2 else COMPRESSIONS["uniform"]
    codecs = plan_codecs(compression, Layout.of([torch.zeros(size) for size in SIZES]), TensorRole.GRADIENT)

    async def scenario() -> None:
        world = World(seed, bandwidth=1.5e6)
        peers = await spawn_swarm(world, 4)
        for peer in peers:
            peer.codecs = codecs
        await asyncio.gather(*(peer.round() for peer in peers))
        victim, *survivors = world.rng.sample(peers, 4)
        tasks = {peer.key: peer.spawn_round(weight=world.rng.choice([0.5, 3.0])) for peer in peers}
        await asyncio.sleep(world.rng.uniform(0.0, 0.25))
        world.kill(victim.node.peer_id)
        outcomes = [await tasks[peer.key] for peer in survivors]
        assert all(isinstance(outcome, Outcome) for outcome in outcomes), outcomes
        assert all(torch.equal(peer.output, survivors[0].output) for peer in survivors)
        assert all(len(results) == 1 for results in results_by_tip(peers).values())
        everyone = torch.stack([peer.vector for peer in peers])
        assert (survivors[0].output.abs() <= everyone.abs().max() * 1.02).all()

    run(scenario())

"""A newcomer downloads the state while rounds go on, and is in the next round, alike in all bits."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from statistics import median

import pytest
import torch

from shoal.simulation.clock import run
from shoal.simulation.world import World
from shoal.transfer.transfer import DownloadFailed
from tests.simulation.swarms import Board, results_by_tip, spawn_peer, spawn_swarm
from tests.simulation.trainers import ELEMENTS, RULES, Trainer


@pytest.mark.parametrize("seed", range(4))
def test_a_newcomer_is_in_the_round_after_its_download(seed: int) -> None:
    async def scenario() -> None:
        world, board = World(seed, bandwidth=5e6), Board()
        veterans = [
            Trainer(p) for p in await spawn_swarm(world, 4, board, elements=ELEMENTS, rules=RULES, keeps_state=True)
        ]
        for trainer in veterans:
            trainer.donate()
        epochs = 14
        tasks = [asyncio.create_task(trainer.train(epochs)) for trainer in veterans]
        await veterans[0].reached(3)
        await asyncio.sleep(world.rng.uniform(0.62, 0.7))  # so that a round ends before its download does
        came = asyncio.get_running_loop().time()
        newcomer = Trainer(await spawn_peer(world, board, elements=ELEMENTS, rules=RULES, keeps_state=True))
        await asyncio.gather(newcomer.arrive(veterans, epochs), *tasks)

        first = newcomer.outcomes[0]
        assert first.begin.tip == newcomer.downloaded[-1], "it waited for another round than the next"
        assert len(newcomer.downloaded) <= 3
        together = [outcome for outcome in newcomer.outcomes if not outcome.missed]
        # At most the round that was under way is fetched; it is in all that begin after.
        assert not any(outcome.missed for outcome in newcomer.outcomes[1:])
        assert all(len(outcome.begin.members) == 5 for outcome in together)
        assert len(together) >= 5
        # Nobody waited for it, and nobody had to download for it.
        for veteran in veterans:
            assert len(veteran.outcomes) == epochs
            assert not any(outcome.missed for outcome in veteran.outcomes)
            ends = [0.0, *veteran.ended]
            gaps = [after - before for before, after in pairwise(ends)]
            assert max(gaps[1:]) < 2 * median(gaps), gaps
            ended = zip(veteran.ended, veteran.outcomes, strict=True)
            meanwhile = [outcome for end, outcome in ended if end > came and len(outcome.begin.members) == 4]
            assert meanwhile, "no round went on while it came: the scenario tests nothing"
        everybody = [*veterans, newcomer]
        assert len({trainer.tip for trainer in everybody}) == 1
        assert all(torch.equal(trainer.state, newcomer.state) for trainer in everybody)
        assert all(torch.equal(trainer.ballast, newcomer.ballast) for trainer in everybody)
        assert all(len(roots) == 1 for roots in results_by_tip(t.peer for t in everybody).values())

    run(scenario(), until=200.0)


@pytest.mark.parametrize("seed", range(3))
def test_a_newcomer_whose_download_takes_longer_than_an_epoch_is_awaited(seed: int) -> None:
    """Wherever in an epoch it asks, and however late its question comes: it takes a state that can still wait."""

    async def scenario() -> None:
        world, board = World(seed, latency=0.06, jitter=0.06), Board()
        veterans = [
            Trainer(p) for p in await spawn_swarm(world, 3, board, elements=ELEMENTS, rules=RULES, keeps_state=True)
        ]
        for trainer in veterans:
            trainer.donate()
        epochs = 30
        tasks = [asyncio.create_task(trainer.train(epochs)) for trainer in veterans]
        await veterans[0].reached(3)
        await asyncio.sleep(world.rng.uniform(0.0, 0.5))
        newcomer = Trainer(await spawn_peer(world, board, elements=ELEMENTS, rules=RULES, keeps_state=True))
        newcomer.download_seconds = 5.0
        await asyncio.gather(newcomer.arrive(veterans, epochs, awaited=True), *tasks)

        assert len(newcomer.downloaded) == 1, "its first download was not awaited"
        # It is in every round from then on, and nobody else missed one.
        assert newcomer.outcomes[0].begin.tip == newcomer.downloaded[0]
        assert not any(outcome.missed for trainer in [*veterans, newcomer] for outcome in trainer.outcomes)
        assert len({trainer.tip for trainer in [*veterans, newcomer]}) == 1
        assert all(torch.equal(trainer.state, newcomer.state) for trainer in veterans)

    run(scenario(), until=200.0)


def test_a_donor_that_hangs_is_not_waited_for() -> None:
    async def scenario() -> None:
        world, board = World(1), Board()
        veteran, newcomer = [
            Trainer(peer)
            for peer in await spawn_swarm(world, 2, board, elements=ELEMENTS, rules=RULES, keeps_state=True)
        ]
        veteran.donate()
        world.hold(veteran.peer.node.peer_id, 30.0)
        with pytest.raises(DownloadFailed, match="no sign of life"):
            await newcomer.catch_up([veteran])
        assert asyncio.get_running_loop().time() < 20.0
        await asyncio.sleep(30.0)  # it goes on, and its tasks end

    run(scenario(), until=200.0)

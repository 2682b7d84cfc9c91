"""Newcomers whose download takes longer than an epoch: the run waits for them, within its budget."""

from __future__ import annotations

import asyncio
import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch

from shoal.simulation.clock import run
from shoal.simulation.world import World
from shoal.swarm.protocol.download import DownloadPlan
from shoal.swarm.protocol.messages import Count, Pause, Progress
from shoal.swarm.protocol.newcomers import FIRST_SECONDS
from shoal.transfer.manifest import CHUNK_ELEMENTS
from tests.simulation.swarms import Board, spawn_peer, spawn_swarm
from tests.simulation.trainers import BALLAST, ELEMENTS, RULES, Trainer
from tests.soaked import only_in_soak

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


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
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
        [pause] = _pauses(veterans[0])
        assert 50 < pause < 75
        assert not any(trainer.peer.swarm.peer.participant.at.deposed for trainer in everybody)
        assert not any(outcome.missed for trainer in everybody for outcome in trainer.outcomes)
        assert all(torch.equal(trainer.state, newcomer.state) for trainer in veterans)

    run(scenario(), until=300.0)


@pytest.mark.long
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
        [pause] = _pauses(veterans[0])
        assert pause < 45
        assert len({trainer.tip for trainer in [*veterans, *newcomers]}) == 1

    run(scenario(), until=300.0)


@pytest.mark.long
def test_a_holder_that_claims_that_there_is_no_room_is_not_believed() -> None:
    """It answers as only the coordinator does. And a donor is killed meanwhile."""

    async def scenario() -> None:
        world, board = World(3), Board()
        veterans = await _veterans(world, board, 4)
        await asyncio.gather(*(trainer.train(4) for trainer in veterans))
        lead = veterans[0].peer.swarm.peer.participant.coordinator().key
        liar, killed, *_ = (trainer for trainer in veterans if trainer.peer.key != lead)
        answer = liar.peer.swarm.peer._on_progress

        def lie(sender: bytes, report: Progress, now: float) -> Any:
            if report.loading:
                return Count(report.tip, 0.0, 0.0, 1, False, pause=Pause(0.0, 0.0, 1e-9, 0.001))
            return answer(sender, report, now)

        liar.peer.swarm.peer._on_progress = lie  # type: ignore[method-assign]
        newcomer = await _newcomer(world, board, 40.0)
        tasks = [each.peer.node.spawn(each.train_on([*veterans, newcomer], 12)) for each in [*veterans, newcomer]]
        await asyncio.sleep(15.0)
        world.kill(killed.peer.node.peer_id)
        await asyncio.wait(tasks)
        assert len(newcomer.downloaded) == 1
        assert newcomer.outcomes[0].begin.tip == newcomer.downloaded[0]

    run(scenario(), until=400.0)


@only_in_soak
@pytest.mark.parametrize(("count", "every"), [(8, 75.0), (64, 10.0)])
def test_newcomers_get_in_and_the_pauses_are_within_the_budget(
    count: int, every: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Epochs of 5 s, downloads of 60 s; at times a newcomer comes and a member is lost."""
    lasts, chunks, batch = 1100.0, 48, 2.5
    # In this world a message is on a line as a whole: dozens of chunks on a slow one would keep all answers for long.
    monkeypatch.setattr(DownloadPlan, "window", 1)
    monkeypatch.setattr(DownloadPlan, "max_outstanding", 3)

    async def scenario() -> None:
        world, board = World(7), Board()
        rules = dataclasses.replace(RULES, target_samples=2.0 * count)
        everybody: list[Trainer] = []

        async def spawn() -> Trainer:
            peer = await spawn_peer(world, board, elements=ELEMENTS, rules=rules, keeps_state=True)
            ballast = torch.zeros(chunks * CHUNK_ELEMENTS, dtype=torch.int8)
            trainer = Trainer(peer, ballast=ballast, batch_seconds=batch)
            trainer.donate()
            everybody.append(trainer)
            return trainer

        veterans = [await spawn() for _ in range(count)]
        loop, came = asyncio.get_running_loop(), {}
        for trainer in veterans:
            trainer.peer.node.spawn(trainer.train_on(everybody, 10_000))
        await veterans[0].reached(3)
        began = loop.time()
        while loop.time() < began + lasts:
            newcomer = await spawn()
            came[newcomer.peer.name] = loop.time()
            world.lines.set_rates(newcomer.peer.node.peer_id, None, chunks * CHUNK_ELEMENTS / 60.0)
            newcomer.peer.node.spawn(newcomer.train_on(everybody, 10_000))
            await asyncio.sleep(every)
            alive = [each for each in everybody if each.peer.alive and each.outcomes]
            if len(alive) > count:
                world.kill(world.rng.choice(alive).peer.node.peer_id)
        alive = [each for each in everybody if each.peer.alive]
        late = [each for each in alive if not each.outcomes and loop.time() - came[each.peer.name] > 900.0]
        ends = sorted({began} | {round(end, 1) for each in everybody for end in each.committed_at if end > began})
        pauses = [after - before - 5.0 for before, after in pairwise(ends) if after - before > 15.0]
        assert not late, f"{len(late)} newcomers have waited for more than 900 s"
        assert all(each.tip.epoch > 10 for each in alive if each.outcomes), "newcomers have made epochs of their own"
        assert 0 < sum(pauses) <= FIRST_SECONDS + 0.11 * (loop.time() - began), pauses

    run(scenario(), until=20_000.0)

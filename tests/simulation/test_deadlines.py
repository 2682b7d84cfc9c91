"""A coordinator that does not do what it has to is replaced, by the word of most members and of nobody alone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import pytest

from shoal.simulation.clock import run
from shoal.simulation.world import World
from shoal.swarm.protocol import messages as msg
from shoal.swarm.protocol.leading import Leading
from tests.simulation.test_missed_commits import assert_alike, trainers_of
from tests.simulation.trainers import RULES, Trainer

SILENT, NEVER_CALLS, NEVER_BEGINS, NEVER_COMMITS = "silent", "never calls", "never begins", "never commits"
SURVEYS = "surveys"  # without end, every 0.5 s
ENDS = "ends"  # each of its rounds, at once
# Four peers, so it is the liar's turn in about every fourth epoch; the times of the four duties, and an epoch.
LONGEST = {
    SILENT: 12.0,
    NEVER_CALLS: 12.0,
    NEVER_BEGINS: RULES.matchmaking_time + 10.0,
    NEVER_COMMITS: 45.0,
    SURVEYS: 45.0,
    ENDS: 2.0,
}


def fails(liar: Trainer, how: str) -> None:
    """From now on this peer answers Ping, and fails in one duty whenever it coordinates."""
    swarm, node = liar.peer.swarm, liar.peer.node
    notify, handler = node.notify, swarm._handle

    async def never() -> Any:
        await asyncio.Event().wait()

    def handle(peer: Any, message: Any, buffers: Sequence[memoryview]) -> Any:
        is_other = peer != node.peer_id
        if how == SILENT and is_other and isinstance(message, msg.Progress | msg.Join):
            return never()
        answer = handler(peer, message, buffers)
        if how == NEVER_CALLS and is_other and isinstance(message, msg.Progress):
            return counts_only(answer)
        return answer

    async def counts_only(answer: Any) -> Any:
        real = await answer if asyncio.iscoroutine(answer) else answer
        return msgspec.structs.replace(real, called=False, wait=0.0) if isinstance(real, msg.Count) else real

    unsaid: dict[str, Any] = {
        NEVER_CALLS: msg.Call | msg.Begin,
        NEVER_BEGINS: msg.Begin,
        NEVER_COMMITS: msg.Commit | msg.Abort,
        SURVEYS: msg.Commit | msg.Abort,
    }

    def end() -> None:
        if (leading := swarm.peer.leading) is not None and not leading.over:
            swarm.peer.out.extend(leading.abort("not yet"))
            swarm._act()

    def say(peers: Any, service: Any, message: Any, buffers: Any = (), name: bytes = b"") -> None:
        if how not in unsaid or not isinstance(message, unsaid[how]):
            notify(peers, service, message, buffers, name)
        if how == ENDS and isinstance(message, msg.Begin):
            asyncio.get_running_loop().call_soon(end)

    async def survey() -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(0.5)
            lead = swarm.peer.lead
            if isinstance(lead, Leading) and lead.begin.tip == swarm.tip:
                swarm.peer.out.extend(lead.start_survey(loop.time()))
                swarm._act()

    if how == SURVEYS:
        node.spawn(survey())
    node.notify = say  # type: ignore[method-assign]
    node.stop_serving(swarm.service)
    node.serve(swarm.service, handle)


@pytest.mark.parametrize("how", LONGEST)
@pytest.mark.parametrize("seed", range(3))
def test_a_coordinator_that_misses_a_deadline_is_replaced(
    how: str, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        world = World(seed)
        liar, *others = trainers = await trainers_of(world, 4)
        await asyncio.gather(*(trainer.train(2) for trainer in trainers))
        fails(liar, how)
        lying = liar.peer.node.spawn(liar.train_on(trainers, 100))
        for other in others:
            other.patience = 300.0  # whoever steps alone has waited for too long
        await asyncio.gather(*(other.train_on(trainers, 16) for other in others))
        assert_alike(others)
        ends = sorted({end for other in others for end in other.ended[1:]})
        pauses = [after - before for before, after in pairwise(ends)]
        assert max(pauses) < LONGEST[how], sorted(pauses)[-5:]
        assert sorted(pauses)[-3] < max(pauses) or max(pauses) < 3.0, "the second time it takes less"
        lying.cancel()

    run(scenario(), until=5000.0)
    told = [record for record in caplog.records if "is replaced as the coordinator" in record.getMessage()]
    assert told, "it was never its turn"
    assert 1 <= sum(record.levelno == logging.WARNING for record in told) <= 4, "each says it once"


def test_one_that_doubts_alone_deposes_nobody() -> None:
    async def scenario() -> None:
        world = World(3)
        liar, *others = trainers = await trainers_of(world, 4)
        await asyncio.gather(*(trainer.train(2) for trainer in trainers))
        swarm = liar.peer.swarm
        training = [other.peer.node.spawn(other.train(12)) for other in others]
        lying = liar.peer.node.spawn(liar.train_on(trainers, 100))
        while not all(task.done() for task in training):
            for other in others:
                doubt = swarm._signer.sign(msg.Doubt(swarm.tip, other.peer.key, swarm.me.key))
                keys = [member.node.peer_id for member in (one.peer for one in others)]
                liar.peer.node.notify(keys, swarm.service, doubt)
                taking = msg.TakeOver(swarm.tip, (doubt,) * 3)
                liar.peer.node.notify(keys, swarm.service, taking)
            await asyncio.sleep(0.05)
            assert not any(other.peer.swarm.peer.participant.at.deposed for other in others)
        assert_alike(others)
        lying.cancel()

    run(scenario(), until=500.0)


def test_of_two_one_doubt_is_enough() -> None:
    async def scenario() -> None:
        world = World(4)
        trainers = await trainers_of(world, 2)
        await asyncio.gather(*(trainer.train(2) for trainer in trainers))
        liar, other = trainers
        fails(liar, SILENT)
        lying = liar.peer.node.spawn(liar.train_on(trainers, 100))
        other.patience = 300.0
        await other.train_on([other], 12)
        ends = other.ended[2:]
        assert max(after - before for before, after in pairwise(ends)) < LONGEST[SILENT]
        lying.cancel()

    run(scenario(), until=1000.0)


def test_who_stood_still_itself_doubts_nobody() -> None:
    async def scenario() -> None:
        world = World(5)
        trainers = await trainers_of(world, 3)
        await asyncio.gather(*(trainer.train(2) for trainer in trainers))
        training = [trainer.peer.node.spawn(trainer.train_on(trainers, 40)) for trainer in trainers]
        held = trainers[0]
        held.peer.swarm.contacts.was_held(8.0)  # so the others wait for it
        for _ in range(4):
            await asyncio.sleep(world.rng.uniform(0.2, 1.0))
            world.hold(held.peer.node.peer_id, 8.0)
            await asyncio.sleep(8.0)
            for _ in range(10):
                await asyncio.sleep(0.2)
                assert not held.peer.swarm.peer.participant.at.doubted
        for task in training:
            task.cancel()

    run(scenario(), until=500.0)

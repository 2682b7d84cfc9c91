"""Two members that cannot reach each other, or accuse each other, both stay in the round."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from shoal.simulation.clock import run
from shoal.simulation.world import World
from shoal.swarm.protocol import messages as msg
from shoal.swarm.protocol.contribution import Outcome
from shoal.swarm.protocol.view import Role
from tests.simulation.swarms import Board, Peer, results_by_tip, spawn_peer, spawn_swarm


async def swarm_of(world: World, count: int) -> tuple[list[Peer], list[Peer]]:
    """So many peers after their first round, and those that do not coordinate the next one."""
    peers = await spawn_swarm(world, count)
    await asyncio.gather(*(peer.round() for peer in peers))
    coordinator = peers[0].swarm.peer.participant.coordinator().key
    return peers, [peer for peer in peers if peer.key != coordinator]


def assert_one_result(peers: list[Peer], outcomes: list[Any]) -> None:
    assert all(isinstance(outcome, Outcome) for outcome in outcomes), outcomes
    assert all(torch.equal(peer.output, peers[0].output) for peer in peers)
    assert all(len(roots) == 1 for roots in results_by_tip(peers).values())


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("count", [3, 4, 7])
def test_two_that_do_not_reach_each_other_stay_in_the_round(count: int, seed: int) -> None:
    async def scenario() -> None:
        world = World(seed, lost_after=0.2)
        peers, others = await swarm_of(world, count)
        one, other = world.rng.sample(others, 2)
        tasks = [peer.spawn_round() for peer in peers]
        await asyncio.sleep(world.rng.uniform(0.0, 0.1))
        world.cut(one.node.peer_id, other.node.peer_id)
        outcomes = [await task for task in tasks]
        assert_one_result(peers, outcomes)
        assert all(len(outcome.begin.members) == count for outcome in outcomes if isinstance(outcome, Outcome))
        assert not any(peer.swarm.missed for peer in peers), "nobody was put out"

    run(scenario(), until=500.0)


@pytest.mark.parametrize("seed", range(6))
def test_the_word_of_one_puts_out_nobody(seed: int) -> None:
    """A liar complains of one member in each round; the two go on apart, and all have the result."""

    async def scenario() -> None:
        world = World(seed)
        peers, others = await swarm_of(world, 5)
        liar, victim = world.rng.sample(others, 2)
        tasks = [peer.spawn_round() for peer in peers]
        while (begin := liar.swarm.peer.participant.begin) is None:  # noqa: ASYNC110  # in virtual time
            await asyncio.sleep(0.001)
        complaint = msg.Broken(begin.round, victim.key, True, "I do not like it")
        leader = next(peer for peer in peers if peer.key == begin.ballot.coordinator)
        liar.node.notify([leader.node.peer_id], liar.swarm.service, complaint)
        outcomes = [await task for task in tasks]
        assert_one_result(peers, outcomes)

    run(scenario(), until=500.0)


@pytest.mark.parametrize("seed", range(6))
def test_who_complains_of_several_is_out(seed: int) -> None:
    async def scenario() -> None:
        world = World(seed)
        peers, others = await swarm_of(world, 5)
        liar, *honest = others
        tasks = {peer.key: peer.spawn_round() for peer in peers}
        while (begin := liar.swarm.peer.participant.begin) is None:  # noqa: ASYNC110  # in virtual time
            await asyncio.sleep(0.001)
        leader = next(peer for peer in peers if peer.key == begin.ballot.coordinator)
        for victim in honest:
            complaint = msg.Broken(begin.round, victim.key, True, "I do not like it")
            liar.node.notify([leader.node.peer_id], liar.swarm.service, complaint)
        rest = [leader, *honest]
        assert_one_result(rest, [await tasks[peer.key] for peer in rest])
        peer = leader.swarm.peer
        assert peer.gathering is None
        assert peer.leading is None or set(peer.leading.out) <= {liar.key}

    run(scenario(), until=500.0)


@pytest.mark.parametrize("seed", range(4))
def test_two_whose_results_no_third_could_bring_are_not_parted(seed: int) -> None:
    """The third one only lends bandwidth: it holds no result."""

    async def scenario() -> None:
        world = World(seed, lost_after=0.2)
        board = Board()
        peers = [await spawn_peer(world, board, role=role) for role in (Role.NODE, Role.NODE, Role.AUXILIARY)]
        await asyncio.gather(*(peer.round() for peer in peers))
        one, other, _ = peers
        tasks = [peer.spawn_round(timeout=30.0) for peer in peers]
        await asyncio.sleep(world.rng.uniform(0.03, 0.06))
        world.cut(one.node.peer_id, other.node.peer_id)
        outcomes = [await task for task in tasks]
        assert sum(isinstance(outcome, Outcome) for outcome in outcomes) >= 2, outcomes
        assert asyncio.get_running_loop().time() < 20.0

    run(scenario(), until=500.0)

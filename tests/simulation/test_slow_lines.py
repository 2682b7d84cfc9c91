"""Rounds over slow lines, in virtual time: nobody who sends is given up, and what has come late has come."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shoal.simulation.clock import run
from shoal.simulation.world import World
from shoal.swarm.protocol.contribution import Outcome
from shoal.swarm.protocol.errors import AveragingError
from shoal.swarm.protocol.rules import Rules
from tests.simulation.swarms import Board, Peer, spawn_swarm

ELEMENTS = 4_750_000  # 19 MB
LATENCY = 0.015


def bytes_time(rate: float) -> float:
    """Seconds that a member of four needs to send its part of a round, at so many Mbit/s."""
    return 2 * 3 / 4 * 4 * ELEMENTS / (rate * 1e6 / 8)


async def lined_up(rate: float, **rules: float) -> tuple[World, list[Peer], list[str]]:
    """Four peers on such lines, with the defaults, and whom they lose."""
    world = World(1, latency=LATENCY, jitter=0.0, bandwidth=rate * 1e6 / 8)
    # The simulator shows no byte of a chunk before it has come whole; real lines do. So the chunks are small.
    usual: dict[str, Any] = {"matchmaking_time": 15.0, "round_timeout": 60.0, "chunk_elements": 1 << 15}
    given = Rules(sizes=(ELEMENTS,), **usual | rules)
    peers = await spawn_swarm(world, 4, Board(), elements=ELEMENTS, rules=given)
    lost: list[str] = []
    for peer in peers:
        peer.node.on_lost(lambda other, reason: lost.append(reason))
    return world, peers, lost


@pytest.mark.parametrize("rate", [5.0, 20.0, 50.0, 100.0])
def test_healthy_peers_make_every_round_together(rate: float) -> None:
    async def scenario() -> None:
        _, peers, lost = await lined_up(rate)
        for _ in range(2):
            began = asyncio.get_running_loop().time()
            # Bound to a state, as training peers are: their patience counts from the last progress.
            outcomes = await asyncio.gather(*(peer.round(bound=True) for peer in peers))
            assert all(len(outcome.begin.members) == 4 for outcome in outcomes)
            took = asyncio.get_running_loop().time() - began
            assert took <= 1.5 * bytes_time(rate) + 8 * 2 * LATENCY, took
        assert lost == []

    run(scenario(), until=2000.0)


def test_a_round_that_gets_on_may_take_longer_than_every_time_out() -> None:
    """`averaging_timeout` and `allreduce_timeout` count from the last progress."""

    async def scenario() -> None:
        _, peers, lost = await lined_up(5.0, round_timeout=20.0)
        outcomes = await asyncio.gather(*(peer.round(timeout=20.0, bound=True) for peer in peers))
        assert all(outcome.allreduce_seconds > 40.0 for outcome in outcomes)
        assert lost == []

    run(scenario(), until=2000.0)


def test_a_round_that_stands_still_ends_all_the_same() -> None:
    async def scenario() -> None:
        world, peers, _ = await lined_up(20.0, round_timeout=20.0)
        world.network.lost_after = 1e6  # no transport notices anything
        tasks = [peer.spawn_round(timeout=20.0, bound=True) for peer in peers]
        await asyncio.sleep(5.0)
        world.partition([[peer.node.peer_id] for peer in peers])
        began = asyncio.get_running_loop().time()
        outcomes = await asyncio.gather(*tasks)
        assert all(isinstance(outcome, AveragingError | Outcome) for outcome in outcomes)
        assert asyncio.get_running_loop().time() - began < 90.0

    run(scenario(), until=2000.0)


def test_a_slow_sender_is_no_reason_to_put_out_the_reducers_that_wait_for_it() -> None:
    """One line is so slow that its chunks take longer than a reducer may owe a result."""

    async def scenario() -> None:
        world, peers, lost = await lined_up(100.0)
        slow = peers[2].node.peer_id
        delay = world.network.delay

        def slower(source: object, target: object, size: int) -> float:
            return delay(source, target, size * 30 if source == slow else size)  # type: ignore[arg-type]

        world.network.delay = slower
        outcomes = await asyncio.gather(*(peer.round(bound=True) for peer in peers))
        assert all(len(outcome.begin.members) == 4 for outcome in outcomes)
        assert lost == []
        assert outcomes[0].allreduce_seconds > 30.0

    run(scenario(), until=2000.0)


def test_a_process_that_stands_still_for_ten_seconds_is_waited_for() -> None:
    """Its Python compiles, its kernel answers: its messages wait in its own machine."""

    async def scenario() -> None:
        _, peers, lost = await lined_up(100.0)
        await asyncio.gather(*(peer.round(bound=True) for peer in peers))
        held = peers[1]
        held.swarm.contacts.was_held(10.0)  # it has compiled before
        handle, waiting = held.node._on_message, []
        held.node.transport.start(lambda *message: waiting.append(message), held.node._on_lost)

        def go_on() -> None:
            held.node.transport.start(handle, held.node._on_lost)
            for message in waiting:
                handle(*message)

        asyncio.get_running_loop().call_later(10.0, go_on)
        outcomes = await asyncio.gather(*(peer.round(bound=True) for peer in peers))
        assert all(len(outcome.begin.members) == 4 for outcome in outcomes)
        assert lost == []

    run(scenario(), until=2000.0)

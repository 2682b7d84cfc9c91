"""Time-outs are each peer's own; how long a round may take, its coordinator says in BEGIN."""

from __future__ import annotations

import asyncio

import pytest

from shoal.simulation.clock import run
from shoal.simulation.world import World
from shoal.swarm.protocol.contribution import Outcome
from shoal.swarm.protocol.errors import AveragingError
from shoal.swarm.protocol.rules import Rules
from tests.simulation.swarms import Board, spawn_peer

ELEMENTS = 40_000
BANDWIDTH = 5_000.0  # bytes a second: a chunk takes more than 3 s, a round of two 32


async def slow_pair(seed: int, *, of_coordinator: float, own: float) -> list[Outcome | AveragingError]:
    """What a round gives two peers. Its coordinator's round time-out is the given one, the other's 2 s; both have given
    up after `own` seconds where there is no round."""
    for coordinator in range(2):
        world, board = World(seed, bandwidth=BANDWIDTH), Board()
        times = [of_coordinator if number == coordinator else 2.0 for number in range(2)]
        rules = [Rules(sizes=(ELEMENTS,), matchmaking_time=5.0, round_timeout=time) for time in times]
        peers = [await spawn_peer(world, board, rules=one, chunk_timeout=60.0) for one in rules]
        if peers[0].swarm.peer.participant.coordinator().key == peers[coordinator].key:
            break
    else:
        raise AssertionError("nobody coordinates")
    return list(await asyncio.gather(*(peer.spawn_round(timeout=own, bound=True) for peer in peers)))


@pytest.mark.parametrize("seed", range(4))
def test_a_member_that_is_less_patient_stays_in_the_round(seed: int) -> None:
    outcomes = run(slow_pair(seed, of_coordinator=60.0, own=4.0))
    roots = [outcome.commit.root for outcome in outcomes if isinstance(outcome, Outcome)]
    assert len(roots) == 2, outcomes
    assert roots[0] == roots[1]


def test_a_round_that_stands_still_for_longer_than_its_coordinator_allows_ends() -> None:
    outcomes = run(slow_pair(1, of_coordinator=3.0, own=4.0))
    assert all(isinstance(outcome, AveragingError) for outcome in outcomes), outcomes
    assert any("has made no progress for 3 s" in str(outcome) for outcome in outcomes), outcomes

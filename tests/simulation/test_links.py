"""Rounds whose plan knows the links, in virtual time: a slow one costs its first round only, and relays are spared."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
import torch

from shoal.p2p.identity import PeerID
from shoal.simulation.clock import run
from shoal.simulation.world import World
from shoal.swarm.protocol.contribution import Outcome
from shoal.swarm.protocol.errors import AveragingError
from shoal.swarm.protocol.plan import best_shares
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.view import Reach, Role
from tests.simulation.swarms import Board, Peer, mean, spawn_peer, spawn_swarm

ELEMENTS, CHUNK = 4_000_000, 50_000  # 16 MB, in chunks that let all shares be nearly as they should
NBYTES = 4.0 * ELEMENTS
RULES = Rules(sizes=(ELEMENTS,), matchmaking_time=15.0, round_timeout=60.0, chunk_elements=CHUNK)
RATE = 2.5e6


async def lined_up(world: World, count: int, board: Board | None = None) -> list[Peer]:
    return await spawn_swarm(world, count, board, elements=ELEMENTS, rules=RULES, bandwidth=None)


async def round_of(peers: list[Peer]) -> list[Outcome]:
    return list(await asyncio.gather(*(peer.round(timeout=300.0) for peer in peers)))


def shares_of(outcome: Outcome) -> dict[bytes, float]:
    """What part of the vector each member has reduced."""
    starts = outcome.begin.starts
    lengths = (stop - start for start, stop in pairwise(starts))
    return {m.key: length / starts[-1] for m, length in zip(outcome.begin.members, lengths, strict=True)}


def seconds_of(outcomes: list[Outcome]) -> float:
    return max(outcome.allreduce_seconds for outcome in outcomes)


@pytest.mark.long
def test_a_slow_way_out_is_measured_in_the_first_round_and_spared_in_the_next() -> None:
    async def scenario() -> None:
        world = World(1, latency=0.01, jitter=0.0, bandwidth=RATE)
        peers = await lined_up(world, 4)
        rates = [RATE / 2, RATE, RATE, RATE]
        world.set_rates(peers[0].node.peer_id, out=rates[0])
        shares = best_shares(rates)
        best = NBYTES * max((1 + 2 * share) / rate for share, rate in zip(shares, rates, strict=True))
        first = await round_of(peers)
        assert set(shares_of(first[0]).values()) == {0.25}, "nobody knows anything yet"
        for _ in range(4):
            outcomes = await round_of(peers)
            assert seconds_of(outcomes) <= 1.15 * best
            assert seconds_of(outcomes) <= 0.75 * seconds_of(first)
            told = shares_of(outcomes[0])
            assert len({told[peer.key] for peer in peers[1:]}) <= 2, "equal peers: to a chunk"
            assert max(told.values()) - min(told[peer.key] for peer in peers[1:]) < 0.02
            assert told[peers[0].key] == pytest.approx(shares[0], abs=0.03)
        assert all(torch.equal(peer.output, peers[0].output) for peer in peers)

    run(scenario(), until=3000.0)


@pytest.mark.long
def test_a_slow_link_between_two_is_spared() -> None:
    async def scenario() -> None:
        world = World(2, latency=0.01, jitter=0.0, bandwidth=RATE)
        peers = await lined_up(world, 4)
        one, other = (peer.node.peer_id for peer in peers[:2])
        world.set_link(one, other, latency=0.01, bandwidth=RATE / 20)
        first = await round_of(peers)
        later = [await round_of(peers) for _ in range(4)]
        slow = [(0, 1, RATE / 20)]
        shares = best_shares([RATE] * 4, slow=slow)
        own = max((1 + 2 * share) / RATE for share in shares)
        best = NBYTES * max(own, (shares[0] + shares[1]) / (RATE / 20))
        for outcomes in later:
            assert seconds_of(outcomes) <= 0.4 * seconds_of(first)
            assert seconds_of(outcomes) <= 1.25 * best

    run(scenario(), until=3000.0)


def test_equal_peers_keep_equal_shares() -> None:
    async def scenario() -> None:
        peers = await lined_up(World(3, latency=0.02, jitter=0.02, bandwidth=RATE), 4)
        for _ in range(4):
            assert set(shares_of((await round_of(peers))[0]).values()) == {0.25}

    run(scenario(), until=3000.0)


def test_a_round_without_a_result_shows_what_the_next_one_spares() -> None:
    """With equal shares the slow line takes longer than all have time for, and would in each round."""

    async def scenario() -> None:
        world = World(8, latency=0.01, jitter=0.0, bandwidth=RATE)
        peers = await lined_up(world, 4)
        world.set_rates(peers[0].node.peer_id, out=RATE / 4)  # 38 s with a fourth of the vector, 26 s with nothing
        for _ in range(2):  # during the second one, bytes of the first are still under way
            failed = await asyncio.gather(*(peer.round(timeout=32.0) for peer in peers), return_exceptions=True)
            assert all(isinstance(result, AveragingError) for result in failed), failed
        outcomes = await asyncio.gather(*(peer.round(timeout=32.0) for peer in peers))
        assert shares_of(outcomes[0])[peers[0].key] == 0

    run(scenario(), until=3000.0)


# -- relays


def test_who_is_relayed_reduces_and_coordinates_nothing() -> None:
    async def scenario() -> None:
        world, board = World(4), Board()
        relayed = [await spawn_peer(world, board, relayed=True, bandwidth=None) for _ in range(2)]
        direct = [await spawn_peer(world, board, bandwidth=None) for _ in range(2)]
        peers = [*relayed, *direct]
        for _ in range(6):  # the order of coordinators changes with each
            outcomes = await round_of(peers)
            assert len(outcomes[0].begin.members) == 4
            shares = shares_of(outcomes[0])
            assert [shares[peer.key] for peer in relayed] == [0, 0]
            assert outcomes[0].commit.coordinator in {peer.key for peer in direct}
        assert (peers[0].output - mean(peers)).abs().max() < 1e-6
        assert all(torch.equal(peer.output, peers[0].output) for peer in peers)

    run(scenario())


@pytest.mark.parametrize("with_client", [False, True])
def test_those_who_are_relayed_train_alone(with_client: bool) -> None:
    async def scenario() -> None:
        world, board = World(5), Board()
        peers = [await spawn_peer(world, board, relayed=True, bandwidth=None) for _ in range(2)]
        if with_client:
            peers.append(await spawn_peer(world, board, role=Role.CLIENT, bandwidth=None))
        for _ in range(3):
            outcomes = await round_of(peers)
            assert len(outcomes[0].begin.members) == len(peers)
            assert [shares_of(outcomes[0])[peer.key] > 0 for peer in peers[:2]] == [True, True]
        assert all(torch.equal(peer.output, peers[0].output) for peer in peers)

    run(scenario())


def test_the_last_that_is_not_relayed_may_leave_in_a_round() -> None:
    async def scenario() -> None:
        world, board = World(6, bandwidth=1e6), Board()
        relayed = [await spawn_peer(world, board, relayed=True, bandwidth=None) for _ in range(3)]
        direct = await spawn_peer(world, board, bandwidth=None)
        tasks = [peer.spawn_round() for peer in [*relayed, direct]]
        while direct.exchange is None:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.05)
        world.kill(direct.node.peer_id)
        outcomes = await asyncio.gather(*tasks[:3])
        assert all(isinstance(outcome, Outcome) for outcome in outcomes), outcomes
        again = await round_of(relayed)
        assert again[0].commit.coordinator in {peer.key for peer in relayed}
        assert all(torch.equal(peer.output, relayed[0].output) for peer in relayed)

    run(scenario())


def test_of_three_homes_the_two_between_which_a_hole_was_punched_reduce() -> None:
    async def scenario() -> None:
        world, board = World(9), Board()
        homes = [await spawn_peer(world, board, relayed=True, bandwidth=None) for _ in range(3)]
        one, other, _ = (home.node.peer_id for home in homes)
        for home, direct in zip(homes, ([other], [one], []), strict=True):
            home.node.transport.is_direct = direct.__contains__  # type: ignore[method-assign, assignment]
        await asyncio.sleep(2.5)
        assert [home.swarm.me.reach for home in homes] == [Reach.DIRECT, Reach.DIRECT, Reach.RELAYED]
        outcome = (await round_of(homes))[0]
        assert [shares_of(outcome)[home.key] > 0 for home in homes] == [True, True, False]
        assert outcome.begin.ballot.coordinator in {one.key, other.key}

    run(scenario())


def test_who_listens_at_a_relay_counts_as_direct_once_all_its_links_are() -> None:
    """As after a hole was punched; and no longer when one comes that reaches it through the relay only."""

    async def scenario() -> None:
        world, board = World(7), Board()
        others = await spawn_swarm(world, 2, board, bandwidth=None)
        punched = await spawn_peer(world, board, bandwidth=None, start=False)
        swarm, relay = punched.swarm, others[0].node.peer_id
        circuit = f"/ip4/10.9.9.9/tcp/4000/p2p/{relay}/p2p-circuit/p2p/{punched.node.peer_id}"
        is_direct: dict[PeerID, bool] = {}
        punched.node.transport.is_direct = lambda peer: is_direct.get(peer, False)  # type: ignore[method-assign]
        swarm.peer.view.say(type(swarm.me)(swarm.me.key, (circuit,), Role.NODE, None, Reach.RELAYED))
        await swarm.start()
        peers = [*others, punched]

        async def is_known(reach: Reach) -> None:
            await asyncio.sleep(1.5)
            assert swarm.me.reach is reach
            assert {peer.swarm.peer.view.members[punched.key].reach for peer in peers} == {reach}
            share = shares_of((await round_of(peers))[0])[punched.key]
            assert (share > 0) == (reach is Reach.DIRECT)

        await is_known(Reach.RELAYED)
        is_direct[others[0].node.peer_id] = True
        await is_known(Reach.RELAYED)
        is_direct[others[1].node.peer_id] = True
        await is_known(Reach.DIRECT)
        peers.append(await spawn_peer(world, board, bandwidth=None))
        await is_known(Reach.RELAYED)

    run(scenario())

"""What peers say of members that are killed, leave, or are put out of a round."""

from __future__ import annotations

import asyncio

from shoal.simulation.clock import run
from shoal.simulation.world import World
from shoal.swarm.losses import LostMember
from shoal.swarm.protocol.view import Role
from tests.simulation.swarms import Board, Peer, spawn_peer, spawn_swarm


def told(peer: Peer) -> list[LostMember]:
    return peer.swarm.contacts.losses.told(4, asyncio.get_running_loop().time())


async def in_a_round(peers: list[Peer]) -> Peer:
    """The coordinator of the round that all have begun."""
    while not all(peer.swarm.peer.participant.begin is not None for peer in peers):  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    leads = peers[0].swarm.peer.participant.at.ballot.coordinator
    return next(peer for peer in peers if peer.key == leads)


def test_all_say_that_the_coordinator_of_their_round_was_lost() -> None:
    async def scenario() -> None:
        world = World(5)
        peers = await spawn_swarm(world, 4)
        rounds = [peer.spawn_round() for peer in peers]
        victim = await in_a_round(peers)
        world.kill(victim.node.peer_id)
        others = [peer for peer in peers if peer is not victim]
        await asyncio.gather(*(task for peer, task in zip(peers, rounds, strict=True) if peer is not victim))
        for peer in others:
            assert told(peer) == [LostMember(victim.key, 0, True)]

    run(scenario())


def test_a_killed_client_is_lost_and_one_that_leaves_is_not() -> None:
    async def scenario() -> None:
        world, board = World(6), Board()
        roles = (Role.NODE, Role.NODE, Role.CLIENT, Role.CLIENT)
        peers = [await spawn_peer(world, board, role=role) for role in roles]
        await asyncio.gather(*(peer.round() for peer in peers))
        peers[2].swarm.stop()
        world.kill(peers[3].node.peer_id)
        await asyncio.sleep(1.0)
        for node in peers[:2]:
            assert told(node) == [LostMember(peers[3].key, 0, False)]
            assert node.swarm.contacts.losses.news.is_set()

    run(scenario())


def test_the_coordinator_says_whom_it_has_put_out() -> None:
    async def scenario() -> None:
        world = World(7)
        peers = await spawn_swarm(world, 4, chunk_timeout=1.0)
        rounds = [peer.spawn_round() for peer in peers]
        leads = await in_a_round(peers)
        hung = next(peer for peer in peers if peer is not leads)
        hung.node._on_message = lambda *_: None  # type: ignore[method-assign]
        hung.node.transport.start(lambda *_: None, lambda *_: None)
        await asyncio.gather(*(task for peer, task in zip(peers, rounds, strict=True) if peer is not hung))
        out = leads.swarm.contacts.losses.last_out
        assert out is not None
        assert (out.key, out.number) == (hung.key, 0)
        assert out.reason
        others = [peer for peer in peers if peer not in (leads, hung)]
        assert [peer.swarm.contacts.losses.last_out for peer in others] == [None, None]

    run(scenario())

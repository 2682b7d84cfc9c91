"""A newcomer that is stopped, or loses its donors, in the middle of its download goes on with it, or begins anew."""

from __future__ import annotations

import asyncio

import pytest

from shoal.p2p.errors import Refused
from shoal.p2p.identity import PeerID
from shoal.p2p.node import Answer, Node, Reply
from shoal.simulation.clock import run
from shoal.simulation.world import World
from shoal.transfer.donor import (
    Chunk,
    EncodedState,
    FrozenState,
    GetManifest,
    Offer,
    StateDonor,
    encoded,
    transfer_service,
)
from shoal.transfer.transfer import MAX_STALE, DownloadFailed
from tests.transfer.test_transfer import NAME, assert_same, download, snapshot, swarm

STATE = snapshot(chunks=24)


def donate(nodes: list[Node]) -> tuple[list[FrozenState], list[int]]:
    """All of them serve the state, which is the list's last. Returns that and the epochs of the snapshots taken."""
    states, taken = [STATE], []

    async def take() -> EncodedState:
        taken.append(states[-1].tip.epoch)
        return encoded(states[-1])

    for node in nodes:
        StateDonor(node, NAME, take, lambda: states[-1].tip)
    return states, taken


@pytest.mark.parametrize("goes_on", [False, True])
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_newcomer_that_is_stopped_goes_on_or_begins_anew(goes_on: bool, is_lost: bool) -> None:
    """It is stopped for longer than donors hold a snapshot that nobody reads. `goes_on`: they train meanwhile."""

    async def scenario() -> None:
        world = World(1, bandwidth=1e6, lost_after=3.0)
        newcomer, donors = await swarm(world, 2)
        states, taken = donate(donors)
        task = newcomer.spawn(download(newcomer, donors))
        await asyncio.sleep(5.0)
        before = newcomer.bytes_received
        assert before > 2e6, "it has received nothing yet: the scenario tests nothing"
        if goes_on:
            states.append(snapshot(8))
        world.hold(newcomer.peer_id, 31.0)
        if is_lost:
            for donor in donors:
                world.cut(newcomer.peer_id, donor.peer_id)
            asyncio.get_running_loop().call_later(10.0, world.heal)
        result = await task
        assert_same(result, states[-1])
        assert asyncio.get_running_loop().time() < 80.0
        if not goes_on:
            nbytes = sum(map(len, encoded(STATE).payloads))
            assert newcomer.bytes_received < 1.4 * nbytes, "what was there was not downloaded again"
            assert sum(result.chunks_from.values()) == 24
        assert len(taken) == 4

    run(scenario(), until=500.0)


def test_a_snapshot_that_is_still_held_is_found_although_the_donor_is_past_it() -> None:
    async def scenario() -> None:
        world = World(1, bandwidth=1e6, lost_after=1.0)
        newcomer, donors = await swarm(world, 1)
        states, taken = donate(donors)
        task = newcomer.spawn(download(newcomer, donors))
        await asyncio.sleep(5.0)
        states.append(snapshot(8))
        world.cut(newcomer.peer_id, donors[0].peer_id)
        await asyncio.sleep(3.0)
        world.heal()
        assert_same(await task, STATE)
        assert taken == [7]

    run(scenario(), until=500.0)


def test_donors_that_never_hold_what_they_offer_are_asked_a_few_times() -> None:
    async def scenario() -> None:
        newcomer, (donor,) = await swarm(World(1), 1)
        asked: list[object] = []

        def handler(_peer: PeerID, message: object, _buffers: object) -> Answer:
            if isinstance(message, GetManifest):
                asked.append(message.tip)
                return Reply(Offer(), [encoded(snapshot()).manifest.encode()])
            raise Refused("this state is not held any more: ask for the manifest again")

        donor.serve(transfer_service(NAME), handler)
        with pytest.raises(DownloadFailed, match="not held any more"):
            await download(newcomer, [donor])
        assert asked == [None] + [snapshot().tip] * MAX_STALE
        assert asyncio.get_running_loop().time() < 20.0

    run(scenario(), until=500.0)


def test_a_donor_that_sends_a_wrong_chunk_is_not_asked_again() -> None:
    async def scenario() -> None:
        newcomer, (liar,) = await swarm(World(1), 1)
        asked: list[object] = []

        def handler(_peer: PeerID, message: object, _buffers: object) -> Answer:
            asked.append(message)
            if isinstance(message, GetManifest):
                return Reply(Offer(), [encoded(snapshot()).manifest.encode()])
            return Reply(Chunk(), [bytes(10)])

        liar.serve(transfer_service(NAME), handler)
        with pytest.raises(DownloadFailed, match="wrong size"):
            await download(newcomer, [liar])
        assert sum(isinstance(message, GetManifest) for message in asked) == 1

    run(scenario(), until=500.0)

"""Members that can't reach each other are told so, and find each other as soon as they can."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from shoal.simulation.clock import run
from shoal.simulation.world import World
from shoal.swarm.protocol.view import Member, Role
from tests.simulation.swarms import Board, Peer, spawn_peer, spawn_swarm


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def reached(peer: Peer) -> set[bytes]:
    return {member.key for member in peer.swarm.peer.view.connected()}


async def until_together(peers: list[Peer], seconds: float) -> float:
    """Wait until all reach all; returns how long that took."""
    loop, everybody = asyncio.get_running_loop(), {peer.key for peer in peers}
    began = loop.time()
    async with asyncio.timeout(seconds):
        while not all(reached(peer) == everybody for peer in peers):  # noqa: ASYNC110  # in virtual time
            await asyncio.sleep(0.1)
    return loop.time() - began


@pytest.mark.long
def test_a_wrong_announced_address_is_told_of_by_both_sides(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        world = World(1)
        first = await spawn_peer(world)
        wrong = await spawn_peer(world, first, start=False)
        nowhere = msgspec.structs.replace(wrong.swarm.me, addresses=("/ip4/10.200.0.1/tcp/7",))
        wrong.swarm.peer.view.me = nowhere
        wrong.swarm.peer.view.members[wrong.key] = nowhere
        await wrong.swarm.start()
        third = await spawn_peer(world, first)
        world.cut(wrong.node.peer_id, third.node.peer_id)  # so it is what it says of itself by which they know it
        await asyncio.sleep(30)
        for peer, other in ((third, wrong), (wrong, third)):
            [report] = peer.swarm.contacts.reports
            assert report.unreached == (other.node.peer_id,)
            assert report.num_peers == 2
        assert len(warnings(caplog)) == 2
        assert f"{wrong.node.peer_id} at /ip4/10.200.0.1/tcp/7 (nobody answers at" in caplog.text
        await asyncio.sleep(100)
        assert len(warnings(caplog)) == 2

    run(scenario())


def test_two_clients_without_a_node_of_the_run_are_told_what_they_lack(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        world = World(2)
        elsewhere = await spawn_peer(world, run_id="another run")  # a node of the DHT
        clients = [await spawn_peer(world, elsewhere, role=Role.CLIENT) for _ in range(2)]
        await asyncio.sleep(30)
        said = warnings(caplog)
        assert len(said) == 2
        assert all("the run needs a node" in text for text in said)
        for client, other in zip(clients, reversed(clients), strict=True):
            [report] = client.swarm.contacts.reports
            assert (report.num_peers, report.unreached) == (1, (other.node.peer_id,))
            assert client.swarm.peer.view.num_clients() == 1, "itself"
        node = await spawn_peer(world, elsewhere)
        await asyncio.sleep(30)
        assert reached(node) == {peer.key for peer in (node, *clients)}
        for client in clients:
            assert client.swarm.peer.view.num_clients() == 2
            assert client.swarm.contacts.reports[-1].advice == "", "now all is well"

    run(scenario())


def test_a_wrong_run_id_is_told_of_by_whoever_is_alone(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        world = World(3)
        right = [await spawn_peer(world)]
        right.append(await spawn_peer(world, right[0]))
        wrong = await spawn_peer(world, right[0], run_id="rum")
        await asyncio.sleep(60)
        [said] = warnings(caplog)
        assert "this peer is alone in the run 'rum', while the DHT has 2 other nodes" in said
        [report] = wrong.swarm.contacts.reports
        assert (report.num_peers, report.unreached, report.advice) == (1, (), said)

    run(scenario())


@pytest.mark.long
@pytest.mark.parametrize("seconds", [30, pytest.param(300, marks=pytest.mark.long), 3000])
def test_whoever_lost_everybody_is_found_again_although_it_is_listed_nowhere(
    seconds: float, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        world = World(4)
        board = Board()
        peers = await spawn_swarm(world, 4, board)
        alone, others = peers[0], peers[1:]
        board.listed.clear()
        alone.swarm.contacts._directory.publish = nothing  # type: ignore[assignment,method-assign]
        world.partition([[alone.node.peer_id], [peer.node.peer_id for peer in others]])
        await asyncio.sleep(seconds)
        assert reached(alone) == {alone.key}
        assert len(warnings(caplog)) == 1, "the others do not know whether it lives"
        world.heal()
        assert await until_together(peers, 70) <= min(66, max(7, seconds * 0.4))

    async def nothing(_member: object) -> None:
        """It is listed no longer."""

    run(scenario())


def test_a_link_that_works_again_is_used_again(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        world = World(5)
        peers = await spawn_swarm(world, 3)
        world.cut(peers[0].node.peer_id, peers[1].node.peer_id)
        await asyncio.sleep(60)
        said = warnings(caplog)
        assert len(said) == 2, "both are listed, so each knows that the other lives"
        assert all("and this peer trains with 1 other only" in text for text in said)
        world.heal()
        await until_together(peers, 20)
        assert [peer.swarm.contacts.reports[-1].advice for peer in peers[:2]] == ["", ""]

    run(scenario())


def test_a_peer_that_has_left_is_neither_dialled_nor_missed(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        world = World(6)
        first = await spawn_peer(world)
        second = await spawn_peer(world, first)
        neighbourhood = first.swarm.contacts
        met: list[Member] = []

        async def meet(member: Member) -> None:
            met.append(member)

        neighbourhood.meet = meet  # type: ignore[method-assign]
        second.swarm.stop()
        await asyncio.sleep(0.1)
        world.kill(second.node.peer_id)
        await asyncio.sleep(300)
        assert (met, warnings(caplog), len(neighbourhood.reports)) == ([], [], 0)

    run(scenario())


def test_a_peer_that_leaves_while_it_meets_somebody_is_no_member_there() -> None:
    """Else it would be waited for in every round: its node, on which others run, answers for it."""

    async def scenario() -> None:
        world = World(6)
        first, second = await spawn_swarm(world, 2)
        leaver = await spawn_peer(world, Board())
        meeting = leaver.node.spawn(leaver.swarm.contacts.meet(first.swarm.me))
        leaver.swarm.stop()
        await meeting
        await asyncio.sleep(1.0)
        for other in (first, second):
            assert leaver.key not in other.swarm.peer.view.members
        assert leaver.node.is_connected(first.node.peer_id)

    run(scenario())


def test_a_peer_that_dies_is_no_reason_for_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        world = World(7)
        peers = await spawn_swarm(world, 3)
        world.kill(peers[2].node.peer_id)
        await asyncio.sleep(300)
        assert warnings(caplog) == []
        assert all(len(peer.swarm.contacts.reports) == 0 for peer in peers[:2])

    run(scenario())


def test_the_survivors_are_told_whom_they_lost(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        caplog.set_level("INFO", "shoal")
        world = World(9)
        peers = await spawn_swarm(world, 3)
        world.kill(peers[2].node.peer_id)
        await asyncio.sleep(300)
        said = [record.getMessage() for record in caplog.records if " is lost" in record.getMessage()]
        assert said == [f"{peers[2].node.peer_id} is lost; members connected, with this peer: 2"] * 2
        peers[1].swarm.stop()
        await asyncio.sleep(0.1)
        world.kill(peers[1].node.peer_id)
        await asyncio.sleep(30)
        assert caplog.text.count(" is lost;") == 2, "who leaves is not lost"

    run(scenario())


def test_after_a_partition_nobody_is_said_to_be_unreachable(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        world = World(10)
        peers = await spawn_swarm(world, 4)
        ids = [peer.node.peer_id for peer in peers]
        board = Board()
        for peer in peers[:2]:
            peer.swarm.contacts._directory = board.place()  # the DHT is cut in two as well
        world.partition([ids[:2], ids[2:]])
        await asyncio.sleep(120)
        world.heal()
        await until_together(peers, 60)
        await asyncio.sleep(60)
        assert warnings(caplog) == []

    run(scenario())


def test_a_node_has_met_a_client_that_was_there_first_when_it_has_started() -> None:
    """Nobody can dial the client; the connection of its DHT is up."""

    async def scenario() -> None:
        world = World(11)
        node = await spawn_peer(world, start=False)
        client = await spawn_peer(world, node, role=Role.CLIENT)
        await asyncio.sleep(20)
        await node.swarm.start()
        assert reached(node) == {node.key, client.key}
        assert client.key in node.swarm.peer.view.members

    run(scenario())


def test_the_same_seed_dials_at_the_same_times() -> None:
    async def scenario() -> str:
        world = World(8)
        peers = await spawn_swarm(world, 3)
        world.partition([[peers[0].node.peer_id], [peer.node.peer_id for peer in peers[1:]]])
        await asyncio.sleep(100)
        world.heal()
        await asyncio.sleep(60)
        return world.digest()

    assert run(scenario()) == run(scenario())


def test_a_lost_member_of_which_another_tells_must_live() -> None:
    """Then it is dialled at once, and warned of in 10 s, whether or not the directory lists it."""

    async def scenario() -> None:
        world = World(9, lost_after=0.2)
        board = Board()
        peers = await spawn_swarm(world, 3, board)
        await asyncio.gather(*(peer.round() for peer in peers))
        one, other, third = peers
        world.cut(one.node.peer_id, other.node.peer_id)
        await asyncio.sleep(2.0)
        assert reached(one) == {one.key, third.key}
        board.listed.pop(other.key)
        await asyncio.sleep(9.0)  # from here on, third should have noticed if it were dead
        third.node.notify([one.node.peer_id], third.swarm.service, third.swarm.peer.hello())
        await asyncio.sleep(0.5)
        assert one.swarm.contacts._reach._missing[other.key].seen < asyncio.get_running_loop().time()

    run(scenario())

"""The directory of a run's peers, which is kept in the DHT: who is found in it, and what it warns of."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from shoal.dht.node import DHTNode
from shoal.dht.records import make_record
from shoal.dht.validation import SignatureValidator, owner_marker
from shoal.simulation.clock import run
from shoal.simulation.world import World
from shoal.swarm.directory import DHTDirectory
from shoal.swarm.protocol.view import MAX_MEMBERS, Member, Role
from tests.dht.swarms import join


def member(dht: DHTNode) -> Member:
    return Member(dht.peer_id.key, (), Role.NODE)


def test_a_peer_that_can_not_be_listed_is_told_so_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        world = World(1)
        first = await join(world)
        late = await join(world, initial=[first], client_mode=True)
        directory = DHTDirectory(late, "run", lambda: world.wall_clock() - 61)
        for _ in range(2):
            await directory.publish(member(late))
        assert caplog.text.count("keeps this peer's record") == 1
        assert await DHTDirectory(first, "run", world.wall_clock).read() == []

    run(scenario())


def test_a_clock_that_is_behind_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        world = World(2)
        first = await join(world)
        second = await join(world, initial=[first])
        on_time = DHTDirectory(first, "run", world.wall_clock)
        behind = DHTDirectory(second, "run", lambda: world.wall_clock() - 20)
        await on_time.publish(member(first))
        await behind.publish(member(second))
        for directory in (on_time, behind, behind):
            assert len(await directory.read()) == 2
        assert [record.getMessage()[:45] for record in caplog.records if record.levelname == "WARNING"] == [
            "this machine's clock is at least 20 s behind "
        ]

    run(scenario())


def test_a_record_that_is_nobodys_gets_no_place(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        world = World(3)
        first = await join(world)
        second = await join(world, initial=[first])
        liar = await join(world, initial=[first])
        key, until = "run/members", world.wall_clock() + 86400
        for dht in (first, second):
            await DHTDirectory(dht, "run", world.wall_clock).publish(member(dht))
        subkeys = [None, *(f"!{number}" for number in range(MAX_MEMBERS + 100))]  # they come before those of members
        lies = [make_record(key, "nobody is here", until, subkey, world.wall_clock()) for subkey in subkeys]
        for dht in (first, second):
            assert not any(await liar._protocol.send_records(dht.peer_id, (), lies) or [True])
        assert not caplog.records
        assert not await liar.store(key, "nobody is here", until)
        assert [line.getMessage() for line in caplog.records] == [
            "1 records are not stored: under a run's key each peer has its own subkey"
        ]
        caplog.clear()
        newcomer = await join(world, initial=[liar])
        assert set(await DHTDirectory(newcomer, "run", world.wall_clock).read()) == {member(first), member(second)}
        assert not caplog.records, "nor does such a record say anything of clocks"

    run(scenario())


def test_an_owner_has_one_place_under_a_runs_key() -> None:
    async def scenario() -> None:
        world = World(7)
        first = await join(world)
        liar = await join(world, initial=[first])
        own, until = owner_marker(liar.peer_id), world.wall_clock() + 86400
        signer = SignatureValidator(liar.node.identity)
        records = [make_record("run/members", "x", until, subkey, until) for subkey in (own, f"!{own}", f"{own}!")]
        signed = [msgspec.structs.replace(record, value=signer.sign_value(record)) for record in records]
        assert await liar._protocol.send_records(first.peer_id, (), signed) == [True, False, False]

    run(scenario())


def test_a_peer_that_is_gone_is_listed_when_its_record_is_newer() -> None:
    async def scenario() -> None:
        world = World(4)
        first = await join(world)
        second = await join(world, initial=[first])
        mine, its = (DHTDirectory(dht, "run", world.wall_clock) for dht in (first, second))
        await its.publish(member(second))
        assert await mine.read() == [member(second)]
        await asyncio.sleep(5)
        mine.gone(second.peer_id.key)
        assert await mine.read() == []
        await asyncio.sleep(5)
        await its.publish(member(second))
        assert await mine.read() == [member(second)]

    run(scenario())


def test_another_process_that_writes_this_peers_record_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        world = World(5)
        dht = await join(world)
        here, there = (DHTDirectory(dht, "run", world.wall_clock) for _ in range(2))
        for _ in range(4):
            await here.publish(member(dht))
            await asyncio.sleep(7)
            await here.read()
            await there.publish(member(dht))
            await asyncio.sleep(8)
            await here.read()
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(warnings) == 1
        assert f"another process uses the identity of this one, peer {dht.peer_id}" in warnings[0]

    run(scenario())


def test_what_an_earlier_start_has_written_is_no_twin(caplog: pytest.LogCaptureFixture) -> None:
    """Also if the clock was set back meanwhile, so that the record of the earlier start outlives the new one's."""

    async def scenario() -> None:
        world = World(6)
        dht = await join(world)
        for behind in (0.0, 20.0):
            directory = DHTDirectory(dht, "run", lambda behind=behind: world.wall_clock() - behind)  # type: ignore[misc]
            for _ in range(3):
                await directory.publish(member(dht))
                await directory.read()
                await asyncio.sleep(5)
        assert "uses the identity" not in caplog.text

    run(scenario())

"""Health records travel in the DHT: each peer writes its own, and what others forge, replay or blow up is not read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from shoal.dht import DHTNode, get_dht_time
from shoal.dht.records import DHTRecord, make_record
from shoal.dht.run_keys import MAX_HEALTH_BYTES, MAX_HEALTH_RECORDS, MAX_HEALTH_SECONDS, health_key
from shoal.dht.validation import SignatureValidator, owner_marker
from shoal.health.board import SHARDED_FROM, HealthBoard
from shoal.health.record import LIFE_SECONDS, MAX_BYTES, encode_health
from shoal.membership import Part
from shoal.p2p.identity import Identity
from shoal.swarm.gates import admit_to
from tests.health.records import WELL, health
from tests.optim.closed_runs import Club

RUN = "test"


@asynccontextmanager
async def nodes(count: int, identities: list[Identity] | None = None) -> AsyncIterator[list[DHTNode]]:
    async with AsyncExitStack() as stack:
        made: list[DHTNode] = []
        for index in range(count):
            known = made[0].visible_addresses() if made else []
            node = await DHTNode.create(known, identity=None if identities is None else identities[index])
            stack.push_async_callback(node.shutdown)
            made.append(node)
        yield made


def said(board: list[Any]) -> list[int]:
    return sorted(posted.health.number for posted in board)


def test_each_reads_what_all_have_written() -> None:
    async def main() -> None:
        async with nodes(3) as made:
            boards = [HealthBoard(node, RUN) for node in made]
            for number, board in enumerate(boards):
                assert await board.publish(health(number=number), 3)
            for board in boards:
                read = await board.read(3)
                assert {posted.peer for posted in read} == {node.peer_id for node in made}
                assert said(read) == [0, 1, 2]
            assert await boards[0].publish(health(number=7), 3)
            assert said(await boards[2].read(3)) == [1, 2, 7]
            assert await HealthBoard(made[0], "another run").read(3) == []

    asyncio.run(main())


def test_a_large_run_has_its_records_under_many_keys() -> None:
    async def main() -> None:
        async with nodes(2) as made:
            boards = [HealthBoard(node, RUN) for node in made]
            await boards[0].publish(health(number=1), SHARDED_FROM + 1)
            await boards[1].publish(health(number=2), SHARDED_FROM)  # it knows of fewer
            assert said(await boards[1].read(SHARDED_FROM)) == [1, 2]
            assert said(await boards[1].read(3)) == [2]

    asyncio.run(main())


def test_what_is_forged_is_kept_by_no_node_and_read_by_nobody() -> None:
    async def main() -> None:
        async with nodes(2) as (victim, liar):
            board, key, until = HealthBoard(victim, RUN), health_key(RUN), get_dht_time() + LIFE_SECONDS
            await board.publish(health(number=1), 2)
            mine, record = owner_marker(victim.peer_id), bytes(encode_health(health(number=666)))
            # In the victim's name, or in nobody's.
            assert not await liar.store(key, record, until + 5, subkey=mine)
            for subkey in (None, "nobody", mine + " ", f"{owner_marker(liar.peer_id)}{mine}"):
                assert not await liar.store(key, record, until + 5, subkey=subkey)
            assert said(await HealthBoard(liar, RUN).read(2)) == [1]

    asyncio.run(main())


def test_a_record_of_another_run_or_an_old_one_is_no_record_here() -> None:
    async def main() -> None:
        async with nodes(2) as (victim, liar):
            board = HealthBoard(victim, RUN)
            old = get_dht_time() + LIFE_SECONDS - 5
            record = victim._signed(
                make_record(
                    health_key(RUN), bytes(encode_health(health(number=1))), old, owner_marker(victim.peer_id), old
                )
            )
            await board.publish(health(number=2), 2)
            assert (await liar._store_records([record]))[record] is False  # the newer one is kept
            there = DHTRecord(msgspec.msgpack.encode(health_key("elsewhere")), record.subkey, record.value, old)
            later = DHTRecord(record.key, record.subkey, record.value, old + 1000)
            for forged in (there, later):
                assert (await liar._store_records([forged]))[forged] is False  # the signature is of another
            assert said(await HealthBoard(liar, RUN).read(2)) == [2]

    asyncio.run(main())


@pytest.mark.parametrize(
    "value",
    [
        bytes(encode_health(WELL)) + b"\x00",
        b"x" * (MAX_BYTES + 1),
        msgspec.msgpack.encode(health(loss=float("nan"))),
        msgspec.msgpack.encode(health(samples=float("inf"))),
        "a text",
        17,
    ],
    ids=["longer", "oversized", "NaN", "infinite", "text", "number"],
)
def test_a_peer_that_writes_nonsense_of_itself_shows_nowhere(value: object) -> None:
    async def main() -> None:
        async with nodes(2) as (writer, reader):
            until = get_dht_time() + LIFE_SECONDS
            assert await writer.store(health_key(RUN), value, until, subkey=owner_marker(writer.peer_id))
            await HealthBoard(reader, RUN).publish(health(number=2), 2)
            assert said(await HealthBoard(reader, RUN).read(2)) == [2]

    asyncio.run(main())


@pytest.mark.parametrize(("size", "ahead"), [(MAX_HEALTH_BYTES, 0.0), (100, 3600.0)], ids=["large", "for an hour"])
def test_no_node_keeps_a_record_that_would_take_the_place_of_many(
    size: int, ahead: float, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with nodes(2) as (writer, reader):
            key, until, mine = health_key(RUN), get_dht_time() + LIFE_SECONDS + ahead, owner_marker(writer.peer_id)
            assert not await writer.store(key, bytes(size), until, subkey=mine)
            record = writer._signed(make_record(key, bytes(size), until, mine, until))
            assert not reader._records.is_valid(record)
            assert "a health record takes 2048 bytes at most, and expires within 90 s" in caplog.text
            assert await writer.store("another key", bytes(size), until, subkey=mine)

    asyncio.run(main())


def test_strangers_make_nobody_go_who_is_there() -> None:
    """In an open run anybody may write records, of as many peers as they like. Those that are there first stay."""

    def theirs(now: float) -> list[DHTRecord]:
        until = now + MAX_HEALTH_SECONDS - 1.0  # honest ones expire sooner
        made = []
        for number in range(MAX_HEALTH_RECORDS + 50):
            identity = Identity(number.to_bytes(32, "big"))
            record = make_record(
                health_key(RUN), bytes(encode_health(WELL)), until, owner_marker(identity.peer_id), now
            )
            made.append(replace(record, value=SignatureValidator(identity).sign_value(record)))
        return made

    async def main() -> None:
        async with nodes(3) as made:
            boards = [HealthBoard(node, RUN) for node in made[:2]]
            for board in boards:
                assert await board.publish(health(number=1), 2)
            liar, flood = made[2], theirs(get_dht_time())
            kept = await liar._store_records(flood)
            assert 200 < sum(kept.values()) < MAX_HEALTH_RECORDS
            for board in boards:
                assert await board.publish(health(number=2), 2)
            for node in made:
                read = {posted.peer: posted.health.number for posted in await HealthBoard(node, RUN).read(2)}
                assert [read.get(honest.peer_id) for honest in made[:2]] == [2, 2]
            assert not await HealthBoard(liar, RUN).publish(health(number=3), 2)  # all places are taken

    asyncio.run(main())


def test_a_place_has_one_spelling() -> None:
    """A node that hands out what it should not have kept gains nothing by it."""

    async def main() -> None:
        async with nodes(1) as (node,):
            board, peer, record = HealthBoard(node, RUN), node.peer_id, bytes(encode_health(WELL))
            until = get_dht_time() + LIFE_SECONDS
            assert board._posted(owner_marker(peer), record, until) is not None
            for subkey in (f"[owner:{peer.to_base58()}]", str(peer), f"{owner_marker(peer)}]", 7, b"[owner:]"):
                assert board._posted(subkey, record, until) is None

    asyncio.run(main())


def test_in_a_closed_run_only_members_say_anything(tmp_path: Path) -> None:
    club = Club(tmp_path)

    async def main() -> None:
        member, stranger, watcher = (Identity() for _ in range(3))
        async with nodes(3, [member, stranger, watcher]) as made:
            admit_to(lambda: made[0].node, club.run_id, club.admit(member.peer_id))
            admit_to(lambda: made[2].node, club.run_id, club.admit(watcher.peer_id, Part.WATCH))
            with pytest.raises(ValueError, match="is a closed run"):
                HealthBoard(made[1], club.run_id)
            assert await HealthBoard(made[0], club.run_id).publish(health(number=1), 1)
            assert await HealthBoard(made[2], club.run_id).publish(health(number=3), 1)  # who watches trains nothing
            key, until, mine = health_key(club.run_id), get_dht_time() + LIFE_SECONDS, owner_marker(stranger.peer_id)
            theirs = club.admit(member.peer_id)
            for record in (
                bytes(encode_health(WELL)),
                msgspec.msgpack.encode((encode_health(WELL), "")),
                msgspec.msgpack.encode((encode_health(WELL), theirs)),
            ):
                assert not await made[1].store(key, record, until, subkey=mine)
            read = await HealthBoard(made[2], club.run_id).read(1)
            assert {posted.peer for posted in read} == {member.peer_id, watcher.peer_id}
            read = await HealthBoard(made[0], club.run_id).read(1)
            assert {posted.peer for posted in read} == {member.peer_id}

    asyncio.run(main())

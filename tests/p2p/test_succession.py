"""A link takes the place of another one while messages and chunks pass: nothing is lost, nothing comes twice."""

from __future__ import annotations

import asyncio
import os
import random
import socket
from typing import Any

import pytest

from shoal.p2p.errors import PeerUnreachable
from shoal.p2p.greeting import Moved
from shoal.p2p.route import PeerRoute
from shoal.p2p.sealing import NAME_BYTES
from shoal.p2p.sockets import LANE_BYTES
from tests.p2p.recorder import LOOPBACK, Recorder, eventually, sockets


class Pairs(PeerRoute):
    """Connects to a transport that does not listen: by pairs of sockets."""

    def __init__(self, other: Recorder) -> None:
        self.other = other
        self.made: list[socket.socket] = []

    async def connect(self) -> socket.socket:
        with socket.create_server(("127.0.0.1", 0)) as server:
            mine = socket.create_connection(server.getsockname())
            theirs, _ = server.accept()
        for end in (mine, theirs):
            end.setblocking(False)
        self.made += [mine, theirs]
        self.other.transport.accept(theirs, "127.0.0.1")
        return mine


def name(number: int) -> bytes:
    return number.to_bytes(NAME_BYTES, "big")


def link_of(end: Recorder, other: Recorder) -> Any:
    return end.transport._peers[other.transport.peer_id]


async def succeed(one: Recorder, other: Recorder) -> Pairs:
    route = Pairs(other)
    await one.transport.succeed(other.transport.peer_id, await route.connect(), route)
    return route


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("who", ["dialler", "listener"])
def test_all_messages_come_once_and_in_order_while_links_take_each_others_place(who, seed):
    async def main() -> None:
        rng = random.Random(seed)
        async with sockets(None, None) as ends:
            await ends[0].transport.dial(await ends[1].transport.listen(LOOPBACK))
            one, other = ends if who == "dialler" else reversed(ends)
            sent: dict[Recorder, int] = {one: 0, other: 0}
            going = True

            async def talk(end: Recorder, to: Recorder) -> None:
                while going:
                    for _ in range(rng.randrange(1, 20)):
                        number, sent[end] = sent[end], sent[end] + 1
                        if rng.random() < 0.3:
                            data = number.to_bytes(4, "big") * (LANE_BYTES // 4 * rng.randrange(1, 16))
                            end.transport.send([to.transport.peer_id], b"%d" % number, [data], name(number))
                        else:
                            end.transport.send([to.transport.peer_id], b"%d" % number, [b"x" * rng.randrange(30000)])
                    await asyncio.sleep(rng.choice([0, 0, 0.001, 0.01]))
                    await to.until(lambda: sent[end] - len(to.messages) < 100)

            talks = [asyncio.create_task(talk(one, other)), asyncio.create_task(talk(other, one))]
            for _ in range(6):
                await asyncio.sleep(rng.choice([0, 0.005, 0.05]))
                own, before = link_of(one, other), link_of(other, one)
                await eventually(lambda: not (one.transport._moves or other.transport._moves))
                await succeed(one, other)
                assert link_of(one, other) is not own
                await other.until(lambda before=before: link_of(other, one) is not before)  # type: ignore[misc]
            going = False
            await asyncio.gather(*talks)
            for end, to in ((one, other), (other, one)):
                await to.until_messages(sent[end])
                numbers = [(int(header), len(buffers[0]) >= LANE_BYTES) for _, header, buffers in to.messages]
                assert sorted(number for number, _ in numbers) == list(range(sent[end]))
                small = [number for number, is_large in numbers if not is_large]
                assert small == sorted(small)
                assert all(
                    buffers[0][:4] == int(header).to_bytes(4, "big") == buffers[0][-4:]
                    for _, header, buffers in to.messages
                    if len(buffers[0]) >= LANE_BYTES
                )
            assert one.lost == other.lost == []
            await eventually(lambda: all(len(end.transport._links) == 1 for end in (one, other)))
            await eventually(lambda: all(len(end.transport._lanes.beside) <= 1 for end in (one, other)))

    asyncio.run(main())


def test_if_the_new_link_fails_before_it_is_proven_the_old_one_stays():
    async def main() -> None:
        async with sockets(None, None, None) as (one, other, stranger):
            await one.transport.dial(await other.transport.listen(LOOPBACK))
            route = Pairs(stranger)
            connection = await route.connect()
            with pytest.raises(PeerUnreachable, match="cannot prove to be that peer"):
                await one.transport.succeed(other.transport.peer_id, connection, route)
            one.transport.send([other.transport.peer_id], b"unharmed")
            await other.until_messages(1)
            with pytest.raises(PeerUnreachable, match="no link that it could succeed"):
                await succeed(one, stranger)
            assert one.lost == other.lost == []

    asyncio.run(main())


def test_if_the_old_link_ends_before_all_has_come_the_peer_is_lost():
    async def main() -> None:
        async with sockets(None, None) as (one, other):
            await one.transport.dial(await other.transport.listen(LOOPBACK))
            old = link_of(one, other), link_of(other, one)
            for end in old:
                asyncio.get_running_loop().remove_reader(end.socket)  # what comes over it is late
            one.transport.send([other.transport.peer_id], b"late")
            await succeed(one, other)
            one.transport.send([other.transport.peer_id], b"must wait")
            await asyncio.sleep(0.1)
            assert other.messages == []
            old[1].end("the relay is gone")
            await other.until_lost(one.transport.peer_id)
            await one.until_lost(other.transport.peer_id)
            assert other.messages == []
            assert len(one.lost) == len(other.lost) == 1

    asyncio.run(main())


@pytest.mark.parametrize("over", ["new", "old"])
def test_who_says_that_it_has_moved_over_the_wrong_link_or_twice_breaks_the_rules(over):
    async def main() -> None:
        async with sockets(None, None) as (one, other):
            await one.transport.dial(await other.transport.listen(LOOPBACK))
            first = link_of(one, other)
            if over == "new":
                asyncio.get_running_loop().remove_reader(link_of(other, one).socket)
                await succeed(one, other)
                link_of(one, other).say(Moved())
            else:
                first.say(Moved())
                first.say(Moved())
            reason = await other.until_lost(one.transport.peer_id)
            assert reason == "it broke the rules: Moved is not expected now"
            assert len(other.lost) == 1

    asyncio.run(main())


def test_a_disconnected_peer_is_reconnected_whatever_was_moving():
    async def main() -> None:
        async with sockets(None, None) as (one, other):
            address = await other.transport.listen(LOOPBACK)
            await one.transport.dial(address)
            one.transport.send([other.transport.peer_id], b"0", [os.urandom(LANE_BYTES)], name(0))
            await succeed(one, other)
            one.transport.disconnect(other.transport.peer_id)
            await other.until_lost(one.transport.peer_id)
            assert one.lost == []
            await eventually(lambda: not one.transport._links)
            await one.transport.dial(address)
            one.transport.send([other.transport.peer_id], b"again")
            await other.until(lambda: b"again" in other.headers)

    asyncio.run(main())


@pytest.mark.parametrize("seed", range(3))
def test_if_both_sides_have_a_link_to_take_the_place_one_does_and_nobody_is_lost(seed):
    async def main() -> None:
        async with sockets(b"%32d" % seed, b"%32d" % (seed + 3)) as (one, other):
            await one.transport.dial(await other.transport.listen(LOOPBACK))
            outcomes = await asyncio.gather(succeed(one, other), succeed(other, one), return_exceptions=True)
            assert sorted(type(outcome) is Pairs for outcome in outcomes) == [False, True]
            for end, to in ((one, other), (other, one)):
                end.transport.send([to.transport.peer_id], b"unharmed")
            await one.until_messages(1)
            await other.until_messages(1)
            assert one.lost == other.lost == []

    asyncio.run(main())


def test_another_process_with_the_same_identity_takes_no_place():
    async def main() -> None:
        async with sockets(None, b"1" * 32, b"1" * 32) as (other, one, twin):
            await one.transport.dial(await other.transport.listen(LOOPBACK))
            twin.transport._peers[other.transport.peer_id] = link_of(one, other)  # it lies to itself
            twin.transport._may_succeed = lambda *_: True
            with pytest.raises(PeerUnreachable, match="no link that it could succeed"):
                await succeed(twin, other)
            twin.transport._peers.clear()
            one.transport.send([other.transport.peer_id], b"unharmed")
            await other.until_messages(1)
            assert one.lost == other.lost == []

    asyncio.run(main())


def test_what_was_to_take_the_place_of_a_lost_link_is_given_up_at_once():
    async def main() -> None:
        async with sockets(None, None) as (one, other):
            address = await other.transport.listen(LOOPBACK)
            await one.transport.dial(address)
            greeted, on_hello = asyncio.Event(), other.transport._on_hello
            other.transport._on_hello = lambda link, hello: greeted.set() if hello.succeeds else on_hello(link, hello)
            task = asyncio.create_task(succeed(one, other))
            await greeted.wait()
            link_of(other, one).end("the relay is gone")
            async with asyncio.timeout(5):
                with pytest.raises(PeerUnreachable):
                    await task
                await one.transport.dial(address)

    asyncio.run(main())


def test_what_passes_over_the_old_link_counts_until_it_has_come():
    async def main() -> None:
        async with sockets(None, None) as (one, other):
            await one.transport.dial(await other.transport.listen(LOOPBACK))
            asyncio.get_running_loop().remove_reader(link_of(one, other).socket)
            one.transport.send([other.transport.peer_id], b"large", [bytes(1 << 20)])
            await other.until_messages(1)
            before = one.transport.moved(other.transport.peer_id)
            await succeed(one, other)
            assert one.transport._moves
            assert one.transport.moved(other.transport.peer_id) >= before > 1 << 19

    asyncio.run(main())

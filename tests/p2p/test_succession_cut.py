"""A link takes the place of another one while a connection of either is cut, at any moment: either both sides lose the
other, once, or all arrives."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest

from shoal.p2p.errors import PeerUnreachable
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.route import PeerRoute
from shoal.p2p.sealing import NAME_BYTES
from shoal.p2p.sockets import LANE_BYTES
from tests.p2p.recorder import LOOPBACK, Recorder, eventually, sockets

NUMBER = 60  # messages each way


class Line:
    """Passes connections on to a transport, a little late."""

    def __init__(self, address: Multiaddr, rng: random.Random) -> None:
        self._to, self._rng = address, rng
        self.address: Multiaddr
        self.passing: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Line]:
        server = await asyncio.start_server(self._pass, "127.0.0.1", 0)
        self.address = self._to.with_port(server.sockets[0].getsockname()[1])
        try:
            yield self
        finally:
            server.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, further = await asyncio.open_connection("127.0.0.1", self._to.port)
        ends = writer, further
        self.passing.append(ends)
        await asyncio.gather(self._pump(reader, further), self._pump(there, writer))
        self.passing.remove(ends)
        cut(ends)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await reader.read(self._rng.choice([100, 1 << 12, 1 << 16])):
                await asyncio.sleep(self._rng.choice([0, 0, 0.001, 0.003]))
                writer.write(piece)
                await writer.drain()
            writer.write_eof()


def cut(ends: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
    """What is under way is gone."""
    for end in ends:
        end.transport.abort()


class Over(PeerRoute):
    """Connects over a line."""

    def __init__(self, line: Line) -> None:
        self._line = line

    async def connect(self) -> socket.socket:
        connection = socket.create_connection(("127.0.0.1", self._line.address.port))
        connection.setblocking(False)
        return connection


async def talk(end: Recorder, to: Recorder, rng: random.Random) -> list[int]:
    """Send numbered messages; returns which of them were small."""
    small = []
    for number in range(NUMBER):
        if rng.random() < 0.3:
            data = number.to_bytes(4, "big") * (LANE_BYTES // 4 * rng.randrange(1, 8))
            end.transport.send([to.transport.peer_id], b"%d" % number, [data], number.to_bytes(NAME_BYTES, "big"))
        else:
            small.append(number)
            end.transport.send([to.transport.peer_id], b"%d" % number, [b"x" * rng.randrange(20000)])
        await asyncio.sleep(rng.choice([0, 0, 0.001, 0.005]))
    return small


@pytest.mark.parametrize("seed", range(16))
def test_a_cut_loses_the_peer_or_nothing(seed: int) -> None:
    async def main() -> None:
        rng = random.Random(seed)
        async with sockets(None, None) as ends:
            lines = [Line(await end.transport.listen(LOOPBACK), rng) for end in ends]
            async with lines[0].open(), lines[1].open():
                await ends[0].transport.dial(lines[1].address)
                to = rng.randrange(2)
                mover, moved = ends[1 - to], ends[to]
                talks = [asyncio.create_task(talk(pair[0], pair[1], rng)) for pair in (ends, ends[::-1])]
                await asyncio.sleep(rng.uniform(0, 0.05))
                route = Over(lines[to])
                with suppress(PeerUnreachable):
                    connection = await route.connect()
                    move = asyncio.create_task(mover.transport.succeed(moved.transport.peer_id, connection, route))
                    await asyncio.sleep(rng.choice([0.002, 0.01, 0.03, 0.1]) * rng.random())
                    if passing := lines[0].passing + lines[1].passing:
                        cut(rng.choice(passing))
                    await move
                small = await asyncio.gather(*talks)

                def is_over() -> bool:
                    if ends[0].lost or ends[1].lost:
                        return len(ends[0].lost) == len(ends[1].lost) == 1
                    return all(len(end.messages) == NUMBER for end in ends)

                await eventually(is_over, 20)
                for end, sent in zip(reversed(ends), small, strict=True):
                    numbers = [int(header) for header in end.headers]
                    assert len(set(numbers)) == len(numbers)
                    came = [number for number in numbers if number in sent]
                    assert came == sent[: len(came)]
                assert len(ends[0].lost) == len(ends[1].lost) <= 1
                await eventually(lambda: not any(end.transport._moves for end in ends), 20)
                links = 0 if ends[0].lost else 1
                await eventually(lambda: all(len(end.transport._links) == links for end in ends), 20)

    asyncio.run(main())

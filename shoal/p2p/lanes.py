"""The lanes beside a peer's links: the two sides agree over the link on each connection, its keys and its token."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from shoal.p2p import congestion
from shoal.p2p.greeting import LANE_BYTE, TOKEN_BYTES, Key, Token, Wanted
from shoal.p2p.lane import MAX_CONNECTIONS, Lane, Shared
from shoal.p2p.link import Link, Stage
from shoal.p2p.sealing import KEY_BYTES, Keys, has_aes, suite_of

TOKEN_SECONDS: Final = 10.0


class Lanes:
    """Makes a lane beside a link when the first chunk is to pass. All is called on the loop's thread.

    The side that dialled the link dials the lane. On a long path without BBR at both ends it dials several connections,
    since a lost packet then halves the rate of one.

    Args:
        shared: what the lanes share.
        on_chunk: called with each chunk that came beside a link: its message and its memory.
        on_over: called when the lane beside a link is over, after its last chunk, with the reason.
    """

    def __init__(
        self,
        shared: Shared,
        on_chunk: Callable[[Link, bytes, memoryview], None],
        on_over: Callable[[Link, str], None],
    ) -> None:
        self._shared, self._on_chunk, self._on_over = shared, on_chunk, on_over
        self._lanes: set[Lane] = set()
        self._none = asyncio.Event()  # there is no lane
        self._none.set()
        self._tokens: dict[bytes, tuple[Link, Keys]] = {}

    def of(self, link: Link) -> Lane:
        """The lane beside an open link. What is sent waits for its first connection."""
        return link.lane or self._begin(link, asks=True)

    def _begin(self, link: Link, *, asks: bool) -> Lane:
        assert link.peer is not None
        loop = asyncio.get_running_loop()

        def chunk(message: bytes, memory: memoryview) -> None:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(self._on_chunk, link, message, memory)

        def over(reason: str) -> None:
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._over, link, lane, reason)

        lane = link.lane = Lane(link.peer, self._shared, chunk, over)
        self._lanes.add(lane)
        self._none.clear()
        if link.dialled:
            self._offer(link)
        elif asks:
            link.say(Wanted())
        return lane

    def _over(self, link: Link, lane: Lane, reason: str) -> None:
        self._lanes.discard(lane)
        lane.join()  # the thread that has told this is about to end
        link.lane = None
        if not self._lanes:
            self._none.set()
        self._on_over(link, reason)

    def _offer(self, link: Link) -> None:
        link.keys.append(os.urandom(KEY_BYTES))
        link.say(Key(link.keys[-1], has_aes(), congestion.has_bbr()))

    def heard(self, link: Link, said: Wanted | Key | Token) -> None:
        """The other side of an open link says something of its lane. Raises ValueError if that is not its turn."""
        match said:
            case Wanted() if link.dialled:
                self.of(link)
            case Key() if not link.dialled and len(link.keys) < MAX_CONNECTIONS:
                if link.lane is None:
                    self._begin(link, asks=False)
                link.keys.append(os.urandom(KEY_BYTES))
                token = LANE_BYTE + os.urandom(TOKEN_BYTES - 1)
                self._tokens[token] = link, Keys(suite_of(said.aes), link.keys[-1], said.key)
                asyncio.get_running_loop().call_later(TOKEN_SECONDS, self._tokens.pop, token, None)
                link.say(Token(link.keys[-1], has_aes(), congestion.has_bbr(), token))
            case Token() if link.dialled and link.lane is not None and link.dialled_lanes < len(link.keys):
                keys = Keys(suite_of(said.aes), link.keys[link.dialled_lanes], said.key)
                link.lane.dial(link.address, said.token, keys)
                link.dialled_lanes += 1
                loses = congestion.is_long(link.socket) and not (said.bbr and congestion.has_bbr())
                if loses and link.dialled_lanes == 1:
                    for _ in range(MAX_CONNECTIONS - 1):
                        self._offer(link)
            case _:
                raise ValueError(f"{type(said).__name__} is not expected now")

    def admit(self, connection: socket.socket, token: bytes) -> None:
        """Add an accepted connection to the lane that `token` is good for, if it is. It gets a copy of the socket."""
        link, keys = self._tokens.pop(token, (None, None))
        if link is not None and keys is not None and link.lane is not None and link.stage is Stage.OPEN:
            link.lane.accept(connection.dup(), keys)

    @property
    def connections(self) -> int:
        """How many connections all lanes have."""
        return sum(lane.connections for lane in self._lanes)

    def cancel(self, prefix: bytes) -> None:
        """See `Transport.cancel`."""
        for lane in self._lanes:
            lane.cancel(prefix)

    async def close(self, linger: float) -> None:
        """End all lanes when what is queued has left, or after `linger` seconds."""
        for lane in list(self._lanes):
            lane.finish()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._none.wait(), linger)
        for lane in list(self._lanes):
            lane.end()
            lane.join()

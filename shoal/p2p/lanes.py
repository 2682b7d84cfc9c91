"""The lanes beside a peer's links. Over the link, the two sides agree on each connection, its keys and its token."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from typing import Any, Final

from shoal.p2p import congestion
from shoal.p2p.errors import P2PError
from shoal.p2p.greeting import LANE_BYTE, TOKEN_BYTES, Key, Token, Wanted
from shoal.p2p.lane import MAX_CONNECTIONS, OPENING_SECONDS, Lane, Shared
from shoal.p2p.link import Link, Stage
from shoal.p2p.route import Route
from shoal.p2p.sealing import KEY_BYTES, Keys, has_aes, suite_of

TOKEN_SECONDS: Final = 60.0
AGAIN_SECONDS: Final = 1.0  # after which another connection is tried, if one did not open
MAX_KEYS: Final = 2 * MAX_CONNECTIONS  # of one link; includes connections that did not open
MAX_OF_ALL: Final = 1024  # connections; each has two threads


class Lanes:
    """Makes a lane beside a link when the first chunk is to be sent. Call everything on the loop's thread.

    The side that dialled the link dials the lane. On a long path without BBR at both ends it dials several connections,
    because there a lost packet halves the rate of one connection.

    Args:
        shared: the resources that the lanes share.
        on_chunk: called with each chunk that came beside a link: its message and its memory.
        on_over: called with the reason when the lane beside a link is over, after its last chunk.
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
        self._dials: set[asyncio.Task[None]] = set()  # dials over routes
        self._tokens: dict[bytes, tuple[Link, Keys, str]] = {}  # (link, keys, the host that will use the token)

    def of(self, link: Link) -> Lane:
        """The lane beside an open link. Chunks wait there for its first connection."""
        self._answer(link)
        return link.lane or self._begin(link, asks=True)

    def _begin(self, link: Link, *, asks: bool) -> Lane:
        assert link.peer is not None
        loop = asyncio.get_running_loop()

        def tell(callback: Callable[..., None], *arguments: Any) -> None:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(callback, link, *arguments)

        callbacks = [partial(tell, callback) for callback in (self._came, self._over, self._opened)]
        lane = link.lane = Lane(link.peer, self._shared, *callbacks)
        self._lanes.add(lane)
        self._none.clear()
        if link.dialled:
            self._offer(link)
        elif asks:
            link.say(Wanted())
        return lane

    def _came(self, link: Link, message: bytes, memory: memoryview) -> None:
        self._answer(link)
        self._on_chunk(link, message, memory)

    def _over(self, link: Link, reason: str) -> None:
        assert link.lane is not None
        self._lanes.discard(link.lane)
        link.lane.join()  # the thread that reported this is about to end
        link.lane = None
        if not self._lanes:
            self._none.set()
        self._on_over(link, reason)

    def _opened(self, link: Link, why_not: str) -> None:
        """A connection of the lane beside a link has opened, or failed to. In that case the dialling side tries again a
        few times.
        """
        if link.succeeded:
            return
        if not link.dialled:
            self._answer(link)
        elif not why_not:
            more, link.more = link.more, 0
            for _ in range(more):
                self._offer(link)
        elif len(link.keys) <= MAX_KEYS - MAX_CONNECTIONS:
            asyncio.get_running_loop().call_later(AGAIN_SECONDS, self._offer, link)
        elif link.lane is not None and not link.lane.connections:
            link.lane.end(why_not)

    def succeed(self, old: Link, new: Link) -> None:
        """Another link replaces `old`. Its lane gets the queued chunks of the old lane, if there are any."""
        if old.lane is not None:
            for chunk in old.lane.leave():
                self.of(new).send(chunk.header.name, chunk.header.message, chunk.memory)

    def _offer(self, link: Link) -> None:
        if link.succeeded:
            return
        link.keys.append(os.urandom(KEY_BYTES))
        link.say(Key(link.keys[-1], has_aes(), congestion.has_bbr()))

    def heard(self, link: Link, said: Wanted | Key | Token) -> None:
        """Handle a message of the other side about a link's lane. Raises ValueError if it is not the other side's
        turn.
        """
        if link.succeeded:
            return  # the other side did not know yet
        match said:
            case Wanted() if link.dialled:
                self.of(link)
            case Key() if not link.dialled and len(link.keys) + len(link.asked) < MAX_KEYS:
                if link.lane is None:
                    self._begin(link, asks=False)
                link.asked.append((said, link.address[0]))
                self._answer(link)
            case Token() if link.dialled and link.lane is not None and link.dialled_lanes < len(link.keys):
                keys = Keys(suite_of(said.aes), link.keys[link.dialled_lanes], said.key)
                if link.route is None:
                    link.lane.dial(link.address, said.token, keys)
                else:
                    self._spawn(self._dial_by(link.route, link, said.token, keys))
                link.dialled_lanes += 1
                loses = congestion.is_long(link.socket) and not (said.bbr and congestion.has_bbr())
                if loses and link.dialled_lanes == 1:
                    link.more = MAX_CONNECTIONS - 1
            case _:
                raise ValueError(f"{type(said).__name__} is not expected now")

    def _spawn(self, dial: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(dial)
        self._dials.add(task)
        task.add_done_callback(self._dials.discard)

    async def _dial_by(self, route: Route, link: Link, token: bytes, keys: Keys) -> None:
        lane = link.lane
        assert lane is not None
        try:
            async with asyncio.timeout(OPENING_SECONDS):
                connection = await route.connect()
        except (P2PError, OSError, TimeoutError) as error:
            if link.lane is lane:
                self._opened(link, str(error) or "the other side did not answer in time")
        else:
            lane.dial(connection, token, keys)

    def _answer(self, link: Link) -> None:
        """Give the other side of a link the tokens that it may have: one at first, and more after a chunk has
        passed.
        """
        if link.succeeded:
            return
        while link.asked and link.lane is not None and self._admits(link.lane):
            said, where = link.asked.pop(0)
            link.keys.append(os.urandom(KEY_BYTES))
            token = LANE_BYTE + os.urandom(TOKEN_BYTES - 1)
            self._tokens[token] = link, Keys(suite_of(said.aes), link.keys[-1], said.key), where
            asyncio.get_running_loop().call_later(TOKEN_SECONDS, self._tokens.pop, token, None)
            link.say(Token(link.keys[-1], has_aes(), congestion.has_bbr(), token))
        if link.asked and link.lane is not None and not link.lane.connections:
            link.end(f"there are {MAX_OF_ALL} connections of lanes already")

    def _admits(self, lane: Lane) -> bool:
        return self.connections < MAX_OF_ALL and (lane.passed or not lane.connections)

    def expects(self, where: str) -> bool:
        """Whether a peer at that address has a token."""
        return any(host == where for *_, host in self._tokens.values())

    def admit(self, connection: socket.socket, token: bytes) -> None:
        """Add an accepted connection to the lane for which `token` is valid, if there is one. The lane gets a copy of
        the socket.
        """
        link, keys, _ = self._tokens.pop(token, (None, None, ""))
        lane = None if link is None or link.stage is not Stage.OPEN else link.lane
        if lane is not None and keys is not None and self._admits(lane):
            lane.accept(connection.dup(), keys)

    @property
    def connections(self) -> int:
        """The number of connections of all lanes."""
        return sum(lane.connections for lane in self._lanes)

    def cancel(self, prefix: bytes) -> None:
        """See `Transport.cancel`."""
        for lane in self._lanes:
            lane.cancel(prefix)

    async def close(self, linger: float) -> None:
        """End all lanes when their queued chunks have been sent, or after `linger` seconds."""
        for dial in self._dials:
            dial.cancel()
        await asyncio.gather(*self._dials, return_exceptions=True)
        for lane in list(self._lanes):
            lane.finish()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._none.wait(), linger)
        for lane in list(self._lanes):
            lane.end()
        await self._none.wait()

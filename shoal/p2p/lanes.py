"""The lanes beside a peer's links. Over the link, the two sides agree on each connection, its keys and its token."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final

from shoal.p2p import congestion
from shoal.p2p.errors import P2PError
from shoal.p2p.greeting import LANE_BYTE, TOKEN_BYTES, Key, Token, Wanted, unexpected
from shoal.p2p.lane import MAX_CONNECTIONS, OPENING_SECONDS, Lane
from shoal.p2p.link import Link, Stage
from shoal.p2p.route import PeerRoute
from shoal.p2p.sealing import KEY_BYTES, LaneKeys, has_aes, suite_of
from shoal.p2p.shared import Shared

TOKEN_SECONDS: Final = 60.0
AGAIN_SECONDS: Final = 1.0  # after which another connection is tried, if one did not open
MAX_KEYS: Final = 2 * MAX_CONNECTIONS  # of one link; includes connections that did not open
MAX_OF_ALL: Final = 1024  # connections; each has two threads

ChunkHandler = Callable[[Link, bytes, memoryview], None]


class LinkLane(Lane):
    """The lane beside a link, and the keys on which the two sides have agreed. All but `Lane`'s methods are to be
    called on the loop's thread.

    Args:
        link: the link.
        shared, callbacks: as of `Lane`.

    Attributes:
        link: the link.
        asked: the other side's keys for connections that it may not dial yet, and the address from which it will dial
            each.
    """

    def __init__(self, link: Link, shared: Shared, *callbacks: Callable[..., None]) -> None:
        assert link.peer is not None
        super().__init__(link.peer, shared, *callbacks)
        self.link = link
        self.asked: list[tuple[Key, str]] = []
        self._keys: list[bytes] = []  # with which this side seals what it sends, one for each connection
        self._used = 0  # of these, if this side dials
        self._more = 0  # connections to dial when the first has opened

    def offer(self) -> None:
        """Say that this side will dial a connection, unless another link has replaced this one."""
        if not self.leaving:
            self._keys.append(os.urandom(KEY_BYTES))
            self.link.say(Key(self._keys[-1], has_aes(), congestion.has_bbr()))

    def offered(self, key: Key) -> None:
        """The other side will dial a connection. Raises ValueError if there were too many."""
        if len(self._keys) + len(self.asked) >= MAX_KEYS:
            raise unexpected(key)
        self.asked.append((key, self.link.address[0]))

    def answer(self) -> tuple[bytes, LaneKeys, str]:
        """Let the other side dial a connection for which it has asked. Returns the token, the keys, and from where."""
        asked, where = self.asked.pop(0)
        key, token = os.urandom(KEY_BYTES), LANE_BYTE + os.urandom(TOKEN_BYTES - 1)
        self._keys.append(key)
        self.link.say(Token(key, has_aes(), congestion.has_bbr(), token))
        return token, LaneKeys(suite_of(asked.aes), key, asked.key), where

    def answered(self, token: Token) -> LaneKeys:
        """The other side lets this one dial a connection. Raises ValueError if this side has not asked for it."""
        if self._used >= len(self._keys):
            raise unexpected(token)
        if not self._used and congestion.is_long(self.link.socket) and not (token.bbr and congestion.has_bbr()):
            self._more = MAX_CONNECTIONS - 1
        self._used += 1
        return LaneKeys(suite_of(token.aes), self._keys[self._used - 1], token.key)

    def opened(self, why_not: str) -> None:
        """A connection that this side has dialled has opened, or failed to; then it tries again a few times."""
        if not why_not:
            more, self._more = self._more, 0
            for _ in range(more):
                self.offer()
        elif len(self._keys) <= MAX_KEYS - MAX_CONNECTIONS:
            asyncio.get_running_loop().call_later(AGAIN_SECONDS, self.offer)
        elif not self.connections:
            self.end(why_not)


class Lanes:
    """Makes a lane beside a link when the first chunk is to be sent. Call everything on the loop's thread.

    The side that dialled the link dials the lane. On a long path without BBR at both ends it dials several connections,
    because there a lost packet halves the rate of one connection.

    Args:
        shared: the resources that the lanes share.
        on_chunk: called with each chunk that came beside a link: its message and its memory.
        on_over: called with the reason when the lane beside a link is over, after its last chunk.

    Attributes:
        beside: the lane beside each link that has one.
    """

    def __init__(self, shared: Shared, on_chunk: ChunkHandler, on_over: Callable[[Link, str], None]) -> None:
        self.beside: dict[Link, LinkLane] = {}
        self._shared, self._on_chunk, self._on_over = shared, on_chunk, on_over
        self._none = asyncio.Event()  # there is no lane
        self._none.set()
        self._dials: set[asyncio.Task[None]] = set()  # dials over routes
        self._tokens: dict[bytes, tuple[LinkLane, LaneKeys, str]] = {}  # the last is the host that will use the token

    def of(self, link: Link) -> Lane:
        """The lane beside an open link. Chunks wait there for its first connection."""
        if link in self.beside:
            self._answer(self.beside[link])
        elif link.dialled:
            self._begin(link).offer()
        else:
            self._begin(link)
            link.say(Wanted())
        return self.beside[link]

    def _begin(self, link: Link) -> LinkLane:
        loop = asyncio.get_running_loop()

        def tell(callback: Callable[..., None], *arguments: Any) -> None:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(callback, link, *arguments)

        callbacks = [partial(tell, callback) for callback in (self._came, self._over, self._opened)]
        self._none.clear()
        return self.beside.setdefault(link, LinkLane(link, self._shared, *callbacks))

    def _came(self, link: Link, message: bytes, memory: memoryview) -> None:
        self._answer(self.beside[link])
        self._on_chunk(link, message, memory)

    def _over(self, link: Link, reason: str) -> None:
        self.beside.pop(link).join()  # the thread that reported this is about to end
        if not self.beside:
            self._none.set()
        self._on_over(link, reason)

    def _opened(self, link: Link, why_not: str) -> None:
        """A connection of the lane beside a link has opened, or failed to."""
        lane = self.beside.get(link)
        if lane is None or lane.leaving:
            return
        if link.dialled:
            lane.opened(why_not)
        else:
            self._answer(lane)

    def succeed(self, old: Link, new: Link) -> None:
        """Another link replaces `old`. Its lane gets the queued chunks of the old lane, if there are any."""
        if old in self.beside:
            for chunk in self.beside[old].leave():
                self.of(new).send(chunk.header.name, chunk.header.message, chunk.memory)
            if new.dialled:
                self.beside[old].finish()  # the other side has left it already

    def heard(self, link: Link, said: Wanted | Key | Token) -> None:
        """Handle a message of the other side about a link's lane. Raises ValueError if it is not the other side's
        turn.
        """
        lane = self.beside.get(link)
        match said:
            case Wanted() if link.dialled:
                self.of(link)
            case Key() if not link.dialled:
                lane = lane or self._begin(link)
                lane.offered(said)
                self._answer(lane)
            case Token() if link.dialled and lane is not None:
                keys = lane.answered(said)
                if link.route is None:
                    lane.dial(link.address, said.token, keys)
                else:
                    task = asyncio.get_running_loop().create_task(self._dial_by(link.route, lane, said.token, keys))
                    self._dials.add(task)
                    task.add_done_callback(self._dials.discard)
            case _:
                raise unexpected(said)

    async def _dial_by(self, route: PeerRoute, lane: LinkLane, token: bytes, keys: LaneKeys) -> None:
        try:
            async with asyncio.timeout(OPENING_SECONDS):
                connection = await route.connect()
        except (P2PError, OSError, TimeoutError) as error:
            self._opened(lane.link, str(error) or "the other side did not answer in time")
        else:
            lane.dial(connection, token, keys)

    def _answer(self, lane: LinkLane) -> None:
        """Give the other side of a link the tokens that it may have: one at first, and more after a chunk has
        passed.
        """
        if lane.leaving:
            return
        while lane.asked and self._admits(lane):
            token, keys, where = lane.answer()
            self._tokens[token] = lane, keys, where
            asyncio.get_running_loop().call_later(TOKEN_SECONDS, self._tokens.pop, token, None)
        if lane.asked and not lane.connections:
            lane.link.end(f"there are {MAX_OF_ALL} connections of lanes already")

    def _admits(self, lane: Lane) -> bool:
        return self.connections < MAX_OF_ALL and (lane.passed or not lane.connections)

    def expects(self, where: str) -> bool:
        """Whether a peer at that address has a token."""
        return any(host == where for *_, host in self._tokens.values())

    def admit(self, connection: socket.socket, token: bytes) -> None:
        """Add an accepted connection to the lane for which `token` is valid, if there is one. The lane gets a copy of
        the socket.
        """
        if token in self._tokens:
            lane, keys, _ = self._tokens.pop(token)
            if lane.link.stage is Stage.OPEN and lane.link in self.beside and self._admits(lane):
                lane.accept(connection.dup(), keys)

    @property
    def connections(self) -> int:
        """The number of connections of all lanes."""
        return sum(lane.connections for lane in self.beside.values())

    def cancel(self, prefix: bytes) -> None:
        """See `Transport.cancel`."""
        for lane in self.beside.values():
            lane.cancel(prefix)

    async def close(self, linger: float) -> None:
        """End all lanes when their queued chunks have been sent, or after `linger` seconds."""
        for dial in self._dials:
            dial.cancel()
        await asyncio.gather(*self._dials, return_exceptions=True)
        for lane in list(self.beside.values()):
            lane.finish()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._none.wait(), linger)
        for lane in list(self.beside.values()):
            lane.end()
        await self._none.wait()

"""Chunks of a round's result that are asked of those who hold them: for a repair, or by a peer that missed the
round."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shoal.p2p.errors import P2PError, Refused
from shoal.p2p.identity import PeerID
from shoal.p2p.node import Answer, Reply
from shoal.swarm.bytes_exchange import BytesExchange
from shoal.swarm.channel import Channel
from shoal.swarm.protocol.book import RuleBroken, check_begin, root_of
from shoal.swarm.protocol.errors import ResultLost
from shoal.swarm.protocol.messages import Begin, Carries, Commit, Committed, Digests, Fetch, Result, name_of

FETCHES = 8  # chunks fetched at a time

Wanted = tuple[bytes, int, bytes]  # holder, chunk, digest


class Fetching:
    """Fetches chunks.

    Args:
        channel: over which the run's messages go.
        timeout: seconds that an answer may take.
        got_on: called with every chunk that has come: on a slow line all of them may take long.
    """

    def __init__(self, channel: Channel, timeout: float, got_on: Callable[[], None]) -> None:
        self._channel, self._timeout, self._got_on = channel, timeout, got_on
        self._tasks: set[asyncio.Task[None]] = set()

    def begin(self, exchange: BytesExchange, wanted: list[Wanted], done: Callable[[dict[bytes, str]], None]) -> None:
        """Begin to `fetch`; `done` is called with what that returns, unless it was stopped."""

        async def fetch() -> None:
            done(await self.fetch(exchange, wanted))

        task = self._channel.spawn(fetch())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def stop(self) -> None:
        """The memory into which chunks are fetched is about to be used for something else."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()

    async def fetch(self, exchange: BytesExchange, wanted: list[Wanted]) -> dict[bytes, str]:
        """Fetch chunks, a few at a time, and put them in place; returns the holders that did not bring what they hold,
        and why."""
        slots = asyncio.Semaphore(FETCHES)
        failed: dict[bytes, str] = {}

        async def one(holder: bytes, chunk: int, digest: bytes) -> None:
            async with slots:
                if holder in failed:
                    return
                request = Fetch(exchange.book.begin.round, chunk)
                try:
                    exchange.await_fetched(chunk, holder, self._channel.leases)
                    reply = await self._channel.ask(holder, request, self._timeout)
                    if len(reply.buffers) != 1:
                        raise RuleBroken("it came without its bytes")
                    exchange.fetched(chunk, digest, memoryview(reply.buffers[0]))
                    self._got_on()
                except (P2PError, RuleBroken, TimeoutError) as error:
                    failed[holder] = f"chunk {chunk} could not be fetched: {str(error) or 'no answer in time'}"

        await asyncio.gather(*(one(*source) for source in wanted))
        return failed

    async def fetch_committed(self, commit: Commit, open_exchange: Callable[[Begin], BytesExchange]) -> BytesExchange:
        """Fetch the whole result of a round from one of its members. Raises `ResultLost` if none of them brings it."""
        failed: dict[bytes, str] = {}
        others = [key for key in commit.members if key != self._channel.node.peer_id.key]
        connected = [key for key in others if self._channel.is_connected(key)]
        exchange = await self._fetch_from(connected, commit, open_exchange, failed)
        if exchange is None:
            reached = await self._reach([key for key in others if key not in connected], failed)
            exchange = await self._fetch_from(reached, commit, open_exchange, failed)
        if exchange is None:
            reasons = "; ".join(f"{PeerID(key)!r}: {reason}" for key, reason in failed.items())
            raise ResultLost(
                f"the round of epoch {commit.tip.epoch} was missed, and nobody brings its result: {reasons}"
            )
        return exchange

    async def _reach(self, keys: list[bytes], failed: dict[bytes, str]) -> list[bytes]:
        """Connect to these members, all at once, since each dial may take as long as it is given; returns those who
        are reached."""

        async def connect(key: bytes) -> None:
            try:
                await self._channel.node.connect(PeerID(key))
            except P2PError as error:
                failed[key] = str(error)

        await asyncio.gather(*map(connect, keys))
        return [key for key in keys if key not in failed]

    async def _fetch_from(
        self,
        holders: list[bytes],
        commit: Commit,
        open_exchange: Callable[[Begin], BytesExchange],
        failed: dict[bytes, str],
    ) -> BytesExchange | None:
        """Fetch the result from the first of these members that brings it; None if nobody does."""
        for key in holders:
            try:
                answer = await self._channel.call(key, Digests(commit.round), Committed, self._timeout)
                if answer.begin.round != commit.round or root_of(answer.digests) != commit.root:
                    raise RuleBroken("its chunks are not those that were committed")
                check_begin(answer.begin)
                exchange = open_exchange(answer.begin)
                missing = await self.fetch(exchange, [(key, chunk, d) for chunk, d in enumerate(answer.digests)])
                if missing:
                    raise RuleBroken(missing[key])
            except (P2PError, RuleBroken, TimeoutError) as error:
                failed[key] = str(error) or "no answer in time"
            else:
                return exchange
        return None


def serve(exchange: BytesExchange | None, message: Fetch | Digests) -> Answer:
    """Answer what is asked of the round whose `exchange` this peer holds, if it holds any. Raises Refused for what it
    does not."""
    if exchange is None or exchange.book.begin.round != message.round:
        raise Refused("this peer does not have that round's result any more")
    book = exchange.book
    if isinstance(message, Digests):
        if not all(book.digests):  # else they can be had, even if this peer has not heard of the COMMIT yet
            raise Refused("that round's result is not complete here")
        return Committed(book.begin, tuple(book.digests))
    if message.chunk >= len(book.chunks) or not book.digests[message.chunk]:
        raise Refused(f"chunk {message.chunk} is not here")
    name = name_of(message.round, Carries.FETCHED, message.chunk)
    # A copy: the next round may write there before it has left, and who asked would wait for it in vain.
    return Reply(Result(message.round, message.chunk, book.plan), [bytes(exchange.chunk_bytes(message.chunk))], name)

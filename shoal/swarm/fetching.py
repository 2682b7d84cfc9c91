"""Fetches chunks of a round's result from members that hold them: for a repair, or because this peer missed the
round."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shoal.p2p.errors import P2PError
from shoal.p2p.identity import PeerID
from shoal.swarm.channel import Channel
from shoal.swarm.protocol.book import RuleBroken, check_begin, root_of
from shoal.swarm.protocol.contribution import BytesExchange
from shoal.swarm.protocol.errors import ResultLost
from shoal.swarm.protocol.messages import Begin, Commit, Committed, Digests, Fetch

FETCHES = 8  # chunks fetched at a time

Wanted = tuple[bytes, int, bytes]  # holder, chunk, digest


class Fetching:
    """Fetches chunks.

    Args:
        channel: sends the requests.
        timeout: seconds that an answer may take.
        progressed: called for each chunk that has arrived: on a slow line all of them may take long.
    """

    def __init__(self, channel: Channel, timeout: float, progressed: Callable[[], None]) -> None:
        self._channel, self._timeout, self._progressed = channel, timeout, progressed
        self._tasks: dict[asyncio.Task[None], bytes] = {}  # the round that each is for

    def begin(self, exchange: BytesExchange, wanted: list[Wanted], done: Callable[[dict[bytes, str]], None]) -> None:
        """Begin to `fetch`. Unless it is stopped, `done` is called with the result."""

        async def fetch() -> None:
            done(await self.fetch(exchange, wanted))

        task = self._channel.spawn(fetch())
        self._tasks[task] = exchange.book.begin.round
        task.add_done_callback(lambda task: self._tasks.pop(task, None))

    def stop(self, round_id: bytes) -> None:
        """The memory into which that round's chunks are fetched is about to be used for something else."""
        for task in [task for task, fetched in self._tasks.items() if fetched == round_id]:
            task.cancel()

    async def fetch(self, exchange: BytesExchange, wanted: list[Wanted]) -> dict[bytes, str]:
        """Fetch chunks, a few at a time, and write them where they belong. Returns the holders that did not send what
        they hold, each with the reason."""
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
                    self._progressed()
                except (P2PError, RuleBroken, TimeoutError) as error:
                    failed[holder] = f"chunk {chunk} could not be fetched: {str(error) or 'no answer in time'}"

        await asyncio.gather(*(one(*source) for source in wanted))
        return failed

    async def fetch_committed(self, commit: Commit, open_exchange: Callable[[Begin], BytesExchange]) -> BytesExchange:
        """Fetch the whole result of a round from one of its members. Raises `ResultLost` if none of them sends it."""
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
        """Connect to these members, all at once, since each dial may take long. Returns those that are reached."""

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
        """Fetch the result from the first of these members that sends it. Returns None if none does."""
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

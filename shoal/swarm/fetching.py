"""Fetches chunks of a round's result from members that hold them: for a repair, or because this peer missed the
round."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from shoal.p2p.errors import P2PError
from shoal.p2p.identity import PeerID
from shoal.p2p.node import DIAL_TIMEOUT
from shoal.swarm.channel import Channel
from shoal.swarm.protocol.book import check_begin, require, root_of
from shoal.swarm.protocol.contribution import BytesExchange
from shoal.swarm.protocol.errors import ResultLost
from shoal.swarm.protocol.messages import Begin, Commit, Committed, Digests, Fetch, Source

FETCHES = 8  # chunks fetched at a time


class Fetching:
    """Fetches chunks.

    Args:
        channel: sends the requests.
        timeout: seconds that an answer may take.
        progressed: called for each chunk that has arrived: on a slow line all of them may take long.
    """

    def __init__(self, channel: Channel, timeout: float, progressed: Callable[[], None]) -> None:
        self._channel, self._timeout, self._progressed = channel, timeout, progressed

    async def fetch(self, exchange: BytesExchange, sources: Iterable[Source]) -> dict[bytes, str]:
        """Fetch chunks, a few at a time, and write them where they belong. Returns the holders that did not send what
        they hold, each with the reason."""
        slots = asyncio.Semaphore(FETCHES)
        failed: dict[bytes, str] = {}

        async def one(source: Source) -> None:
            chunk, holder = source.chunk, source.owner
            async with slots:
                if holder in failed:
                    return
                request = Fetch(exchange.book.begin.round, chunk)
                try:
                    exchange.await_fetched(chunk, holder, self._channel.node.transport.leases)
                    reply = await self._channel.ask(holder, request, self._timeout)
                    require(len(reply.buffers) == 1, "it came without its bytes")
                    exchange.fetched(chunk, source.digest, memoryview(reply.buffers[0]))
                    self._progressed()
                except (P2PError, TimeoutError) as error:
                    failed[holder] = f"chunk {chunk} could not be fetched: {str(error) or 'no answer in time'}"

        await asyncio.gather(*map(one, sources))
        return failed

    async def fetch_committed(self, commit: Commit, open_exchange: Callable[[Begin], BytesExchange]) -> BytesExchange:
        """Fetch the whole result of a round from one of its members. All are asked at once: one that says nothing
        holds up nobody. Raises `ResultLost` if none of them sends it."""
        failed: dict[bytes, str] = {}
        connected, missing = self._holders(commit)
        for holders in (connected, missing):
            asked = [asyncio.ensure_future(self._ask(key, commit, failed)) for key in holders]
            try:
                for answered in asyncio.as_completed(asked):
                    key, answer = await answered
                    if answer is not None and (exchange := await self._fetch_from(key, answer, open_exchange, failed)):
                        return exchange
            finally:
                for question in asked:
                    question.cancel()
        reasons = "; ".join(f"{PeerID(key)!r}: {reason}" for key, reason in failed.items())
        raise ResultLost(f"the round of epoch {commit.tip.epoch} was missed, and nobody brings its result: {reasons}")

    async def _ask(self, key: bytes, commit: Commit, failed: dict[bytes, str]) -> tuple[bytes, Committed | None]:
        """Ask a member for the plan of the round, and for the digests of its chunks; dial it if need be."""
        try:
            unreached = await self._channel.connect({} if self._channel.is_connected(key) else {key: DIAL_TIMEOUT})
            require(key not in unreached, unreached.get(key, ""))
            answer = await self._channel.call(key, Digests(commit.round), Committed, self._timeout)
            is_it = answer.begin.round == commit.round and root_of(answer.digests) == commit.root
            require(is_it, "its chunks are not those that were committed")
            check_begin(answer.begin)
            require(commit.samples == sum(answer.begin.weights), "the round had other samples than were committed")
            is_whole = len(answer.digests) == answer.begin.starts[-1]
            require(is_whole, "it says that the round had another number of chunks")
            return key, answer
        except (P2PError, TimeoutError) as error:
            failed[key] = str(error) or "no answer in time"
            return key, None

    async def _fetch_from(
        self,
        key: bytes,
        answer: Committed,
        open_exchange: Callable[[Begin], BytesExchange],
        failed: dict[bytes, str],
    ) -> BytesExchange | None:
        """Fetch the chunks from a member that knows their digests; None if it does not send them."""
        try:
            exchange = open_exchange(answer.begin)
        except P2PError as error:
            failed[key] = str(error)
            return None
        wanted = [Source(chunk, key, digest) for chunk, digest in enumerate(answer.digests)]
        try:
            missing = await self.fetch(exchange, wanted)
        finally:  # cancelled, too
            exchange.close()  # the next holder, or the next round, writes there
        failed.update(missing)
        return None if missing else exchange

    def _holders(self, commit: Commit) -> tuple[list[bytes], list[bytes]]:
        """The other members of the round: those that are connected, and those that may be dialled."""
        others = [key for key in commit.members if key != self._channel.node.peer_id.key]
        connected = [key for key in others if self._channel.is_connected(key)]
        return connected, [key for key in others if key not in connected]

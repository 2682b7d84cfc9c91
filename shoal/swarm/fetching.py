"""Fetches chunks of a round's result from members that hold them, for a repair or because this peer missed the
round."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from shoal.p2p.errors import P2PError
from shoal.p2p.identity import PeerID
from shoal.p2p.node import DIAL_TIMEOUT
from shoal.p2p.transport import Movement
from shoal.swarm.channel import Channel, loop_time
from shoal.swarm.protocol.book import check_begin, require, root_of
from shoal.swarm.protocol.contribution import BytesExchange
from shoal.swarm.protocol.download import DownloadPlan
from shoal.swarm.protocol.errors import ResultLost
from shoal.swarm.protocol.messages import Begin, Commit, Committed, Digests, Fetch, Source
from shoal.swarm.protocol.rules import Rules

FETCHES = 8  # chunks fetched at a time
Open = Callable[[Begin], BytesExchange]


class Fetching:
    """Fetches chunks of results from other members.

    Args:
        channel: sends the requests.
        timeout: the time, in seconds, within which a member must answer.
        progressed: called for each chunk that has arrived, because on a slow line all chunks together may take long.
        rules: the rules of the run.
    """

    def __init__(self, channel: Channel, timeout: float, progressed: Callable[[], None], rules: Rules) -> None:
        self._channel, self._timeout, self._progressed, self._rules = channel, timeout, progressed, rules

    async def fetch(self, exchange: BytesExchange, sources: Iterable[Source]) -> dict[bytes, str]:
        """Fetch chunks, a few at a time, and write them to the exchange's output. Returns the holders that did not send
        their chunks, each with the reason."""
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

    async def fetch_committed(self, commit: Commit, open_exchange: Open) -> BytesExchange:
        """Fetch the whole result of a round from its members.

        It asks all members at the same time, and all that hold the result send chunks at the same time. So a member
        that is silent or slow does not hold this up.

        Args:
            commit: the COMMIT of the round.
            open_exchange: makes the exchange for the BEGIN of the round.

        Returns:
            The exchange, whose output holds the result.

        Raises:
            ResultLost: if the members do not send the result.
        """
        failed: dict[bytes, str] = {}
        for holders in self._holders(commit):
            exchange = await self._fetch_from(holders, commit, open_exchange, failed)
            if exchange is not None:
                return exchange
        reasons = "; ".join(f"{PeerID(key)!r}: {reason}" for key, reason in failed.items()) or "no other peer was in it"
        raise ResultLost(f"the round of epoch {commit.tip.epoch} was missed, and nobody brings its result: {reasons}")

    async def _fetch_from(
        self, holders: Iterable[bytes], commit: Commit, open_exchange: Open, failed: dict[bytes, str]
    ) -> BytesExchange | None:
        """Fetch the result from the members among `holders` that hold it. Returns None if they do not send all of
        it."""
        whole: _Whole | None = None
        questions = {asyncio.ensure_future(self._ask(key, commit, failed)) for key in holders}
        waited_for: set[asyncio.Future[Any]]
        try:
            while questions or (whole is not None and not whole.plan.failed):
                check_at = None if whole is None else whole.fetch_more()
                waited_for = {*questions, *(whole.fetches if whole is not None else ())}
                seconds = None if check_at is None else check_at - loop_time()
                await asyncio.wait(waited_for, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                for question in [question for question in questions if question.done()]:
                    questions.discard(question)
                    key, answer = question.result()
                    if answer is None:
                        continue
                    try:
                        whole = whole or _Whole(self, answer, open_exchange(answer.begin))
                        whole.plan.add_donor(PeerID(key))
                    except P2PError as error:
                        failed[key] = str(error)
                if whole is not None and whole.is_complete():
                    return whole.exchange
            return None
        finally:  # cancelled, too
            for question in questions:
                question.cancel()
            if whole is not None:
                whole.close()
                failed.update((peer.key, reason) for peer, reason in whole.plan.dropped.items())

    async def _ask(self, key: bytes, commit: Commit, failed: dict[bytes, str]) -> tuple[bytes, Committed | None]:
        """Ask a member for the BEGIN of the round and the digests of its chunks. Dial the member if it is not
        connected."""
        try:
            unreached = await self._channel.connect({} if self._channel.is_connected(key) else {key: DIAL_TIMEOUT})
            require(key not in unreached, unreached.get(key, ""))
            answer = await self._channel.call(key, Digests(commit.round), Committed, self._timeout)
            is_it = answer.begin.round == commit.round and root_of(answer.digests) == commit.root
            require(is_it, "its chunks are not those that were committed")
            check_begin(answer.begin)
            brought = self._rules.samples(answer.begin)
            require(commit.samples == brought, "the round had other samples than were committed")
            is_whole = len(answer.digests) == answer.begin.starts[-1]
            require(is_whole, "it says that the round had another number of chunks")
            return key, answer
        except (P2PError, TimeoutError) as error:
            failed[key] = str(error) or "no answer in time"
            return key, None

    def _holders(self, commit: Commit) -> tuple[list[bytes], ...]:
        """The other members of the round, in the order in which to ask them: connected ones, connected ones that are
        relayed, and ones that must be dialled first."""
        others = [key for key in commit.members if key != self._channel.node.peer_id.key]
        relayed = {member.key for member in commit.view if member.is_relayed}
        connected = [key for key in others if self._channel.is_connected(key)]
        direct = [key for key in connected if key not in relayed]
        later = [key for key in connected if key in relayed]
        return direct, later, [key for key in others if key not in connected]


class _Whole:
    """The download of one round's whole result.

    Args:
        fetching: the `Fetching` to which this belongs.
        answer: the answer of a member that holds the result.
        exchange: the exchange of the round; its output receives the result.

    Attributes:
        exchange: as given.
        plan: decides which member to ask for which chunk.
        fetches: the requests that are under way.
    """

    def __init__(self, fetching: Fetching, answer: Committed, exchange: BytesExchange) -> None:
        self._channel, self._timeout, self._progressed = fetching._channel, fetching._timeout, fetching._progressed
        self._digests, self.exchange = answer.digests, exchange
        sizes = [exchange.chunk_bytes(chunk).nbytes for chunk in range(len(answer.digests))]
        self.plan = DownloadPlan(answer.digests, sizes, (), give_up=fetching._timeout)
        self.fetches: set[asyncio.Future[None]] = set()
        self._movements: dict[PeerID, Movement] = {}

    def fetch_more(self) -> float | None:
        """Send the requests that are due. Returns when to call this again if nothing happens."""
        transport = self._channel.node.transport
        for holder in self.plan.owing:  # a holder whose chunk is on its way over a slow line is not silent
            moved = transport.moved(holder)
            if self._movements.setdefault(holder, Movement(moved)).goes_on(moved):
                self.plan.is_sending(holder, loop_time())
        for holder, chunk in self.plan.next_requests(loop_time()):
            self.fetches.add(asyncio.ensure_future(self._fetch(holder, chunk)))
        return self.plan.next_check()

    def is_complete(self) -> bool:
        """Whether all chunks have arrived."""
        for fetch in [fetch for fetch in self.fetches if fetch.done()]:
            self.fetches.discard(fetch)
            fetch.result()
        return not self.plan.missing

    async def _fetch(self, holder: PeerID, chunk: int) -> None:
        book, digest = self.exchange.book, self._digests[chunk]
        try:
            if chunk in self.plan.missing:  # otherwise a late holder has just sent it
                self.exchange.await_fetched(chunk, holder.key, self._channel.node.transport.leases)
            reply = await self._channel.ask(holder.key, Fetch(book.begin.round, chunk), self._timeout)
            require(len(reply.buffers) == 1, f"chunk {chunk} came without its bytes")
            if chunk in self.plan.missing:
                self.exchange.fetched(chunk, digest, memoryview(reply.buffers[0]))
        except (P2PError, TimeoutError) as error:
            self.plan.donor_failed(holder, f"chunk {chunk} could not be fetched: {str(error) or 'no answer in time'}")
        else:
            self.plan.received(holder, chunk, digest, loop_time())
            self._progressed()

    def close(self) -> None:
        """Stop fetching and writing, because the next round writes to the same output."""
        for fetch in self.fetches:
            fetch.cancel()
        self.exchange.close()

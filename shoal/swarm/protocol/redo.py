"""The redo log: past rounds with their results, for members that were not in them and replay them one after another."""

from __future__ import annotations

from dataclasses import dataclass

from shoal.p2p.node import Reply
from shoal.swarm.protocol import messages as msg
from shoal.swarm.protocol.book import require
from shoal.swarm.protocol.contribution import BytesExchange

WANTED_SECONDS = 60.0
MAX_ROUNDS = 256  # a round without chunks still has a BEGIN, of all members


@dataclass(frozen=True, slots=True)
class _Kept:
    """A committed round. Each chunk of its result is as the reducer has encoded it, or else uncompressed."""

    commit: msg.Commit
    committed: msg.Committed
    plan: bytes
    chunks: list[bytes]


class RedoLog:
    """Keeps the last committed rounds while somebody may want them, and sends them. No I/O, no clock.

    It is wanted for `WANTED_SECONDS` after each `want`. Otherwise it holds nothing, and copies nothing. The rounds in
    it are consecutive and lead to this peer's tip.

    [Note: what a liar can do]
    Who replays asks several members which round followed its tip, and believes a COMMIT that more than half of the
    answers name. So one liar among three is outvoted. One of two can only prevent the replay, which costs a download. A
    wrong chunk does not have its digest. It costs its bytes, and other members send the chunk. If a majority lies, the
    peer gets a wrong state, as it does if it downloads from them. If nobody sends the result of a COMMIT, it is void,
    and the peer downloads. Whoever pretends to replay or to download keeps the log wanted: that costs the others a copy
    of each result, and at most `max_bytes` of memory.

    Args:
        max_bytes: how many bytes of results it keeps. It drops the oldest rounds. With 0 it is never wanted.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._until = max_bytes, float("-inf")
        self._rounds: dict[bytes, _Kept] = {}  # by their names, the oldest first
        self._nbytes = 0

    def want(self, now: float) -> None:
        """Somebody is behind, or reads the log."""
        self._until = now + WANTED_SECONDS

    def is_wanted(self, now: float) -> bool:
        """Whether to keep the rounds that are committed now."""
        return self._max_bytes > 0 and now < self._until

    def look(self, now: float) -> None:
        """Drop everything if nobody wants it any more. Called every second."""
        if self._rounds and not self.is_wanted(now):
            self.clear()

    def clear(self) -> None:
        """Drop everything: the rounds do not lead to this peer's state, or nobody wants them."""
        self._rounds, self._nbytes = {}, 0

    def keep(self, commit: msg.Commit, exchange: BytesExchange | None, now: float) -> None:
        """A round was committed. `exchange` has its result; without one, the rounds before it lead nowhere."""
        if not self.is_wanted(now):
            return
        book = None if exchange is None else exchange.book
        if exchange is None or book is None or book.root() != commit.root:
            self.clear()
            return
        encoded, numbers = exchange.encoded or {}, range(len(book.chunks))
        chunks = [encoded.get(number) or exchange.chunk_bytes(number) for number in numbers]
        nbytes = sum(memoryview(chunk).nbytes for chunk in chunks)
        while self._rounds and (self._nbytes + nbytes > self._max_bytes or len(self._rounds) >= MAX_ROUNDS):
            oldest = self._rounds.pop(next(iter(self._rounds)))
            self._nbytes -= sum(map(len, oldest.chunks))
        if nbytes <= self._max_bytes:
            committed = msg.Committed(book.begin, tuple(book.digests))
            # A copy, because the next round writes to this memory.
            self._rounds[commit.round] = _Kept(commit, committed, book.plan, [bytes(chunk) for chunk in chunks])
            self._nbytes += nbytes

    def after(self, message: msg.After, now: float) -> msg.Commit | None:
        """The COMMIT of the round that followed a tip, if it is here."""
        found = next((kept.commit for kept in self._rounds.values() if kept.commit.tip == message.tip), None)
        if found is not None:
            self.want(now)
        return found

    def answer(self, message: msg.Fetch | msg.Digests, now: float) -> Reply | msg.Committed | None:
        """The answer about a round's result; None if that round is not here. Raises RuleBroken for a chunk that the
        round does not have."""
        kept = self._rounds.get(message.round)
        if kept is None:
            return None
        self.want(now)
        if isinstance(message, msg.Digests):
            return kept.committed
        require(message.chunk < len(kept.chunks), f"chunk {message.chunk} is not here")
        name = msg.name_of(message.round, msg.Carries.FETCHED, message.chunk)
        return Reply(msg.Result(message.round, message.chunk, kept.plan), [kept.chunks[message.chunk]], name)

"""Peers of the product on a network that a test controls message by message. The digest of a chunk stands for its
bytes: it hashes whose parts were summed."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

from shoal.p2p.errors import Refused
from shoal.p2p.leases import Leases
from shoal.p2p.node import Reply
from shoal.swarm.protocol.actions import Ask, Enter, FetchChunks, Send
from shoal.swarm.protocol.book import Book, RuleBroken
from shoal.swarm.protocol.contribution import Contribution, Fault, SendTo
from shoal.swarm.protocol.errors import Behind
from shoal.swarm.protocol.messages import Begin, Commit, Fetch, Hello, Join, Part, Repair, Result, Source
from shoal.swarm.protocol.peer import Peer
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.silence import Silence
from shoal.swarm.protocol.statements import Signer
from shoal.swarm.protocol.view import Member, View
from tests.swarm.rounds import IDENTITIES, TERMS, chunks_of


class Digests:
    """A `BytesExchange` of digests."""

    def __init__(self, book: Book, send: SendTo) -> None:
        self.book, self._send, self.progressed = book, send, 0
        self.encoded: dict[int, bytes] | None = None

    def start(self, weight: float, leases: Leases) -> None:
        self._reduce(self.book.put_out(()))
        self._send_parts()

    def _send_parts(self) -> None:
        for owner, chunk in self.book.next_parts():
            self._send([owner], Part(self.book.begin.round, chunk, self.book.plan, 1.0))

    def part(self, sender: bytes, part: Part, buffers: Sequence[memoryview]) -> None:
        self.progressed += 1
        if self.book.part_arrived(sender, part.chunk, part.plan, part.weight) and self.book.is_ready(part.chunk):
            self._reduce([part.chunk])

    def result(self, sender: bytes, result: Result, buffers: Sequence[memoryview]) -> None:
        self.progressed += 1
        if self.book.result_arrived(sender, result.chunk, result.plan):
            self.book.received(result.chunk, bytes(buffers[0]))
        self._send_parts()

    def _reduce(self, chunks: list[int]) -> None:
        book = self.book
        for chunk in chunks:
            digest = blake3(b"%d" % chunk + b"".join(sorted({*book.parts[chunk], book.me}))).digest()
            book.reduced(chunk)
            others = [key for key in book.keys if key != book.me and key not in book.out]
            self._send(others, Result(book.begin.round, chunk, book.plan), [memoryview(digest)])
            book.received(chunk, digest)

    def put_out(self, keys: Sequence[bytes]) -> None:
        self._reduce(self.book.put_out(keys))

    def repair(self, repair: Repair) -> list[Source]:
        fetches, ready = self.book.repair(repair)
        self._reduce(ready)
        self._send_parts()
        return fetches

    def await_fetched(self, chunk: int, holder: bytes, leases: Leases) -> None:
        """No memory waits."""

    def fetched(self, chunk: int, digest: bytes, data: memoryview) -> None:
        if bytes(data) != digest:
            raise RuleBroken(f"chunk {chunk} is not the one that was committed")
        self.book.received(chunk, digest)

    def close(self) -> None:
        """Nothing is written."""

    def chunk_bytes(self, chunk: int) -> memoryview:
        return memoryview(self.book.digests[chunk])


@dataclass(frozen=True)
class Request:
    """A message that is answered; `about` is the action that it belongs to."""

    message: Any
    buffers: Sequence[Any]
    about: Ask | FetchChunks


@dataclass(frozen=True)
class Response:
    """The answer to a request, or the reason why there is none."""

    request: Request
    answer: Any
    refused: str = ""


class Wire:
    """Messages in transit: of one pair of peers in their order, of several pairs in any order.

    Args:
        members: of the run; each knows all.
        rules: of the run.
    """

    def __init__(self, members: Sequence[Member], rules: Rules) -> None:
        self.now = 0.0
        self.ways: dict[tuple[bytes, bytes], deque[Any]] = {}
        self.cut: set[frozenset[bytes]] = set()
        self.dead: set[bytes] = set()
        self.gone: dict[bytes, set[bytes]] = {member.key: set() for member in members}  # whom each knows to be lost
        self.results: dict[bytes, set[bytes]] = {member.key: set() for member in members}  # of the first tip
        self.peers: dict[bytes, Peer] = {}
        for member in members:
            peer = Peer(
                View("run", member, self._reaches(member.key)),
                TERMS,
                rules,
                Silence(1e9, 1e9),
                Signer(next(one for one in IDENTITIES if one.peer_id == member.peer), "run"),
                keeps_state=True,
            )
            peer.view.learn(members)
            self.peers[member.key] = peer

    def _reaches(self, key: bytes) -> Any:
        return lambda other: other not in self.gone[key]  # until it notices that the other is lost

    def connected(self, one: bytes, other: bytes) -> bool:
        both_live = one not in self.dead and other not in self.dead
        return one == other or (both_live and other not in self.gone[one] and frozenset((one, other)) not in self.cut)

    def offer(self, key: bytes) -> None:
        """That peer has an input, and joins."""
        peer = self.peers[key]

        def open_exchange(begin: Begin, send: SendTo, fault: Fault) -> Digests:
            return Digests(Book(key, begin, chunks_of(begin)), send)

        peer.participant.offer(Contribution(1.0, open_exchange, patience=5.0, tip=peer.tip))
        peer.participant.next_step(self.now)
        self.act(key)

    @property
    def living(self) -> list[bytes]:
        return [key for key in self.peers if key not in self.dead]

    def act(self, key: bytes) -> None:
        """Perform what that peer has decided."""
        peer = self.peers[key]
        while peer.out:
            action = peer.out.pop(0)
            match action:
                case Send(message=message):
                    if isinstance(message, Commit) and message.tip.epoch == 0:
                        self.results[key].add(message.root)
                    for target in action.to:
                        self._send(key, target, (message, [memoryview(bytes(data)) for data in action.buffers]))
                case Ask(message=message):
                    for target in action.to:
                        self._send(key, target, Request(message, action.buffers, action))
                case Enter():
                    self._send(key, key, action)
                case FetchChunks(exchange=exchange):
                    for source in action.sources:
                        fetch = Fetch(exchange.book.begin.round, source.chunk)
                        self._send(key, source.owner, Request(fetch, (), action))

    def _send(self, source: bytes, target: bytes, message: Any) -> None:
        if self.connected(source, target):
            self.ways.setdefault((source, target), deque()).append(message)

    def waiting(self) -> list[tuple[bytes, bytes]]:
        return sorted(way for way, messages in self.ways.items() if messages)

    def deliver(self, way: tuple[bytes, bytes]) -> None:
        source, target = way
        message = self.ways[way].popleft()
        if target in self.dead:
            return
        peer = self.peers[target]
        match message:
            case Enter(begin=begin):
                peer.participant.started(begin, Leases())
            case Request():
                self._send(target, source, self._answer(peer, source, message))
            case Response():
                self._answered(peer, source, message)
            case (Hello(tip=tip), _):
                peer.told(source, tip, self.now)
            case (content, buffers):
                try:
                    peer.receive(source, content, buffers, self.now)
                except Refused:
                    assert not isinstance(content, Part | Result), "a member that obeys all rules was refused"
        if peer.participant.at.commit is not None and peer.participant.at.commit.tip.epoch == 0:
            self.results[target].add(peer.participant.at.commit.root)
        if peer.participant.at.missed is not None:
            self.results[target].add(peer.participant.at.missed.root)
        self._try_again(peer)
        self.act(target)

    def _try_again(self, peer: Peer) -> None:
        """Whose round has ended without a result joins again, as a trainer does."""
        participant = peer.participant
        if participant.given.input is not None and participant.given.finished is None and participant.at.tip.epoch == 0:
            participant.given.error = None
            try:
                participant.next_step(self.now)
            except Behind:
                participant.withdraw()  # to download that state

    def _answer(self, peer: Peer, source: bytes, request: Request) -> Response:
        if isinstance(request.message, Join):
            peer.expect_join(source, request.message)
        try:
            return Response(request, peer.receive(source, request.message, request.buffers, self.now))
        except Refused as error:
            return Response(request, None, str(error))

    def _answered(self, peer: Peer, source: bytes, response: Response) -> None:
        about, refused = response.request.about, response.refused
        if isinstance(about, FetchChunks):
            chunk = response.request.message.chunk
            digest = next(source.digest for source in about.sources if source.chunk == chunk)
            failed = {source: refused} if refused else {}
            if isinstance(response.answer, Reply):
                about.exchange.fetched(chunk, digest, memoryview(response.answer.buffers[0]))
            peer.participant.fetched(about.exchange, failed)
        elif not isinstance(about.message, Join):
            peer.answered(source, about.message, Refused(refused) if refused else response.answer, self.now)
        elif isinstance(response.answer, Hello) and response.answer.tip == about.message.tip:
            peer.participant.introduced(source)
            peer.participant.rejoin(source)

    # -- what goes wrong

    def kill(self, key: bytes, unsent: int) -> None:
        """Its process dies; the last `unsent` messages to each other peer have not left it."""
        self.dead.add(key)
        for (source, target), messages in self.ways.items():
            if source == key:
                for _ in range(min(unsent, len(messages))):
                    messages.pop()
            elif target == key:
                messages.clear()

    def cut_link(self, one: bytes, other: bytes) -> None:
        self.cut.add(frozenset((one, other)))
        for way in ((one, other), (other, one)):
            self.ways.pop(way, None)

    def unnoticed(self) -> list[tuple[bytes, bytes]]:
        """(peer, other) where the peer can't hear the other any more, and does not know it yet. What a peer has sent
        comes before the news of its loss."""
        return [
            (key, other)
            for key in self.living
            for other in self.peers
            if other not in self.gone[key] and not self.connected(key, other) and not self.ways.get((other, key))
        ]

    def notice(self, key: bytes, other: bytes) -> None:
        """That peer notices that the other is lost; what was asked there is not answered."""
        self.gone[key].add(other)
        peer = self.peers[key]
        known = peer.view.lose(other)
        if known:
            peer.members_changed(self.now)
        peer.lost(other, known, self.now)
        self.act(key)

    def heal(self) -> None:
        """All links are back, and all that live have found each other again."""
        self.cut.clear()
        for key in self.living:
            peer = self.peers[key]
            for other in sorted(self.gone[key] - self.dead):
                self.gone[key].remove(other)
                peer.view.returned(self.peers[other].view.me)
            peer.members_changed(self.now)
            self.act(key)

    def pass_time(self, seconds: float) -> None:
        """Timers run."""
        self.now += seconds
        for key in self.living:
            self.peers[key].tick(self.now)
            self.peers[key].succeed(self.now)
            self._try_again(self.peers[key])
            self.act(key)

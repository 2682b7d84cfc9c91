"""Peers that decide and do not talk: what `swarm.py`, `lead.py` and `round.py` do with a message, without a network,
a clock or a vector. The digest of a chunk stands for its bytes: it hashes whose parts were summed."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from blake3 import blake3

from shoal.swarm.protocol.book import Book, RuleBroken
from shoal.swarm.protocol.coordinator import Coordinator, Phase, Send
from shoal.swarm.protocol.messages import (
    Abort,
    Begin,
    Commit,
    Done,
    Fetch,
    Have,
    Hello,
    Part,
    Repair,
    Result,
    Survey,
    Terms,
)
from shoal.swarm.protocol.participant import Participant
from shoal.swarm.protocol.tip import Tip
from tests.averaging.rounds import RULES, chunks_of, member


@dataclass(frozen=True)
class Refusal:
    """The answer to a survey or a repair that is not followed."""

    message: Survey | Repair


@dataclass(frozen=True)
class Answered:
    """The answer to a survey."""

    survey: Survey
    have: Have | Hello


@dataclass(frozen=True)
class Brought:
    """A chunk (its digest): the average that a reducer sends, or the answer to a Fetch."""

    message: Result | Fetch
    digest: bytes


class Wire:
    """Messages on their way: of one pair of peers in their order, of several in any order."""

    def __init__(self) -> None:
        self.brains: dict[bytes, Brain] = {}
        self.ways: dict[tuple[bytes, bytes], deque[Any]] = {}
        self.cut: set[frozenset[bytes]] = set()

    def connected(self, one: bytes, other: bytes) -> bool:
        both_live = self.brains[one].alive and self.brains[other].alive
        return one == other or (both_live and frozenset((one, other)) not in self.cut)

    def send(self, source: bytes, target: bytes, message: Any) -> None:
        if self.connected(source, target):
            self.ways.setdefault((source, target), deque()).append(message)

    def waiting(self) -> list[tuple[bytes, bytes]]:
        return sorted(way for way, messages in self.ways.items() if messages)

    def deliver(self, way: tuple[bytes, bytes]) -> None:
        message = self.ways[way].popleft()
        if self.brains[way[1]].alive:
            self.brains[way[1]].receive(way[0], message)

    def kill(self, key: bytes, unsent: int) -> None:
        """Its process dies; the last `unsent` messages to each other peer have not left it."""
        self.brains[key].alive = False
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


@dataclass
class Brain:
    """One peer."""

    key: bytes
    wire: Wire
    tip: Tip
    alive: bool = True
    book: Book | None = None
    lead: Coordinator | None = None
    results: set[bytes] = field(default_factory=set)  # committed at `tip`
    gone: set[bytes] = field(default_factory=set)  # who is known to be lost
    early: list[tuple[bytes, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.participant = Participant(self.key, self.tip)

    def act(self, actions: list[Send]) -> None:
        for action in actions:
            for target in action.to:
                self.wire.send(self.key, target, action.message)

    def say(self, target: bytes, message: Any) -> None:
        self.wire.send(self.key, target, message)

    def receive(self, sender: bytes, message: Any) -> None:
        match message:
            case Begin():
                self.enter(sender, message, relayed=False)
            case Part() | Brought(message=Result()):
                self.on_chunk(sender, message)
            case Brought(message=Fetch()):
                self.on_fetched(message)
            case Fetch():
                if self.book is not None and self.book.begin.round == message.round:
                    self.say(sender, Brought(message, self.book.digests[message.chunk]))
            case Done():
                if self.lead is not None and self.lead.begin is not None:
                    view = [m for m in self.lead.begin.members if self.wire.connected(self.key, m.key)]
                    self.act(self.lead.finished(sender, message, view, 0.0))
            case Survey():
                self.on_survey(sender, message)
            case Answered():
                self.on_answer(sender, message)
            case Repair():
                self.on_repair(sender, message)
            case Refusal(message=refused):
                if self.lead is not None and self.lead.ballot == refused.ballot:
                    if isinstance(refused, Survey):
                        self.act(self.lead.put_out(sender, "it refuses", 0.0))
                    elif self.lead.phase is Phase.RUNNING:
                        self.act(self.lead.start_survey(0.0))
            case Commit():
                self.on_commit(message)
            case Abort():
                begin, ballot = self.participant.begin, self.participant.ballot
                if begin and ballot and begin.round == message.round and ballot.coordinator == sender:
                    self.participant.leave()
                    self.book = None
        self.check_done()

    # -- as a member

    def enter(self, sender: bytes, begin: Begin, *, relayed: bool) -> None:
        try:
            self.participant.follow_begin(sender, begin, joined=True, relayed=relayed)
        except RuleBroken:
            return
        self.book = Book(self.key, begin, chunks_of(begin))
        self.reduce(self.book.put_out(()))
        self.send_parts()
        self.look_again()

    def send_parts(self) -> None:
        assert self.book is not None
        for owner, chunk in self.book.next_parts():
            self.say(owner, Part(self.book.begin.round, chunk, self.book.plan, 1.0))

    def look_again(self) -> None:
        early, self.early = self.early, []
        for sender, message in early:
            self.on_chunk(sender, message)

    def on_chunk(self, sender: bytes, message: Part | Brought) -> None:
        content = message.message if isinstance(message, Brought) else message
        assert not isinstance(content, Fetch)
        if self.book is None or self.book.begin.round != content.round:
            if not self.results:
                self.early.append((sender, message))
            return
        if sender in self.book.out:
            return
        if content.plan > self.book.plan:
            self.early.append((sender, message))
            return
        # RuleBroken here would put out a member that obeys all rules: then the test fails.
        if isinstance(message, Part):
            wanted = self.book.part_arrived(sender, message.chunk, message.plan, message.weight)
            if wanted and self.book.is_ready(message.chunk):
                self.reduce([message.chunk])
        else:
            if self.book.result_arrived(sender, content.chunk, content.plan):
                self.book.received(content.chunk, message.digest)
            self.send_parts()

    def reduce(self, chunks: list[int]) -> None:
        book = self.book
        assert book is not None
        for chunk in chunks:
            digest = blake3(b"%d" % chunk + b"".join(sorted({*book.parts[chunk], self.key}))).digest()
            book.reduced(chunk)
            for key in book.keys:
                if key != self.key and key not in book.out:
                    self.say(key, Brought(Result(book.begin.round, chunk, book.plan), digest))
            book.received(chunk, digest)

    def on_fetched(self, brought: Brought) -> None:
        if self.book is not None and self.book.begin.round == brought.message.round and brought.digest:
            self.book.received(brought.message.chunk, brought.digest)

    def check_done(self) -> None:
        participant = self.participant
        if self.book is None or participant.awaits_repair or participant.done == participant.ballot:
            return
        if self.book.complete:
            ballot = participant.was_complete()
            self.say(ballot.coordinator, Done(self.book.begin.round, ballot, self.book.root()))

    def on_survey(self, sender: bytes, survey: Survey) -> None:
        participant, commit = self.participant, self.participant.commit
        if commit is not None:
            answer: Have | Hello = Have(survey.ballot, (), None, (), None, commit)
            if commit.round != survey.round:
                answer = Hello(member(0), Terms({}, bytes(32)), participant.tip, ())
            self.say(sender, Answered(survey, answer))
            return
        if participant.begin is None and survey.begin is not None:
            self.enter(sender, survey.begin, relayed=True)
        begin, ballot = participant.begin, participant.ballot
        if begin is not None and ballot is not None and begin.round == survey.round and ballot > survey.ballot:
            self.say(sender, Answered(survey, Have(ballot, (), None, (), None, None)))
            return
        try:
            participant.follow_survey(sender, survey)
        except RuleBroken:
            self.say(sender, Refusal(survey))
            return
        assert self.book is not None
        self.reduce(self.book.put_out(survey.out))
        book = self.book
        have = Have(
            survey.ballot, tuple(book.digests), participant.done, tuple(book.out), participant.repair, None
        )  # fmt: skip
        self.say(sender, Answered(survey, have))

    def on_repair(self, sender: bytes, repair: Repair) -> None:
        try:
            self.participant.follow_repair(sender, repair)
        except RuleBroken:
            self.say(sender, Refusal(repair))
            return
        assert self.book is not None
        fetches, ready = self.book.repair(repair)
        self.reduce(ready)
        self.send_parts()
        for source in fetches:
            self.say(source.owner, Fetch(repair.round, source.chunk))
        self.look_again()

    def on_commit(self, commit: Commit) -> None:
        if commit.tip != self.participant.tip:
            if commit.tip == self.tip:
                self.results.add(commit.root)
            return
        self.results.add(commit.root)
        self.participant.advance(commit)
        self.book = self.lead = None
        for other in self.wire.brains:
            if other != self.key:
                self.say(other, commit)

    # -- as a coordinator, or the next one

    def on_answer(self, sender: bytes, answered: Answered) -> None:
        lead, have = self.lead, answered.have
        if lead is None:
            return
        if isinstance(have, Hello):
            self.act(lead.abort("others are past this round"))
        elif have.ballot > answered.survey.ballot:
            reachable = self.wire.connected(self.key, have.ballot.coordinator)
            self.act(lead.outbid(have.ballot, reachable, 0.0))
        else:
            self.act(lead.surveyed(sender, answered.survey.ballot, have, 0.0))

    def notice(self, key: bytes) -> None:
        """That one is lost, to this peer."""
        self.gone.add(key)
        if self.participant.commit is not None:
            for other in self.wire.brains:
                self.say(other, self.participant.commit)
        if self.lead is not None:
            self.act(self.lead.put_out(key, "lost", 0.0))

    @property
    def may_take_over(self) -> bool:
        """Whether nobody coordinates the round that it is in, as far as it knows."""
        ballot = self.participant.ballot
        if not self.alive or self.participant.begin is None or ballot is None:
            return False
        if ballot.coordinator == self.key:
            return self.lead is None or self.lead.phase is Phase.ABORTED
        return ballot.coordinator in self.gone

    def take_over(self) -> None:
        begin = self.participant.begin
        assert begin is not None
        lost = [m.key for m in begin.members if m.key in self.gone]
        self.lead = Coordinator.successor(self.key, begin, self.participant.attempt, lost, RULES)
        self.act(self.lead.start_survey(0.0))

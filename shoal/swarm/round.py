"""One peer's way through rounds, from BEGIN to COMMIT: drives its `Participant` and the `Exchange` of the bytes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from shoal.p2p.errors import P2PError, Refused
from shoal.p2p.identity import PeerID
from shoal.p2p.node import Answer
from shoal.swarm.bytes_exchange import BytesExchange
from shoal.swarm.contribution import Attempt, Outcome
from shoal.swarm.early import EarlyChunks
from shoal.swarm.fetching import Fetching, serve
from shoal.swarm.neighbourhood import Neighbourhood
from shoal.swarm.protocol.book import RuleBroken
from shoal.swarm.protocol.errors import AveragingError
from shoal.swarm.protocol.messages import (
    Abort,
    Begin,
    Broken,
    Carries,
    Commit,
    Digests,
    Done,
    Elsewhere,
    Fetch,
    Follows,
    Have,
    Part,
    Ping,
    Pong,
    Repair,
    Result,
    Survey,
    Waiting,
)
from shoal.swarm.silence import Silence

log = logging.getLogger(__name__)

AGAIN_SECONDS = 1.5  # that a round waits for a member that this peer could not reach before


class RoundDriver:
    """Takes this peer through the rounds that it has joined.

    Args:
        neighbourhood: this peer among the members of its run.
        chunk_timeout: seconds that an answer may take.
        sender_timeout, reducer_timeout: seconds of silence after which one that owes parts, or results, is complained
            of.

    Attributes:
        attempt: the call for a round that is under way.
        changed: set by whatever may let that call go on.
        got_on_at: when a round was last seen to get on, on the loop's clock.
    """

    def __init__(
        self, neighbourhood: Neighbourhood, chunk_timeout: float, sender_timeout: float, reducer_timeout: float
    ) -> None:
        channel, participant = self._channel, self._participant = neighbourhood.channel, neighbourhood.participant
        self._membership, self._chunk_timeout = neighbourhood.membership, chunk_timeout
        self._fetching = Fetching(channel, chunk_timeout, self.gets_on)
        self._silence = Silence(channel, participant, sender_timeout, reducer_timeout)
        self.attempt: Attempt | None = None
        self.got_on_at = float("-inf")
        self._of_all = 0  # the signs of all members, as the coordinator last told
        self.changed = asyncio.Event()
        self._last: BytesExchange | None = None  # of the last commit: serves those that missed it
        self._early = EarlyChunks()
        self._left = b""  # the round that this peer was in last, and left

    @property
    def _exchange(self) -> BytesExchange | None:
        """Of the round that this peer is in."""
        return self.attempt.exchange if self.attempt is not None and self._participant.begin is not None else None

    def on_begin(self, peer: PeerID, begin: Begin, buffers: Sequence[memoryview]) -> None:
        """The coordinator begins a round with this peer in it. Raises Refused if this peer must not follow."""
        try:
            self.enter(peer, begin, buffers, relayed=False)
        except RuleBroken as error:
            # The coordinator waits for this peer now: it must hear that it waits in vain, and for whom it would have
            # to.
            other = self._participant.other_coordinator(peer.key)
            broken = Broken(begin.round, self._participant.me, False, str(error)[:256])
            self._channel.notify([peer.key], Elsewhere(other) if other is not None else broken)
            raise Refused(str(error)) from error

    def enter(self, peer: PeerID, begin: Begin, buffers: Sequence[memoryview], *, relayed: bool) -> None:
        """Enter a round; `relayed` by another than its coordinator. Raises RuleBroken if this peer must not follow."""
        attempt = self.attempt
        joined = attempt is not None and attempt.outcome is None
        self._participant.follow_begin(peer.key, begin, joined=joined, relayed=relayed)
        assert attempt is not None
        try:
            if attempt.contribution.tip not in (None, begin.tip):
                raise RuleBroken("BEGIN of a state that this peer's input was not made from")
            attempt.gathered = _gathered.decode(buffers[0]) if buffers else {}
            attempt.exchange = attempt.contribution.open(begin, self._channel.notify, self.complain)
        except (RuleBroken, msgspec.MsgspecError) as error:
            self._participant.leave()
            raise RuleBroken(str(error)) from error
        attempt.began = self._now()
        self._of_all = 0
        self.gets_on()
        self._forget(self._last)  # its memory is written again
        self._last = None
        self.changed.set()  # who waits for the result goes by the time of this round
        self._channel.spawn(self._flow(attempt, begin))

    async def _flow(self, attempt: Attempt, begin: Begin) -> None:
        """Connect to the reducers, then let the bytes flow."""
        node = self._channel.node
        missing = [m for m in begin.members if m.addresses and not node.is_connected(m.peer)]
        for member in missing:
            self._channel.learn(member)
        # One that this peer has tried to reach in vain may be there now, but all wait for this.
        lost = self._membership.lost
        patience = [AGAIN_SECONDS if member.key in lost else self._chunk_timeout for member in missing]
        results = await asyncio.gather(
            *(node.connect(member.peer, seconds) for member, seconds in zip(missing, patience, strict=True)),
            return_exceptions=True,
        )
        for member, result in zip(missing, results, strict=True):
            if isinstance(result, P2PError):
                self.complain(member.key, str(result), fault=False)
            elif isinstance(result, BaseException):
                raise result
        if attempt.contribution.prepare is not None:
            self._silence.ask_to_wait(attempt)
            await attempt.contribution.prepare()
        if attempt.exchange is None or self._participant.begin is not begin:
            return
        attempt.exchange.start(attempt.contribution.weight, self._channel.leases)
        self._follow_plan(begin.round)

    def _follow_plan(self, round_id: bytes) -> None:
        """There is a new plan: the chunks that came before it may belong to it."""
        for peer, message, buffers in self._early.take(round_id):
            try:
                self.on_chunk(peer, message, buffers)
            except Refused as error:
                log.warning("%r refused a chunk of %r: %s", self._channel.node.peer_id, peer, error)
        self._check_done()

    def on_chunk(self, peer: PeerID, message: Part | Result, buffers: Sequence[memoryview]) -> None:
        """A chunk has come. Raises Refused, and complains of the sender, if it does not belong here."""
        exchange = self._exchange
        if exchange is None or exchange.book.begin.round != message.round:
            # Chunks pass beside other messages: what says of which round they are may come later, or have come.
            known = message.round == self._left or self._participant.commit_of(message.round) is not None
            if self.attempt is not None and not known:
                self._keep_early(peer, message, buffers)
            return
        book = exchange.book
        if peer.key in book.out:
            return
        if message.plan > book.plan and peer.key in book.weights:
            self._keep_early(peer, message, buffers)
            return
        try:
            if isinstance(message, Part):
                exchange.part(peer.key, message, buffers)
            else:
                exchange.result(peer.key, message, buffers)
        except RuleBroken as error:
            self.complain(peer.key, str(error))
            raise Refused(str(error)) from error
        self._check_done()

    def _keep_early(self, peer: PeerID, message: Part | Result, buffers: Sequence[memoryview]) -> None:
        if peer.key not in self._membership.members and not self._participant.is_with(peer.key):
            raise Refused("a chunk from a peer that is no member")
        self._early.keep(peer, message, buffers)

    def _check_done(self) -> None:
        exchange, participant = self._exchange, self._participant
        if exchange is None or participant.awaits_repair or participant.done == participant.ballot:
            return
        if exchange.book.complete:
            ballot = participant.was_complete()
            self._channel.notify([ballot.coordinator], Done(exchange.book.begin.round, ballot, exchange.book.root()))

    def on_survey(self, peer: PeerID, survey: Survey, buffers: Sequence[memoryview]) -> Have | Elsewhere:
        """A coordinator puts members out and asks what the others hold. Raises Refused if it must not be followed."""
        commit = self._participant.commit_of(survey.round)
        if commit is not None:
            return Have(survey.ballot, (), None, (), None, commit)
        try:
            if self._participant.begin is None and survey.begin is not None and survey.begin.round == survey.round:
                self.enter(peer, survey.begin, buffers, relayed=True)
            begin, ballot = self._participant.begin, self._participant.ballot
            other = self._participant.other_coordinator(peer.key)
            if begin is not None and begin.round != survey.round and other is not None:
                return Elsewhere(other)  # its round can't commit without this peer, who is in another of the same tip
            if begin is not None and begin.round == survey.round and ballot is not None and ballot > survey.ballot:
                return Have(ballot, (), None, (), None, None)
            self._participant.follow_survey(peer.key, survey)
        except RuleBroken as error:
            raise Refused(str(error)) from error
        exchange = self._exchange
        if exchange is None:
            raise Refused("this peer has left the round")
        exchange.put_out(survey.out)
        book = exchange.book
        digests = tuple(book.digests) if book.receives[self._participant.me] else ()
        return Have(survey.ballot, digests, self._participant.done, tuple(book.out), self._participant.repair, None)

    def on_repair(self, peer: PeerID, repair: Repair) -> Follows:
        """A coordinator says where chunks come from now. Raises Refused if it must not be followed."""
        exchange = self._exchange
        try:
            self._participant.follow_repair(peer.key, repair)
            if exchange is None:
                raise RuleBroken("this peer has left the round")
            sources = exchange.repair(repair)
        except RuleBroken as error:
            raise Refused(str(error)) from error
        if sources:
            self._fetching.begin(exchange, [(s.owner, s.chunk, s.digest) for s in sources], self._fetched)
        self._follow_plan(repair.round)
        return Follows(repair.ballot)

    def _fetched(self, failed: dict[bytes, str]) -> None:
        for holder, reason in failed.items():
            self.complain(holder, reason, fault=False)
        self._check_done()

    def on_fetch(self, message: Fetch | Digests) -> Answer:
        """Somebody asks for what this peer holds of a round. Raises Refused if it does not."""
        return serve(self._exchange or self._last, message)

    def on_abort(self, peer: PeerID, abort: Abort) -> None:
        """The coordinator ends the round, or this peer's part in it. Raises Refused if it is not the coordinator."""
        begin, ballot = self._participant.begin, self._participant.ballot
        if begin is not None and begin.round == abort.round:
            if ballot is None or ballot.coordinator != peer.key:
                raise Refused("ABORT from a peer that does not coordinate the round")
            self.fail(AveragingError(f"the round was ended by {peer!r}: {abort.reason}"))

    def on_commit(self, commit: Commit) -> bool:
        """The round of this peer's tip is committed, with this peer or without it; returns whether this peer holds the
        result."""
        attempt, exchange = self.attempt, self._exchange
        if attempt is None or exchange is None or exchange.book.begin.round != commit.round:
            return False
        holds = exchange.book.complete and exchange.book.root() in (commit.root, b"")
        if holds:
            self._has_result(attempt, exchange, commit, missed=False)
        return holds

    async def fetch_committed(self, attempt: Attempt, commit: Commit) -> None:
        """Get the average of a round that went on without this peer, from those who were in it; or that this peer has,
        but did not use. Raises `ResultLost` if nobody brings it."""
        self._forget(attempt.exchange)
        self._forget(self._last)
        exchange, self._last = self._last, None  # its memory is written again, but for what it is asked for
        # The two sides of a partition may commit two results of one round.
        held = exchange is not None and exchange.book.begin.round == commit.round
        missed = exchange is None or not held or exchange.book.root() not in (commit.root, b"")
        if exchange is None or missed:
            exchange = await self._fetching.fetch_committed(
                commit, lambda begin: attempt.contribution.open(begin, self._channel.notify, lambda key, reason: None)
            )
        attempt.began = self._now()
        self._has_result(attempt, exchange, commit, missed=missed)

    def _has_result(self, attempt: Attempt, exchange: BytesExchange, commit: Commit, *, missed: bool) -> None:
        node, self._last = self._channel.node, exchange
        attempt.outcome = Outcome(
            begin=exchange.book.begin,
            commit=commit,
            gathered=attempt.gathered,
            missed=missed,
            matchmaking_seconds=attempt.began - attempt.started,
            allreduce_seconds=self._now() - attempt.began,
            join_to_begin_seconds=attempt.join_to_begin,
            bytes_sent=node.bytes_sent - attempt.sent,
            bytes_received=node.bytes_received - attempt.received,
        )

    def finish(self) -> None:
        """The call that this was for is over, with a result or without."""
        attempt = self.attempt
        if attempt is not None and attempt.outcome is None and self._participant.begin is not None:
            self.complain(self._participant.me, "it gave up", fault=False)
            self.leave()
        if attempt is not None:
            self._forget(attempt.exchange)
        self.attempt = None
        self._early.clear()
        self._fetching.stop()

    def _forget(self, exchange: BytesExchange | None) -> None:
        """Its memory is about to be used for something else: nothing is written there, nor sent from there."""
        if exchange is not None:
            exchange.close()
            for carries in (Carries.PART, Carries.RESULT):
                self._channel.cancel(exchange.book.begin.round + carries.value)

    def leave(self) -> None:
        """Be in no round."""
        self._participant.leave()
        self._fetching.stop()
        if self.attempt is not None:
            if self.attempt.exchange is not None:
                self._left = self.attempt.exchange.book.begin.round
            self._forget(self.attempt.exchange)
            self.attempt.exchange = None
            self.attempt.joined = None

    def fail(self, error: AveragingError) -> None:
        """The round gives this peer no result, for this reason."""
        self.leave()
        if self.attempt is not None:
            self.attempt.error = error
        self.changed.set()

    def complain(self, key: bytes, reason: str, *, fault: bool = True) -> None:
        """Tell the coordinator that this peer can't go on with that member; `fault` if it has broken a rule."""
        begin, ballot = self._participant.begin, self._participant.ballot
        if begin is not None and ballot is not None:
            me = self._membership.me.peer
            log.info("%r in round of epoch %d: %r: %s", me, begin.tip.epoch, PeerID(key), reason)
            self._channel.notify([ballot.coordinator], Broken(begin.round, key, fault, reason[:256]))

    def on_waiting(self, peer: PeerID, message: Waiting) -> None:
        """A member's user has not allowed the round yet. Raises Refused if that is no member of this peer's round."""
        self._silence.on_waiting(self.attempt, peer, message)

    def look(self) -> None:
        """Call it every second: complain of those that hold up the round, if nothing has come for too long."""
        before = self._silence.signs
        for key, reason in self._silence.look(self.attempt).items():
            self.complain(key, reason, fault=False)
        if self._silence.signs != before:
            self.gets_on()

    @property
    def signs(self) -> int:
        """How often this peer has seen a round get on."""
        return self._silence.signs

    @property
    def quiet(self) -> list[bytes]:
        """The keys of members that owe something and have been silent for a while."""
        return self._silence.quiet if self._exchange is not None else []

    def answered(self, key: bytes, ping: Ping, pong: Pong) -> None:
        """A member was asked how a round gets on, and says so."""
        self._silence.answered(key, pong.signs)
        begin, ballot = self._participant.begin, self._participant.ballot
        if begin is None or begin.round != ping.round or ballot is None or ballot.coordinator != key:
            return
        if not pong.knows:
            # It was started anew, or has given the round up, and this peer has missed that.
            self.fail(AveragingError(f"{PeerID(key)!r} does not coordinate the round any more"))
        elif pong.of_all > self._of_all:
            self._of_all = pong.of_all
            self.gets_on()

    def gets_on(self) -> None:
        """The round was seen to get on, so the patience of who waits for its end counts from now. (Not where the input
        hangs on no state: there a user has said how long the call may take.)"""
        self.got_on_at = self._now()
        attempt = self.attempt
        if attempt is None or attempt.contribution.tip is None or attempt.patience is None:
            return
        if not attempt.patience.expired():
            attempt.patience.reschedule(self.got_on_at + attempt.timeout)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


_gathered = msgspec.msgpack.Decoder(dict[bytes, bytes])

"""One peer's part in a run: what it can be asked to do there, and what becomes of each message and each loss.

It and what it is made of are drivers: what is decided, is decided in `Membership`, `Coordinator`, `Participant` and
`Book`. They live on the node's loop, and import no torch: the bytes are the `Exchange`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

from shoal.p2p.errors import P2PError, Refused, Unavailable
from shoal.p2p.identity import PeerID
from shoal.p2p.node import Answer, Node, Service
from shoal.swarm.channel import Channel
from shoal.swarm.contribution import Contribution, Outcome
from shoal.swarm.coordination import Coordination
from shoal.swarm.directory import Directory
from shoal.swarm.following import Following
from shoal.swarm.liveness import Liveness
from shoal.swarm.matchmaking import Matchmaking
from shoal.swarm.neighbourhood import Neighbourhood
from shoal.swarm.protocol.member import Member, Role
from shoal.swarm.protocol.membership import Membership
from shoal.swarm.protocol.messages import (
    Abort,
    Begin,
    Broken,
    Call,
    Commit,
    Count,
    Describe,
    Digests,
    Done,
    Elsewhere,
    Fetch,
    Hello,
    Join,
    Leave,
    Message,
    Orphaned,
    Part,
    Ping,
    Pong,
    Progress,
    Repair,
    Result,
    Survey,
    Terms,
    Unjoin,
    Waiting,
)
from shoal.swarm.protocol.participant import Participant
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.tensors import Tensors
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.reporting import Reporting
from shoal.swarm.round import RoundDriver

DEFAULT_CHUNK_TIMEOUT = 15.0  # `next_chunk_timeout` when none is given, in seconds
JOIN_TIMEOUT = 10.0

log = logging.getLogger(__name__)


class Swarm:
    """The rounds of one run, for one peer.

    Args:
        node: this peer.
        directory: where the members of the run are listed.
        run_id: names the run.
        me: this peer as a member.
        terms: what must be equal in the run.
        rules: when a round begins; the same for all members but for the times.
        chunk_timeout: seconds of silence after which a member that holds up a round is left out.
        sender_timeout, reducer_timeout: the same of those that owe parts (`chunk_timeout` when None), and of those that
            owe results (twice `sender_timeout`).
        request_timeout: seconds that the coordinator may take to answer.
        keeps_state: whether a tip names a state that this peer keeps, and so only has with the result of its round.
        on_commit: called with every commit that this peer follows.
        tensors: those behind the schema hash in `terms`: a peer with other ones is told which differ.
    """

    def __init__(
        self,
        node: Node,
        directory: Directory,
        run_id: str,
        me: Member,
        terms: Terms,
        rules: Rules,
        *,
        chunk_timeout: float | None = None,
        sender_timeout: float | None = None,
        reducer_timeout: float | None = None,
        request_timeout: float = JOIN_TIMEOUT,
        keeps_state: bool = False,
        on_commit: Callable[[Commit], None] = lambda commit: None,
        tensors: Sequence[Tensors] = (),
    ) -> None:
        chunk_timeout = DEFAULT_CHUNK_TIMEOUT if chunk_timeout is None else chunk_timeout
        sender_timeout = chunk_timeout if sender_timeout is None else sender_timeout
        # A reducer that waits for a part looks like one that stalls, so it may complain first.
        reducer_timeout = 2 * sender_timeout if reducer_timeout is None else reducer_timeout
        self.node, self.me, self.rules, self._request_timeout = node, me, rules, request_timeout
        participant = self.participant = Participant(me.key, Tip.genesis(run_id))
        membership = self.membership = Membership(run_id, me)
        self.service = Service(f"averaging/{run_id}", Message, self._undecodable)
        channel = self._channel = Channel(node, self.service)
        neighbourhood = self.neighbourhood = Neighbourhood(
            channel,
            participant,
            membership,
            directory,
            terms,
            changed=self._review,
            heard=lambda peer, tip: self._following.heard(peer, tip),
            tensors=tensors,
        )
        driver = self._round = RoundDriver(neighbourhood, chunk_timeout, sender_timeout, reducer_timeout)
        coordination = self._coordination = Coordination(neighbourhood, driver, rules, chunk_timeout)
        following = self._following = Following(neighbourhood, driver, coordination, keeps_state, on_commit)
        self._reporting = Reporting(neighbourhood, following, request_timeout)
        self._matchmaking = Matchmaking(neighbourhood, driver, coordination, following, request_timeout)
        self._liveness = Liveness(
            channel, chunk_timeout, self._waited_for, self._ping, self._answered, self._stood_still
        )
        self._watching: list[bytes] = []
        self._retired = False
        self._tasks: list[asyncio.Task[Any]] = []
        self._stop_listening: Callable[[], None] = lambda: None

    @property
    def tip(self) -> Tip:
        """The state that this peer is at."""
        return self.participant.tip

    @property
    def called(self) -> bool:
        """Whether the coordinator has called the round of this tip."""
        return self._following.called

    @property
    def behind(self) -> Tip | None:
        """The best state that a connected member holds, if it outranks ours."""
        return self._following.behind

    def forget_behind(self) -> None:
        """Nobody could bring a state that outranks ours: those who hold it are not asked for a while."""
        self._following.forget_behind()

    @property
    def made(self) -> bool:
        """Whether this peer has ended an epoch since its start: then it is no newcomer any more."""
        return self._following.made

    @property
    def got_on_at(self) -> float:
        """When a round was last seen to get on, on the loop's clock."""
        return self._round.got_on_at

    # -- life

    async def start(self) -> None:
        """Serve, be listed, and meet the members that are there."""
        self._coordination.settle()
        self._stop_listening = self.node.on_lost(lambda peer, reason: self._lost(peer))
        self.node.serve(self.service, self._handle)
        await self.neighbourhood.start()
        self._tasks = [self.node.spawn(self._liveness.run())]

    def stop(self) -> None:
        """Leave the run."""
        if not self._retired:
            self.retire()
        self.node.stop_serving(self.service)
        self._stop_listening()
        for task in self._tasks:
            task.cancel()
        self._coordination.stop()

    def retire(self) -> None:
        """Leave the run, but until `stop` still tell those who missed the last round what it was."""
        self._channel.notify(self.membership.others(), Leave())
        self.neighbourhood.stop()
        self._retired = True

    def move(self, tip: Tip, *, made: bool = False) -> None:
        """Be at another state: it was downloaded, or this peer has `made` it alone. All are told: a JOIN for the old
        tip is void."""
        self._following.move(tip, made=made)

    def catch_up(self) -> Tip:
        """For a peer that holds no state: be at the best one that was heard of; returns it. An auxiliary peer counts
        for nothing there: it goes back as well, to the best one that a connected member holds."""
        best, lends = self._following.best, self.me.role is Role.AUXILIARY
        if best is not None and best != self.tip and (lends or best.outranks(self.tip)):
            self.move(best)
        return self.tip

    # -- samples and rounds

    async def report(self, report: Progress) -> Count:
        """Tell the coordinator this peer's samples since the tip; returns what all members have. Raises `Behind` if
        the coordinator is at a state that outranks ours, P2PError if it can't be asked, `Rejected` if the run goes by
        other terms."""
        return await self._reporting.report(report)

    async def be_awaited(self, tip: Tip, holders: Sequence[PeerID]) -> bool:
        """Tell whoever coordinates at the state `tip`, as these holders of it know, that this peer is downloading it;
        whether the next round waits for that."""
        for holder in holders:
            try:
                if await self._is_awaited(holder, Progress(tip, 0.0, 0.0, loading=True)):
                    return True
            except (P2PError, TimeoutError) as error:
                log.debug("could not ask %r to be waited for: %s", holder, error)
        return False

    async def _is_awaited(self, holder: PeerID, loading: Progress) -> bool:
        answer = (await self._channel.ask(holder.key, loading, self._request_timeout)).body
        if isinstance(answer, Elsewhere):
            coordinator = answer.coordinator
            await self.neighbourhood.meet(coordinator)
            answer = (await self._channel.ask(coordinator.key, loading, self._request_timeout)).body
        return isinstance(answer, Count)

    @contextlib.contextmanager
    def watching(self, keys: Iterable[bytes]) -> Iterator[None]:
        """Within, this peer waits for these: one that gives no sign of life is lost."""
        self._watching = list(keys)
        try:
            yield
        finally:
            self._watching = []

    async def news(self) -> None:
        """Return when the round of this tip is called, the tip changes, or a state that outranks it is heard of."""
        await self._following.news()

    async def average(self, contribution: Contribution, timeout: float) -> Outcome:
        """Take part in the next round and return when it is committed; the exchange's outputs then hold the average.

        Raises AveragingError with the reason if there is no result within `timeout` seconds (for an input that was made
        from a state, without progress for so long), `Behind` if the swarm is not at `contribution.tip`, `Rejected` if
        the run goes by other terms.
        """
        return await self._matchmaking.average(contribution, timeout)

    def rejoin(self) -> None:
        """What the JOIN said has changed: say it anew. Nothing to do once the round has begun."""
        self._matchmaking.rejoin()

    # -- messages

    def _handle(self, peer: PeerID, message: Any, buffers: Sequence[memoryview]) -> Answer | Awaitable[Answer]:
        if self._retired and isinstance(message, Hello | Progress | Join | Call | Begin):
            raise Unavailable("this peer has left the run")
        match message:
            case Progress():
                return self._coordination.on_progress(peer, message)
            case Join():
                return self._coordination.on_join(peer, message, bytes(buffers[0]) if buffers else b"")
            case Survey() if message.tip != self.tip and self.participant.commit_of(message.round) is None:
                return self.neighbourhood.hello()
            case Survey():
                return self._round.on_survey(peer, message, buffers)
            case Repair():
                return self._round.on_repair(peer, message)
            case Fetch() | Digests():
                return self._round.on_fetch(message)
            case Hello():
                return self.neighbourhood.on_hello(peer, message)
            case Describe():
                return self.neighbourhood.on_describe(peer, buffers[0] if buffers else b"")
            case Ping():
                return self._pong(peer, message)
        self._on_notice(peer, message, buffers)
        return None

    def _undecodable(self, peer: PeerID, reason: str) -> None:
        """What a member of this peer's round sends can't be read: nobody is to wait for it."""
        if self.participant.is_with(peer.key):
            self._round.complain(peer.key, reason)

    def _on_begin(self, peer: PeerID, begin: Begin, buffers: Sequence[memoryview]) -> None:
        if peer.key not in self.membership.members:
            # Should it be one that is wrongly believed to be lost, it must hear that it waits in vain.
            reason = "BEGIN from a peer that is no member"
            self._channel.notify([peer.key], Broken(begin.round, self.me.key, False, reason))
            raise Refused(reason)
        lead = self._coordination.lead
        if self._round.attempt is not None and lead is not None and peer == self.node.peer_id:
            self._round.attempt.join_to_begin = lead.join_to_begin
        self._round.on_begin(peer, begin, buffers)

    def _on_notice(self, peer: PeerID, message: Any, buffers: Sequence[memoryview]) -> None:
        match message:
            case Part() | Result():
                self._round.on_chunk(peer, message, buffers)
            case Begin():
                self._on_begin(peer, message, buffers)
            case Orphaned():
                self._coordination.on_orphaned(peer, message, buffers)
            case Done() | Broken() | Unjoin():
                self._coordination.on_notice(peer, message)
            case Waiting():
                self._round.on_waiting(peer, message)
                self._coordination.on_notice(peer, message)
            case Call():
                self._following.on_call(peer, message)
            case Commit():
                self._following.on_commit(peer, message)
            case Abort():
                self._round.on_abort(peer, message)
                self._matchmaking.waits_in_vain(peer)
            case Elsewhere():
                self._coordination.on_notice(peer, message)
                self.node.spawn(self._matchmaking.go_elsewhere(peer, message.coordinator))
            case Leave():
                self.neighbourhood.left(peer.key)
                self._lost(peer)
            case _:
                raise Refused(f"{type(message).__name__} is an answer, and nothing was asked")

    # -- who is there

    def _lost(self, peer: PeerID) -> None:
        self._following.lost(peer.key)
        self._coordination.lost(peer.key)

    def _review(self) -> None:
        """Members came or went: does somebody else coordinate now?"""
        self._coordination.members_changed()
        self._reporting.members_changed()
        self._round.changed.set()

    def _stood_still(self) -> None:
        """The others may have gone on without this peer: find them before a round is begun without them."""
        self._coordination.settle()
        self.neighbourhood.look(dial=True)

    def _waited_for(self) -> list[bytes]:
        """On whom this peer waits now."""
        return [*self._waited_for_in_round(), *self._watching]

    def _waited_for_in_round(self) -> list[bytes]:
        """The same, of those in a round or on the way to one. Also the moment to see whether a round gets on, and has a
        coordinator."""
        if self._is_short_of_members():
            self.neighbourhood.look()
        self._round.look()
        self._coordination.saw(self.me.key, self._round.signs)
        self._coordination.succeed()
        watched = self._coordination.watched
        if watched is not None:
            return watched
        attempt, ballot = self._round.attempt, self.participant.ballot
        if self.participant.begin is not None and ballot is not None:
            return [ballot.coordinator, *self._round.quiet]
        if attempt is not None and attempt.joined is not None:
            return [attempt.joined[0]]
        return self._reporting.waited_for

    def _ping(self) -> Ping:
        begin = self.participant.begin
        return Ping(begin.round if begin is not None else b"")

    def _pong(self, peer: PeerID, ping: Ping) -> Pong:
        """How the round gets on in which a member is; one that was committed is told once more."""
        begin, lead = self.participant.begin, self._coordination.lead
        commit = self.participant.commit_of(ping.round)
        if commit is not None:
            self._channel.notify([peer.key], commit)
            return Pong()
        leads = lead is not None and not lead.over and lead.is_of(ping.round)
        knows = not ping.round or leads or (begin is not None and begin.round == ping.round)
        return Pong(knows, self._round.signs, lead.signs if lead is not None and leads else 0)

    def _answered(self, key: bytes, ping: Ping, pong: Pong) -> None:
        self._round.answered(key, ping, pong)
        self._coordination.saw(key, pong.signs)

    def _is_short_of_members(self) -> bool:
        connected = len(self.neighbourhood.connected())
        alone_again = connected == 1 and bool(self.membership.lost)
        return alone_again or (self._round.attempt is not None and connected < max(2, self.rules.min_group))

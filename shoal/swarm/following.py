"""At which state of the run one peer is: it follows calls and commits, and hears of states that outrank its own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from shoal.p2p.errors import Refused
from shoal.p2p.identity import PeerID
from shoal.swarm.coordination import Coordination
from shoal.swarm.neighbourhood import Neighbourhood
from shoal.swarm.protocol.member import Role
from shoal.swarm.protocol.messages import Call, Commit, Elsewhere
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.round import RoundDriver

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 60.0  # seconds for which a state that nobody could bring is not asked for again


@dataclass(slots=True)
class _Claim:
    """A member's state, as it last told."""

    tip: Tip
    ignored: bool = False  # nobody could bring that state, and it is not asked for
    pause: float = FIRST_PAUSE  # for how long, the next time


class Following:
    """Moves a `Participant` from tip to tip.

    Args:
        neighbourhood: this peer among the members of its run.
        driver: of the round that this peer is in.
        coordination: of this peer's tip, if it is its turn.
        keeps_state: whether a tip names a state that this peer keeps. Then it goes on to the next one only when it
            holds the result of the round between them.
        on_commit: called with every commit that this peer follows.

    Attributes:
        called: whether the coordinator has called the round of this tip, or it was held without this peer.
        made: whether this peer has ended an epoch since its start: it is no newcomer any more.
    """

    def __init__(
        self,
        neighbourhood: Neighbourhood,
        driver: RoundDriver,
        coordination: Coordination,
        keeps_state: bool,
        on_commit: Callable[[Commit], None],
    ) -> None:
        self._channel, self._participant = neighbourhood.channel, neighbourhood.participant
        self._neighbourhood, self._membership = neighbourhood, neighbourhood.membership
        self._round, self._coordination, self._on_commit = driver, coordination, on_commit
        self._keeps_state = keeps_state
        self._claims: dict[bytes, _Claim] = {}
        self.called = self.made = False
        self._news = asyncio.Event()

    @property
    def tip(self) -> Tip:
        return self._participant.tip

    @property
    def best(self) -> Tip | None:
        """The best state that a connected member holds, of those that can be had; in any thread."""
        best: Tip | None = None
        for key, claim in list(self._claims.items()):
            member = self._membership.members.get(key)
            holds = member is not None and member.role is not Role.AUXILIARY and self._channel.is_connected(key)
            if holds and not claim.ignored and (best is None or claim.tip.outranks(best)):
                best = claim.tip
        return best

    @property
    def behind(self) -> Tip | None:
        """The best state that a connected member holds, if it outranks ours. The result of a round that this peer has
        missed is fetched first, so it counts as ours, unless this peer is a newcomer, who downloads."""
        best, missed = self.best, self._participant.missed
        ours = missed.next_tip if missed is not None and self.made else self.tip
        return best if best is not None and best.outranks(ours) else None

    def forget_behind(self) -> None:
        """Nobody could bring a state that outranks ours: those who hold it are not asked for a while."""
        for claim in self._claims.values():
            if claim.tip.outranks(self.tip) and not claim.ignored:
                claim.ignored = True
                asyncio.get_running_loop().call_later(claim.pause, self._remember, claim)
                claim.pause = min(2 * claim.pause, LONGEST_PAUSE)

    def _remember(self, claim: _Claim) -> None:
        claim.ignored = False
        self._tell_news()

    async def news(self) -> None:
        """Return when the round of this tip is called, the tip changes, or a state that outranks it is heard of."""
        await self._news.wait()

    def _tell_news(self) -> None:
        waited_for, self._news = self._news, asyncio.Event()
        waited_for.set()
        self._round.changed.set()

    def move(self, tip: Tip, *, made: bool = False) -> None:
        """Be at another state: it was downloaded, or this peer has `made` it alone. All are told: a JOIN for the old
        tip is void."""
        self._participant.move(tip)
        self.made = self.made or made
        self._new_tip(arrived=self._keeps_state and not made)
        self._neighbourhood.announce()

    def _new_tip(self, arrived: bool = False) -> None:
        """The tip has changed: what was about the old one is over."""
        self.called = False
        self._coordination.new_tip(arrived)
        self._tell_news()

    def heard(self, peer: PeerID, tip: Tip) -> None:
        """A member told its tip."""
        if peer.key in self._membership.members:
            self._claims.setdefault(peer.key, _Claim(tip)).tip = tip
        if not tip.outranks(self.tip):
            return
        self._coordination.others_are_past(peer)
        if self._coordination.coordinator_of_round() is None:
            self._round.leave()  # an orphan of a round that the others are past
        attempt = self._round.attempt
        if self._participant.begin is None and attempt is not None and attempt.contribution.tip is None:
            self.move(tip)  # what is averaged here hangs on no state: go on from where the others are
        self._tell_news()

    def lost(self, key: bytes) -> None:
        """A member is gone, and with it the state that it held."""
        self._claims.pop(key, None)

    # -- calls

    def on_call(self, peer: PeerID, call: Call) -> None:
        """A peer that takes itself for the coordinator calls the round of a tip."""
        begin, ballot = self._participant.begin, self._participant.ballot
        if call.tip != self.tip:
            self._channel.notify([peer.key], self._neighbourhood.hello())
        elif self._participant.missed is not None:
            self._channel.notify([peer.key], self._participant.missed)
        elif begin is not None and ballot is not None:
            coordinator = self._membership.members.get(ballot.coordinator)
            if coordinator is not None and coordinator.peer != peer:
                self._channel.notify([peer.key], Elsewhere(coordinator))
        else:
            self.is_called()
            if self._neighbourhood.coordinator().peer != peer:
                # One of the two does not know somebody whom the other knows: tell each other.
                self._channel.spawn(self._neighbourhood.meet_peer(peer))

    def is_called(self) -> None:
        """The coordinator has called the round of this tip."""
        self.called = True
        self._tell_news()

    # -- commits

    def on_commit(self, peer: PeerID, commit: Commit) -> None:
        """The round of a tip is committed. Raises Refused if that is told by a peer that is no member."""
        if commit.tip != self.tip or self._participant.missed is not None:
            return  # passed on by another member before, or of a state that this peer does not have
        begin = self._participant.begin
        if not self._participant.is_with(peer.key) and peer.key not in self._membership.members:
            raise Refused("COMMIT from a peer that is no member")
        holds = self._round.on_commit(commit)
        if begin is not None and begin.round != commit.round:
            # Another round of this tip than the one that we are in: those in ours must hear that it is void.
            self._channel.notify([m.key for m in begin.members if m.key != self._participant.me], commit)
        self._membership.fix(commit.view)
        # The coordinator may not reach all whom this peer reaches.
        reached = {peer.key, *(member.key for member in commit.view)}
        self._channel.notify([key for key in self._membership.others() if key not in reached], commit)
        if holds or not self._keeps_state:
            self._advance(commit)
        else:
            self._round.leave()
            self._participant.miss(commit)
            self._coordination.missed(commit)
            self.is_called()

    def _advance(self, commit: Commit) -> None:
        self._participant.advance(commit)
        self.made = True
        for key in commit.members:
            self._membership.told(key, behind=False)
            claim = self._claims.get(key)
            if claim is not None and claim.tip == commit.tip:
                claim.tip = commit.next_tip  # it was in that round, and goes on as this peer does
        self._new_tip()
        self._on_commit(commit)

    def has_missed_result(self) -> None:
        """The result of the round that was missed was fetched: go on from there, and say so, since those who were in it
        take this peer for one that is behind."""
        commit = self._participant.missed
        assert commit is not None
        self._advance(commit)
        self._neighbourhood.announce()

    def give_up_missed(self) -> None:
        """Nobody brings the result of the round that was missed: the epoch is made again."""
        self._participant.give_up_missed()
        self.called = False
        self._tell_news()

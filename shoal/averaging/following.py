"""At which state of the run one peer is: it follows calls and commits, and hears of states that outrank its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shoal.averaging.coordination import Coordination
from shoal.averaging.messages import Call, Commit, Elsewhere
from shoal.averaging.neighbourhood import Neighbourhood
from shoal.averaging.round import RoundDriver
from shoal.averaging.tip import Tip
from shoal.p2p.errors import Refused
from shoal.p2p.identity import PeerID


class Following:
    """Moves a `Participant` from tip to tip.

    Args:
        neighbourhood: this peer among the members of its run.
        driver: of the round that this peer is in.
        coordination: of this peer's tip, if it is its turn.
        on_commit: called with every commit that this peer follows.

    Attributes:
        called: whether the coordinator has called the round of this tip.
        behind: a state that outranks ours, of which a member told.
    """

    def __init__(
        self,
        neighbourhood: Neighbourhood,
        driver: RoundDriver,
        coordination: Coordination,
        on_commit: Callable[[Commit], None],
    ) -> None:
        self._channel, self._participant = neighbourhood.channel, neighbourhood.participant
        self._neighbourhood, self._membership = neighbourhood, neighbourhood.membership
        self._round, self._coordination, self._on_commit = driver, coordination, on_commit
        self.called = False
        self.behind: Tip | None = None
        self._news = asyncio.Event()

    @property
    def tip(self) -> Tip:
        return self._participant.tip

    async def news(self) -> None:
        """Return when the round of this tip is called, the tip changes, or a state that outranks it is heard of."""
        await self._news.wait()

    def _tell_news(self) -> None:
        waited_for, self._news = self._news, asyncio.Event()
        waited_for.set()
        self._round.changed.set()

    def move(self, tip: Tip) -> None:
        """Be at another state: it was downloaded, or made alone. All are told: a JOIN for the old tip is void."""
        self._participant.move(tip)
        self._new_tip()
        self._neighbourhood.announce()

    def _new_tip(self) -> None:
        """The tip has changed: what was about the old one is over."""
        self.called = False
        if self.behind is not None and not self.behind.outranks(self.tip):
            self.behind = None
        self._coordination.new_tip()
        self._tell_news()

    def heard(self, peer: PeerID, tip: Tip) -> None:
        """A member told its tip."""
        if not tip.outranks(self.tip):
            return
        self.behind = tip
        self._coordination.others_are_past(peer)
        if self._coordination.coordinator_of_round() is None:
            self._round.leave()  # an orphan of a round that the others are past
        attempt = self._round.attempt
        if self._participant.begin is None and attempt is not None and attempt.contribution.tip is None:
            self.move(tip)  # what is averaged here hangs on no state: go on from where the others are
        self._tell_news()

    # -- calls

    def on_call(self, peer: PeerID, call: Call) -> None:
        """A peer that takes itself for the coordinator calls the round of a tip."""
        begin, ballot = self._participant.begin, self._participant.ballot
        if call.tip != self.tip:
            self._channel.notify([peer.key], self._neighbourhood.hello())
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
        if commit.tip != self.tip:
            return  # passed on by another member before, or of a state that this peer does not have
        begin = self._participant.begin
        if not self._participant.is_with(peer.key) and peer.key not in self._membership.members:
            raise Refused("COMMIT from a peer that is no member")
        self._round.on_commit(commit)
        if begin is not None and begin.round != commit.round:
            # Another round of this tip than the one that we are in: those in ours must hear that it is void.
            self._channel.notify([m.key for m in begin.members if m.key != self._participant.me], commit)
        self._participant.advance(commit)
        self._membership.fix(commit.view)
        for key in commit.members:
            self._membership.told(key, behind=False)
        # The coordinator may not reach all whom this peer reaches.
        reached = {peer.key, *(member.key for member in commit.view)}
        self._channel.notify([key for key in self._membership.others() if key not in reached], commit)
        self._new_tip()
        self._on_commit(commit)

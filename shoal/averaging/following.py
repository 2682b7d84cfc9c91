"""At which state of the run one peer is: it follows calls and commits, and hears of states that outrank its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from shoal.averaging.coordination import Coordination
from shoal.averaging.membership import Membership
from shoal.averaging.messages import Call, Commit, Elsewhere
from shoal.averaging.neighbourhood import Neighbourhood
from shoal.averaging.participant import Participant
from shoal.averaging.round import RoundDriver
from shoal.averaging.tip import Tip
from shoal.p2p.errors import Refused
from shoal.p2p.identity import PeerID
from shoal.p2p.node import Node, Service


class Following:
    """Moves a `Participant` from tip to tip.

    Args:
        node, service: over which the run's messages go.
        participant: its promises.
        membership, neighbourhood: who this peer is and knows, and who is connected.
        driver: of the round that this peer is in.
        coordination: of this peer's tip, if it is its turn.
        changed: called when the round is called, the tip changes, or a state that outranks it is heard of.
        on_commit: called with every commit that this peer follows.

    Attributes:
        called: whether the coordinator has called the round of this tip.
        behind: a state that outranks ours, of which a member told.
    """

    def __init__(
        self,
        node: Node,
        service: Service,
        participant: Participant,
        membership: Membership,
        neighbourhood: Neighbourhood,
        driver: RoundDriver,
        coordination: Coordination,
        changed: Callable[[], None],
        on_commit: Callable[[Commit], None],
    ) -> None:
        self._node, self._service = node, service
        self._participant, self._membership, self._neighbourhood = participant, membership, neighbourhood
        self._round, self._coordination = driver, coordination
        self._changed, self._on_commit = changed, on_commit
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
        self._changed()

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
            self._node.notify([peer], self._service, self._neighbourhood.hello())
        elif begin is not None and ballot is not None:
            coordinator = self._membership.members.get(ballot.coordinator)
            if coordinator is not None and coordinator.peer != peer:
                self._node.notify([peer], self._service, Elsewhere(coordinator))
        else:
            self.is_called()
            if self._neighbourhood.coordinator().peer != peer:
                # One of the two does not know somebody whom the other knows: tell each other.
                self._node.spawn(self._neighbourhood.meet_peer(peer))

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
        in_round = begin is not None and any(member.key == peer.key for member in begin.members)
        if not in_round and peer.key not in self._membership.members:
            raise Refused("COMMIT from a peer that is no member")
        self._round.on_commit(commit)
        if begin is not None and begin.round != commit.round:
            # Another round of this tip than the one that we are in: those in ours must hear that it is void.
            others = [member.peer for member in begin.members if member.key != self._participant.me]
            self._node.notify(others, self._service, commit)
        self._participant.advance(commit)
        self._membership.fix(commit.view)
        for key in commit.members:
            self._membership.told(key, behind=False)
        # The coordinator may not reach all whom this peer reaches.
        reached = {peer.key, self._participant.me, *(member.key for member in commit.view)}
        others = [member.peer for member in self._neighbourhood.connected() if member.key not in reached]
        self._node.notify(others, self._service, commit)
        self._new_tip()
        self._on_commit(commit)

    def has_committed(self, round_id: bytes) -> bool:
        """Whether that round is the one that led to this peer's tip."""
        return self._participant.commit is not None and self._participant.commit.round == round_id

    def is_followed_by(self, peer: PeerID, tip: Tip) -> bool:
        """Whether a member that is at that tip was in the round which ended it: it hears of the commit, too. (Counted
        as behind it would be no candidate any more for us alone, and nothing that it says later need come here.)"""
        commit = self._participant.commit
        return commit is not None and commit.tip == tip and peer.key in commit.members

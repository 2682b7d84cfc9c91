"""How long the members of a round may be silent while others wait for them, before they are complained of."""

from __future__ import annotations

import asyncio

from shoal.averaging.channel import Channel
from shoal.averaging.contribution import Attempt
from shoal.averaging.messages import Waiting
from shoal.averaging.participant import Participant
from shoal.p2p.errors import Refused
from shoal.p2p.identity import PeerID

EXCUSE_SECONDS = 3.0  # so long nobody is complained of after a member said that its user lets it wait


class Silence:
    """Sees whether the round that this peer is in gets on, and excuses its own silence.

    Args:
        channel: over which the run's messages go.
        participant: knows the round.
        sender_timeout, reducer_timeout: seconds of silence after which one that owes parts, or results, is complained
            of.
    """

    def __init__(
        self, channel: Channel, participant: Participant, sender_timeout: float, reducer_timeout: float
    ) -> None:
        self._channel, self._participant = channel, participant
        self._sender_timeout, self._reducer_timeout = sender_timeout, reducer_timeout

    def ask_to_wait(self, attempt: Attempt) -> bool:
        """Whether this peer's user lets the others wait; then they are told."""
        begin = self._participant.begin
        if begin is None or not attempt.contribution.excused():
            return False
        others = {begin.ballot.coordinator, *(member.key for member in begin.members)} - {self._participant.me}
        self._channel.notify(sorted(others), Waiting(begin.round))
        return True

    def on_waiting(self, attempt: Attempt | None, peer: PeerID, message: Waiting) -> None:
        """A member's user has not allowed the round yet. Raises Refused if that is no member of this peer's round."""
        begin = self._participant.begin
        if attempt is None or begin is None or begin.round != message.round:
            return  # the round has ended meanwhile, or its BEGIN is still on its way
        if not self._participant.is_with(peer.key):
            raise Refused("only a member of a round can ask for patience in it")
        if attempt.contribution.tip is not None:
            raise Refused("in a round of a training run nobody's user is waited for")
        attempt.asked_to_wait = asyncio.get_running_loop().time()

    def too_long(self, attempt: Attempt | None) -> dict[bytes, str]:
        """The members that hold up the round, and why to complain of them, if nothing has come for too long."""
        if attempt is None or attempt.exchange is None or self._participant.begin is None:
            return {}
        now, (count, since) = asyncio.get_running_loop().time(), attempt.progressed
        waits = self.ask_to_wait(attempt) or now - attempt.asked_to_wait < EXCUSE_SECONDS
        if waits or attempt.exchange.progressed != count or attempt.exchange.book.complete:
            attempt.progressed = (attempt.exchange.progressed, now)
            return {}
        late: dict[bytes, None] = {}
        if now - since > self._sender_timeout:
            late.update(attempt.exchange.book.waiting_for())
        if now - since > self._reducer_timeout:
            late.update(attempt.exchange.book.owed_results())
        if late:
            attempt.progressed = (count, now)
        return dict.fromkeys(late, f"nothing came from it for {now - since:.1f} s")

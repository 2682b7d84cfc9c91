"""Whether the round that this peer is in gets on, and who holds it up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from shoal.p2p.errors import Refused
from shoal.p2p.identity import PeerID
from shoal.p2p.movement import Movement
from shoal.swarm.channel import Channel
from shoal.swarm.contribution import Attempt
from shoal.swarm.protocol.messages import Waiting
from shoal.swarm.protocol.participant import Participant

EXCUSE_SECONDS = 3.0  # so long nobody is complained of after a member said that its user lets it wait
QUIET_SECONDS = 2.0  # so long nothing is said of those who owe something; then they are asked how they get on


@dataclass(slots=True)
class _Debtor:
    """A member that owes this peer a part or a result.

    Attributes:
        since: when it last brought something, or was seen to send.
        movement: of the connection to it.
        signs: of `Pong`, as it last said.
        got_on: when it last said that the round gets on there: a reducer may have to wait for others.
    """

    since: float
    movement: Movement
    signs: int = -1
    got_on: float = float("-inf")

    @property
    def heard(self) -> float:
        """When there was last a sign that its result will come."""
        return max(self.since, self.got_on)


class Silence:
    """Sees whether a round gets on, and excuses this peer's own silence.

    A member is late if the round has stood still here for too long, and no part of a message has come from it either. A
    reducer may wait for others: it is late if it has not got on itself.

    Args:
        channel: over which the run's messages go.
        participant: knows the round.
        sender_timeout, reducer_timeout: seconds of silence after which one that owes parts, or results, is complained
            of.

    Attributes:
        signs: how often this peer has seen the round get on; grows from round to round.
    """

    def __init__(
        self, channel: Channel, participant: Participant, sender_timeout: float, reducer_timeout: float
    ) -> None:
        self._channel, self._participant = channel, participant
        self._sender_timeout, self._reducer_timeout = sender_timeout, reducer_timeout
        self.signs = 0
        self._attempt: Attempt | None = None  # that was last looked at
        self._progressed = 0  # the exchange's counter then
        self._looked = 0.0
        self._debtors: dict[bytes, _Debtor] = {}

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

    @property
    def quiet(self) -> list[bytes]:
        """The keys of members that owe something and have been silent for a while: to be asked how they get on."""
        now = asyncio.get_running_loop().time()
        return [key for key, debtor in self._debtors.items() if now - debtor.since > QUIET_SECONDS]

    def answered(self, key: bytes, signs: int) -> None:
        """A member says how often it has seen the round get on."""
        debtor = self._debtors.get(key)
        if debtor is not None and signs != debtor.signs:
            if debtor.signs >= 0:  # the first answer says nothing yet
                debtor.got_on = asyncio.get_running_loop().time()
            debtor.signs = signs

    def look(self, attempt: Attempt | None) -> dict[bytes, str]:
        """Call it every second. The members that hold up the round, and why to complain of them, if nothing has come
        for too long."""
        exchange = None if attempt is None or self._participant.begin is None else attempt.exchange
        if attempt is None or exchange is None:
            self._attempt, self._debtors = None, {}
            return {}
        now, book = asyncio.get_running_loop().time(), exchange.book
        parts, results = book.waiting_for(), book.owed_results()
        if attempt is not self._attempt:
            self._attempt, self._debtors, self._progressed, self._looked = attempt, {}, 0, now
        gets_on = exchange.progressed != self._progressed
        moves = self._look_at({**parts, **results}, now)
        self.signs += gets_on or moves
        waits = self.ask_to_wait(attempt) or now - attempt.asked_to_wait < EXCUSE_SECONDS
        slept = now - self._looked > 2 * QUIET_SECONDS  # this process itself; what has come meanwhile was not read yet
        self._progressed, self._looked = exchange.progressed, now
        if gets_on or waits or slept or book.complete:
            for debtor in self._debtors.values():
                debtor.since = now
            return {}
        late = [key for key in parts if now - self._debtors[key].since > self._sender_timeout]
        if not late:  # else the reducers may wait for the same members
            late = [key for key in results if now - self._debtors[key].heard > self._reducer_timeout]
        complaints = {key: f"nothing came from it for {now - self._debtors[key].since:.1f} s" for key in late}
        for key in late:
            self._debtors[key].since = now
        return complaints

    def _look_at(self, owing: Iterable[bytes], now: float) -> bool:
        """Whether any of these members is seen to send something large."""
        transport = self._channel.node.transport
        moved = {key: transport.moved(PeerID(key)) for key in owing}
        self._debtors = {key: self._debtors.get(key) or _Debtor(now, Movement(count)) for key, count in moved.items()}
        moving = [key for key, count in moved.items() if self._debtors[key].movement.goes_on(count)]
        for key in moving:
            self._debtors[key].since = now
        return bool(moving)

"""Whether a round makes progress on this peer, and which members hold it up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.p2p.transport import Movement
from shoal.swarm.protocol.contribution import BytesExchange
from shoal.swarm.protocol.messages import Begin

EXCUSE_SECONDS = 3.0  # nobody is complained of for so long after a member said that its user lets it wait
QUIET_SECONDS = 2.0  # after so long without a message, a member that owes something is asked how its round goes


@dataclass(slots=True)
class _Debtor:
    """A member that owes this peer a part or a result.

    Attributes:
        since: when it last brought something, or was seen to send.
        movement: the bytes on the connection to it.
        progressed: when it last reported progress of its own: a reducer may have to wait for others.
    """

    since: float
    movement: Movement
    progressed: float = float("-inf")


@dataclass(slots=True)
class Silence:
    """Watches the members that owe this peer something in a round.

    A sender is late if this peer has seen no progress for `sender_timeout` seconds and no bytes from that member
    either. A reducer may be waiting for others: it is late if it has not made progress itself for `reducer_timeout`.

    Attributes:
        signs: how often this peer has seen a round make progress; grows from round to round.
    """

    sender_timeout: float
    reducer_timeout: float
    signs: int = 0
    _begin: Begin | None = None  # the round that was looked at last
    _progressed: int = 0  # its exchange's counter then
    _changes: int = 0  # its book's counter then
    _looked: float = 0.0
    _excused_until: float = float("-inf")
    _debtors: dict[bytes, _Debtor] = field(default_factory=dict)

    def excuse(self, now: float) -> None:
        """A member has said that its user lets it wait."""
        self._excused_until = now + EXCUSE_SECONDS

    def quiet(self, now: float) -> list[bytes]:
        """The members that owe something and have been silent for a while."""
        return [key for key, debtor in self._debtors.items() if now - debtor.since > QUIET_SECONDS]

    def excuse_reducer(self, key: bytes, now: float) -> None:
        """A member makes progress itself: as a reducer it may wait for others."""
        if (debtor := self._debtors.get(key)) is not None:
            debtor.progressed = now

    def look(self, exchange: BytesExchange, moved: Callable[[bytes], int], waits: bool, now: float) -> dict[bytes, str]:
        """Look again; to be called every second.

        Args:
            exchange: the bytes of the round.
            moved: the number of bytes that have passed between this peer and another.
            waits: whether this peer's user lets the others wait.

        Returns: the members that hold up the round, each with the reason.
        """
        book = exchange.book
        if book.begin is not self._begin:
            self._begin, self._progressed, self._looked, self._debtors = book.begin, 0, now, {}
        parts, results = book.waiting_for(), dict.fromkeys(book.awaited.values())
        counts = {key: moved(key) for key in {**parts, **results}}
        debtors = {key: self._debtors.get(key) or _Debtor(now, Movement(count)) for key, count in counts.items()}
        self._debtors = debtors
        moving = [key for key, count in counts.items() if debtors[key].movement.goes_on(count)]
        # A coordinator that changes the plan gives those that owe something more time, and is no progress itself.
        progressed, changed = exchange.progressed != self._progressed, book.changes != self._changes
        self.signs += progressed or bool(moving)
        slept = now - self._looked > 2 * QUIET_SECONDS  # this process itself; what has arrived was not read yet
        self._progressed, self._changes, self._looked = exchange.progressed, book.changes, now
        is_excused = progressed or changed or waits or slept or now < self._excused_until or book.complete
        for key in debtors if is_excused else moving:
            debtors[key].since = now
        late = [key for key in parts if now - debtors[key].since > self.sender_timeout]
        if not late:  # otherwise the reducers may be waiting for the same members
            late = [k for k in results if now - max(debtors[k].since, debtors[k].progressed) > self.reducer_timeout]
        complaints = {key: f"nothing came from it for {now - debtors[key].since:.1f} s" for key in late}
        for key in late:
            debtors[key].since = now
        return complaints

"""Whether a round makes progress on this peer, and which members hold it up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.p2p.transport import Movement
from shoal.swarm.protocol.contribution import BytesExchange
from shoal.swarm.protocol.messages import Begin
from shoal.swarm.protocol.patience import Patience

EXCUSE_SECONDS = 3.0  # nobody is complained of for so long after a member said that its user lets it wait
MOST_TIMES = 8  # as long as otherwise, a member that sends is waited for: then something whole must have come
QUIET_SECONDS = 2.0  # after so long without a message, a member that owes something is asked how its round goes


@dataclass(slots=True)
class _Debtor:
    """A member that owes this peer a part or a result.

    Attributes:
        since: when it last brought something, or was seen to send.
        progressed: when it last reported progress of its own: a reducer may have to wait for others.
    """

    since: float
    progressed: float = float("-inf")


@dataclass(slots=True)
class Silence:
    """Watches the members that owe this peer something in a round.

    A sender is late if this peer has seen no progress for `sender_timeout` seconds and no bytes from that member
    either; or none for MOST_TIMES as long, whatever it sends. A reducer may be waiting for others: it is late if it has
    not made progress itself for `reducer_timeout`.
    Who has held up rounds before is late sooner.

    Attributes:
        patience: with whom this peer has how much.
        signs: how often this peer has seen a round make progress, by what it received or by bytes on the connections to
            the members; grows from round to round.
    """

    sender_timeout: float
    reducer_timeout: float
    patience: Patience = field(default_factory=Patience)
    signs: int = 0
    _begin: Begin | None = None  # the round that was looked at last
    _progressed: int = 0  # its exchange's counter then
    _changes: int = 0  # its book's counter then
    _looked: float = 0.0
    _excused_at: float = 0.0  # when all that owe something were given more time
    _excused_until: float = float("-inf")
    _debtors: dict[bytes, _Debtor] = field(default_factory=dict)
    _movements: dict[bytes, Movement] = field(default_factory=dict)  # on the connection to each member of the round

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
            self._excused_at = now
            self._movements = {m.key: Movement(moved(m.key)) for m in book.begin.members if m.key != book.me}
        parts, results = book.waiting_for(), dict.fromkeys(book.awaited.values())
        debtors = {key: self._debtors.get(key) or _Debtor(now) for key in {**parts, **results}}
        self._debtors = debtors
        # Also to those that owe nothing: another member may wait until a slow one has taken what this one sends.
        # But who only drips, or sends what nobody has asked for, is waited for no longer than for something whole.
        most = MOST_TIMES * self.sender_timeout
        moving = [
            key
            for key, movement in self._movements.items()
            if movement.goes_on(moved(key)) and now - self._excused_at < self.patience.of(key, most, now)
        ]
        # A coordinator that changes the plan gives those that owe something more time, and is no progress itself.
        progressed, changed = exchange.progressed != self._progressed, book.changes != self._changes
        self.signs += progressed or bool(moving)
        slept = now - self._looked > 2 * QUIET_SECONDS  # this process itself; what has arrived was not read yet
        self._progressed, self._changes, self._looked = exchange.progressed, book.changes, now
        is_excused = progressed or changed or waits or slept or now < self._excused_until or book.complete
        self._excused_at = now if is_excused else self._excused_at
        for key in debtors if is_excused else debtors.keys() & set(moving):
            debtors[key].since = now
        times = self.patience.of
        late = [key for key in parts if now - debtors[key].since > times(key, self.sender_timeout, now)]
        if not late:  # otherwise the reducers may be waiting for the same members
            silent = {key: now - max(debtors[key].since, debtors[key].progressed) for key in results}
            late = [key for key, seconds in silent.items() if seconds > times(key, self.reducer_timeout, now)]
        complaints = {key: f"nothing came from it for {now - debtors[key].since:.1f} s" for key in late}
        for key in late:
            debtors[key].since = now
            self.patience.held_up(key, now)
        return complaints

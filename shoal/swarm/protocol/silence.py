"""Watches whether a round makes progress at this peer, and which members hold it up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from shoal.p2p.transport import Movement
from shoal.swarm.protocol.contribution import BytesExchange
from shoal.swarm.protocol.messages import Begin
from shoal.swarm.protocol.patience import Patience

EXCUSE_SECONDS = 3.0  # no complaints for so long after a member said that its user makes it wait
MOST_TIMES = 8  # a member whose bytes arrive gets this many times the usual time, until a whole chunk must have arrived
QUIET_SECONDS = 2.0  # a member that owes something and is silent for so long is asked whether its round makes progress


@dataclass(slots=True)
class _Debtor:
    """A member that owes this peer a part or a result.

    Attributes:
        since: when something last arrived from it.
        progressed: when it last reported progress of its own. A reducer may have to wait for others.
    """

    since: float
    progressed: float = float("-inf")


@dataclass(slots=True)
class Silence:
    """Watches the members that owe this peer something in a round.

    A sender is late if for `sender_timeout` seconds this peer has seen no progress of the round and no bytes of that
    member. It is also late if there was no progress for MOST_TIMES as long, whatever bytes it sends. A reducer may be
    waiting for others, so it is late only if it has made no progress itself for `reducer_timeout`. A member that has
    held up rounds before is late sooner.

    Attributes:
        patience: how long this peer waits for each member.
        signs: how often this peer has seen a round make progress, by chunks that arrived or by bytes on the connections
            to members. It keeps growing from round to round.
    """

    sender_timeout: float
    reducer_timeout: float
    patience: Patience = field(default_factory=Patience)
    signs: int = 0
    _begin: Begin | None = None  # the round at the last look
    _progressed: int = 0  # the counter of its exchange at the last look
    _changes: int = 0  # the counter of its book at the last look
    _looked: float = 0.0
    _excused_at: float = 0.0  # when all members that owe something were last given more time
    _excused_until: float = float("-inf")
    _debtors: dict[bytes, _Debtor] = field(default_factory=dict)
    _movements: dict[bytes, Movement] = field(default_factory=dict)  # on the connection to each member of the round

    def excuse(self, now: float) -> None:
        """A member has said that its user makes it wait."""
        self._excused_until = now + EXCUSE_SECONDS

    def quiet(self, now: float) -> list[bytes]:
        """The members that owe something and have been silent for a while."""
        return [key for key, debtor in self._debtors.items() if now - debtor.since > QUIET_SECONDS]

    def excuse_reducer(self, key: bytes, now: float) -> None:
        """A member reports progress of its own, so as a reducer it is not late."""
        if (debtor := self._debtors.get(key)) is not None:
            debtor.progressed = now

    def look(self, exchange: BytesExchange, moved: Callable[[bytes], int], waits: bool, now: float) -> dict[bytes, str]:
        """Check the round. Called every second.

        Args:
            exchange: the exchange of the round.
            moved: returns the number of bytes that have passed between this peer and another.
            waits: whether this peer's user makes the other members wait.
            now: the time.

        Returns:
            The members that hold up the round, each with the reason.
        """
        book = exchange.book
        if book.begin is not self._begin:
            self._begin, self._progressed, self._looked, self._debtors = book.begin, 0, now, {}
            self._excused_at = now
            self._movements = {m.key: Movement(moved(m.key)) for m in book.begin.members if m.key != book.me}
        parts, results = book.waiting_for(), dict.fromkeys(book.awaited.values())
        debtors = {key: self._debtors.get(key) or _Debtor(now) for key in {**parts, **results}}
        self._debtors = debtors
        # Bytes to members that owe nothing count as well: others may wait until a slow member has received this peer's
        # chunks. But if no whole chunk arrives for long, a member's bytes do not count any more: it may send very
        # slowly, or send what nobody has asked for.
        most = MOST_TIMES * self.sender_timeout
        moving = [key for key, movement in self._movements.items() if movement.goes_on(moved(key))]
        moving = [key for key in moving if now - self._excused_at < self.patience.of(key, most, now)]
        # A change of the plan gives members that owe something more time, but is no progress itself.
        progressed, changed = exchange.progressed != self._progressed, book.changes != self._changes
        self.signs += progressed or bool(moving)
        slept = now - self._looked > 2 * QUIET_SECONDS  # this process stood still, and has not read what has arrived
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

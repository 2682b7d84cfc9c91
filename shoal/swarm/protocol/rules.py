"""When a round of a run begins, and what it averages. Equal for all members, except for the times. Pure functions."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shoal.swarm.protocol.messages import Join
from shoal.swarm.protocol.plan import CHUNK_ELEMENTS


@dataclass(frozen=True, slots=True)
class Rules:
    """When a round begins, and what it averages.

    Attributes:
        sizes: elements of each flat buffer of what every round averages.
        in_turn: elements of each flat buffer of what rounds average in turn: the one that ends epoch k has the
            (k mod n)-th of n.
        matchmaking_time: the longest wait, in seconds, from the CALL to BEGIN. Where samples are not counted, the first
            member that joins says how long it waits.
        round_timeout: seconds without progress after which a round ends that this peer began.
        min_group: the least number of members of a round; where samples are counted, of members that contribute.
        min_share: of the members that contributed to the last round, so many are needed: with more than a half, of a
            swarm that falls apart at most one side goes on. 0.0 for no such share.
        target_group: when so many members have joined, the round begins at once; None for no such number.
        target_samples: a round is called when the members have so many samples; None if the first JOIN calls it.
        target_is_each: that is so many for each member that is counted on. What members report need not be samples
            then: a JOIN counts for nothing, only reports do.
        ahead: by so much less of the target the first epoch of a run ends.
        chunk_elements: no chunk is larger, unless there would be too many.
        element_bytes: how many bytes an element takes on its way, about.
        smallest_span: members that would reduce fewer elements reduce none.
        due_sizes: elements of each flat buffer that is averaged, too, in rounds where state is due.
        state_sizes: elements of each flat buffer of the state itself, which is averaged where it is due and where
            members hold different ones.
        state_every: state is due in the rounds that end the epochs of this many, twice this many, and so on.
        state_always: average the state whenever it is due, whatever the members say of theirs.
        options_fit: whether the options of a JOIN can be those of the members' steps; others have no vote.
    """

    sizes: tuple[int, ...]
    matchmaking_time: float
    round_timeout: float
    min_group: int = 1
    min_share: float = 0.0
    target_group: int | None = None
    target_samples: float | None = None
    target_is_each: bool = False
    ahead: float = 0.0
    chunk_elements: int = CHUNK_ELEMENTS
    element_bytes: float = 4.0
    smallest_span: int = 0
    due_sizes: tuple[int, ...] = ()
    state_sizes: tuple[int, ...] = ()
    state_every: int = 1
    state_always: bool = False
    options_fit: Callable[[bytes], bool] = bool
    in_turn: tuple[tuple[int, ...], ...] = ()

    def target(self, epoch: int, members: int) -> float | None:
        """What all members have together when the round of that epoch is called, if so many are counted on."""
        if self.target_samples is None or not self.target_is_each:
            return self.target_samples
        return (self.target_samples - (0.0 if epoch else self.ahead)) * max(1, members)

    def least(self, last: int) -> int:
        """The least number of members of a round, after one to which `last` members contributed."""
        # 0.1 * 30 is a little more than 3.
        return max(1, self.min_group, math.ceil(round(self.min_share * last, 6)))

    def is_due(self, epoch: int) -> bool:
        """Whether state is due in the round that ends this epoch."""
        return (epoch + 1) % self.state_every == 0

    def may_average_state(self, epoch: int) -> bool:
        """Whether the state itself may be averaged in the round that ends this epoch."""
        return bool(self.state_sizes) and self.is_due(epoch) and (self.state_always or epoch > 0)

    def averages_state(self, epoch: int, joins: Iterable[Join]) -> bool:
        """Whether the round that ends this epoch, with these JOINs, averages the state itself.

        Members with machines of one kind can differ only by a fault, or at the start of a run, and a download makes
        them equal. So the states compared are those that most members of each kind of machine hold.
        """
        if not self.may_average_state(epoch):
            return False
        votes: dict[str, Counter[bytes]] = {}
        for join in joins:
            if join.state:
                votes.setdefault(join.machine, Counter())[join.state] += 1
        usual = {max(count, key=lambda state: (count[state], state)) for count in votes.values()}
        return self.state_always or len(usual) > 1

    def options(self, joins: Iterable[Join]) -> bytes:
        """The options with which all members make the step that follows a round with these JOINs: those that most of
        them hold that hold any, on a tie those with more samples behind them, or b"" if there are none."""
        votes: Counter[bytes] = Counter()
        samples: defaultdict[bytes, float] = defaultdict(float)
        for join in joins:
            if join.options and self.options_fit(join.options):
                votes[join.options] += 1
                samples[join.options] += join.weight
        return max(votes, key=lambda options: (votes[options], samples[options], options), default=b"")

    def vector(self, epoch: int, with_state: bool) -> tuple[int, ...]:
        """Elements of each flat buffer that such a round averages."""
        due = self.due_sizes if self.is_due(epoch) else ()
        turn = self.in_turn[epoch % len(self.in_turn)] if self.in_turn else ()
        return (*self.sizes, *turn, *due, *(self.state_sizes if with_state else ()))

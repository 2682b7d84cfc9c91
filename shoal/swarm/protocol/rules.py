"""The rules of a run: when a round begins, and what it averages. Equal for all members, except for the times. Pure
functions."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shoal.swarm.protocol.messages import Begin, Join
from shoal.swarm.protocol.plan import CHUNK_ELEMENTS


@dataclass(frozen=True, slots=True)
class Rules:
    """When a round begins, and what it averages.

    "Sizes" are the numbers of elements of flat buffers. "Samples are counted" if `target_samples` is given.

    Attributes:
        sizes: the sizes of the buffers that every round averages.
        in_turn: the sizes of the buffers that rounds average in turn. With n entries, the round that ends epoch k
            averages entry k mod n.
        matchmaking_time: the longest time, in seconds, from CALL to BEGIN. If samples are not counted, the first member
            that joins decides how long the round waits.
        own_rounds: how many seconds members may take between CALL and JOIN for rounds of their own, whose results they
            bring. As long, BEGIN waits for them while less than half of them have joined.
        round_timeout: a round that this peer has begun ends after this many seconds without progress.
        min_group: the least number of members of a round. If samples are counted, only members that contribute count.
        min_share: a round needs this share of the members that contributed to the last round. With more than a half, at
            most one side of a swarm that falls apart continues. 0.0: no such condition.
        target_group: a round begins at once when this many members have joined; None: no such number.
        target_samples: a round is called when the members have this many samples; None: the first JOIN calls it.
        target_is_each: whether `target_samples` is for each member instead of for all together. Then members may report
            something other than samples, and JOINs do not count, only reports.
        ahead: the target of the first epoch of a run is smaller by this.
        chunk_elements: the most elements of a chunk, unless there would be too many chunks.
        element_bytes: the approximate encoded size of an element, in bytes.
        smallest_span: a member that would reduce fewer elements than this reduces none.
        due_sizes: the sizes of further buffers, which rounds average when state is due.
        state_sizes: the sizes of the buffers of the state itself. A round averages it if state is due and members hold
            different states.
        state_every: state is due in the rounds that end epochs number `state_every`, 2 * `state_every`, and so on,
            counted from 1.
        state_always: whether to average the state whenever it is due, even if all members hold the same.
        brings_samples: whether the weights of a round are samples of the run. In the rounds of a strand they are not:
            the run's own rounds bring them.
        wait_for_newcomers: the share of the run's time that rounds may wait for newcomers that load the state, see
            `Newcomers`; 0.0: none.
        options_fit: whether this peer can use the options of a JOIN for its own steps. If votes are equal, such options
            win.
    """

    sizes: tuple[int, ...]
    matchmaking_time: float
    round_timeout: float
    own_rounds: float = 0.0
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
    wait_for_newcomers: float = 0.0
    brings_samples: bool = True

    def samples(self, begin: Begin) -> float:
        """The samples that a round brings to the state."""
        return sum(begin.weights) if self.brings_samples else 0.0

    def target(self, epoch: int, members: int) -> float | None:
        """The number of samples of all members at which the round of that epoch is called; None if the first JOIN calls
        it. `members` is the number of members that are counted on."""
        if self.target_samples is None or not self.target_is_each:
            return self.target_samples
        return (self.target_samples - (0.0 if epoch else self.ahead)) * max(1, members)

    def least(self, last: int) -> int:
        """The least number of members of a round, after one to which `last` members contributed."""
        # Rounded, since in floating point 0.1 * 30 is a little more than 3.
        return max(1, self.min_group, math.ceil(round(self.min_share * last, 6)))

    def is_due(self, epoch: int) -> bool:
        """Whether state is due in the round that ends this epoch."""
        return (epoch + 1) % self.state_every == 0

    def may_average_state(self, epoch: int) -> bool:
        """Whether the state itself may be averaged in the round that ends this epoch."""
        return bool(self.state_sizes) and self.is_due(epoch) and (self.state_always or epoch > 0)

    def averages_state(self, epoch: int, joins: Iterable[Join]) -> bool:
        """Whether the round that ends this epoch, with these JOINs, averages the state itself.

        Members with machines of one kind have different states only after a fault or at the start of a run, and a
        download makes them equal. So this compares the states that most members with each kind of machine hold.
        """
        if not self.may_average_state(epoch):
            return False
        votes: defaultdict[tuple[str, bytes], Counter[bytes]] = defaultdict(Counter)
        for join in joins:
            if join.state:
                votes[join.machine, join.average][join.state] += 1
        usual = {max(count, key=lambda state: (count[state], state)) for count in votes.values()}
        return self.state_always or len(usual) > 1

    def options(self, joins: Iterable[Join]) -> bytes:
        """The options with which all members make the step after a round with these JOINs: those that most JOINs with
        options have, even if this peer can't use them. On a tie those that it can use, and of these those with more
        samples. b"" if no JOIN has any."""
        votes: Counter[bytes] = Counter()
        samples: defaultdict[bytes, float] = defaultdict(float)
        for join in joins:
            if join.options:
                votes[join.options] += 1
                samples[join.options] += join.weight

        def rank(options: bytes) -> tuple[int, bool, float, bytes]:
            return votes[options], self.options_fit(options), samples[options], options

        return max(votes, key=rank, default=b"")

    def vector(self, epoch: int, with_state: bool) -> tuple[int, ...]:
        """The sizes of all buffers that the round of that epoch averages, with the state itself or without."""
        due = self.due_sizes if self.is_due(epoch) else ()
        turn = self.in_turn[epoch % len(self.in_turn)] if self.in_turn else ()
        return (*self.sizes, *turn, *due, *(self.state_sizes if with_state else ()))

"""Who begins another step near the end of an epoch: rules one by one, and whole epochs of a model of the peers."""

from __future__ import annotations

import heapq
import itertools
import math
import random
import statistics
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.swarm.protocol.pace import LATE, Pace

A, B, C = b"a", b"b", b"c"


def begin(pace: Pace, key: bytes, now: float, samples: float = 0.0, step: float = 10.0, seconds: float = 1.0) -> None:
    """A member begins a step without asking."""
    assert pace.reported(key, samples, step, seconds, False, now) == 0.0


def ask(pace: Pace, key: bytes, now: float, samples: float, step: float = 10.0, seconds: float = 1.0) -> float:
    return pace.reported(key, samples, step, seconds, True, now)


def test_steps_under_way_are_enough() -> None:
    pace = Pace(30.0)
    begin(pace, A, 0.0)
    begin(pace, B, 0.0)
    assert ask(pace, A, 0.9, 10.0) == 0.0, "10 are there and 10 come: 10 are missing"
    begin(pace, B, 1.1, 10.0)  # and now all are there or come
    begin(pace, C, 1.1)
    assert ask(pace, C, 1.2, 5.0) == pytest.approx(1.9 - 1.2 + LATE), "until a's step is long overdue"
    assert pace.under_way(but=A) == 10.0


def test_a_slow_step_under_way_is_waited_for_too() -> None:
    """The round would wait for it in any case."""
    pace = Pace(30.0)
    begin(pace, A, 0.0, seconds=100.0)
    begin(pace, B, 0.0, 10.0)
    assert ask(pace, B, 1.0, 20.0) == pytest.approx(100.0 + LATE * 100.0 - 1.0)


def test_others_that_will_be_faster() -> None:
    pace = Pace(60.0)
    begin(pace, A, 0.0)
    assert ask(pace, B, 0.0, 10.0, seconds=4.9) == 0.0, "a has 40 in the time of b's step"
    pace.lost(B)
    assert ask(pace, B, 0.0, 10.0, seconds=5.0) > 5.0, "a has 50 in the time of b's step"


def test_nobody_waits_before_it_has_a_sample_or_without_a_known_speed() -> None:
    pace = Pace(20.0)
    begin(pace, A, 0.0, 10.0)
    assert ask(pace, B, 0.0, 0.0) == 0.0
    assert ask(pace, B, 0.0, 5.0, seconds=0.0) == 0.0
    assert ask(pace, B, 0.0, 5.0, step=0.0) == 0.0


def test_one_that_waits_is_not_counted_on() -> None:
    pace = Pace(30.0)
    begin(pace, A, 0.0)
    begin(pace, B, 0.0, 10.0)
    assert ask(pace, B, 0.5, 20.0) > 0
    pace.lost(A)
    assert ask(pace, C, 0.5, 1.0) == 0.0, "b waits, so c has to go"
    assert ask(pace, B, 0.6, 20.0) > 0, "and now b waits for c"


def test_overdue_steps_and_steps_in_vain_are_not_counted_on() -> None:
    pace = Pace(20.0)
    begin(pace, A, 0.0)
    assert ask(pace, B, 0.9 + LATE, 10.0) == pytest.approx(0.1)
    assert ask(pace, B, 1.01 + LATE, 10.0) == 0.0
    pace = Pace(20.0)
    begin(pace, A, 0.0)
    begin(pace, A, 1.0)  # it has dropped what it made: its gradients overflowed
    assert ask(pace, B, 1.1, 10.0) == 0.0


def test_without_a_target_nobody_waits() -> None:
    pace = Pace(float("inf"))
    begin(pace, A, 0.0)
    assert ask(pace, B, 0.0, 1e15) == 0.0


@dataclass
class Model:
    """Peers in steps of their own, whose epoch ends as `Gathering` and `RunProgress` have it: the round is called by a
    report, those that wait and the reporter join at once, the others at the end of their step. Where each peer makes a
    part of the epoch, it does not ask, and when it has its part, it announces no step and waits for the round."""

    batch: float
    seconds: list[float]
    target: float
    noise: float
    waits: bool
    seed: int
    part: float = math.inf
    now: float = 0.0
    slowest: list[float] = field(default_factory=list)  # by epoch: how long the peer computed that took longest
    durations: list[float] = field(default_factory=list)
    totals: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.recent = [[seconds] for seconds in self.seconds]

    def expected(self, peer: int) -> float:
        return statistics.median(self.recent[peer][-5:])

    def epoch(self) -> None:
        start, peers = self.now, range(len(self.seconds))
        pace, numbers = Pace(self.target), itertools.count()
        rest: set[int] = set()
        computed = [0.0] * len(self.seconds)
        samples = [0.0] * len(self.seconds)
        joined: set[int] = set()
        events: list[
            tuple[float, int, int, float]
        ] = []  # when, a number, who; how long its step took, or 0: asks again
        called = False
        # A peer's first, second, … step of an epoch takes as long whether others wait or not.
        times = [random.Random(f"{self.seed} {len(self.durations)} {peer}") for peer in peers]

        def go(peer: int) -> None:
            took = self.seconds[peer] * times[peer].lognormvariate(0.0, self.noise)
            heapq.heappush(events, (self.now + took, next(numbers), peer, took))

        for peer in peers:
            pace.reported(bytes([peer]), 0.0, self.batch, self.expected(peer), False, self.now)
            go(peer)
        while len(joined) < len(samples):
            assert events, "all wait for each other"
            self.now, _, peer, took = heapq.heappop(events)
            if took:
                samples[peer] += self.batch
                computed[peer] += took
                self.recent[peer].append(took)
            if called:
                joined.add(peer)
                continue
            rests = samples[peer] >= self.part
            step, seconds = (0.0, 0.0) if rests else (self.batch, self.expected(peer))
            asks = self.waits and self.part == math.inf
            wait = pace.reported(bytes([peer]), samples[peer], step, seconds, asks, self.now)
            if sum(samples) >= self.target:
                called = True
                joined = {other for _, _, other, took in events if not took} | rest | {peer}
                events = [event for event in events if event[3]]
                heapq.heapify(events)
            elif rests:
                rest.add(peer)
            elif wait:
                heapq.heappush(events, (self.now + min(wait, self.expected(peer)), next(numbers), peer, 0.0))
            else:
                go(peer)
        self.slowest.append(max(computed))
        self.durations.append(self.now - start)
        self.totals.append(sum(samples))


def run(epochs: int, **arguments: object) -> Model:
    model = Model(**arguments)  # type: ignore[arg-type]
    for _ in range(epochs):
        model.epoch()
    return model


groups = st.tuples(
    st.lists(st.floats(1.0, 6.0), min_size=2, max_size=8) | st.integers(2, 8).map(lambda n: [1.0] * n),
    st.floats(1.0, 8.0),  # steps of each peer in an epoch
    st.integers(0, 1 << 20),
)


@settings(max_examples=60)
@given(groups)
def test_samples_are_at_most_1_1_of_the_target_and_epochs_are_no_longer(
    group: tuple[list[float], float, int],
) -> None:
    seconds, steps, seed = group
    target = max(10.0, steps * len(seconds)) * 16.0  # a batch is at most a tenth of it
    given_ = {"batch": 16.0, "seconds": seconds, "target": target, "noise": 0.02, "seed": seed}
    waiting = run(12, waits=True, **given_)
    rushing = run(12, waits=False, **given_)
    assert max(waiting.totals) <= 1.1 * target + 1e-6
    assert sum(waiting.durations) <= 1.02 * sum(rushing.durations)


def test_steps_that_vary() -> None:
    """With a fifth of noise some are late, and a few too many are made; eleven steps would be 1.058 of the target."""
    totals, durations = {}, {}
    for waits in (True, False):
        models = [
            run(
                20,
                batch=16.0,
                seconds=[1.0] * peers,
                target=16.0 * 1.3 * max(peers, 8),
                noise=0.2,
                waits=waits,
                seed=seed,
            )
            for peers in (2, 4, 8)
            for seed in range(4)
        ]
        totals[waits] = statistics.mean(total / model.target for model in models for total in model.totals)
        durations[waits] = sum(sum(model.durations) for model in models)
    assert totals[True] < 1.07
    assert totals[False] > 1.15, "the model shows no overshoot to avoid"
    assert durations[True] < 0.95 * durations[False]


@settings(max_examples=60)
@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=8), st.floats(0.0, 0.5), st.integers(0, 1 << 20))
def test_where_each_has_a_part_an_epoch_takes_as_long_as_the_slowest_needs_for_its_own(
    seconds: list[float], noise: float, seed: int
) -> None:
    target = 10.0 * len(seconds)
    model = run(12, batch=1.0, seconds=seconds, target=target, noise=noise, waits=True, seed=seed, part=10.0)
    assert model.totals == [target] * 12
    assert model.durations == pytest.approx(model.slowest)


def test_one_peer_never_waits() -> None:
    model = run(5, batch=16.0, seconds=[1.0], target=100.0, noise=0.0, waits=True, seed=0)
    assert model.totals == [112.0] * 5
    assert model.durations == pytest.approx([7.0] * 5)


def test_everyone_else_dies() -> None:
    """Those who wait go on as soon as they ask again."""
    pace = Pace(100.0)
    for number in range(8):
        begin(pace, bytes([number]), 0.0, step=20.0)
    assert ask(pace, bytes([0]), 1.0, 20.0, step=20.0) > 0
    for number in range(1, 8):
        pace.lost(bytes([number]))
    assert ask(pace, bytes([0]), 1.1, 20.0, step=20.0) == 0.0


def test_who_does_not_keep_its_word_is_not_relied_on_until_it_does() -> None:
    word: dict[bytes, None] = {}
    pace = Pace(30.0, unreliable=word)
    pace.reported(A, 0.0, 20.0, 4.0, False, 0.0)
    assert pace.reported(B, 10.0, 10.0, 1.0, True, 1.0) > 0, "20 are under way"
    assert pace.reported(B, 10.0, 10.0, 1.0, True, 9.0) == 0, "they should have come by 4.0"
    assert A in word
    later = Pace(30.0, unreliable=word)  # the next epoch
    later.reported(A, 0.0, 20.0, 4.0, False, 10.0)
    assert later.under_way(but=B) == 0
    assert later.reported(B, 10.0, 10.0, 1.0, True, 11.0) == 0
    later.reported(A, 20.0, 20.0, 4.0, False, 14.0)  # it comes
    assert A not in word


def test_a_step_that_takes_longer_than_begin_waits_is_not_relied_on() -> None:
    pace = Pace(30.0, patience=15.0)
    pace.reported(A, 0.0, 1e15, 1e4, False, 0.0)
    assert pace.reported(B, 10.0, 10.0, 1.0, True, 1.0) == 0

"""What a round's plan makes of links that carry little: what nobody can do faster, and the same for equal peers."""

from __future__ import annotations

import itertools
import math
import random
from itertools import pairwise

import numpy as np
import pytest

from shoal.swarm.protocol.plan import best_shares, divide
from shoal.swarm.protocol.rates import KEPT_SECONDS, LEAST_BYTES, MAX_SLOW, Measured, Rates
from shoal.swarm.protocol.view import Member, Reach, Role
from tests.swarm.rounds import key, member

V = 100e6  # bytes of the vector


def seconds(shares: list[float], bandwidths: list[float], slow: list[tuple[int, int, float]]) -> float:
    """How long a round of a vector of length 1 takes."""
    n = len(bandwidths)
    own = [(1 + (n - 2) * w) / b for w, b in zip(shares, bandwidths, strict=True)]
    return max(*own, *((shares[i] + shares[j]) / rate for i, j, rate in slow))


def least_seconds(bandwidths: list[float], slow: list[tuple[int, int, float]]) -> float:
    """The same for the best shares there are, by the dual of the linear program: that has a best solution of halves."""
    n = len(bandwidths)
    duals = np.array(list(itertools.product((0.0, 0.5, 1.0), repeat=n + len(slow))))
    covers = duals[:, :n].copy()
    for number, (i, j, _) in enumerate(slow):
        covers[:, i] += duals[:, n + number]
        covers[:, j] += duals[:, n + number]
    duals = duals[(covers >= 1).all(axis=1)]

    def most(until: float) -> float:
        caps = [max(0.0, (until * b - 1) / (n - 2)) for b in bandwidths] + [until * rate for *_, rate in slow]
        return float((duals @ np.array(caps)).min())

    early, late = 1 / min(bandwidths), 2 / min(bandwidths)
    if most(early) >= 1:
        return early
    while most(late) < 1:
        late *= 2
    for _ in range(40):
        middle = (early + late) / 2
        early, late = (middle, late) if most(middle) < 1 else (early, middle)
    return late


def test_slow_links_are_spared_nearly_as_well_as_can_be() -> None:
    rng = random.Random(5)
    times = []
    for _ in range(150):
        n = rng.randint(3, 5)
        bandwidths = [math.exp(rng.uniform(0, 2)) for _ in range(n)]
        pairs = rng.sample(list(itertools.combinations(range(n), 2)), rng.randint(1, min(4, n * (n - 1) // 2)))
        slow = [(*pair, math.exp(rng.uniform(-4, 0))) for pair in pairs]
        shares = best_shares(bandwidths, slow=slow)
        assert sum(shares) == pytest.approx(1)
        assert min(shares) >= 0
        times.append(seconds(shares, bandwidths, slow) / least_seconds(bandwidths, slow))
    assert min(times) > 1 - 1e-6
    assert max(times) < 1.15
    assert sum(times) / len(times) < 1.005


def test_a_slow_link_changes_nothing_where_it_carries_enough() -> None:
    assert best_shares([3.0, 4.0, 5.0], slow=[(0, 1, 5.0)]) == best_shares([3.0, 4.0, 5.0])
    assert best_shares([1.0, 1.0], slow=[(0, 1, 1e-6)]) == [0.5, 0.5], "of two, all passes the link anyway"


def test_who_has_many_slow_links_reduces_nothing() -> None:
    shares = best_shares([10.0] * 5, slow=[(0, other, 0.1) for other in range(1, 5)])
    assert shares == pytest.approx([0, 0.25, 0.25, 0.25, 0.25])


def test_an_auxiliary_peer_has_slow_links_too() -> None:
    shares = best_shares([10.0] * 3, [10.0], slow=[(0, 3, 0.01)])
    assert shares[0] + shares[3] < 0.1


def test_liars_who_tell_of_many_slow_links_do_not_hold_up_the_plan() -> None:
    group = [measured(number) for number in range(200)]
    told = {m.key: Rates(1e6, tuple((key((n + k) % 200), float(k)) for k in range(1, 9))) for n, m in enumerate(group)}
    assert divide(1000, group, told=told, nbytes=V)[-1] == 1000


# -- what members say


def measured(number: int, reach: Reach = Reach.DIRECT, role: Role = Role.NODE) -> Member:
    one = member(number, role)
    return Member(one.key, one.addresses, role, None, reach)


FOUR = [measured(number) for number in range(1, 5)]


def lengths(told: dict[int, Rates], group: list[Member] = FOUR, nbytes: float = V) -> list[int]:
    starts = divide(10_000, group, told={key(number): rates for number, rates in told.items()}, nbytes=nbytes)
    return [stop - start for start, stop in pairwise(starts)]


def of(rates: dict[int, float]) -> dict[int, Rates]:
    return {number: Rates(rate) for number, rate in rates.items()}


def test_shares_follow_the_rates_that_members_tell() -> None:
    best = best_shares([5e6, 1e7, 1e7, 1e7])
    assert lengths(of({1: 5e6, 2: 1e7, 3: 1e7, 4: 1e7})) == pytest.approx([10_000 * share for share in best], abs=1)


def test_equal_peers_have_equal_shares_though_they_measure_unlike_rates() -> None:
    assert lengths(of({1: 9.1e6, 2: 1e7, 3: 1.05e7, 4: 9.9e6})) == [2500] * 4
    assert lengths(of({1: 1e9, 2: 5e9, 3: 2e10, 4: 3e9})) == [2500] * 4, "each is fast enough"
    assert lengths(of({1: 1e4, 2: 1e6, 3: 1e5, 4: 1e5}), nbytes=100) == [2500] * 4, "a small vector"
    assert lengths(of({1: 1e4, 2: 1e6, 3: 1e5, 4: 1e5}), nbytes=0) == [2500] * 4


def test_no_share_is_more_than_a_chunk_off() -> None:
    """Where chunks are few, a little difference of the rates must not give a peer more than with equal shares."""
    told = {key(number): Rates(rate) for number, rate in {1: 1.82e7, 2: 2.1e7, 3: 2.15e7, 4: 2.2e7}.items()}
    assert divide(8, FOUR, told=told, nbytes=V) == (0, 2, 4, 6, 8)


def test_who_has_measured_nothing_is_taken_for_the_mean() -> None:
    assert lengths({}) == [2500] * 4
    assert lengths(of({1: 2e6})) == [2500] * 4
    with_mean = of({1: 5e6, 2: 1e7, 3: 7.5e6, 4: 7.5e6})
    assert lengths(of({1: 5e6, 2: 1e7})) == lengths(with_mean)


def test_what_was_measured_does_not_count_beside_what_a_user_gives() -> None:
    told = of({1: 1e6, 2: 1e7, 3: 1e7, 4: 1e7})
    given = [Member(FOUR[0].key, FOUR[0].addresses, Role.NODE, 3.0), *FOUR[1:]]
    assert lengths(told, given) == [2500] * 4
    none = [Member(FOUR[0].key, FOUR[0].addresses, Role.NODE, 0.0), *FOUR[1:]]
    assert lengths(told, none)[0] == 0, "0 is the same in all units"
    assert lengths({2: Rates(5e6), 3: Rates(1e7), 4: Rates(1e7)}, none)[1] < 3333


def test_two_who_lie_do_not_have_one_reduce_everything() -> None:
    """They tell of slow links to all others but one."""
    group = [measured(number) for number in range(1, 11)]
    slow = tuple((key(number), 1.0) for number in range(3, 10))
    told = {number: Rates(1e7, slow if number < 3 else ()) for number in range(1, 11)}
    assert lengths(told, group) == [1000] * 10


def test_a_slow_link_is_spared_if_more_than_one_member_tells_of_it() -> None:
    def told(*slow: tuple[int, int]) -> dict[int, Rates]:
        """Of each pair, the first says that its link to the second is slow."""
        links = {by: tuple((key(of), 2e5) for one, of in slow if one == by) for by in range(1, 5)}
        return {number: Rates(1e7, links[number]) for number in range(1, 5)}

    both = lengths(told((1, 2), (2, 1)))
    assert both[0] + both[1] < 1000
    assert lengths(told((1, 2), (2, 1)), nbytes=1000) == [2500] * 4, "it carries that soon enough"
    assert lengths(told((1, 3), (2, 3), (4, 3)))[2] == 0, "its way in is slow, of which it does not know"
    for slow in ([(1, 2)], [(1, 2), (1, 3), (1, 4)], [(1, 2), (2, 3)], [(1, 99), (99, 1), (1, 1)]):
        assert lengths(told(*slow)) == [2500] * 4, "what one says alone, or of others, counts for nothing"


def test_who_is_relayed_reduces_only_if_all_are() -> None:
    two, four = (measured(number, Reach.RELAYED) for number in (2, 4))
    assert lengths({}, [measured(1), two, measured(3), four]) == [5000, 0, 5000, 0]
    assert lengths({}, [two, four]) == [5000, 5000]
    assert lengths({}, [measured(1, role=Role.CLIENT), two]) == [0, 10_000]
    zero = Member(FOUR[0].key, FOUR[0].addresses, Role.NODE, 0.0)
    assert lengths({}, [zero, two]) == [0, 10_000], "who wants to reduce nothing does so later still"


# -- what is measured


def test_links_are_measured_while_they_are_in_use() -> None:
    measures = Measured()
    assert measures.rates(math.inf, 0.0) == Rates()
    assert measures.rates(1e6, 0.0) == Rates(1e6), "what the user allows is known before"
    for number, busy in enumerate((2.0, 1.0, 4.0, 4.0, 4.0)):
        before = {b"a": (1000, 10.0), b"b": (0, 0.0)}
        measures.add(before, {b"a": (1000 + 10_000_000, 10.0 + busy), b"b": (10_000_000, busy)}, float(number))
        best = 1e7 / min(busy, 2.0 if number == 0 else 1.0 if number < 4 else 4.0)
        assert measures.rates(math.inf, float(number)) == Rates(2 * best), number
    assert measures.rates(1e6, 5.0) == Rates(1e6)
    assert measures.rates(math.inf, 5.0 + KEPT_SECONDS) == Rates(), "it may have been mended"


def test_slow_links_are_told_and_no_more_of_them_than_may_be() -> None:
    measures, names = Measured(), [bytes([n]) * 32 for n in range(40)]
    after = {name: (10_000_000, 100.0 + n if n < 12 else 1.0) for n, name in enumerate(names)}
    measures.add(dict.fromkeys(names, (0, 0.0)), after, 0.0)
    slow = measures.rates(math.inf, 0.0).slow
    assert [name for name, _ in slow] == names[11:3:-1]
    assert len(slow) == MAX_SLOW


def test_what_carried_little_or_is_another_connection_is_not_measured() -> None:
    measures = Measured()
    before = {b"a": (0, 0.0), b"b": (10_000_000, 5.0), b"c": (0, 0.0), b"e": (1_000_000, 5.0)}
    after = {b"a": (LEAST_BYTES - 1, 1.0), b"b": (9_000_000, 1.0), b"d": (9_000_000, 1.0), b"e": (9_000_000, 4.0)}
    measures.add(before, after, 0.0)
    assert measures.rates(math.inf, 0.0) == Rates()


@pytest.mark.parametrize(("little", "is_measured"), [(LEAST_BYTES - 1, False), (LEAST_BYTES // 8, True)])
def test_a_peer_is_not_taken_for_slow_since_one_of_its_links_carried_little(little: int, is_measured: bool) -> None:
    """That link took its part of the way out: the others say less than the peer can send."""
    measures = Measured()
    measures.add({b"a": (0, 0.0), b"b": (0, 0.0)}, {b"a": (2 * LEAST_BYTES, 1.0), b"b": (little, 1.0)}, 0.0)
    assert (measures.rates(math.inf, 0.0).own is not None) == is_measured

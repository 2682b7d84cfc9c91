"""The plan of a download: which chunk to ask whom for, and how long to wait. Decided without I/O."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.download import LEAST_PACE, SLOW_LINE, DownloadPlan

DIGESTS = [bytes([number]) * 32 for number in range(10)]
ANN, BOB = (PeerID(bytes([number]) * 32) for number in range(1, 3))
CYD = PeerID(bytes([3]) * 32)


def planned(digests: list[bytes], donors: list[PeerID], **limits: float) -> DownloadPlan:
    plan = DownloadPlan(digests, [1 << 20] * len(digests), donors)
    for name, limit in limits.items():
        assert hasattr(plan, name)
        setattr(plan, name, limit)
    return plan


def test_chunks_are_spread_over_donors_within_their_windows_and_asked_once():
    plan = planned(DIGESTS, [ANN, BOB], window=3)
    first = plan.next_requests(0.0)
    assert [chunk for _, chunk in first] == [0, 1, 2, 3, 4, 5]
    assert [donor for donor, _ in first] == [ANN, BOB] * 3
    assert plan.next_requests(0.0) == []
    assert plan.received(ANN, 0, DIGESTS[0], 1.0)
    assert plan.next_requests(1.0) == [(ANN, 6)]


def test_what_is_outstanding_is_bounded_over_all_donors():
    donors = [PeerID(bytes([number]) * 32) for number in range(100)]
    plan = planned([bytes(32)] * 1000, donors, window=4, max_outstanding=32)
    assert len(plan.next_requests(0.0)) == 32


def test_what_a_failed_donor_owed_goes_to_the_others():
    plan = planned(DIGESTS[:4], [ANN, BOB], window=4)
    assert plan.next_requests(0.0) == [(ANN, 0), (BOB, 1), (ANN, 2), (BOB, 3)]
    plan.donor_failed(ANN, "lost")
    assert plan.next_requests(0.0) == [(BOB, 0), (BOB, 2)]
    plan.add_donor(ANN)
    plan.donor_failed(BOB, "lost too")
    assert plan.failed
    assert plan.missing
    assert plan.dropped == {ANN: "lost", BOB: "lost too"}


def test_a_wrong_digest_drops_the_donor_and_the_chunk_is_asked_of_another():
    plan = planned(DIGESTS[:2], [ANN, BOB])
    assert plan.next_requests(0.0) == [(ANN, 0), (BOB, 1)]
    assert not plan.received(ANN, 0, DIGESTS[7], 1.0)
    assert plan.dropped == {ANN: "sent chunk 0 with a wrong digest"}
    assert plan.next_requests(1.0) == [(BOB, 0)]
    assert plan.received(BOB, 0, DIGESTS[0], 1.0)
    assert plan.received(BOB, 1, DIGESTS[1], 1.0)
    assert not plan.missing
    assert plan.chunks_from == {BOB: 2}


def test_a_chunk_that_was_not_asked_for_counts_as_nothing():
    plan = planned(DIGESTS[:2], [ANN, BOB], window=1)
    plan.next_requests(0.0)
    assert not plan.received(ANN, 1, DIGESTS[1], 1.0)
    assert not plan.received(CYD, 1, DIGESTS[1], 1.0)
    assert len(plan.missing) == 2
    assert plan.dropped == {}


def test_a_late_donor_gets_no_more_and_others_are_asked_for_what_it_owes():
    plan = planned(DIGESTS[:4], [ANN, BOB], window=2, patience=5.0, give_up=20.0)
    assert plan.next_requests(0.0) == [(ANN, 0), (BOB, 1), (ANN, 2), (BOB, 3)]
    assert plan.next_check() == 5.0
    assert plan.received(BOB, 1, DIGESTS[1], 4.0)
    assert plan.next_requests(4.9) == []
    assert plan.next_requests(5.0) == [(BOB, 0)]
    assert plan.received(BOB, 3, DIGESTS[3], 6.0)
    # Ann answers after all: what she still owes is not asked of others as well.
    assert plan.received(ANN, 0, DIGESTS[0], 6.0)
    assert plan.next_requests(6.0) == []
    assert not plan.received(BOB, 0, DIGESTS[0], 7.0)
    assert plan.received(ANN, 2, DIGESTS[2], 7.0)
    assert not plan.missing


def test_a_donor_that_stays_silent_is_dropped():
    plan = planned(DIGESTS[:1], [ANN], patience=5.0, give_up=20.0)
    plan.next_requests(0.0)
    assert plan.next_requests(5.0) == []
    assert plan.next_check() == 20.0
    assert plan.next_requests(20.0) == []
    assert plan.failed
    assert plan.dropped == {ANN: "sent nothing for 20 s"}


def test_a_slow_but_steady_donor_is_never_late():
    plan = planned(DIGESTS[:6], [ANN, BOB], window=3, patience=5.0)
    asked = plan.next_requests(0.0)
    for step, chunk in enumerate([chunk for donor, chunk in asked if donor == ANN]):
        assert plan.received(ANN, chunk, DIGESTS[chunk], 4.0 * (step + 1))
        for donor, other in asked:
            if donor == BOB and step == 0:
                assert plan.received(BOB, other, DIGESTS[other], 4.0)
        assert plan.next_requests(4.0 * (step + 1)) == []
    assert not plan.missing


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.integers(0, 20), st.integers(1, 5))
def test_whatever_happens_a_plan_ends_and_keeps_its_rules(seed: int, chunks: int, donors: int):
    rng = random.Random(seed)
    digests = [bytes([number]) * 32 for number in range(chunks)]
    peers = [PeerID(bytes([number]) * 32) for number in range(donors)]
    plan = planned(digests, peers, window=2, max_outstanding=5, patience=5.0, give_up=20.0)
    now, asked, kept = 0.0, [], []
    while plan.missing and not plan.failed:
        requests = plan.next_requests(now)
        assert not {donor for donor, _ in requests} & set(plan.dropped)
        asked += requests
        assert len(asked) == len(set(asked)), "one donor was asked twice for one chunk"
        event = rng.random()
        if event < 0.6 and asked:
            donor, chunk = asked.pop(rng.randrange(len(asked)))
            digest = digests[chunk] if rng.random() < 0.95 else bytes(31) + b"x"
            if plan.received(donor, chunk, digest, now):
                kept.append(chunk)
        elif event < 0.63:
            plan.donor_failed(rng.choice(peers), "lost")
        else:
            check = plan.next_check()
            assert check is not None or not plan.missing or plan.failed, "nothing is outstanding, and nothing is asked"
            now = max(now, check or 0.0) if rng.random() < 0.5 else now + rng.random()
        asked = [(donor, chunk) for donor, chunk in asked if donor not in plan.dropped]
    assert sorted(kept) == sorted(set(kept))
    assert plan.failed or len(kept) == chunks


def arrive(plan: DownloadPlan, donor: PeerID, pace: float, seconds: float) -> float:
    """A donor sends what it is asked for at that pace, all at the same time, until it was dropped or all is here. Bytes
    pass all the time. Returns when that is."""
    now, sent, owed = 0.0, 0.0, {chunk: 0.0 for _, chunk in plan.next_requests(0.0)}
    while plan.missing and not plan.failed and now < seconds:
        now, sent = now + 1.0, pace / max(1, len(owed))
        plan.is_sending(donor, now)
        for chunk in list(owed):
            owed[chunk] += sent
            if owed[chunk] >= plan._sizes[chunk]:
                del owed[chunk]
                assert plan.received(donor, chunk, bytes(32), now)
        owed.update((chunk, 0.0) for _, chunk in plan.next_requests(now))
    return now


def test_a_slow_line_is_waited_for_however_much_it_has_to_send():
    for size in (1 << 20, 4 << 20):
        plan = DownloadPlan([bytes(32)] * 100, [size] * 100, [ANN])
        assert arrive(plan, ANN, SLOW_LINE, 1e6) >= 100 * size / SLOW_LINE
        assert not plan.missing, plan.dropped


def test_who_sends_all_the_time_and_lets_little_arrive_is_dropped():
    plan = DownloadPlan([bytes(32)] * 100, [1 << 20] * 100, [ANN])
    assert arrive(plan, ANN, LEAST_PACE / 4, 1e6) < 100.0
    assert "less than 32 KiB/s" in plan.dropped[ANN]
    plan = DownloadPlan([bytes(32)] * 10_000, [1000] * 10_000, [ANN])  # many small ones
    assert arrive(plan, ANN, 100.0, 1e6) < 30.0
    assert plan.failed


def test_who_was_fast_has_no_more_time_to_drip_than_who_was_not():
    plan = DownloadPlan([bytes(32)] * 100, [1 << 20] * 100, [ANN])
    now = 0.0
    for chunk in range(90):
        plan.next_requests(now)
        plan.received(ANN, chunk, bytes(32), now := now + 0.1)
    plan.next_requests(now)
    while not plan.failed:
        plan.is_sending(ANN, now := now + 1.0)
        plan.next_requests(now)
    assert now < 9.0 + 20.0 + 4 * (1 << 20) / SLOW_LINE + 2.0


def test_one_that_drips_among_others_is_the_one_that_is_dropped():
    plan = planned(DIGESTS, [ANN, BOB])
    now, waiting = 0.0, []
    while plan.missing:
        assert now < 200.0
        waiting += [(donor, chunk) for donor, chunk in plan.next_requests(now) if donor == BOB]
        plan.is_sending(ANN, now := now + 1.0)
        if waiting:
            plan.received(*(pair := waiting.pop(0)), DIGESTS[pair[1]], now)
    assert list(plan.dropped) == [ANN]
    assert plan.chunks_from == {BOB: 10}


def test_while_this_process_was_stopped_nobody_was_silent():
    plan = planned(DIGESTS, [ANN, BOB], window=1)
    assert plan.next_requests(0.0) == [(ANN, 0), (BOB, 1)]
    plan.stood_still(100.0)
    assert plan.next_requests(100.0) == []
    assert not plan.dropped
    assert plan.received(ANN, 0, DIGESTS[0], 101.0)
    assert plan.next_requests(101.0) == [(ANN, 2)]
    assert (BOB, 1) not in plan.next_requests(106.0)
    plan.next_requests(120.5)
    assert list(plan.dropped) == [BOB], "it is silent from then on"


def test_chunks_that_are_here_are_not_asked_for():
    plan = DownloadPlan(DIGESTS[:4], [1 << 20] * 4, [ANN], have=[0, 2])
    assert plan.next_requests(0.0) == [(ANN, 1), (ANN, 3)]
    assert plan.missing == {1, 3}

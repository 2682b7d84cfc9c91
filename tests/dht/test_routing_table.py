"""The routing table knows many peers near its own id, few far away, and prefers those that are known to live."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shoal.dht.records import ID_BITS, node_id
from shoal.dht.routing import CHECK_AFTER, FORGET_AFTER_FAILURES, RETRY_AFTER, STALE_AFTER, RoutingTable
from shoal.p2p.identity import PeerID

PEERS = [PeerID(index.to_bytes(32, "big")) for index in range(400)]
OWN, *OTHERS = PEERS
ADDRESSES = ("/ip4/127.0.0.1/tcp/1",)


def shared_bits(peer: PeerID) -> int:
    return ID_BITS - (node_id(peer) ^ node_id(OWN)).bit_length()


class TableMachine(RuleBasedStateMachine):
    """Any history of signs of life and failures, compared with a plain record of them."""

    def __init__(self) -> None:
        super().__init__()
        self.table = RoutingTable(node_id(OWN), bucket_size=3)
        self.now = 0.0
        self.last_failed: dict[PeerID, bool] = {}

    @rule(peer=st.sampled_from(PEERS), later=st.sampled_from([0.0, 1.0, 100.0]))
    def heard(self, peer: PeerID, later: float) -> None:
        self.now += later
        check = self.table.heard(peer, ADDRESSES, self.now)
        if peer == OWN:
            assert check is None
            assert self.table.get(peer) is None
            return
        self.last_failed[peer] = False
        if check is not None:
            assert not self.table.is_alive(peer)
            assert self.now - check.heard_at > CHECK_AFTER
            self.table.failed(check.peer, self.now)
            self.last_failed[check.peer] = True
            assert self.table.is_alive(peer)  # the newcomer took its place

    @rule(peer=st.sampled_from(PEERS))
    def failed(self, peer: PeerID) -> None:
        self.table.failed(peer, self.now)
        self.last_failed[peer] = True

    @rule(peer=st.sampled_from(PEERS))
    def forget(self, peer: PeerID) -> None:
        self.table.forget(peer)
        assert self.table.get(peer) is None

    @invariant()
    def alive_means_heard_and_not_failed_since(self) -> None:
        for contact in self.table.alive():
            assert self.last_failed[contact.peer] is False

    @invariant()
    def buckets_are_bounded_and_hold_what_belongs_there(self) -> None:
        assert len(self.table) == sum(len(bucket.contacts) for bucket in self.table._buckets)
        last = len(self.table._buckets) - 1
        for index, bucket in enumerate(self.table._buckets):
            assert len(bucket.contacts) <= 3
            assert len(bucket.replacements) <= 3
            assert not bucket.contacts.keys() & bucket.replacements.keys()
            for peer in [*bucket.contacts, *bucket.replacements]:
                assert peer != OWN
                assert shared_bits(peer) == index or (index == last and shared_bits(peer) > index)

    @invariant()
    def nearest_is_sorted_by_distance(self) -> None:
        target = node_id(PEERS[7])
        distances = [contact.id ^ target for contact in self.table.nearest(target, 5)]
        assert distances == sorted(contact.id ^ target for contact in self.table.alive())[:5]


TestTable = TableMachine.TestCase
TestTable.settings = settings(max_examples=60, stateful_step_count=40)


@given(st.integers())
def test_a_node_knows_all_of_its_own_neighbourhood(seed: int) -> None:
    peers = random.Random(seed).sample(OTHERS, 200)
    table = RoutingTable(node_id(OWN), bucket_size=8)
    for peer in peers:
        table.heard(peer, ADDRESSES, 0.0)
    last = len(table._buckets) - 1
    assert last > 2
    assert all(table.is_alive(peer) for peer in peers if shared_bits(peer) >= last)


def test_of_a_full_bucket_the_one_unheard_for_longest_is_asked_and_replaced_if_it_fails() -> None:
    far = [peer for peer in OTHERS if shared_bits(peer) == 0][:4]
    table = RoutingTable(node_id(OWN), bucket_size=3)
    for peer in [*far[:3], *(peer for peer in OTHERS if shared_bits(peer) > 0)]:
        table.heard(peer, ADDRESSES, 0.0)  # the others make the table split
    table.heard(far[0], ADDRESSES, 1.0)
    assert table.heard(far[3], ADDRESSES, 2.0) is None  # all were heard of recently
    check = table.heard(far[3], ADDRESSES, 2.0 + CHECK_AFTER)
    assert check is not None
    assert check.peer == far[1]
    table.failed(check.peer, 100.0)
    assert table.get(far[1]) is None
    assert table.is_alive(far[3])


def test_a_failed_contact_is_tried_again_ever_later_and_then_forgotten() -> None:
    table = RoutingTable(node_id(OWN))
    table.heard(OTHERS[0], ADDRESSES, 0.0)
    now = 0.0
    for failures in range(FORGET_AFTER_FAILURES - 1):
        table.failed(OTHERS[0], now)
        assert table.nearest(0, 10) == []
        wait = RETRY_AFTER * 2**failures
        assert table.due(now + wait - 0.1) == []
        now += wait
        assert [contact.peer for contact in table.due(now)] == [OTHERS[0]]
    table.failed(OTHERS[0], now)
    assert len(table) == 0


def test_a_failed_contact_that_is_heard_again_counts_as_alive() -> None:
    table = RoutingTable(node_id(OWN))
    table.heard(OTHERS[0], ADDRESSES, 0.0)
    table.failed(OTHERS[0], 1.0)
    table.heard(OTHERS[0], ("/ip4/127.0.0.1/tcp/2",), 2.0)
    assert [contact.addresses for contact in table.nearest(0, 1)] == [("/ip4/127.0.0.1/tcp/2",)]
    assert table.due(2.0 + RETRY_AFTER) == []


def test_silent_contacts_and_buckets_are_due() -> None:
    table = RoutingTable(node_id(OWN), bucket_size=2)
    for peer in OTHERS:
        table.heard(peer, ADDRESSES, 0.0)
    assert table.due(STALE_AFTER) == []
    assert len(table.due(STALE_AFTER + 1)) == len(table)
    rng = random.Random(0)
    assert table.refresh_targets(STALE_AFTER, rng) == []
    targets = table.refresh_targets(STALE_AFTER + 1, rng)
    assert [ID_BITS - (target ^ node_id(OWN)).bit_length() for target in targets] == list(range(len(targets)))
    assert len(targets) == len(table._buckets) - 1 > 3

"""Who says what of a peer's reach, and what follows from that."""

from __future__ import annotations

import logging

import pytest

from shoal.p2p.identity import Identity
from shoal.p2p.multiaddr import Multiaddr
from shoal.reach import words
from shoal.reach.finding import Reached, WayIn, host_of, judge
from shoal.reach.probe import Answer

PEER = Identity().peer_id
AT_HOME, OUTSIDE, MAPPED, LIE, LOOPBACK = (
    Multiaddr(f"/ip4/{place}").with_peer(PEER)
    for place in ("10.0.0.2/tcp/7", "52.1.2.3/tcp/7", "52.1.2.3/tcp/99", "6.6.6.6/tcp/7", "127.0.0.1/tcp/7")
)


def yes(*reached: Multiaddr, seen: str = "52.1.2.3", failed: tuple[Multiaddr, ...] = ()) -> Answer:
    return Answer(seen, frozenset(reached), frozenset(failed))


def no(*failed: Multiaddr, seen: str = "52.1.2.3") -> Answer:
    return Answer(seen, frozenset(), frozenset(failed))


@pytest.mark.parametrize(
    ("answers", "num_hosts", "reached"),
    [
        ([yes(OUTSIDE)], 1, Reached.PUBLIC),
        ([no(OUTSIDE)], 1, Reached.NOBODY),
        ([yes(OUTSIDE)], 2, None),
        ([no(OUTSIDE)], 2, None),
        ([yes(OUTSIDE), no(OUTSIDE)], 2, None),
        ([yes(OUTSIDE), yes(OUTSIDE)], 3, Reached.PUBLIC),
        ([no(OUTSIDE), no(OUTSIDE)], 3, Reached.NOBODY),
        ([yes(MAPPED), yes(MAPPED, failed=(OUTSIDE,))], 2, Reached.MAPPED),
        ([], 0, None),
    ],
)
def test_two_hosts_have_to_agree_where_there_are_two(answers, num_hosts, reached):
    found = judge(answers, num_hosts, [OUTSIDE], mapped=MAPPED)
    assert (found and found.reached) == reached


@pytest.mark.parametrize("lie", [no(OUTSIDE), yes(LIE, seen="6.6.6.6"), yes(LIE, seen="6.6.6.6", failed=(OUTSIDE,))])
def test_a_host_that_lies_alone_changes_nothing(lie):
    honest = [yes(OUTSIDE), yes(OUTSIDE)]
    assert judge([lie, *honest], 3, [AT_HOME]) == judge(honest, 2, [AT_HOME])
    honest = [no(OUTSIDE), no(OUTSIDE)]
    lies = yes(OUTSIDE) if lie.failed and not lie.reached else lie
    found = judge([lies, *honest], 3, [AT_HOME])
    assert found is not None
    assert (found.reached, found.addresses, found.seen) == (Reached.NOBODY, (), "52.1.2.3")


def test_an_address_that_only_one_host_names_is_not_announced():
    found = judge([yes(OUTSIDE), yes(OUTSIDE), yes(OUTSIDE, LIE)], 3, [AT_HOME])
    assert found is not None
    assert found.addresses == (OUTSIDE,)


def test_what_works_comes_first_and_what_fails_is_not_announced():
    found = WayIn(Reached.PUBLIC, (OUTSIDE,), frozenset({MAPPED}))
    assert found.announced([LOOPBACK, MAPPED, AT_HOME]) == [OUTSIDE, AT_HOME, LOOPBACK]
    assert WayIn(Reached.NOBODY).announced([LOOPBACK, AT_HOME]) == []
    assert WayIn().announced([AT_HOME, LOOPBACK]) == [AT_HOME, LOOPBACK]


def test_a_host_is_one_however_many_ipv6_addresses_it_has():
    assert host_of("2001:db8:1:2::5") == host_of("2001:db8:1:2:ffff::1") != host_of("2001:db8:1:3::5")
    assert host_of("52.1.2.3") != host_of("52.1.2.4")


@pytest.mark.parametrize("mended", [WayIn(Reached.RELAYED, (OUTSIDE,)), WayIn(Reached.PUBLIC, (OUTSIDE,))])
def test_what_was_warned_of_is_said_to_be_over(mended, caplog):
    with caplog.at_level(logging.INFO):
        words.found(WayIn(), mended, [AT_HOME], ["52.1.1.1"], insists=False)
        words.found(WayIn(Reached.NOBODY), mended, [AT_HOME], ["52.1.1.1"], insists=False)
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]


def test_a_relay_that_is_lost_is_named(caplog):
    relay = Multiaddr("/ip4/52.9.9.9/tcp/7").with_peer(Identity().peer_id)
    before = WayIn(Reached.RELAYED, (relay.by_relay(PEER),))
    words.found(before, WayIn(Reached.NOBODY), [AT_HOME], ["52.1.1.1"], insists=False)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert f"was lost ({relay})" in record.getMessage()
    assert "shoal node --relay" in record.getMessage()

"""Whom a peer dials when, and what it says about members that it can't reach: once, with who, where, why and what to
do."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from shoal.swarm.protocol.reach import Reachability, Reaching
from shoal.swarm.protocol.view import MAX_MEMBERS, Member, Role
from tests.swarm.rounds import key, member, members

ME = member(0)
CLIENT = member(0, Role.CLIENT)


def reach_of(me: Member = ME) -> Reaching:
    reach = Reaching("run", me, random.Random(1))
    reach.begin(0.0)
    return reach


def play(reach: Reaching, start: float, stop: float, reason: str = "nobody listens there", others: int = 0) -> Played:
    """Let time pass as the driver does, while every dial fails."""
    played, now = Played(), start
    while now <= stop:
        for dialled in reach.due(now):
            played.dialled.append((now, dialled))
            reach.failed(dialled.key, reason)
        if (report := reach.notice(now, lambda: others)) is not None:
            played.reports.append((now, report))
        following = reach.next_time(now)
        if following is None:
            break
        assert following > now, "the driver would never sleep"
        now = following
    return played


class Played:
    def __init__(self) -> None:
        self.dialled: list[tuple[float, Member]] = []
        self.reports: list[tuple[float, Reachability]] = []

    def only(self) -> Reachability:
        [(_, report)] = self.reports
        return report

    def times(self, number: int) -> list[float]:
        return [when for when, dialled in self.dialled if dialled.key == key(number)]


# -- dialling


def test_nodes_are_dialled_at_once_and_then_again_and_clients_never() -> None:
    reach = reach_of()
    reach.reached(ME)
    reach.known([ME, member(1), member(2, Role.AUXILIARY), member(3, Role.CLIENT)], 0.0, listed=True)
    played = play(reach, 0.0, 100.0)
    assert played.times(1)[0] == played.times(2)[0] == 0.0
    assert 8 < len(played.times(1)) < 20
    assert not played.times(0)
    assert not played.times(3)


def test_a_lost_member_is_dialled_where_it_was_whether_or_not_it_is_listed() -> None:
    reach = reach_of()
    reach.reached(member(1))
    assert reach.lost(key(1), 50.0)
    assert not reach.lost(key(1), 51.0)
    played = play(reach, 50.0, 5000.0)
    assert 51.0 <= played.times(1)[0] <= 51.2
    assert len(played.times(1)) > 80
    assert played.dialled[-1][1] == member(1)
    reach.reached(member(1))
    assert play(reach, 5000.0, 9000.0).dialled == []


def test_a_member_that_left_is_not_dialled_until_it_is_listed_anew() -> None:
    reach = reach_of()
    reach.reached(member(1))
    reach.left(key(1), 0.0)
    assert not reach.lost(key(1), 1.0), "its connection ends after that"
    reach.known([member(1)], 2.0, listed=False)  # others may not have heard yet
    played = play(reach, 0.0, 1000.0)
    assert (played.dialled, played.reports) == ([], [])
    reach.known([member(1)], 1000.0, listed=True)
    assert play(reach, 1000.0, 1100.0).times(1)[0] == 1000.0


def test_one_that_is_seen_to_live_or_has_moved_is_dialled_at_once() -> None:
    reach = reach_of()
    reach.reached(member(1))
    reach.lost(key(1), 0.0)
    play(reach, 0.0, 1000.0)
    reach.known([member(1)], 1000.5, listed=True)
    assert [m.key for m in reach.due(1000.5)] == [key(1)]
    reach.known([member(1)], 1001.0, listed=True)
    assert reach.due(1001.0) == [], "but not each time"
    moved = Member(key(1), ("/ip4/10.9.9.9/tcp/1",), Role.NODE)
    reach.known([moved], 1002.0, listed=True)
    assert reach.due(1002.0) == [moved]


def test_hearsay_right_after_a_loss_says_nothing() -> None:
    """The others may not have noticed yet."""
    reach = reach_of()
    reach.reached(member(1))
    reach.reached(member(2))
    reach.lost(key(1), 0.0)
    reach.known([member(1)], 0.9, listed=False)
    assert reach.due(0.9) == []
    assert play(reach, 5.0, 100.0).reports == []
    reach.known([member(1)], 100.0, listed=False)
    assert play(reach, 100.0, 200.0).only().unreached == (member(1).peer,)


def test_a_peer_that_was_away_dials_all_at_once() -> None:
    reach = reach_of()
    for one in members(1, 2):
        reach.reached(one)
    reach.lost(key(1), 0.0)
    reach.hurry(1.0)
    reach.lost(key(2), 1.5)
    assert {m.key for m in reach.due(1.5)} == {key(1), key(2)}


def test_who_is_reached_through_a_relay_is_not_asked_to_open_a_port() -> None:
    reach = reach_of()
    circuit = f"/ip4/198.51.100.4/tcp/31337/p2p/{member(9).peer}/p2p-circuit/p2p/{member(1).peer}"
    reach.known([Member(key(1), (circuit,), Role.NODE)], 0.0, listed=True)
    [(_, report)] = play(reach, 0.0, 100.0).reports
    assert f"{member(1).peer} at the relay /ip4/198.51.100.4/tcp/31337 (nobody listens there)" in report.advice
    assert "Start the relay again through which it is reached, or another one" in report.advice
    assert "firewall" not in report.advice


def test_what_it_knows_is_bounded() -> None:
    reach = reach_of()
    crowd = [Member(n.to_bytes(32, "big"), ("/ip4/10.0.0.1/tcp/1",), Role.NODE) for n in range(1, MAX_MEMBERS + 100)]
    reach.known(crowd, 0.0, listed=True)
    due = reach.due(0.0)
    assert len(due) == MAX_MEMBERS
    assert crowd[0] not in due, "who is missing for longest is forgotten"
    for one in crowd:
        reach.left(one.key, 0.0)
    assert len(reach._left) == MAX_MEMBERS


# -- warnings


def test_after_10_s_one_warning_says_who_where_why_and_what_to_do() -> None:
    reach = reach_of()
    reach.known(members(1, 2), 0.0, listed=True)
    played = play(reach, 0.0, 5000.0)
    [(when, report)] = played.reports
    assert when == 10.0
    assert report.num_peers == 1
    assert report.unreached == (member(1).peer, member(2).peer)
    for number in (1, 2):
        assert f"{member(number).peer} at /ip4/10.0.0.{number}/tcp/4000 (nobody listens there)" in report.advice
    assert "2 known members of the run 'run' can't be reached, and this peer trains alone" in report.advice
    for way_out in ("firewall", "announce_maddrs", "client_mode=True", "dialled again every 5 to 60 s"):
        assert report.advice.count(way_out) == 1


def test_who_is_reached_in_time_is_not_spoken_of() -> None:
    reach = reach_of()
    reach.known(members(1, 2), 0.0, listed=True)
    play(reach, 0.0, 9.0)
    reach.reached(member(1))
    report = play(reach, 9.0, 100.0).only()
    assert (report.num_peers, report.unreached) == (2, (member(2).peer,))
    assert "this peer trains with 1 other only" in report.advice


def test_others_that_go_missing_are_told_of_together_and_not_at_once() -> None:
    reach = reach_of()
    reach.known([member(1)], 0.0, listed=True)
    play(reach, 0.0, 11.0)
    reach.known([member(2)], 12.0, listed=True)
    reach.known([member(3)], 40.0, listed=True)
    [(when, report)] = play(reach, 12.0, 300.0).reports
    assert when == 70.0
    assert str(member(2).peer) in report.advice
    assert str(member(3).peer) in report.advice
    assert str(member(1).peer) not in report.advice, "that was said"
    assert len(report.unreached) == 3


def test_when_all_are_reached_or_have_left_that_is_told_once() -> None:
    reach = reach_of()
    reach.known(members(1, 2), 0.0, listed=True)
    play(reach, 0.0, 20.0)
    reach.reached(member(1))
    assert play(reach, 20.0, 30.0).reports == []
    reach.left(key(2), 0.0)
    assert reach.notice(31.0, lambda: 5) == Reachability(2, (), "")
    assert reach.notice(32.0, lambda: 5) is None


def test_a_member_that_dies_is_dialled_and_not_warned_of() -> None:
    """Peers come and go; what matters is who is there and can't be reached, or that nobody is left."""
    reach = reach_of()
    reach.reached(member(1))
    reach.reached(member(2))
    reach.lost(key(1), 100.0)
    played = play(reach, 100.0, 1000.0)
    assert played.reports == []
    assert played.times(1)
    reach.lost(key(2), 1000.0)
    [(when, report)] = play(reach, 1000.0, 2000.0).reports
    assert when == 1010.0
    assert report.unreached == (member(1).peer, member(2).peer)
    assert "trains alone" in report.advice


@pytest.mark.parametrize("listed", [True, False])
def test_a_lost_member_that_lives_has_10_s_from_the_first_sign_of_it(listed: bool) -> None:
    """A partition heals: it is dialled at that moment, so it is too early to say that it can't be reached."""
    reach = reach_of()
    reach.reached(member(1))
    reach.reached(member(2))
    reach.lost(key(1), 100.0)
    assert play(reach, 100.0, 160.0).reports == []
    reach.known([member(1)], 160.5, listed=listed)
    reach.known([member(1)], 165.0, listed=listed)
    [(when, _)] = play(reach, 160.5, 1000.0).reports
    assert when == 170.5


def test_what_was_said_of_a_lost_member_holds_when_it_is_seen_to_live() -> None:
    reach = reach_of()
    reach.reached(member(1))
    reach.lost(key(1), 0.0)
    assert len(play(reach, 0.0, 20.0).reports) == 1
    reach.known([member(1)], 20.0, listed=True)
    assert play(reach, 20.0, 100.0).reports == []
    reach.reached(member(1))
    assert reach.notice(100.0, lambda: 0) == Reachability(2, (), "")


def test_the_loss_of_everybody_is_told_although_another_warning_was_just_given() -> None:
    reach = reach_of()
    reach.known([member(1)], 0.0, listed=True)
    reach.reached(member(2))
    assert len(play(reach, 0.0, 11.0).reports) == 1
    reach.known([member(3)], 12.0, listed=True)
    reach.lost(key(2), 15.0)
    [(when, report)] = play(reach, 15.0, 1000.0).reports
    assert when == 25.0
    assert str(member(2).peer) in report.advice
    assert str(member(3).peer) in report.advice, "whoever is missing is named at once"
    assert "trains alone" in report.advice


def test_who_loses_everybody_again_and_again_is_told_once_in_60_s() -> None:
    reach = reach_of()
    told = []
    for start in range(0, 180, 15):
        reach.reached(member(1))
        reach.notice(start, lambda: 0)
        reach.lost(key(1), float(start))
        told += [when for when, report in play(reach, float(start), start + 14.0).reports if report.advice]
    assert told == [10.0, 70.0, 130.0]


def test_a_lost_member_that_is_still_listed_lives_and_is_warned_of() -> None:
    reach = reach_of()
    reach.reached(member(1))
    reach.reached(member(2))
    reach.lost(key(1), 100.0)
    reach.known([member(1)], 105.0, listed=True)
    [(when, report)] = play(reach, 105.0, 1000.0, reason="").reports
    assert when == 115.0
    assert f"{member(1).peer} at /ip4/10.0.0.1/tcp/4000 (its connection was lost)" in report.advice


@pytest.mark.parametrize("addresses", [("/ip4/127.0.0.1/tcp/4000",), ("/ip6/::1/tcp/1", "/dns/localhost/tcp/2")])
def test_one_that_listens_on_loopback_is_told_apart(addresses: Sequence[str]) -> None:
    reach = reach_of()
    reach.known([Member(key(1), tuple(addresses), Role.NODE)], 0.0, listed=True)
    advice = play(reach, 0.0, 100.0).only().advice
    assert "loopback" in advice
    assert "host_maddrs=['/ip4/0.0.0.0/tcp/<port>']" in advice
    assert "firewall" not in advice


def test_two_clients_without_a_node_are_told_what_they_lack() -> None:
    reach = reach_of(CLIENT)
    reach.known([member(1, Role.CLIENT)], 0.0, listed=True)
    played = play(reach, 0.0, 1000.0)
    assert not played.dialled
    assert f"{member(1).peer}, a client" in played.only().advice
    advice = played.only().advice
    for part in (
        str(CLIENT.peer),
        str(member(1).peer),
        "the run needs a node",
        "`shoal node --relay`",
        "initial_peers=",
    ):
        assert part in advice


def test_two_clients_of_one_node_do_not_miss_each_other() -> None:
    reach = reach_of(CLIENT)
    reach.known([member(1, Role.CLIENT), member(2)], 0.0, listed=True)
    reach.reached(member(2))
    assert play(reach, 0.0, 1000.0).reports == []


@pytest.mark.parametrize("warned_before", [False, True])
def test_a_client_that_loses_its_only_node_is_told_of_the_node_first(warned_before: bool) -> None:
    """It needs the other clients from then on only; they are many, and the node is named all the same."""
    reach = reach_of(CLIENT)
    clients = [member(number, Role.CLIENT) for number in range(1, 21)]
    reach.known(clients, 0.0, listed=True)
    if warned_before:
        assert len(play(reach, 0.0, 90.0).reports) == 1
    reach.reached(member(50))
    play(reach, 90.0, 100.0)
    reach.lost(key(50), 100.0)
    [(when, report)] = play(reach, 100.0, 1000.0).reports
    assert when == 110.0
    assert f"this peer trains alone: {member(50).peer} at /ip4/10.0.0.50/tcp/4000 (nobody listens" in report.advice
    assert str(member(1).peer) in report.advice
    assert set(report.unreached) == {member(50).peer, *(client.peer for client in clients)}


def test_a_client_whose_node_left_misses_other_clients_from_then_on() -> None:
    reach = reach_of(CLIENT)
    reach.known([member(1, Role.CLIENT)], 0.0, listed=True)
    reach.reached(member(2))
    reach.left(key(2), 100.0)
    [(when, report)] = play(reach, 100.0, 1000.0).reports
    assert (when, report.unreached) == (110.0, (member(1).peer,))


def test_a_client_that_does_not_come_may_have_a_wrong_address_of_this_peer() -> None:
    reach = reach_of()
    reach.known([member(1, Role.CLIENT)], 0.0, listed=True)
    advice = play(reach, 0.0, 100.0).only().advice
    assert f"{member(1).peer}, a client" in advice
    assert "this peer's addresses (/ip4/10.0.0.0/tcp/4000)" in advice


def test_a_warning_names_a_bounded_number() -> None:
    reach = reach_of()
    reach.known(members(*range(1, 31)), 0.0, listed=True)
    report = play(reach, 0.0, 100.0).only()
    assert len(report.unreached) == 30
    assert report.advice.count("/ip4/") == 8
    assert "; and 22 more." in report.advice


def test_one_that_is_alone_in_its_run_while_the_dht_has_others_is_told_so_once() -> None:
    reach = reach_of()
    assert play(reach, 0.0, 9.9, others=3).reports == []
    report = reach.notice(10.0, lambda: 3)
    assert report is not None
    assert report.num_peers == 1
    assert "this peer is alone in the run 'run', while the DHT has 3 other nodes" in report.advice
    assert "the same run_id" in report.advice
    assert reach.notice(11.0, lambda: 3) is None
    reach.known([member(1)], 12.0, listed=True)
    assert reach.notice(12.0, lambda: 3) is None
    reach.reached(member(1))
    assert reach.notice(13.0, lambda: 3) == Reachability(2, (), "")


def test_one_that_is_alone_in_the_dht_too_began_it() -> None:
    assert play(reach_of(), 0.0, 100.0, others=0).reports == []
    reach = reach_of()
    reach.reached(member(1))
    reach.left(key(1), 0.0)
    assert reach.notice(1000.0, lambda: 3) is None, "the others have left: nothing is wrong"


def test_a_peer_with_other_terms_is_dialled_and_no_warning_names_it() -> None:
    """Its user is told what differs: no port or address of it is wrong."""
    reach = reach_of()
    reach.refused(member(1))
    reach.lost(key(1), 1.0)
    reach.known(members(1), 2.0, listed=True)
    played = play(reach, 2.0, 100.0)
    assert played.times(1)
    assert played.reports == []
    reach.accepted(key(1))  # it was started again, with the terms of the run
    reach.reached(member(1))
    reach.lost(key(1), 101.0)
    assert "can't be reached" in play(reach, 101.0, 120.0).only().advice

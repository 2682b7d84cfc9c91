"""What is shown of a run follows from records and connections alone, and says who is not well, and how."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace as replace_dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from shoal.health.board import Posted
from shoal.health.record import Fault, FaultKind, Lost, OtherTerms, PutOut, Totals, name_of
from shoal.monitor.findings import ALONE_SECONDS, TOLD_SECONDS, UNLIKE_SECONDS
from shoal.monitor.picture import LATE_SECONDS, Picture
from shoal.monitor.snapshot import PeerView, Snapshot, Standing, Trouble
from shoal.p2p.identity import Identity, PeerID
from shoal.swarm.protocol.view import Role
from tests.health.records import START, WELL, health, mark

A, B, C, D = (Identity(bytes([seed]) * 32).peer_id for seed in range(4))


def totals(**differing: Any) -> Totals:
    return replace(WELL.totals, **differing)


class World:
    """A picture, and a clock for it: monotonic time is `now`, and records are published by `START + now`."""

    def __init__(self) -> None:
        self.picture, self.now, self.number = Picture("run"), 0.0, 0

    def read(self, *posts: Posted, began: float | None = None) -> None:
        self.picture.read(posts, self.now if began is None else began, self.now, START + self.now)

    def post(self, peer: PeerID, **differing: Any) -> Posted:
        self.number += 1
        given = {"number": self.number, "at": START + self.now} | differing
        return Posted(peer, health(**given), START + self.now)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.picture.tick(self.now, START + self.now)

    @property
    def snapshot(self) -> Snapshot:
        return self.picture.snapshot(self.now, START + self.now)

    def view(self, peer: PeerID) -> PeerView:
        return next(view for view in self.snapshot.peers if view.id == str(peer))

    def troubles(self, peer: PeerID) -> list[Trouble]:
        return [finding.trouble for finding in self.view(peer).findings]

    def happenings(self, peer: PeerID) -> list[str]:
        return [each.what for each in self.snapshot.happenings if each.peer == name_of(peer)]


@pytest.fixture
def world() -> World:
    return World()


def test_a_machine_that_breaks_its_parameters_again_and_again_is_named(world: World) -> None:
    """It has mended them by a download whenever one looks; once it has not for a while, all is well."""
    fault = Fault(FaultKind.UNLIKE, "this peer's parameters differ from those of like peers", START)
    broken = {"faults": {FaultKind.UNLIKE: 7}, "fault": fault}
    world.read(world.post(A), world.post(B), world.post(C, **broken))
    assert world.troubles(C) == [Trouble.UNLIKE]
    assert "has other parameters (than those like it: found 7x" in world.snapshot.sentence
    world.pass_time(UNLIKE_SECONDS - 1)
    world.read(world.post(A), world.post(B), world.post(C, **broken))
    assert world.troubles(C) == [Trouble.UNLIKE]
    world.pass_time(1.0)
    world.read(world.post(A), world.post(B), world.post(C, **broken))
    assert world.snapshot.is_well


def test_all_is_well(world: World) -> None:
    world.read(world.post(A), world.post(B), world.post(C))
    snapshot = world.snapshot
    assert snapshot.is_well
    assert snapshot.sentence == "3 of 3 peers in epoch 16, 2.00 s an epoch, all alike"
    assert snapshot.happenings == ()  # what is there at the beginning has not happened now
    assert (snapshot.loss, snapshot.samples, snapshot.target) == (0.5, 90.0, 100.0)
    assert snapshot.samples_per_second == 150.0
    assert [view.share for view in snapshot.peers] == pytest.approx([1 / 3] * 3)
    assert snapshot.phases is not None
    assert snapshot.phases.computing == pytest.approx(2.0 - 0.1 - 0.02 - 0.3 - 0.05)


def test_nobody_is_there(world: World) -> None:
    world.read()
    assert not world.snapshot.is_well
    assert world.snapshot.sentence == (
        "nobody in the run 'run' says how it is: is that its run_id, does anybody train, and is this machine's clock "
        "right?"  # by one that is 30 s ahead, all records have expired
    )


def test_one_peer_alone_is_well(world: World) -> None:
    world.read(world.post(A, members=1))
    world.pass_time(LATE_SECONDS - 1)
    world.read(world.post(A, members=1))
    assert (world.snapshot.is_well, world.snapshot.sentence) == (True, "1 peer in epoch 16, 2.00 s an epoch")


NAMED: dict[str, tuple[dict[str, Any], Trouble, str]] = {
    "terms": ({"terms": b"other---"}, Trouble.TERMS, "they are not those of most"),
    "version": ({"version": "0.0.9"}, Trouble.VERSION, "0.0.9, and most run 0.1.0"),
    "parameters": ({"marks": (mark(16, b"unlike"),)}, Trouble.UNLIKE, "than 2 like it, in epoch 16"),
    "line": ({"marks": (mark(16, lineage=b"fork"),)}, Trouble.FORKED, "in epoch 16"),
    "behind": ({"epoch": 9, "newest": 16, "marks": ()}, Trouble.BEHIND, "in epoch 9, where others are in 16"),
}


@pytest.mark.parametrize("what", NAMED)
def test_who_is_not_well_is_named(world: World, what: str) -> None:
    differing, trouble, detail = NAMED[what]
    world.read(world.post(A), world.post(B), world.post(C, **differing))
    assert (world.troubles(A), world.troubles(B), world.troubles(C)) == ([], [], [trouble])
    assert not world.snapshot.is_well
    assert world.snapshot.sentence == (
        f"2 of 3 peers are well in epoch 16, 2.00 s an epoch: …{name_of(C)} {trouble.value} ({detail})"
    )


def test_the_difference_of_terms_is_what_others_say_of_it(world: World) -> None:
    refused = OtherTerms(C.key[:8], "target_batch_size is 64 here, and 32 there")
    world.read(world.post(A, refused=refused), world.post(B), world.post(C, terms=b"other---"))
    assert str(world.view(C).findings[0]) == "has other terms (target_batch_size is 64 here, and 32 there)"
    assert world.snapshot.sentence.count("target_batch_size") == 1


def test_who_was_refused_and_says_nothing_is_told_too(world: World) -> None:
    world.read(world.post(A, refused=OtherTerms(D.key[:8], "optimizer is SGD here, and Adam there")), world.post(B))
    assert "was refused, since it has other terms (optimizer is SGD here, and Adam there)" in world.snapshot.sentence
    assert not world.snapshot.is_well


def test_states_are_compared_where_peers_have_an_epoch_in_common(world: World) -> None:
    """Records are made at different times."""
    world.read(world.post(A, epoch=20, newest=20, marks=(mark(20, b"x"), mark(16))))
    world.read(world.post(B, epoch=17, marks=(mark(17, b"y"), mark(16))))
    assert world.snapshot.sentence.endswith("all alike")
    world.read(world.post(B, epoch=20, newest=20, marks=(mark(20, b"other"), mark(16))))
    assert (world.troubles(A) or world.troubles(B)) == [Trouble.UNLIKE]


def test_unlike_machines_may_round_otherwise(world: World) -> None:
    other = {"machine": b"AVX2----", "marks": (mark(16, b"rounded"),)}
    world.read(world.post(A), world.post(B), world.post(C, **other), world.post(D, **other))
    assert world.snapshot.is_well
    assert "alike" not in world.snapshot.sentence
    world.read(world.post(D, machine=b"AVX2----", marks=(mark(16, b"broken"),)))
    assert not world.snapshot.is_well


def test_local_updates_are_not_compared(world: World) -> None:
    nothing = bytes(8)
    world.read(*(world.post(peer, marks=(mark(16, nothing),)) for peer in (A, B)))
    world.read(world.post(A), world.post(B, marks=(mark(16, nothing),)))
    assert world.snapshot.is_well


def test_who_has_downloaded_the_state_is_alike_again(world: World) -> None:
    world.read(world.post(A), world.post(B), world.post(C, marks=(mark(16, b"unlike"),)))
    after = (mark(17),)
    world.read(*(world.post(peer, epoch=17, newest=17, marks=after) for peer in (A, B, C)))
    assert world.snapshot.is_well


def test_who_trains_alone_beside_others_is_named(world: World) -> None:
    def read() -> None:
        world.read(world.post(A, members=1), world.post(B, members=1))

    read()
    assert world.snapshot.is_well  # they have not had the time to meet
    world.pass_time(ALONE_SECONDS / 2 + 1)
    read()
    world.pass_time(ALONE_SECONDS / 2)
    read()
    assert (world.troubles(A), world.troubles(B)) == ([Trouble.ALONE], [Trouble.ALONE])


def test_who_cannot_be_reached_is_named(world: World) -> None:
    world.read(world.post(A, unreached=(C.key[:8],)), world.post(B, unreached=(C.key[:8],)), world.post(C))
    assert str(world.view(C).findings[0]) == "can't be reached (by 2 of the others)"
    world.read(world.post(A), world.post(B))
    assert world.snapshot.is_well
    world.picture.unreachable(C, "connection refused")
    assert str(world.view(C).findings[0]) == "can't be reached (from here: connection refused)"
    world.picture.connected(C)
    assert world.snapshot.is_well


def test_a_lost_connection_is_a_lost_peer_at_once(world: World) -> None:
    world.read(world.post(A), world.post(B), world.post(C))
    world.pass_time(1.0)
    world.picture.lost(C, "connection reset", world.now, START + world.now)
    world.pass_time(3.0)
    assert world.snapshot.sentence == (
        f"2 of 3 peers are well in epoch 16, 2.00 s an epoch: …{name_of(C)} was lost (3 s ago: connection reset)"
    )
    assert world.happenings(C) == ["was lost: connection reset"]
    assert world.view(C).share == 0.0
    world.read(world.post(A), world.post(B))
    world.now += TOLD_SECONDS
    world.read(world.post(A), world.post(B))
    assert world.snapshot.is_well  # it was told for long enough


def test_a_record_from_before_the_loss_brings_nobody_back(world: World) -> None:
    world.read(world.post(A), world.post(C))
    world.pass_time(1.0)
    began, last = world.now, world.post(C)
    world.pass_time(0.5)
    world.picture.lost(C, "connection reset", world.now, START + world.now)
    world.read(world.post(A), last, began=began)  # the reading was under way
    assert world.view(C).standing is Standing.LOST
    world.pass_time(2.0)
    world.read(world.post(A), last)
    world.pass_time(2.0)
    world.read(world.post(A), last)
    assert world.view(C).standing is Standing.LOST


def test_who_says_something_after_it_was_lost_is_back(world: World) -> None:
    world.read(world.post(A), world.post(C))
    world.picture.lost(C, "cut", world.now, START)
    world.pass_time(2.0)
    world.read(world.post(A))
    world.pass_time(2.0)
    world.read(world.post(A), world.post(C))
    assert world.view(C).standing is Standing.HERE
    assert world.happenings(C) == ["was lost: cut", "is back"]
    assert world.snapshot.is_well


def test_who_was_started_anew_is_back_at_once(world: World) -> None:
    world.read(world.post(A), world.post(C))
    world.picture.lost(C, "killed", world.now, START)
    world.read(world.post(A), world.post(C, started=START + 1, number=0))
    assert world.happenings(C) == ["was lost: killed", "is back, started anew"]
    assert world.snapshot.is_well


def test_who_says_nothing_is_silent_and_then_lost(world: World) -> None:
    world.read(world.post(A), world.post(C, role=Role.CLIENT))
    world.pass_time(LATE_SECONDS + 1)
    world.read(world.post(A))
    assert str(world.view(C).findings[0]) == "is silent (for 16 s, where 10 are usual)"
    world.pass_time(15.0)
    world.read(world.post(A))
    assert world.view(C).standing is Standing.LOST
    assert world.happenings(C) == ["was lost: it has said nothing for 31 s"]


def lost(*peers: PeerID, number: int = 0, coordinated: bool = False) -> dict[str, Any]:
    return {"lost": tuple(Lost(peer.key[:8], number, coordinated) for peer in peers)}


def with_client(world: World, *, members: int = 4) -> None:
    """Three members that listen, and a client of them."""
    world.read(*(world.post(peer) for peer in (A, B, C)), world.post(D, role=Role.CLIENT, members=members))


def test_a_client_is_lost_when_most_of_those_say_so_that_held_it(world: World) -> None:
    with_client(world)
    world.pass_time(2.0)
    world.read(world.post(A, **lost(D)))
    assert world.view(D).standing is Standing.HERE
    world.pass_time(2.0)
    world.read(world.post(B, **lost(D)))
    assert world.view(D).why == "2 of 3 members that listen have lost it"
    assert world.happenings(D) == ["was lost: 2 of 3 members that listen have lost it"]
    world.pass_time(2.0)
    world.read(world.post(A, **lost(D)), world.post(B, **lost(D)))
    world.pass_time(2.0)
    world.read(world.post(D, role=Role.CLIENT), world.post(A, **lost(D)), world.post(B, **lost(D)))
    assert world.view(D).standing is Standing.HERE  # what was said before it spoke is void
    assert world.happenings(D)[1:] == ["is back"]
    world.pass_time(2.0)
    world.read(world.post(A, **lost(D, number=1)), world.post(C, **lost(D)))
    assert world.view(D).standing is Standing.LOST


def test_one_liar_makes_no_client_lost(world: World) -> None:
    with_client(world)
    for number in range(20):
        world.pass_time(2.0)
        more = [world.post(D, role=Role.CLIENT)] if number % 5 == 0 else []
        world.read(world.post(A, lost=lost(D, number=number)["lost"] * 4), world.post(B), world.post(C), *more)
        assert world.view(D).standing is Standing.HERE


def test_who_listens_is_not_lost_for_what_others_say(world: World) -> None:
    with_client(world)
    world.read(*(world.post(peer, **lost(C)) for peer in (A, B)), world.post(D, role=Role.CLIENT, **lost(C)))
    assert world.view(C).standing is Standing.HERE


def test_clients_have_no_say(world: World) -> None:
    world.read(world.post(A), *(world.post(peer, role=Role.CLIENT) for peer in (B, C, D)))
    world.read(*(world.post(peer, role=Role.CLIENT, **lost(D)) for peer in (B, C)))
    assert world.view(D).standing is Standing.HERE
    world.read(world.post(A, **lost(D)))  # the only one that can hold it
    assert world.view(D).standing is Standing.LOST


def test_a_client_that_knows_two_members_is_lost_when_both_have_lost_it(world: World) -> None:
    """Of three that listen: it could not reach the third."""
    with_client(world, members=3)
    world.read(world.post(A, **lost(D)), world.post(B, **lost(D)))
    assert world.view(D).standing is Standing.LOST


def test_that_the_coordinator_was_lost_is_told_once(world: World) -> None:
    world.read(*(world.post(peer) for peer in (A, B, C)))
    for _ in range(2):
        world.pass_time(2.0)
        world.read(*(world.post(peer, **lost(C, coordinated=True)) for peer in (A, B)))
    assert world.happenings(A) == [f"has lost the coordinator, …{name_of(C)}"]
    assert world.happenings(B) == []


def test_who_was_put_out_of_a_round_is_told_with_the_reason(world: World) -> None:
    world.read(world.post(A), world.post(B))
    for number in (0, 0, 1):
        world.read(world.post(A, put_out=PutOut(B.key[:8], number, "no answer to a survey")))
    world.read(world.post(A, put_out=PutOut(D.key[:8], 2, "it is elsewhere, again")))
    assert world.happenings(A) == [
        *2 * [f"has put …{name_of(B)} out of a round: no answer to a survey"],
        f"has put …{D.key[:8].hex()} out of a round: it is elsewhere, again",
    ]


def run_with_clock(world: World, ahead: float, seconds: int) -> None:
    """A and B publish every 10 s, and are read every 2 s; B's clock is not this machine's."""
    for second in range(0, seconds, 2):
        posts = []
        if second % 10 == 0:
            late = world.post(B)
            posts = [world.post(A), replace_dataclass(late, at=late.at + ahead)]
        world.read(*posts)
        world.pass_time(2.0)


@pytest.mark.parametrize(
    ("ahead", "says"),
    [(-20.0, "at least 18 s behind this machine's"), (20.0, "at least 20 s ahead of this machine's")],
)
def test_who_has_another_clock_is_not_silent_but_named_as_that(world: World, ahead: float, says: str) -> None:
    run_with_clock(world, ahead, 40)
    assert (world.troubles(A), world.troubles(B)) == ([], [Trouble.CLOCK])
    assert str(world.view(B).findings[0]) == f"has another clock ({says})"
    assert world.view(B).seen <= 12.0
    world.pass_time(LATE_SECONDS)
    assert world.view(B).standing is Standing.SILENT
    world.pass_time(15.0)
    assert world.view(B).standing is Standing.LOST


def test_clocks_of_usual_machines_and_one_record_that_came_late_are_nothing(world: World) -> None:
    run_with_clock(world, -4.0, 40)
    assert world.snapshot.is_well
    late = world.post(B)
    world.read(world.post(A), replace_dataclass(late, at=late.at - 20.0))
    assert world.snapshot.is_well


def test_who_leaves_says_so_and_is_not_missed(world: World) -> None:
    world.read(world.post(A), world.post(B), world.post(C))
    world.read(world.post(C, left=True))
    world.picture.lost(C, "closed", world.now, START)
    assert world.view(C).standing is Standing.LEFT
    assert (world.snapshot.is_well, world.happenings(C)) == (True, ["has left"])
    assert world.snapshot.sentence.startswith("2 of 2 peers")


def test_replayed_records_change_nothing(world: World) -> None:
    old = world.post(A, loss=9.0, epoch=3, newest=3)
    new = world.post(A, loss=1.0)
    world.read(new, world.post(B))
    world.pass_time(5.0)
    seen = world.view(A).seen
    for replayed in (old, new, Posted(A, health(started=START - 100, number=10**6, loss=9.0), START + 20)):
        world.read(replayed)
        assert world.view(A).loss == 1.0
        assert world.view(A).seen == seen


def test_what_happens_is_told(world: World) -> None:
    world.read(world.post(A))
    joined = world.post(B)
    world.read(joined)
    world.read(world.post(B, totals=totals(downloads=1)))
    fault = Fault(FaultKind.ROUND, "the coordinator was lost", START + 1)
    world.read(world.post(B, fault=fault, totals=totals(downloads=1)))
    world.read(world.post(B, fault=fault, totals=totals(downloads=1)))
    assert world.happenings(B) == [
        "has joined",
        "has downloaded the state of epoch 16",
        "round: the coordinator was lost",
    ]


def test_rates_are_between_two_records(world: World) -> None:
    world.read(world.post(A, totals=totals(sent=1_000_000, received=0)))
    world.pass_time(10.0)
    world.read(world.post(A, totals=totals(sent=21_000_000, received=5_000_000)))
    assert (world.view(A).up, world.view(A).down) == (2e6, 5e5)


def test_many_are_named_in_few_words(world: World) -> None:
    peers = [Identity(bytes([seed]) * 32).peer_id for seed in range(10, 17)]
    world.read(*(world.post(peer) for peer in peers))
    for peer in peers[:5]:
        world.picture.lost(peer, "cut", world.now, START)
    assert world.snapshot.sentence.startswith("2 of 7 peers are well")
    assert world.snapshot.sentence.endswith("; and 2 more")


def test_a_thousand_peers_are_the_most(world: World) -> None:
    def posts(seeds: Iterable[int]) -> list[Posted]:
        return [world.post(PeerID(seed.to_bytes(32, "big"))) for seed in seeds]

    world.read(*posts(range(1100)))
    assert len(world.snapshot.peers) == 1024
    for peer in list(world.picture.expected())[:10]:
        world.picture.lost(peer, "cut", world.now, START)
    world.read(*posts(range(2000, 2010)))
    assert len(world.picture.expected()) == 1024


def test_a_loss_and_a_speed_at_their_bounds_leave_a_mean_that_is_a_number(world: World) -> None:
    world.read(world.post(A, loss=1e30, samples_per_second=1e300), world.post(B, loss=-1e30, samples_per_second=1e300))
    assert world.snapshot.loss == 0.0
    world.read(world.post(B, loss=1e30, samples_per_second=1e300))
    assert world.snapshot.loss == 1e30


def test_what_a_peer_answers_to_a_dial_writes_nothing_else_to_a_terminal(world: World) -> None:
    world.read(world.post(A), world.post(B))
    world.picture.unreachable(A, "it refused: \x1b[2J\u202e" + 1000 * "x")
    world.picture.lost(B, "it refused: \x1b]0;title\x07", world.now, START + world.now)
    said = [*(str(finding) for view in world.snapshot.peers for finding in view.findings), *world.happenings(B)]
    assert len(said) == 3
    assert all(text.isprintable() and len(text) < 500 for text in said)


def test_a_flood_of_refusals_makes_no_long_sentence(world: World) -> None:
    """In an open run anybody may write records, each of which tells of another peer."""
    peers = [Identity(bytes([1, seed]) * 16).peer_id for seed in range(200)]
    world.read(*(world.post(p, refused=OtherTerms(p.key[8:16], 40 * "long ")) for p in peers))
    assert len(world.snapshot.sentence) < 1200
    assert "and 197 more were refused" in world.snapshot.sentence


def test_of_parameters_that_are_not_compared_nothing_is_shown(world: World) -> None:
    """As with local updates: the line is the same, and the bits are not known."""
    unknown = (mark(16, bytes(8)),)
    world.read(world.post(A, marks=unknown), world.post(B, marks=unknown))
    assert world.snapshot.sentence == "2 of 2 peers in epoch 16, 2.00 s an epoch"
    assert [view.mark for view in world.snapshot.peers] == ["", ""]
    world.read(world.post(A, marks=unknown), world.post(B, marks=(mark(16, lineage=b"other"),), samples_behind=1.0))
    assert world.troubles(B) == [Trouble.FORKED]


def test_who_has_a_state_that_newcomers_can_not_get_is_named(world: World) -> None:
    fault = Fault(FaultKind.STATE, "state of parameter 'block.0.weight': 'projector' is a GaLoreProjector", 0.0)
    world.read(world.post(A), world.post(B, faults={FaultKind.STATE: 1}, fault=fault))
    assert (world.troubles(A), world.troubles(B)) == ([], [Trouble.STATE])
    assert str(world.view(B).findings[0]) == (
        "can't give newcomers its state (state of parameter 'block.0.weight': 'projector' is a GaLoreProjector)"
    )

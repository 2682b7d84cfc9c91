"""A peer that joins is shown as joining. The run says whom it waits for. Neither counts as a peer that is not well."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from shoal.health.metrics import families
from shoal.health.record import Fault, FaultKind, Joining, name_of
from shoal.monitor.findings import BEGINS_SECONDS
from shoal.monitor.picture import Picture
from shoal.monitor.snapshot import Snapshot, Standing, Trouble
from shoal.monitor.top import LossBars, screen
from shoal.p2p.identity import Identity
from tests.health.records import START, WELL, health, posted

A, B, C = (Identity(bytes([seed]) * 32).peer_id for seed in range(3))
JOINING: dict[str, Any] = {
    "started": START - 60.0, "epoch": 0, "newest": 16, "samples_behind": 0.0, "marks": (), "loss": None,
    "samples_per_second": 0.0, "epoch_seconds": 0.0, "last": None, "joining": Joining(12_000_000, 57_000_000, 20.0),
}  # fmt: skip
WAITS: dict[str, Any] = {"waits": 22.0}


def seen(*, members: dict[str, Any], newcomer: dict[str, Any], later: float = 0.0) -> Snapshot:
    """Two members and a newcomer, whose records are so many seconds old."""
    picture = Picture("my run")
    picture.read([posted(A, **members), posted(B, **members), posted(C, **newcomer)], 0.0, 0.0, START)
    return picture.snapshot(later, START + later)


def drawn(snapshot: Snapshot, width: int = 180) -> str:
    with Path(os.devnull).open("w") as nowhere:
        console = Console(width=width, record=True, file=nowhere)
        console.print(screen(snapshot, LossBars()))
        return console.export_text()


def row(text: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"…{name_of(C)} "))


def test_the_run_says_for_whom_it_waits_and_how_long() -> None:
    snapshot = seen(members=WAITS, newcomer=JOINING, later=4.0)
    assert snapshot.is_well
    assert snapshot.waits == 18.0
    assert snapshot.sentence == (
        f"2 of 3 peers in epoch 16, 2.00 s an epoch, all alike; the run waits for …{name_of(C)} to load the state, "
        "18 s left"
    )


def test_a_newcomer_for_which_nothing_waits_is_joining() -> None:
    snapshot = seen(members={}, newcomer=JOINING)
    assert (snapshot.is_well, snapshot.waits) == (True, 0.0)
    assert snapshot.sentence.endswith(f", all alike; …{name_of(C)} is joining")


def test_top_shows_how_far_a_newcomer_is() -> None:
    text = drawn(seen(members=WAITS, newcomer=JOINING, later=2.0))
    assert "● 2 of 3 peers in epoch 16" in text
    assert row(text).split()[1] == "joining"
    assert f"…{name_of(C)} is joining: 12.0 of 57.0 MB, 18 s left" in text
    assert max(map(len, drawn(seen(members=WAITS, newcomer=JOINING), 80).splitlines())) <= 80


@pytest.mark.parametrize(
    ("joining", "later", "says"),
    [
        (Joining(), 0.0, "it asks for the state"),
        (Joining(0, 57_000_000), 0.0, "0.0 of 57.0 MB"),
        (Joining(57_000_000, 57_000_000), 0.0, "57.0 of 57.0 MB"),
        (Joining(12_000_000, 57_000_000, 5.0), 9.0, "12.0 of 57.0 MB"),
    ],
    ids=["it asks", "the rate is unknown", "all has come", "an old record"],
)
def test_what_is_not_known_is_not_said(joining: Joining, later: float, says: str) -> None:
    snapshot = seen(members={}, newcomer=JOINING | {"joining": joining}, later=later)
    assert [peer.joining for peer in snapshot.peers if peer.joining] == [says]


def test_nobody_is_accused_while_the_run_waits() -> None:
    """The newcomer is many epochs behind, and the round before has waited for another one."""
    assert WELL.last is not None
    waited = {**WAITS, "last": replace(WELL.last, matchmaking=40.0), "epoch_seconds": 6.0}
    snapshot = seen(members=waited, newcomer=JOINING, later=10.0)
    assert snapshot.is_well
    assert [peer.findings for peer in snapshot.peers] == [()] * 3
    assert snapshot.advice == ""
    assert seen(members={**waited, "waits": 0.0}, newcomer={}).advice


@pytest.mark.parametrize("differing", [{"epoch": 3}, {"at": START + BEGINS_SECONDS + 1}], ids=["a member", "for long"])
def test_who_is_behind_and_loads_nothing_is_behind(differing: dict[str, Any]) -> None:
    """A newcomer has a while, in which it meets the others and makes its first step."""
    behind, picture = JOINING | {"joining": None, "started": START}, Picture("my run")
    picture.read([posted(A), posted(C, **behind)], 0.0, 0.0, START)
    assert picture.snapshot(BEGINS_SECONDS / 2, START).is_well
    behind |= {"number": 1} | differing
    at = behind.pop("at", START)
    picture.read([posted(A), posted(C, at=at, **behind)], 0.0, at - START, at)
    snapshot = picture.snapshot(at - START, at)
    assert not snapshot.is_well
    assert f"…{name_of(C)} is behind (in epoch {behind['epoch']}, where others are in 16)" in snapshot.sentence


def test_who_could_not_load_the_state_is_told_with_the_reason() -> None:
    """It has forgotten by then that the others are ahead."""
    fault = Fault(FaultKind.DOWNLOAD, "the state takes 91 s: DiLoCo helps", START)
    snapshot = seen(members={}, newcomer=JOINING | {"joining": None, "newest": 0, "fault": fault})
    (finding,) = next(peer.findings for peer in snapshot.peers if peer.findings)
    assert finding.trouble is Trouble.BEHIND
    assert finding.detail == "in epoch 0, where others are in 16: the state takes 91 s: DiLoCo helps"


def test_who_has_joined_after_a_failed_download_is_well() -> None:
    """Others are ahead by now, and its last record is older than theirs."""
    fault = Fault(FaultKind.DOWNLOAD, "the state takes 91 s: DiLoCo helps", START - 100.0)
    picture = Picture("my run")
    picture.read([posted(C, fault=fault)], 0.0, 0.0, START)
    picture.read([posted(A, START + 9, epoch=36, newest=36), posted(C, fault=fault)], 9.0, 9.0, START + 9)
    assert picture.snapshot(9.0, START + 9).is_well


def test_a_reason_of_another_kind_is_no_reason_to_be_behind() -> None:
    fault = Fault(FaultKind.ROUND, "another one", START)
    snapshot = seen(members={}, newcomer=JOINING | {"joining": None, "fault": fault, "epoch": 3})
    assert snapshot.sentence.endswith("is behind (in epoch 3, where others are in 16)")


def test_a_wait_is_over_with_its_epoch_or_its_time() -> None:
    """A member's record is up to ten seconds old, and another peer's shows that the epoch has ended."""
    assert seen(members=WAITS, newcomer={"epoch": 17, "newest": 17}).waits == 0.0
    assert seen(members=WAITS, newcomer={}, later=23.0).waits == 0.0


def test_a_newcomer_that_says_nothing_is_waited_for_by_no_name() -> None:
    assert seen(members=WAITS, newcomer={}).sentence.endswith(
        "; the run waits for a newcomer to load the state, 22 s left"
    )


def test_who_was_lost_while_it_joined_is_joining_no_more() -> None:
    picture = Picture("my run")
    picture.read([posted(A), posted(B), posted(C, **JOINING)], 0.0, 0.0, START)
    picture.lost(C, "cut", 0.0, START)
    snapshot = picture.snapshot(0.0, START)
    (lost,) = [peer for peer in snapshot.peers if peer.standing is Standing.LOST]
    assert (lost.joining, [finding.trouble for finding in lost.findings]) == ("", [Trouble.LOST])
    assert "joining" not in drawn(snapshot)


def test_metrics_have_both() -> None:
    records = [(A, health(**WAITS)), (C, health(**JOINING))]
    values = {each.name: [sample.value for sample in each.samples] for each in families("my run", records)}
    assert values["shoal_joining"] == [0.0, 1.0]
    assert values["shoal_waits_for_newcomers_seconds"] == [22.0, 0.0]

"""`shoal top` shows what a snapshot has, on one screen, and for scripts as JSON with an exit code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shoal.health.record import name_of
from shoal.membership import Part
from shoal.monitor.picture import Picture
from shoal.monitor.snapshot import Snapshot
from shoal.monitor.top import SPARKS, LossBars, screen, show
from shoal.p2p.identity import Identity
from shoal.swarm.protocol.view import Role
from tests.health.records import START, health, mark, posted
from tests.monitor.processes import Trainers, trainers
from tests.optim.closed_runs import Club
from tests.waiting import wait_until
from tests.workers.monitored import Monitored

A, B, C = (Identity(bytes([seed]) * 32).peer_id for seed in range(3))


def drawn(width: int = 180, **differing: Any) -> str:
    picture = Picture("my run")
    picture.read([posted(A), posted(B), posted(C, **differing)], 0.0, 0.0, START)
    with Path(os.devnull).open("w") as nowhere:
        console = Console(width=width, record=True, file=nowhere)
        console.print(screen(picture.snapshot(0.0, START), LossBars()))
        return console.export_text()


def test_a_run_with_an_outer_optimizer_counts_inner_steps() -> None:
    text = drawn(counts_steps=True, samples_behind=1e6)
    assert "epoch 16: 100 inner steps, 150.0 inner steps a second" in text
    assert "steps/s" in text
    assert "samples" not in text


def test_one_screen_has_it_all() -> None:
    text = drawn()
    assert "● 3 of 3 peers in epoch 16, 2.00 s an epoch, all alike" in text
    assert "epoch 16: 100 samples, 150.0 samples a second" in text
    assert "■ computing 1.53 ■ waiting 0.10 ■ matchmaking 0.02 ■ bytes 0.30 ■ step 0.05 s" in text
    assert "76% of an epoch is computing: more peers make more epochs." in text
    for peer in (A, B, C):
        assert f"…{name_of(peer)}" in text
    assert "3 of 3 run Shoal 0.1.0, torch 2.13.0+cpu" in text
    assert len(text.splitlines()) < 24


def test_eighty_columns_are_enough() -> None:
    text = drawn(80, role=Role.AUXILIARY, samples_per_second=12345.6, epoch=123456, newest=123456)
    assert max(map(len, text.splitlines())) <= 80
    assert "auxiliary" in text
    row = next(line for line in text.splitlines() if line.startswith(f"…{name_of(C)}"))
    assert "…" not in row[1:]  # nothing is cut
    assert row.split()[1:5] == ["auxiliary", "123456", "0.5", "12345.6"]


def test_numbers_at_their_bounds_leave_the_others_readable() -> None:
    text = drawn(80, samples_per_second=1e300, loss=-1e30, samples_behind=1e300, target=1e300, epoch_seconds=1e9)
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) < 26
    row = next(line for line in text.splitlines() if line.startswith(f"…{name_of(A)}"))
    assert row.split()[1:5] == ["node", "16", "0.5", "50.0"]


def test_of_a_long_epoch_the_progress_is_shown() -> None:
    picture = Picture("my run")
    picture.read([posted(A, epoch_seconds=60.0)], 0.0, 0.0, START)
    with Path(os.devnull).open("w") as nowhere:
        console = Console(width=180, record=True, file=nowhere)
        console.print(screen(picture.snapshot(0.0, START), LossBars()))
        assert "90 of 100, 50.0 samples a second" in console.export_text()


def test_who_is_not_well_is_named_in_the_table() -> None:
    text = drawn(marks=(mark(16, b"unlike"),))
    assert text.count("has other parameters (than 2 like it, in epoch 16)") == 2  # in the sentence, and at the peer


def test_what_peers_say_is_no_markup() -> None:
    assert "[bold]1.0[/bold]" in drawn(version="[bold]1.0[/bold]")


def test_the_losses_are_one_line() -> None:
    losses, picture = LossBars(), Picture("my run")
    for number, loss in enumerate((3.0, 2.0, 1.0, 1.0)):
        picture.read([posted(A, number=number, epoch=number, loss=loss)], 0.0, 0.0, START)
        for _ in range(2):  # an epoch counts once
            losses.add(picture.snapshot(0.0, START))
    assert str(losses) == SPARKS[-1] + SPARKS[4] + SPARKS[0] * 2
    assert health().loss == 0.5


def test_of_many_peers_those_come_first_that_are_not_well() -> None:
    picture = Picture("my run")
    peers = [Identity(bytes([seed]) * 32).peer_id for seed in range(100)]
    picture.read([posted(peer) for peer in peers], 0.0, 0.0, START)
    for peer in peers[90:]:
        picture.lost(peer, "cut", 0.0, START)
    with Path(os.devnull).open("w") as nowhere:
        console = Console(width=100, record=True, file=nowhere)
        console.print(screen(picture.snapshot(0.0, START), LossBars()))
        text = console.export_text()
    assert len(text.splitlines()) < 50
    assert all(re.search(f"^…{name_of(peer)} lost ", text, re.MULTILINE) for peer in peers[90:])
    assert "and 80 more; peers that are not well come first" in text
    assert "and 4 more that are not well" in text


def test_it_draws_until_it_is_told_to_stop() -> None:
    picture, stop = Picture("my run"), threading.Event()
    taken: list[int] = []

    def take() -> Snapshot:
        taken.append(len(taken))
        picture.read([posted(A, number=len(taken), epoch=len(taken), newest=len(taken))], 0.0, 0.0, START)
        if len(taken) == 2:
            stop.set()
        return picture.snapshot(0.0, START)

    with Path(os.devnull).open("w") as nowhere:
        console = Console(width=180, record=True, file=nowhere)
        show(take, console, stop)
        assert "1 peer in epoch 2" in console.export_text()
    assert taken == [0, 1]


def top(peers: Trainers, *arguments: str, run_id: str = "test") -> subprocess.CompletedProcess[str]:
    addresses = ["--initial-peers", peers.addresses[0]] if peers.addresses else []
    command = [sys.executable, "-m", "shoal", "top", run_id, *addresses, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.processes
@pytest.mark.long
def test_for_scripts_it_prints_the_peers_own_numbers() -> None:
    with trainers(2) as peers:
        peers.train()
        wait_until(lambda: peers.all[0].ask(Monitored.health)["epoch"] >= 2)
        peers.pause()
        number = peers.all[0].ask(Monitored.health)["number"]
        wait_until(lambda: all(peer.ask(Monitored.health)["number"] > number + 2 for peer in peers.all))
        done = top(peers, "--once", "--json")
        assert (done.returncode, done.stderr) == (0, "")
        snapshot = json.loads(done.stdout)
        views = {view["id"]: view for view in snapshot["peers"]}
        for peer in peers.all:
            own = peer.ask(Monitored.health)
            same = own.keys() & views[own["id"]].keys()
            assert len(same) > 15
            assert {name: views[own["id"]][name] for name in same} == pytest.approx({name: own[name] for name in same})
        done = top(peers, "--once")
        assert (done.returncode, done.stderr) == (0, "")
        assert "2 of 2 peers in epoch" in done.stdout
        done = top(peers, "--once", run_id="another")
        assert done.returncode == 1
        assert "nobody in the run 'another' says how it is" in done.stdout


@pytest.mark.processes
@pytest.mark.long
def test_in_a_closed_run_a_membership_to_watch_is_enough_and_without_one_it_says_how_to_get_it(tmp_path: Path) -> None:
    club = Club(tmp_path)
    with trainers(0, run_id=club.run_id) as peers:
        for path, peer in [club.identity("first"), club.identity("second")]:
            peers.add(identity=path, membership=club.admit(peer))
        (file, me), membership = club.identity("watcher"), tmp_path / "membership"
        membership.write_text(club.admit(me, Part.WATCH))
        given = ("--identity", file, "--membership", str(membership))
        done = top(peers, "--once", "--json", *given, run_id=club.run_id)
        assert (done.returncode, done.stderr) == (0, "")
        assert json.loads(done.stdout)["sentence"].startswith("2 of 2 peers")
        for lacking in ((), given[:2], given[2:]):
            done = top(peers, "--once", *lacking, run_id=club.run_id)
            said = " ".join(done.stderr.replace("│", "").split())
            assert done.returncode == 2
            assert "--role watch" in said
            assert "shoal keys peer" in said


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ((), 2, "Missing option"),
        (("--initial-peers", "/ip4/127.0.0.1/tcp/9"), 2, "must end in /p2p/"),
        (
            ("--initial-peers", f"/ip4/127.0.0.1/tcp/9/p2p/{A}"),
            1,
            "the run can't be watched: none of the initial peers",
        ),
        (("--initial-peers", f"/ip4/127.0.0.1/tcp/9/p2p/{A}", "--json"), 2, "give --once with it"),
    ],
)
def test_what_cannot_be_is_one_clear_error(arguments: tuple[str, ...], code: int, says: str) -> None:
    done = top(Trainers({}), *arguments)
    assert done.returncode == code
    assert says in " ".join(done.stderr.replace("│", "").split())
    assert "Traceback" not in done.stderr


def test_watching_imports_no_torch() -> None:
    code = "import sys, shoal.cli.watch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0

"""The parent's scenario, with peers that only pretend to train: kill, newcomer, failures, and the exit code."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from shoal.cli.demo.record import PeerState, Record
from shoal.cli.demo.settings import DemoSettings
from shoal.cli.demo.summary import Summary, summarise
from shoal.cli.demo.swarm import Swarm

pytestmark = pytest.mark.processes


class Notes:
    """A view that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def update(self, record: Record) -> None:
        pass

    def note(self, text: str) -> None:
        self.notes.append(text)


def run(folder: Path, how: str, *, kill: bool = True) -> tuple[Record, Summary, list[str]]:
    settings = DemoSettings(out=folder, epochs=20, kill=kill)
    view = Notes()
    command = (sys.executable, str(Path(__file__).with_name("fake_peer.py")), how)
    with Swarm(settings, view, command=command) as swarm:
        record = swarm.run()
    return record, summarise(record, settings), view.notes


def test_one_peer_is_killed_a_newcomer_joins_and_all_is_well(tmp_path: Path) -> None:
    record, summary, notes = run(tmp_path, "well")
    assert summary.problems == []
    states = {index: peer.state for index, peer in record.peers.items()}
    assert states.pop(3) == PeerState.KILLED
    assert states == dict.fromkeys((0, 1, 2, 4), PeerState.FINISHED)
    assert record.newcomer == 4
    assert record.sample == "def f():"
    assert any("SIGKILL" in note for note in notes)
    assert any("peer 4 downloaded the state of epoch 12: 4.0 MB from 3 peers" in note for note in notes)


def test_nobody_is_killed_when_that_is_not_wanted(tmp_path: Path) -> None:
    record, summary, _ = run(tmp_path, "well", kill=False)
    assert summary.problems == []
    assert all(peer.state == PeerState.FINISHED for peer in record.peers.values())


def test_a_peer_that_fails_is_named_with_its_last_words_and_the_others_go_on(tmp_path: Path) -> None:
    record, summary, _ = run(tmp_path, "crash")
    assert summary.problems == ["peer 1 ended with exit code 1: the fake peer fails as it was told"]
    assert record.peers[2].state == PeerState.FINISHED


def test_different_digests_fail_the_run(tmp_path: Path) -> None:
    _, summary, _ = run(tmp_path, "differ")
    assert summary.problems == ["in epoch 3 4 peers had 2 different states"]


def test_a_line_that_is_no_message_fails_its_peer(tmp_path: Path) -> None:
    _, summary, _ = run(tmp_path, "babble")
    (problem,) = summary.problems
    assert problem.startswith("peer 1 wrote a line that is not a message")

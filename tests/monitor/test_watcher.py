"""A watcher joins a real run, sees its peers' own numbers, who is lost and why, and is no burden."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import shoal
from shoal.health.board import HealthBoard, Posted
from shoal.membership import Part
from shoal.monitor import Snapshot, Watcher
from shoal.monitor import watcher as watcher_module
from shoal.monitor.snapshot import Standing, Trouble
from tests.monitor.processes import Trainers, trainers
from tests.optim.closed_runs import Club
from tests.peers import Failed, ask_all
from tests.waiting import wait_until
from tests.workers.monitored import Monitored

pytestmark = pytest.mark.processes


@contextmanager
def watching(peers: Trainers, run_id: str = "test", **options: str) -> Iterator[Watcher]:
    identity, membership = options.get("identity"), options.get("membership")
    with (
        shoal.DHT(peers.addresses, client_mode=True, start=True, identity_path=identity) as dht,
        Watcher(dht, run_id, membership=membership) as watcher,
    ):
        assert watcher.wait_until_ready(60.0)
        yield watcher


def standing(snapshot: Snapshot, peer: str) -> Standing | None:
    return next((view.standing for view in snapshot.peers if view.id == peer), None)


def test_a_killed_peer_is_lost_within_ten_seconds_and_back_when_it_is_started_anew(tmp_path: Path) -> None:
    with trainers(2) as peers:
        victim = peers.add(identity=str(tmp_path / "key"))
        peers.train()
        with watching(peers) as watcher:
            wait_until(lambda: watcher.snapshot().epoch >= 4 and watcher.snapshot().is_well)
            assert len(watcher.snapshot().peers) == 3
            assert "3 of 3 peers" in watcher.snapshot().sentence
            victim.kill()
            assert wait_until(lambda: standing(watcher.snapshot(), victim.peer) is Standing.LOST) < 10.0
            snapshot = watcher.snapshot()
            view = next(view for view in snapshot.peers if view.id == victim.peer)
            assert view.findings[0].trouble is Trouble.LOST
            assert "; dialled again: 127.0.0.1:" in view.why
            assert f"…{view.name} was lost (" in snapshot.sentence
            peers.add(identity=str(tmp_path / "key")).ask(Monitored.train)
            wait_until(lambda: watcher.snapshot().is_well)
            said = [each.what for each in watcher.snapshot().happenings if each.peer == view.name]
            assert said[0].startswith("was lost")
            assert said[1] == "is back, started anew"


def test_a_killed_client_is_lost_within_ten_seconds_too(tmp_path: Path) -> None:
    """Nobody can dial it: the members that it was connected to tell of it at once."""
    with trainers(2, period=10.0) as peers:
        victim = peers.add(client=True, identity=str(tmp_path / "key"))
        peers.train()
        with watching(peers) as watcher:
            wait_until(lambda: watcher.snapshot().epoch >= 2 and "3 of 3 peers" in watcher.snapshot().sentence)
            victim.kill()
            assert wait_until(lambda: standing(watcher.snapshot(), victim.peer) is Standing.LOST) < 10.0
            view = next(view for view in watcher.snapshot().peers if view.id == victim.peer)
            assert view.why == "2 of 2 members that listen have lost it"
            peers.add(client=True, identity=str(tmp_path / "key")).ask(Monitored.train)
            wait_until(lambda: watcher.snapshot().is_well)


def test_an_unexpected_error_is_one_warning_and_it_watches_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, failing = HealthBoard.read, [ZeroDivisionError("first"), KeyError("second")]

    async def breaks_twice(self: HealthBoard, members: int) -> list[Posted]:
        if failing:
            raise failing.pop(0)
        return await read(self, members)

    monkeypatch.setattr(HealthBoard, "read", breaks_twice)
    monkeypatch.setattr(watcher_module, "SHORTEST", 0.05)
    with shoal.DHT(start=True) as dht, Watcher(dht, "test") as watcher:
        assert watcher.wait_until_ready(30.0)
    assert failing == []
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == ["the records could not be read: ZeroDivisionError('first')"]


def test_who_leaves_is_not_lost() -> None:
    with trainers(2) as peers, watching(peers) as watcher:
        leaver = peers.all[1]
        wait_until(lambda: len(watcher.snapshot().peers) == 2)
        leaver.ask(Monitored.end)
        wait_until(lambda: standing(watcher.snapshot(), leaver.peer) is not Standing.HERE)
        wait_until(lambda: standing(watcher.snapshot(), leaver.peer) is Standing.LEFT)
        assert watcher.snapshot().is_well


@pytest.mark.long
def test_a_peer_that_is_not_as_the_others_is_named_as_what_it_is() -> None:
    """One that runs another version, one that others can't dial, and one with other terms, which is refused."""
    with trainers(2) as peers:
        other = peers.add(version="0.0.9")
        with watching(peers) as watcher:
            wait_until(lambda: len(watcher.snapshot().peers) == 3)
            view = next(view for view in watcher.snapshot().peers if view.id == other.peer)
            assert str(view.findings[0]) == "runs another version (0.0.9, and most run 0.1.0)"
            assert f"…{view.name} runs another version" in watcher.snapshot().sentence
            peers.train()
            wait_until(lambda: watcher.snapshot().epoch >= 2)
            with pytest.raises(Failed):
                peers.add(target=640)
            wait_until(lambda: "target_batch_size is 64 here, and 640 there" in watcher.snapshot().sentence)


@pytest.mark.long
def test_a_peer_that_cannot_be_dialled_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with trainers(2) as peers:
        hidden = peers.add(tells_port=port)
        peers.train()
        with watching(peers) as watcher:
            wait_until(lambda: "can't be reached (from here: " in watcher.snapshot().sentence)
            (bad,) = [view for view in watcher.snapshot().peers if view.findings]
            assert bad.id == hidden.peer
            assert [finding.trouble for finding in bad.findings] == [Trouble.UNREACHABLE]
            assert "nobody listens there" in bad.findings[0].detail
            wait_until(lambda: watcher.snapshot().epoch >= 2)  # it has dialled the others, and trains


@pytest.mark.long
def test_other_parameters_are_noticed() -> None:
    with trainers(3, target=24) as peers:
        peers.train()
        with watching(peers) as watcher:
            wait_until(lambda: watcher.snapshot().epoch >= 2 and "all alike" in watcher.snapshot().sentence)
            broken = peers.all[2]
            broken.ask(Monitored.change)

            def told() -> bool:
                views = [view for view in watcher.snapshot().peers if view.id == broken.peer]
                return any("unlike" in fault for view in views for fault in view.faults)

            wait_until(told)

            def is_named() -> bool:
                broken.ask(Monitored.change)  # the machine does it again and again
                return f"…{broken.peer[-8:]} has other parameters (than" in watcher.snapshot().sentence

            wait_until(is_named)


def test_in_a_closed_run_who_watches_needs_no_more_than_that_part(tmp_path: Path) -> None:
    club = Club(tmp_path)
    names = ("first", "second")
    files = [club.identity(name) for name in names]
    with trainers(0, run_id=club.run_id) as peers:
        for path, peer in files:
            peers.add(identity=path, membership=club.admit(peer))
        peers.train()
        path, me = club.identity("watcher")
        with watching(peers, club.run_id, identity=path, membership=club.admit(me, Part.WATCH)) as watcher:
            wait_until(lambda: watcher.snapshot().is_well and watcher.snapshot().epoch >= 2)
            assert watcher.snapshot().sentence.startswith("2 of 2 peers")
        with (
            shoal.DHT(peers.addresses, client_mode=True, start=True) as stranger,
            pytest.raises(ValueError, match="is a closed run: give membership="),
        ):
            Watcher(stranger, club.run_id)


@pytest.mark.long
def test_a_watcher_that_is_killed_or_closed_disturbs_nobody() -> None:
    with trainers(2) as peers:
        peers.train()
        with watching(peers) as watcher:
            wait_until(lambda: watcher.snapshot().epoch >= 2)
            with watching(peers) as other:
                before = other.snapshot().epoch
            wait_until(lambda: watcher.snapshot().epoch > before + 1)
        numbers = ask_all(peers.all, Monitored.health)
        assert [each["members"] for each in numbers] == [2, 2]

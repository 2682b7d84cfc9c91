"""``shoal keys``: what an owner does, from the command line, without torch."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

import pytest

import shoal
from shoal.membership import ClosedRun, Part
from shoal.membership.membership import MEMBERSHIP
from shoal.membership.pin import PIN
from shoal.membership.revocations import REVOCATIONS
from shoal.swarm.owners_words import words_key
from tests.cli.test_command import shoal_command

TIP = f"3:1.5:{'ab' * 32}"


@pytest.fixture
def run_id(tmp_path: Path) -> str:
    done = shoal_command("keys", "run", "test", "--folder", str(tmp_path / "keys"))
    assert done.returncode == 0, done.stderr
    assert str(tmp_path / "keys") in done.stderr
    return done.stdout.strip()


def keys(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return shoal_command("keys", *arguments, "--folder", str(tmp_path / "keys"))


def words(text: str) -> str:
    """Without the frame that typer draws."""
    return " ".join(text.replace("│", " ").split())


def peer_of(tmp_path: Path) -> str:
    return shoal_command("keys", "peer", str(tmp_path / "me")).stdout.strip()


def test_a_run_a_membership_a_revocation_and_a_pin(tmp_path: Path, run_id: str) -> None:
    run, peer = ClosedRun.of(run_id), peer_of(tmp_path)
    assert run is not None
    assert peer_of(tmp_path) == peer, "the file keeps it"
    (secret,) = (tmp_path / "keys").iterdir()
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "keys").stat().st_mode) == 0o700

    out = tmp_path / "membership"
    given = ("admit", run_id, peer, "--role", "client", "--role", "watch", "--days", "2", "--out", str(out))
    assert keys(tmp_path, *given).returncode == 0
    membership = MEMBERSHIP.read(out.read_text(), run)
    assert (str(membership.peer_id), membership.parts) == (peer, (Part.CLIENT, Part.WATCH))
    assert membership.expires - membership.issued == 2 * 86400
    printed = keys(tmp_path, "admit", run_id, peer).stdout.strip()
    assert MEMBERSHIP.read(printed, run).parts == (Part.TRAIN,)
    shown = keys(tmp_path, "show", str(out)).stdout
    assert peer in shown
    assert "client, watch" in shown
    assert keys(tmp_path, "show", printed).stdout.startswith(f"membership of {run_id}")
    assert keys(tmp_path, "show", str(tmp_path / "me")).stdout == f"peer: {peer}\n"

    assert "give --initial-peers" in keys(tmp_path, "revoke", run_id, peer).stderr
    assert keys(tmp_path, "pin", run_id, TIP, "--rewind").returncode == 0
    file = tmp_path / "keys" / f"{run_id}.revocations"
    assert REVOCATIONS.read(file.read_text(), run).voids(membership)
    shown = keys(tmp_path, "show", run_id).stdout
    assert peer in shown
    assert TIP in shown
    assert "go back" in shown


@pytest.mark.long
def test_the_run_is_told(tmp_path: Path, run_id: str) -> None:
    run, peer = ClosedRun.of(run_id), peer_of(tmp_path)
    assert run is not None
    with shoal.DHT(start=True) as dht:
        there = ("--initial-peers", str(dht.get_visible_maddrs()[0]))
        for command in (("revoke", run_id, peer), ("pin", run_id, TIP)):
            done = keys(tmp_path, *command, *there)
            assert "told the run" in done.stdout, done.stderr
        found = dht.get(words_key(run), latest=True)
        assert found is not None
        ((_, record),) = found.value.items()
        assert dht.peer_id != run.owner
        text = record.value
        assert REVOCATIONS.prefix.encode() in text
        assert PIN.prefix.encode() in text, "the second word does not displace the first"


@pytest.mark.long
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("run", "a b"), "can't be named 'a b'"),
        (("run", "test"), "choose another name or folder"),
        (("admit", "open", "PEER"), "'open' is no closed run"),
        (("admit", "test@x", "PEER"), "stands before the 52 characters of its owner's key"),
        (("admit", "RUN", "me"), "'me' is not a peer id"),
        (("admit", "RUN", "PEER", "--days", "0"), "at most 366 days"),
        (("admit", "RUN", "PEER", "--role", "boss"), "'boss' is not one of"),
        (("admit", "OTHER", "PEER"), "this needs the run's key, which only its owner has"),
        (("pin", "RUN", "3:1"), "'3:1' is not a tip"),
        (("show", "nothing"), "'nothing' is no closed run"),
        (("revoke", "RUN", "PEER", "--initial-peers", "/ip4/127.0.0.1/tcp/1"), "/p2p/"),
    ],
)
def test_what_cannot_be_done_is_told(tmp_path: Path, run_id: str, arguments: tuple[str, ...], says: str) -> None:
    other = run_id[:-3] + ("aaq" if run_id[-3:] != "aaq" else "baq")
    names = {"RUN": run_id, "PEER": peer_of(tmp_path), "OTHER": other}
    done = keys(tmp_path, *(names.get(argument, argument) for argument in arguments))
    assert done.returncode != 0
    assert says in words(done.stderr)
    assert "Traceback" not in done.stderr


def test_it_imports_no_torch() -> None:
    code = "import sys, shoal.cli, shoal.cli.keys.command, shoal.cli.keys.publish; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0

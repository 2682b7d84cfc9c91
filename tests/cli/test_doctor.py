"""`shoal doctor`: each thing that would stop a machine is found, with the way out; `--help` says what to do first."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

import shoal
from shoal.cli.doctor import machine, peer
from shoal.cli.doctor.command import judge_clocks, judge_run
from shoal.cli.doctor.finding import Finding, Level
from shoal.monitor.picture import Picture
from shoal.p2p.identity import Identity
from shoal.p2p.multiaddr import Multiaddr
from tests.cli.test_command import shoal_command
from tests.health.records import START, posted

LOCAL = ("python", "torch", "ciphers", "ports", "addresses", "clock", "descriptors", "disk", "congestion")


def addresses(*hosts: str) -> list[Multiaddr]:
    return [Multiaddr(f"/ip4/{host}/tcp/1") for host in hosts]


@pytest.mark.parametrize(
    ("finding", "level"),
    [
        (machine.judge_python((3, 11), has_tls13=True), Level.GOOD),
        (machine.judge_python((3, 10), has_tls13=True), Level.BAD),
        (machine.judge_python((3, 12), has_tls13=False), Level.BAD),
        (machine.judge_torch("2.13.0+cpu", "x86_64 AVX512", []), Level.GOOD),
        (machine.judge_torch("2.10.1", "x86_64 AVX2", ["NVIDIA H100"]), Level.GOOD),
        (machine.judge_torch("2.5.1", "x86_64 AVX2", []), Level.BAD),
        (machine.judge_torch("2.13.0", "x86_64 DEFAULT", []), Level.POOR),
        (machine.judge_torch(None, "", []), Level.BAD),
        (machine.judge_ciphers(aes=True), Level.GOOD),
        (machine.judge_ciphers(aes=False), Level.POOR),
        (machine.judge_listening(""), Level.GOOD),
        (machine.judge_listening("Permission denied"), Level.BAD),
        (machine.judge_addresses(addresses("8.8.8.8", "127.0.0.1")), Level.GOOD),
        (machine.judge_addresses(addresses("192.168.1.7", "127.0.0.1")), Level.POOR),
        (machine.judge_addresses(addresses("127.0.0.1")), Level.POOR),
        (machine.judge_clock(0x2001), Level.GOOD),
        (machine.judge_clock(0x40), Level.POOR),
        (machine.judge_clock(None), Level.GOOD),
        (machine.judge_descriptors(-1), Level.GOOD),
        (machine.judge_descriptors(1 << 20), Level.GOOD),
        (machine.judge_descriptors(1024), Level.POOR),
        (machine.judge_descriptors(256), Level.BAD),
        (machine.judge_disk(100 << 30, "/"), Level.GOOD),
        (machine.judge_disk(1 << 30, "/"), Level.POOR),
        (machine.judge_congestion(bbr=True), Level.GOOD),
        (machine.judge_congestion(bbr=False), Level.POOR),
        (judge_clocks([7.0, 1.0])[0], Level.GOOD),
        (judge_clocks([-20.0, 3.0])[0], Level.POOR),
        (judge_clocks([25.0, 28.0])[0], Level.POOR),
        (peer.judge_line(0.05, 1e8)[1], Level.GOOD),
        (peer.judge_line(0.05, 1e5)[1], Level.POOR),
    ],
)
def test_what_is_wrong_has_a_way_out(finding: Finding, level: Level) -> None:
    assert finding.level is level
    assert bool(finding.way_out) == (level is not Level.GOOD)


def test_a_run_with_another_version_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    picture = Picture("run")
    picture.read([posted(Identity().peer_id, version="0.2.0")], 0.0, 0.0, START)
    snapshot = picture.snapshot(0.0, START)
    assert [finding.level for finding in judge_run(snapshot, "0.2.0")] == [Level.GOOD, Level.GOOD]
    run, version = judge_run(snapshot, "0.1.0")
    assert run.says == snapshot.sentence
    assert (version.level, version.way_out) == (Level.POOR, "pip install shoal==0.2.0")


def findings(*arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    done = shoal_command("doctor", "--json", *arguments)
    assert done.stderr == ""
    told = json.loads(done.stdout)
    assert told["ok"] == (done.returncode == 0)
    return done.returncode, {finding["about"]: finding for finding in told["findings"]}


def test_a_peer_that_answers_is_measured() -> None:
    with shoal.DHT(start=True) as dht:
        code, found = findings(str(dht.get_visible_maddrs()[0]), "--run", "nobody trains here")
        assert code == 0
        assert (*LOCAL, "address", "round trip", "bandwidth", "run") == tuple(found)
        assert found["bandwidth"]["level"] == "good"
        assert "nobody in the run" in found["run"]["says"]


def test_an_address_where_nobody_or_another_answers_is_bad() -> None:
    stranger = Identity().peer_id
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    code, found = findings(f"/ip4/127.0.0.1/tcp/{port}/p2p/{stranger}")
    assert (code, found["address"]["level"]) == (1, "bad")
    assert "nobody listens there" in found["address"]["says"]
    with shoal.DHT(start=True) as dht:
        address = dht.get_visible_maddrs()[0].with_peer(stranger)
        code, found = findings(str(address))
        assert (code, found["address"]["level"]) == (1, "bad")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("127.0.0.1:80",), "is not an address"),
        (("/ip4/127.0.0.1/tcp/9",), "must end in /p2p/"),
        (("--run", "my run"), "give the ADDRESS of a peer with it"),
    ],
)
def test_what_cannot_be_is_one_clear_error(arguments: tuple[str, ...], says: str) -> None:
    done = shoal_command("doctor", *arguments)
    assert done.returncode == 2
    assert says in " ".join(done.stderr.replace("│", "").split())


def test_it_is_a_table_for_people() -> None:
    done = shoal_command("doctor")
    assert done.returncode == 0
    assert all(about in done.stdout for about in LOCAL)


def test_help_begins_with_what_to_do_first() -> None:
    text = " ".join(shoal_command("--help").stdout.split())
    assert text.index("First `shoal demo`") < text.index("Then `shoal doctor`") < text.index("`shoal node`")
    assert "listens on all interfaces" in " ".join(shoal_command("node", "--help").stdout.replace("│", "").split())

"""What `shoal monitor` answers: numbers, metrics, a page that fetches nothing from elsewhere; and what it refuses."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sqlite3
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shoal.monitor.history import EVERY_SECONDS
from shoal.monitor.web import FILES, MAX_LISTENERS, PAGE
from tests.monitor.pages import monitor
from tests.monitor.processes import Trainers, trainers
from tests.peers import ask_all
from tests.soaked import only_in_soak
from tests.waiting import wait_until
from tests.workers.monitored import Monitored

pytestmark = [pytest.mark.processes, pytest.mark.long]
MAX_PAGE_BYTES = 200_000


@pytest.fixture(scope="module")
def peers() -> Iterator[Trainers]:
    with trainers(2) as made:
        made.train()
        yield made


@pytest.fixture(scope="module")
def address(peers: Trainers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with monitor(peers, tmp_path_factory.mktemp("history") / "h.sqlite") as address:
        yield address


def get(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=20) as answer:
        return bytes(answer.read())


def status(asked: str | urllib.request.Request, method: str = "GET") -> int:
    request = urllib.request.Request(asked, method=method) if isinstance(asked, str) else asked
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def epoch(address: str) -> int:
    snapshot = json.loads(get(f"{address}/snapshot"))
    return 0 if snapshot is None else int(snapshot["epoch"])


def test_it_follows_the_run(address: str) -> None:
    wait_until(lambda: epoch(address) >= 1)
    before = epoch(address)
    wait_until(lambda: epoch(address) > before)
    snapshot = json.loads(get(f"{address}/snapshot"))
    assert snapshot["sentence"].startswith("2 of 2 peers in epoch")
    wait_until(lambda: len(json.loads(get(f"{address}/history?hours=1"))["at"]) >= 2)


def test_the_events_are_snapshots(address: str) -> None:
    with urllib.request.urlopen(f"{address}/events", timeout=20) as answer:
        lines = [answer.readline() for _ in range(4)]
    seen = [json.loads(line.removeprefix(b"data: ")) for line in lines[::2]]
    assert lines[1] == lines[3] == b"\n"
    assert seen[0]["run_id"] == "test"
    assert seen[1]["at"] > seen[0]["at"]


def test_its_metrics_are_those_of_all_peers(address: str, peers: Trainers) -> None:
    wait_until(lambda: epoch(address) >= 1)
    text = get(f"{address}/metrics").decode()
    assert text.startswith("# 2 of 2 peers in epoch")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert len(families["shoal_epoch"].samples) == len(peers.all)
    assert families["shoal_run_is_well"].samples[0].value == 1.0
    standing = {sample.labels["standing"]: sample.value for sample in families["shoal_run_peers"].samples}
    assert standing == {"here": 2.0, "silent": 0.0, "lost": 0.0, "left": 0.0}
    if shutil.which("promtool") is not None:
        done = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_page_is_small_and_fetches_nothing_from_elsewhere(address: str) -> None:
    sizes = {path: len(get(address + path)) for path in FILES}
    assert sum(sizes.values()) < MAX_PAGE_BYTES
    for file in PAGE.iterdir():
        own = file.read_text()
        assert "http" not in own.replace("http://www.w3.org/2000/svg", "") or file.name.startswith("uPlot")
        assert "innerHTML" not in own or file.name.startswith("uPlot")
    with urllib.request.urlopen(address, timeout=20) as answer:
        assert answer.headers["content-security-policy"] == "default-src 'self'; frame-ancestors 'none'"
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_there_is_nothing_to_order_with(address: str) -> None:
    for path in (*FILES, "/snapshot", "/events", "/history", "/metrics"):
        for method in ("POST", "PUT", "DELETE"):
            assert status(address + path, method) == 405
    assert status(f"{address}/page/../web.py") == status(f"{address}/uPlot.LICENSE") == 404


def test_only_who_asks_for_this_machine_is_answered(address: str) -> None:
    for host, expected in (("localhost:8080", 200), ("127.0.0.1", 200), ("elsewhere.example", 400)):
        request = urllib.request.Request(f"{address}/snapshot", headers={"Host": host})
        assert status(request) == expected


@pytest.mark.parametrize("hours", ["0", "-1", "nan", "inf", "1e9", "x", "1;drop"])
def test_a_time_that_makes_no_sense_is_refused(address: str, hours: str) -> None:
    assert status(f"{address}/history?hours={hours}") == 400


def test_a_flood_of_listeners_is_refused_and_disturbs_nobody(address: str, peers: Trainers) -> None:
    before = peers.all[0].ask(Monitored.health)["epoch"]
    with ExitStack() as stack:
        for _ in range(MAX_LISTENERS):
            stack.enter_context(urllib.request.urlopen(f"{address}/events", timeout=20)).readline()
        assert status(f"{address}/events") == 503
        wait_until(lambda: peers.all[0].ask(Monitored.health)["epoch"] > before + 2)
        assert status(f"{address}/snapshot") == 200
    wait_until(lambda: _streams(address))


def _streams(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/events", timeout=20):
            return True
    except urllib.error.HTTPError as error:
        error.close()
        return False


def test_a_monitor_that_is_killed_disturbs_nobody_and_keeps_its_history(peers: Trainers, tmp_path: Path) -> None:
    file, times = tmp_path / "h.sqlite", 0
    with monitor(peers, file, end=signal.SIGKILL) as address:
        wait_until(lambda: len(series(address)["at"]) >= 2)
        times = len(series(address)["at"])
    before = ask_all(peers.all, Monitored.health)
    wait_until(lambda: peers.all[0].ask(Monitored.health)["epoch"] > before[0]["epoch"] + 2)
    assert [peer.ask(Monitored.health)["members"] for peer in peers.all] == [2, 2]
    with monitor(peers, file) as address:
        assert len(series(address)["at"]) >= times


@only_in_soak
def test_a_history_that_can_no_longer_be_written_does_not_stop_the_page(peers: Trainers, tmp_path: Path) -> None:
    file = tmp_path / "h.sqlite"
    with monitor(peers, file) as address:
        wait_until(lambda: len(series(address)["at"]) >= 1)
        with contextlib.closing(sqlite3.connect(file)) as other:
            other.execute("DROP TABLE run")
        until = json.loads(get(f"{address}/snapshot"))["at"] + 2 * EVERY_SECONDS
        wait_until(lambda: json.loads(get(f"{address}/snapshot"))["at"] > until)


def series(address: str) -> dict[str, Any]:
    return dict(json.loads(get(f"{address}/history?hours=1")))

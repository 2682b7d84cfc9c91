"""The page in a real browser, beside three real peers of which one is killed: its numbers are the peers' own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shoal.monitor.web import MAX_LISTENERS
from tests.monitor.browser import Browser, browser
from tests.monitor.pages import monitor
from tests.monitor.processes import Peer, trainers
from tests.waiting import wait_until
from tests.workers.monitored import Monitored

pytestmark = [pytest.mark.processes, pytest.mark.long]

ROWS = """
return [...document.querySelectorAll('#peers tbody tr')].map((row) => Object.assign({id: row.dataset.peer,
    standing: row.className, said: row.lastChild.textContent},
    Object.fromEntries([...row.querySelectorAll('[data-name]')].map((cell) => [cell.dataset.name, cell.textContent]))))
"""
FIRST_PAINT = "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
RESOURCES = "return performance.getEntriesByType('resource').map((entry) => [entry.name, entry.transferSize])"


def sentence(page: Browser) -> str:
    return str(page.run("return document.getElementById('sentence').textContent"))


def rows(page: Browser) -> dict[str, dict[str, str]]:
    return {row["id"]: row for row in page.run(ROWS)}


def own(peer: Peer) -> dict[str, Any]:
    return peer.ask(Monitored.health)


def as_shown(numbers: dict[str, Any]) -> dict[str, str]:
    return {
        "epoch": str(numbers["epoch"]),
        "loss": f"{numbers['loss']:.4f}",
        "samples/s": f"{numbers['samples_per_second']:.1f}",
        "sees": str(numbers["members"]),
    }


def keep(page: Browser, name: str) -> None:
    """A picture, where somebody wants to look at it."""
    if folder := os.environ.get("SHOAL_PICTURES"):
        page.picture(Path(folder) / f"{name}.png")


def about(page: Browser) -> str:
    return str(page.run("return document.getElementById('about').textContent"))


def test_who_comes_when_too_many_look_sees_the_run_and_is_told_why_it_is_slower(tmp_path: Path) -> None:
    with ExitStack() as stack:
        peers = stack.enter_context(trainers(1))
        peers.train()
        address = stack.enter_context(monitor(peers, tmp_path / "h.sqlite"))
        page = stack.enter_context(browser(tmp_path))
        for _ in range(MAX_LISTENERS):
            stack.enter_context(urllib.request.urlopen(f"{address}/events", timeout=20)).readline()
        page.open(address)
        wait_until(lambda: sentence(page).startswith("1 peer in epoch"))
        assert "many look at this run, so this page asks every 5 s" in about(page)
        first = sentence(page)
        wait_until(lambda: sentence(page) != first)  # it goes on
        assert page.run("return document.getElementById('sentence').className") == "well"


def test_a_page_whose_monitor_has_ended_says_so(tmp_path: Path) -> None:
    with trainers(1) as peers, browser(tmp_path) as page:
        with monitor(peers, tmp_path / "h.sqlite") as address:
            page.open(address)
            wait_until(lambda: sentence(page).startswith("1 peer in epoch"))
        wait_until(lambda: about(page) == "The monitor does not answer: what follows is how the run was.")


def test_three_peers_and_one_is_killed(tmp_path: Path) -> None:
    with (
        trainers(3, target=96, pause=0.05) as peers,
        monitor(peers, tmp_path / "h.sqlite") as address,
        browser(tmp_path) as page,
    ):
        peers.train()
        page.look(1280, 900)
        paints = []
        for _ in range(3):
            page.open(address)
            wait_until(lambda: page.run(FIRST_PAINT) is not None)
            paints.append(page.run(FIRST_PAINT))
        assert min(paints) < 500, f"first paint after {paints} ms"
        resources = page.run(RESOURCES)
        assert all(name.startswith(f"{address}/") for name, _ in resources), "it asks others than the monitor"
        assert sum(size for _, size in resources) < 200_000

        wait_until(lambda: sentence(page).startswith("3 of 3 peers in epoch") and "all alike" in sentence(page))
        wait_until(lambda: page.run("return document.querySelectorAll('#loss canvas').length") == 1)
        keep(page, "light")

        # Every number is the peers' own, one period after they have stopped.
        peers.pause()
        numbers = {peer.peer: own(peer) for peer in peers.all}
        wait_until(lambda: all(own(peer)["number"] > numbers[peer.peer]["number"] + 2 for peer in peers.all))
        numbers = {peer.peer: own(peer) for peer in peers.all}
        shown: dict[str, dict[str, str]] = {}

        def is_equal() -> bool:
            shown.update(rows(page))
            return all(as_shown(numbers[peer]).items() <= row.items() for peer, row in shown.items())

        wait_until(is_equal, 20.0)
        assert len(shown) == 3
        metrics = urllib.request.urlopen(f"{address}/metrics", timeout=20).read().decode()
        told = {
            (family.name, sample.labels.get("peer")): sample.value
            for family in text_string_to_metric_families(metrics)
            for sample in family.samples
        }
        command = [
            sys.executable,
            "-m",
            "shoal",
            "top",
            "test",
            "--initial-peers",
            peers.addresses[0],
            "--once",
            "--json",
        ]
        top = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=100, check=True).stdout)
        of_top = {view["id"]: view for view in top["peers"]}
        for peer, mine in numbers.items():
            for name in ("epoch", "loss", "members", "samples_per_second"):
                assert told[f"shoal_{name}", mine["name"]] == pytest.approx(mine[name])
                assert of_top[peer][name] == pytest.approx(mine[name])
        figures = page.run(
            "return Object.fromEntries([...document.querySelectorAll('#figures div')].map("
            "(box) => [box.dataset.name, box.firstChild.textContent]))"
        )
        assert figures["epoch"] == str(max(mine["epoch"] for mine in numbers.values()))
        assert figures["peers"] == "3"

        # One is killed.
        peers.train()
        victim = peers.all[2]
        victim.kill()
        took = wait_until(lambda: rows(page)[victim.peer]["standing"] == "lost")
        assert took < 10.0
        name = numbers[victim.peer]["name"]
        assert f"…{name} was lost (" in sentence(page)
        assert "was lost" in rows(page)[victim.peer]["said"]
        assert f"…{name} was lost" in page.run("return document.getElementById('happenings').textContent")
        survivors = peers.all[:2]
        before = own(survivors[0])["epoch"]
        wait_until(lambda: own(survivors[0])["epoch"] > before + 2)

        # Dark, and on a phone.
        page.look(1280, 900, dark=True)
        dark = page.run("return getComputedStyle(document.body).backgroundColor")
        keep(page, "dark")
        page.look(360, 780)
        assert page.run("return getComputedStyle(document.body).backgroundColor") != dark
        assert page.run("return document.documentElement.scrollWidth") == 360
        cut = page.run(
            "return [...document.querySelectorAll('main *, header *')].filter((part) => "
            "part.getBoundingClientRect().right > 361 && !part.closest('.chart')).map((part) => part.outerHTML)"
        )
        assert cut == []
        keep(page, "narrow")

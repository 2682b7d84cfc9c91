"""The page's server in this process, with a watcher that is made up."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from msgspec.structs import replace

from shoal.monitor import web
from shoal.monitor.history import EVERY_SECONDS, RunHistory
from shoal.monitor.picture import Picture
from shoal.monitor.snapshot import Snapshot
from shoal.monitor.web import Site
from shoal.p2p.identity import PeerID
from tests.health.records import START, posted


class Watching:
    """Stands in for a `Watcher`: fails twice, and then stops the site."""

    def __init__(self) -> None:
        self.site: Site | None = None
        self.failing: list[Exception] = [ZeroDivisionError("first"), KeyError("second")]

    def snapshot(self) -> Snapshot:
        if self.failing:
            raise self.failing.pop(0)
        assert self.site is not None
        self.site.stop()
        return Picture("my run").snapshot(0.0, START)


def test_an_unexpected_error_is_one_warning_and_the_page_goes_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(web, "LOOK_SECONDS", 0.0)
    watcher: Any = Watching()
    with RunHistory(":memory:", "my run") as history:
        site = watcher.site = Site(watcher, history)
        asyncio.run(site._keep_looking())
    assert b"nobody in the run" in site._latest
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == ["the run could not be looked at: ZeroDivisionError('first')"]


def test_history_is_kept_on_where_the_clock_is_set_back() -> None:
    picture = Picture("my run")
    picture.read([posted(PeerID(bytes(32)))], 0.0, 0.0, START)
    one = picture.snapshot(0.0, START)

    times = [START, START - 3600.0, START - 3600.0 + EVERY_SECONDS / 2, START - 3600.0 + EVERY_SECONDS]

    class AtThoseTimes:
        def snapshot(self) -> Snapshot:
            return replace(one, at=times.pop(0))

    watcher: Any = AtThoseTimes()
    with RunHistory(":memory:", "my run") as history:
        site = Site(watcher, history)
        while times:
            asyncio.run(site._look())
        at = history.series(START, 7200.0)["at"]
    assert at == [START - 3600.0, START - 3600.0 + EVERY_SECONDS, START]

"""`shoal monitor`: serves a page about a run, its events and history, and Prometheus metrics. Everything is read-only.

Needs the extra `shoal[monitor]`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.core import GaugeMetricFamily
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shoal.health.metrics import OWN_NAMES, Metrics, families, registry_of
from shoal.health.record import Health, printable
from shoal.monitor.history import EVERY_SECONDS, LONGEST, RunHistory
from shoal.monitor.snapshot import Snapshot, Standing
from shoal.monitor.watcher import Watcher
from shoal.p2p.identity import PeerID

log = logging.getLogger(__name__)

PAGE = Path(__file__).with_name("page")
FILES = {
    "/": "index.html",
    "/page.js": "page.js",
    "/page.css": "page.css",
    "/uPlot.js": "uPlot.iife.min.js",
    "/uPlot.css": "uPlot.min.css",
    "/icon.svg": "icon.svg",
}
LOOK_SECONDS = 2.0
MAX_LISTENERS = 64  # open streams of events
HEADERS = {
    # The page runs only its own scripts and fetches nothing from elsewhere, whatever text a peer publishes.
    b"content-security-policy": b"default-src 'self'; frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-cache",
}


class Site:
    """The page of one run.

    Args:
        watcher: the watcher of the run.
        history: the history of the run.

    Attributes:
        app: the ASGI application.
    """

    def __init__(self, watcher: Watcher, history: RunHistory) -> None:
        self._watcher, self._history = watcher, history
        self._latest: bytes = b""
        self._changed = asyncio.Event()
        self._listeners = 0
        self._kept_at = 0.0
        self._stopped = self._warned = False
        routes = [Route(path, self._file) for path in FILES]
        routes += [
            Route("/snapshot", self._snapshot),
            Route("/events", self._events),
            Route("/history", self._series),
            Route("/metrics", self._metrics),
        ]
        own_names = [Middleware(TrustedHostMiddleware, allowed_hosts=OWN_NAMES)]
        self.app: ASGIApp = _WithHeaders(Starlette(routes=routes, middleware=own_names, lifespan=self._lifespan))

    def stop(self) -> None:
        """End the open streams of events, so that the server can end."""
        self._stopped = True
        self._changed.set()

    # -- snapshots

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        looking = asyncio.create_task(self._keep_looking())
        yield
        looking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await looking

    async def _keep_looking(self) -> None:
        """Make a snapshot for all viewers every LOOK_SECONDS."""
        while not self._stopped:
            try:
                await self._look()
            except RuntimeError as error:  # the DHT was shut down: the last snapshot stays
                log.debug("%s", error)
            except Exception as error:  # the next snapshot may succeed
                level = logging.DEBUG if self._warned else logging.WARNING
                log.log(level, "the run could not be looked at: %r", error, exc_info=error)
                self._warned = True
            await asyncio.sleep(LOOK_SECONDS)

    async def _look(self) -> None:
        snapshot = await asyncio.to_thread(self._watcher.snapshot)
        self._latest = msgspec.json.encode(snapshot)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if not 0 <= snapshot.at - self._kept_at < EVERY_SECONDS:  # the clock may have been set back
            self._kept_at = snapshot.at
            try:
                await asyncio.to_thread(self._history.add, snapshot)
            except OSError as error:  # the page continues without history
                log.warning("%s", error)

    # -- answers

    async def _file(self, request: Request) -> Response:
        return FileResponse(PAGE / FILES[request.url.path])

    async def _snapshot(self, _: Request) -> Response:
        return Response(self._latest or b"null", media_type="application/json")

    async def _events(self, _: Request) -> Response:
        if self._listeners >= MAX_LISTENERS:
            return PlainTextResponse(f"{MAX_LISTENERS} others are looking: try again later", 503)
        return StreamingResponse(self._stream(), media_type="text/event-stream")

    async def _stream(self) -> AsyncIterator[bytes]:
        """The snapshots as they are made. A slow reader misses some."""
        self._listeners += 1
        try:
            while not self._stopped:
                if self._latest:
                    yield b"data: " + self._latest + b"\n\n"
                await self._changed.wait()
        finally:
            self._listeners -= 1

    async def _series(self, request: Request) -> Response:
        try:
            hours = float(request.query_params.get("hours", "1"))
        except ValueError:
            hours = 0.0
        if not 0 < hours <= LONGEST / 3600:
            return PlainTextResponse(f"hours= is a number over 0, and at most {LONGEST // 3600}", 400)
        series = await asyncio.to_thread(self._history.series, time.time(), hours * 3600)
        return Response(msgspec.json.encode(series), media_type="application/json")

    async def _metrics(self, _: Request) -> Response:
        text = await asyncio.to_thread(self._scrape)
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    def _scrape(self) -> bytes:
        records, snapshot = self._watcher.records(), self._watcher.snapshot()
        first = f"# {printable(snapshot.sentence, len(snapshot.sentence.encode()))}\n"  # a comment for Prometheus
        return first.encode() + generate_latest(registry_of(lambda: metrics_of(snapshot, records)))


def metrics_of(snapshot: Snapshot, records: list[tuple[PeerID, Health]]) -> Metrics:
    """The metrics of all peers, and two metrics of the run."""
    well = GaugeMetricFamily("shoal_run_is_well", "Whether nothing is known to be wrong.", labels=["run"])
    well.add_metric([snapshot.run_id], float(snapshot.is_well))
    peers = GaugeMetricFamily("shoal_run_peers", "Peers, by whether they are there.", labels=["run", "standing"])
    for standing in Standing:
        count = sum(peer.standing is standing for peer in snapshot.peers)
        peers.add_metric([snapshot.run_id, standing.value], count)
    return [*families(snapshot.run_id, records), well, peers]


class _WithHeaders:
    """Adds HEADERS to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers: list[Any] = [h for h in message.get("headers", []) if h[0].lower() not in HEADERS]
                message["headers"] = [*headers, *HEADERS.items()]
            await send(message)

        await self._app(scope, receive, send_with_headers)

"""Serves the page of a run until it is stopped."""

from __future__ import annotations

import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from shoal.monitor.web import Site

LOOPBACK = "127.0.0.1"
GRACE_SECONDS = 2  # open answers must end within this time


def listen(port: int) -> socket.socket:
    """A socket that listens on loopback; port 0 for any free one. Raises OSError if the port is taken."""
    return socket.create_server((LOOPBACK, port))


class _Server(uvicorn.Server):
    """A server that ends the streams of events when it is stopped."""

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop = stop

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._stop()
        super().handle_exit(sig, frame)


def serve(site: Site, listening: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM, and then raise KeyboardInterrupt."""
    config = uvicorn.Config(
        site.app, log_level="critical", access_log=False, timeout_graceful_shutdown=GRACE_SECONDS, lifespan="on"
    )
    _Server(config, site.stop).run(sockets=[listening])

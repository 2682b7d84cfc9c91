"""TCP's reaction to packet loss: BBR keeps its rate, where other algorithms halve theirs."""

from __future__ import annotations

import logging
import socket
from functools import cache
from typing import Final

from shoal.p2p import tcp

log = logging.getLogger(__name__)

SHORT_SECONDS: Final = 0.001


@cache
def has_bbr() -> bool:
    """Whether this process may use BBR. If not, it logs a warning, once. (`lanes` calls this before any thread
    does.)
    """
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")
        except OSError as error:
            log.warning(
                "tensors pass slowly over lines that lose packets: this kernel has no BBR, or does not allow it (%s). "
                "`modprobe tcp_bbr` and the sysctl net.ipv4.tcp_allowed_congestion_control help",
                error.strerror,
            )
            return False
    return True


def is_long(connection: socket.socket) -> bool:
    """Whether the path is so long that it may lose packets. (Over loopback, BBR takes twice the time and CPU.)"""
    return tcp.round_trip(connection) >= SHORT_SECONDS


def suit(connection: socket.socket) -> None:
    """Use BBR on a connection that may lose packets, if the kernel allows it."""
    if is_long(connection) and has_bbr():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"bbr")

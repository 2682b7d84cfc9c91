"""Settings of Linux's TCP for a connection, and the kernel's knowledge of it."""

from __future__ import annotations

import socket
import struct

LEAST_PATIENCE, MOST_PATIENCE = 6.0, 20.0  # seconds without a sign of the other machine, after which it is lost
ROUND_TRIPS = 12  # added to LEAST_PATIENCE: on a slow, full line a retransmission may be dropped as well
_KEEPALIVE_SECONDS = 2  # between two keep-alive probes of an idle connection
_KEEPALIVES = 10  # unanswered probes until the kernel itself gives up, which is later than `is_silent`
# Fields of struct tcp_info: tcpi_probes (unanswered probes, of a keep-alive or for room), tcpi_unacked (segments under
# way), tcpi_last_data_recv, tcpi_last_ack_recv (milliseconds), tcpi_rtt (microseconds), tcpi_bytes_acked,
# tcpi_bytes_received.
_INFO = struct.Struct("=3xB20xI24xII8xI48xQQ")
# tcpi_bytes_acked, tcpi_busy_time, tcpi_rwnd_limited (microseconds).
_FLOW = struct.Struct("=120xQ40xQQ")


def prepare(connection: socket.socket, keepalive: int = _KEEPALIVE_SECONDS) -> None:
    """Send data at once, and let the kernel probe the other side when nothing has come for `keepalive` seconds."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, keepalive)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, keepalive)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVES)


def _info(connection: socket.socket, fields: struct.Struct = _INFO) -> tuple[int, ...]:
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, fields.size)
    except OSError:  # it has ended, which is reported elsewhere
        info = b""
    return fields.unpack(info.ljust(fields.size, b"\0"))


def counts(connection: socket.socket) -> tuple[int, int]:
    """The payload bytes that the other side has acknowledged, and those that have come from it. Zeros if the connection
    has ended.
    """
    *_, acknowledged, received = _info(connection)
    return acknowledged, received


def delivered(connection: socket.socket) -> tuple[int, float]:
    """The payload bytes that the other side has acknowledged, and the seconds in which bytes were under way while the
    other side had room for them, so that the path was the bottleneck. Zeros if the connection has ended.
    """
    acknowledged, busy, without_room = _info(connection, _FLOW)
    return acknowledged, max(0, busy - without_room) / 1e6


def round_trip(connection: socket.socket) -> float:
    """The approximate time to the other machine and back, in seconds. 0 if the connection has ended."""
    return _info(connection)[4] / 1e6


def is_silent(connection: socket.socket) -> bool:
    """Whether the other machine has sent neither data nor an acknowledgement for too long.

    TCP_USER_TIMEOUT would be the kernel's own means. But it also ends a connection whose other side answers but does
    not read, like a process that holds its GIL for long. The kernel probes such a connection for room less and less
    often. So if nothing is under way, the connection counts as silent only if probes were left unanswered.
    """
    probes, under_way, data, acknowledgement, microseconds, *_ = _info(connection)
    patience = min(LEAST_PATIENCE + ROUND_TRIPS * microseconds / 1e6, MOST_PATIENCE)
    return min(data, acknowledgement) > 1000 * patience and (under_way > 0 or probes > 1)

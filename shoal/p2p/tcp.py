"""What Linux's kernel does for a TCP connection, and what it knows of one."""

from __future__ import annotations

import socket
import struct

LEAST_PATIENCE, MOST_PATIENCE = 6.0, 20.0  # seconds without a sign of the other machine, after which it is lost
ROUND_TRIPS = 12  # that are added to the least: on a slow line that is full, a retransmission may be dropped as well
_KEEPALIVE_SECONDS = 2  # between two questions of the kernel over an idle connection
_KEEPALIVES = 10  # unanswered ones until the kernel itself gives up, which is later than `is_silent`
# Of struct tcp_info: tcpi_probes (questions that were not answered, of a keep-alive or for room), tcpi_unacked
# (segments that are under way), tcpi_last_data_recv, tcpi_last_ack_recv (milliseconds), tcpi_rtt (microseconds),
# tcpi_bytes_acked, tcpi_bytes_received.
_INFO = struct.Struct("=3xB20xI24xII8xI48xQQ")
# tcpi_bytes_acked, tcpi_busy_time, tcpi_rwnd_limited (microseconds).
_FLOW = struct.Struct("=120xQ40xQQ")


def prepare(connection: socket.socket, keepalive: int = _KEEPALIVE_SECONDS) -> None:
    """Have what is sent leave at once, and the kernel ask after the other side when nothing came for `keepalive`
    seconds."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, keepalive)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, keepalive)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVES)


def _info(connection: socket.socket, fields: struct.Struct = _INFO) -> tuple[int, ...]:
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, fields.size)
    except OSError:  # it has ended, and that is told elsewhere
        info = b""
    return fields.unpack(info.ljust(fields.size, b"\0"))


def counts(connection: socket.socket) -> tuple[int, int]:
    """Payload bytes of which the other side has said that they came, and those that came from it; zeros if it is no
    connection any more."""
    *_, acknowledged, received = _info(connection)
    return acknowledged, received


def delivered(connection: socket.socket) -> tuple[int, float]:
    """Payload bytes of which the other side has said that they came, and the seconds for which some were under way
    while the other side had room: it is the path that took so long. Zeros if it is no connection any more."""
    acknowledged, busy, without_room = _info(connection, _FLOW)
    return acknowledged, max(0, busy - without_room) / 1e6


def round_trip(connection: socket.socket) -> float:
    """The time to the other machine and back, in seconds, about; 0 if it is no connection any more."""
    return _info(connection)[4] / 1e6


def is_silent(connection: socket.socket) -> bool:
    """Whether the other machine has given no sign for longer than it may: neither data nor an acknowledgement.

    TCP_USER_TIMEOUT would be the kernel's own way. But it also ends a connection whose other side answers and only
    does not read, as a process that holds its GIL for long. For such a one the kernel asks ever more rarely whether
    there is room; so without anything under way, questions must have been left unanswered.
    """
    probes, under_way, data, acknowledgement, microseconds, *_ = _info(connection)
    patience = min(LEAST_PATIENCE + ROUND_TRIPS * microseconds / 1e6, MOST_PATIENCE)
    return min(data, acknowledgement) > 1000 * patience and (under_way > 0 or probes > 1)

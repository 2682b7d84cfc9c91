"""What Linux's kernel does for a TCP connection, and what it knows of one."""

from __future__ import annotations

import socket
import struct

LEAST_PATIENCE, MOST_PATIENCE = 6.0, 20.0  # seconds without a sign of the other machine, after which it is lost
ROUND_TRIPS = 12  # that are added to the least: on a slow line that is full, a retransmission may be dropped as well
_KEEPALIVE_SECONDS = 2  # between two questions of the kernel over an idle connection
_KEEPALIVES = 10  # unanswered ones until the kernel itself gives up, which is later than `is_silent`
_INFO_BYTES = 136  # of struct tcp_info, up to what is used of it
_PROBES_OFFSET = 3  # tcpi_probes: questions that were not answered, of a keep-alive or for room
_UNACKNOWLEDGED_OFFSET = 24  # tcpi_unacked: segments that are under way
_LAST_RECEIVED = struct.Struct("=II")  # tcpi_last_data_recv, tcpi_last_ack_recv, milliseconds
_LAST_RECEIVED_OFFSET = 52
_RTT_OFFSET = 68  # tcpi_rtt, microseconds
_NUMBER = struct.Struct("=I")
_COUNTS = struct.Struct("=QQ")  # tcpi_bytes_acked, tcpi_bytes_received
_COUNTS_OFFSET = 120


def prepare(connection: socket.socket, keepalive: int = _KEEPALIVE_SECONDS) -> None:
    """Have what is sent leave at once, and the kernel ask after the other side when nothing came for `keepalive`
    seconds."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, keepalive)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, keepalive)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _KEEPALIVES)


def _info(connection: socket.socket) -> bytes:
    try:
        return connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES).ljust(_INFO_BYTES, b"\0")
    except OSError:  # it has ended, and that is told elsewhere
        return bytes(_INFO_BYTES)


def counts(connection: socket.socket) -> tuple[int, int]:
    """Payload bytes of which the other side has said that they came, and those that came from it; zeros if it is no
    connection any more."""
    acknowledged, received = _COUNTS.unpack_from(_info(connection), _COUNTS_OFFSET)
    return acknowledged, received


def is_silent(connection: socket.socket) -> bool:
    """Whether the other machine has given no sign for longer than it may: neither data nor an acknowledgement.

    TCP_USER_TIMEOUT would be the kernel's own way. But it also ends a connection whose other side answers and only
    does not read, as a process that holds its GIL for long. For such a one the kernel asks ever more rarely whether
    there is room; so without anything under way, questions must have been left unanswered.
    """
    info = _info(connection)
    (microseconds,) = _NUMBER.unpack_from(info, _RTT_OFFSET)
    (under_way,) = _NUMBER.unpack_from(info, _UNACKNOWLEDGED_OFFSET)
    patience = min(LEAST_PATIENCE + ROUND_TRIPS * microseconds / 1e6, MOST_PATIENCE)
    data, acknowledgement = _LAST_RECEIVED.unpack_from(info, _LAST_RECEIVED_OFFSET)
    return bool(min(data, acknowledgement) > 1000 * patience and (under_way or info[_PROBES_OFFSET] > 1))

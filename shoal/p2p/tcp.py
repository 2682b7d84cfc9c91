"""What Linux's kernel knows of a TCP connection, and for how long it waits for the other side."""

from __future__ import annotations

import os
import socket
import struct

LEAST_PATIENCE, MOST_PATIENCE = 6.0, 20.0  # seconds without an acknowledgement, after which a connection is lost
ROUND_TRIPS = 12  # that are added to the least
_INFO_BYTES = 136  # of struct tcp_info, up to what is used of it
_RTT = struct.Struct("=I")  # tcpi_rtt, microseconds
_RTT_OFFSET = 68
_COUNTS = struct.Struct("=QQ")  # tcpi_bytes_acked, tcpi_bytes_received
_COUNTS_OFFSET = 120


def counts(fd: int) -> tuple[int, int]:
    """Payload bytes of connection `fd` of which the other side has said that they came, and those that came from it;
    zeros if it is no connection any more. What is sent and not acknowledged takes memory here, be it ZeroMQ's or the
    kernel's."""
    try:
        with socket.socket(fileno=os.dup(fd)) as duplicate:
            info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    except OSError:
        return 0, 0
    acknowledged, received = _COUNTS.unpack_from(info, _COUNTS_OFFSET)
    return acknowledged, received


def set_patience(fd: int) -> None:
    """Have connection `fd` end when the other side has acknowledged nothing for a while: for long where a round trip
    takes long, since on a slow line that is full, a retransmission may be dropped as well."""
    try:
        with socket.socket(fileno=os.dup(fd)) as duplicate:
            info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            (microseconds,) = _RTT.unpack_from(info, _RTT_OFFSET)
            seconds = min(LEAST_PATIENCE + ROUND_TRIPS * microseconds / 1e6, MOST_PATIENCE)
            duplicate.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * seconds))
    except OSError:
        return  # it has ended, and that is told elsewhere

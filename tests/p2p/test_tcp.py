"""What the kernel tells of a connection."""

from __future__ import annotations

import socket

import pytest

from shoal.p2p import tcp


def test_a_socket_that_is_no_connection_received_nothing_and_is_not_silent():
    near, far = socket.socketpair()
    with near, far:
        assert tcp.counts(near) == (0, 0)
        assert not tcp.is_silent(near)
    assert tcp.counts(near) == (0, 0)
    assert not tcp.is_silent(near)


def test_bytes_are_counted_and_silence_is_measured(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            near.sendall(bytes(1000))
            assert far.recv(1000, socket.MSG_WAITALL) == bytes(1000)
            assert tcp.counts(far)[1] == 1000
            assert 1000 <= tcp.counts(near)[0] <= 1001  # the kernel counts the SYN, too
            assert not tcp.is_silent(near)
            monkeypatch.setattr(tcp, "LEAST_PATIENCE", -1.0)
            assert not tcp.is_silent(near), "nobody was asked"


def test_the_time_in_which_the_other_side_has_no_room_is_not_the_paths():
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        with socket.create_connection(server.getsockname()) as near:
            far, _ = server.accept()
            with far:
                near.settimeout(0.5)
                with pytest.raises(TimeoutError):
                    near.sendall(bytes(1 << 25))  # more than fits, and nobody reads
                nbytes, seconds = tcp.delivered(near)
                assert nbytes >= 1 << 14
                assert seconds < 0.3

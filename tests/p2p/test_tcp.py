"""What the kernel tells of a connection."""

from __future__ import annotations

import socket

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

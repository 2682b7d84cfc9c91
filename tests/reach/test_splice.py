"""The thread that passes bytes between two connections: all of them, in order, at the pace of who reads."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shoal.reach import splice
from shoal.reach.splice import Splice, Splicer

MIB = 1 << 20


class Bed:
    """A splicer, and what it has told."""

    def __init__(self, rate: float | None = None) -> None:
        self.over: list[Splice] = []
        self.splicer = Splicer(rate, self.over.append)
        self.sockets: list[socket.socket] = []

    def circuit(self) -> tuple[socket.socket, socket.socket, Splice]:
        """Two ends that are joined, each a TCP connection to the splicer's side."""
        ends, inner = [], []
        with socket.create_server(("127.0.0.1", 0)) as server:
            for _ in range(2):
                ends.append(socket.create_connection(server.getsockname()))
                accepted, _ = server.accept()
                accepted.setblocking(False)
                inner.append(accepted)
                ends[-1].settimeout(20)
        self.sockets += ends
        return ends[0], ends[1], self.splicer.join(*inner)

    def until_over(self, number: int = 1) -> None:
        deadline = time.monotonic() + 20
        while len(self.over) < number:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@contextmanager
def bed(rate: float | None = None) -> Iterator[Bed]:
    made = Bed(rate)
    try:
        yield made
    finally:
        made.splicer.close()
        for each in made.sockets:
            each.close()


def read_all(end: socket.socket) -> bytes:
    data = bytearray()
    while piece := end.recv(1 << 16):
        data += piece
    return bytes(data)


def in_thread(target, *arguments) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments)
    thread.start()
    return thread


def test_all_bytes_pass_both_ways_at_once_and_ends_are_passed_on():
    with bed() as at:
        one, other, circuit = at.circuit()
        data = [os.urandom(8 * MIB + 1), os.urandom(5 * MIB)]

        def talk(end: socket.socket, said: bytes) -> None:
            end.sendall(said)
            end.shutdown(socket.SHUT_WR)

        threads = [in_thread(talk, one, data[0]), in_thread(talk, other, data[1])]
        heard: list[bytes] = []
        threads.append(in_thread(lambda: heard.append(read_all(one))))
        assert read_all(other) == data[0]
        for thread in threads:
            thread.join()
        assert heard == [data[1]]
        at.until_over()
        assert at.over == [circuit]
        assert circuit.passed == at.splicer.passed == 13 * MIB + 1


def test_a_half_closed_circuit_goes_on_the_other_way():
    with bed() as at:
        one, other, _ = at.circuit()
        one.shutdown(socket.SHUT_WR)
        assert other.recv(1) == b""
        other.sendall(b"still here")
        assert one.recv(100) == b"still here"
        assert at.over == []
        other.close()
        assert one.recv(1) == b""
        at.until_over()


def test_who_does_not_read_holds_up_nobody_else_and_gets_everything_later():
    with bed() as at:
        one, other, _ = at.circuit()
        quick, reader, _ = at.circuit()
        data = os.urandom(MIB) * 64
        sender = in_thread(one.sendall, data)
        quick.sendall(b"quick")
        assert reader.recv(10) == b"quick"
        sender.join(0.3)
        assert sender.is_alive()  # the kernel's memory is all that there is
        got = bytearray()
        while len(got) < len(data):
            got += other.recv(MIB)
        assert got == data
        sender.join()


@pytest.mark.parametrize("reset", [False, True])
def test_what_came_before_an_end_is_lost_arrives(reset):
    with bed() as at:
        one, other, _ = at.circuit()
        data = os.urandom(MIB)
        if reset:
            other.sendall(b"which the other one never reads")
            time.sleep(0.1)  # it is there, so that closing resets the connection
        one.sendall(data)
        time.sleep(0.2)
        one.close()
        got = bytearray()
        try:
            while piece := other.recv(1 << 16):
                got += piece
        except ConnectionResetError:
            assert reset
        assert got == data
        other.close()
        at.until_over()


def test_a_rate_holds_for_all_together_and_all_have_their_share():
    with bed(rate=4 * MIB) as at:
        pairs = [at.circuit() for _ in range(3)]
        threads = [in_thread(one.sendall, bytes(MIB)) for one, _, _ in pairs]
        got = dict.fromkeys(range(3), 0)
        started = time.monotonic()

        def read(number: int) -> None:
            while got[number] < MIB:
                got[number] += len(pairs[number][1].recv(MIB))
                if got[number] == MIB:
                    ends.append(dict(got))

        ends: list[dict[int, int]] = []
        threads += [in_thread(read, number) for number in range(3)]
        for thread in threads:
            thread.join()
        assert time.monotonic() - started > 0.5
        assert min(ends[0].values()) > MIB // 4


def test_a_circuit_can_be_ended_and_no_descriptor_stays():
    with bed() as at:
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(20):
            one, other, circuit = at.circuit()
            one.sendall(bytes(MIB))
            at.splicer.end(circuit)
            with contextlib.suppress(ConnectionError):
                while other.recv(MIB):
                    pass
            one.close()
            other.close()
        at.until_over(20)
        assert len(os.listdir("/proc/self/fd")) - before <= 2 * len(at.splicer._pipes)
        assert len(at.splicer._pipes) <= 2


def test_a_machine_that_is_gone_ends_its_circuit(monkeypatch):
    monkeypatch.setattr(splice, "LOOK_INTERVAL", 0.05)
    with bed() as at:
        one, other, circuit = at.circuit()
        _, _, stays = at.circuit()
        gone = circuit.ends[0].fileno()
        monkeypatch.setattr("shoal.p2p.tcp.is_silent", lambda connection: connection.fileno() == gone)
        one.sendall(b"x")
        at.until_over()
        assert at.over == [circuit]
        assert stays not in at.over
        other.close()


def test_close_ends_all_circuits_and_the_thread():
    with bed() as at:
        at.circuit()
    assert at.over
    assert not [thread for thread in threading.enumerate() if thread.name == "shoal-splice"]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_without_descriptors_for_pipes_circuits_end_and_one_line_says_why(number, monkeypatch, caplog):
    made = splice._pipe

    class KeepsNone(list[tuple[int, int]]):
        def append(self, pipe: tuple[int, int]) -> None:
            splice._close(pipe)

    def none_left() -> tuple[int, int]:
        raise OSError(number, os.strerror(number))

    with bed() as at:
        at.splicer._pipes = KeepsNone()
        for attempts in (3, 1):
            monkeypatch.setattr(splice, "_pipe", none_left)
            for _ in range(attempts):
                one, other, _ = at.circuit()
                one.sendall(b"x")
                assert other.recv(1) == b""
                other.close()
            monkeypatch.setattr(splice, "_pipe", made)
            one, other, _ = at.circuit()
            one.sendall(b"x")
            assert other.recv(1) == b"x"
    assert caplog.messages == ["circuits end: there are no descriptors left for their pipes"] * 2

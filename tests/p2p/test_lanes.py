"""What users of lanes may rely on, over loopback."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from random import Random

import pytest
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM, ChaCha20Poly1305

from shoal.p2p import congestion, lane, sealing, tcp
from shoal.p2p.errors import MessageTooLarge
from shoal.p2p.identity import PeerID
from shoal.p2p.lane import LEAST_SHARE, MAX_CONNECTIONS, SCRATCH_BYTES
from shoal.p2p.limit import Limit
from shoal.p2p.sealing import MAX_MESSAGE_BYTES, MAX_PAYLOAD_BYTES, NAME_BYTES, Header
from tests.p2p.lane_ends import PATIENCE, End, Raw, both_keys, join, name

MIB = 1 << 20


@pytest.mark.parametrize(("connections", "suite"), [(1, AESGCM), (3, AESGCM), (1, ChaCha20Poly1305)])
def test_chunks_pass_both_ways_into_their_targets_or_scratch(connections, suite):
    sizes = [1, 100, 65_536, MIB + 1, MAX_PAYLOAD_BYTES]
    data = [os.urandom(size) for size in sizes]
    with End(1) as near, End(2) as far:
        lanes = join(near, far, connections, suite)
        for here, there, mine in ((near, far, lanes[0]), (far, near, lanes[1])):
            memory = [bytearray(size) for size in sizes]
            targets = [
                there.shared.leases.register(name(n), here.peer, memoryview(memory[n])) for n in range(len(sizes))
            ]
            for n, chunk in [*enumerate(data), *enumerate(data[:-1])]:  # into the targets; the same again: into scratch
                here.send(mine, n, chunk)
            arrivals = [there.arrival() for _ in range(2 * len(data) - 1)]
            assert sum(any(arrival.memory is target.memory for target in targets) for arrival in arrivals) == len(data)
            for arrival in arrivals:
                assert arrival.peer == here.peer
                assert bytes(arrival.memory) == data[int(arrival.message.split()[1])]
            assert memory == data
            assert all(target.filled for target in targets)
        assert lanes[0].moved > 2 * 2 * sum(sizes[:-1])


def test_a_chunk_of_another_size_or_source_leaves_a_target_alone():
    with End(1) as near, End(2) as far:
        ours, _ = join(near, far)
        memory = bytearray(5)
        leases = far.shared.leases
        targets = [
            leases.register(name(1), near.peer, memoryview(memory)),
            leases.register(name(2), PeerID(b"3" * 32), memoryview(memory)),
        ]
        near.send(ours, 1, b"more than 5")
        near.send(ours, 2, b"other")
        assert [bytes(far.arrival().memory) for _ in range(2)] == [b"more than 5", b"other"]
        assert not any(target.filled for target in targets)
        assert memory == bytes(5)


def test_what_breaks_the_bounds_is_not_sent():
    with End(1) as near:
        unconnected = near.lane(PeerID(b"2" * 32))
        for size, message, length in (
            (0, 0, 24),
            (MAX_PAYLOAD_BYTES + 1, 0, 24),
            (1, MAX_MESSAGE_BYTES + 1, 24),
            (1, 0, 3),
        ):
            with pytest.raises(MessageTooLarge):
                unconnected.send(bytes(length), bytes(message), memoryview(bytes(size)))
        assert unconnected.send(name(1), bytes(MAX_MESSAGE_BYTES), memoryview(bytes(1)))


def test_a_queue_is_bounded_and_gone_with_the_lane(monkeypatch):
    monkeypatch.setattr(lane, "QUEUE_BYTES", 8 * MIB)
    with End(1) as near:
        unconnected = near.lane(PeerID(b"2" * 32))
        memory = bytearray(3 * MIB)
        assert [unconnected.send(name(n), b"", memoryview(memory)) for n in range(4)] == [True, True, False, False]
        unconnected.end()
        memory.clear()  # which nobody refers to any more
        assert near.loss() == "this side ended it"
        assert unconnected.send(name(9), b"", memoryview(bytes(1)))  # to nobody
    assert near.lost.empty()


def test_what_waited_for_the_connection_is_sent_but_what_was_cancelled():
    with End(1) as near, End(2) as far:
        ours, theirs = near.lane(far.peer), far.lane(near.peer)
        memory = [bytearray(10) for _ in range(4)]
        for number in range(4):
            chunk_name = b"ab"[number % 2 :][:1] + bytes([number]) + bytes(NAME_BYTES - 2)
            assert ours.send(chunk_name, bytes([number]), memoryview(memory[number]))
        ours.cancel(b"a")
        memory[0].clear()  # it is nobody's any more
        near_keys, far_keys = both_keys()
        ours.dial(far.listener.getsockname(), bytes(32), near_keys)
        far.accept(theirs, far_keys)
        assert [far.arrival().message for _ in range(2)] == [b"\1", b"\3"]


def test_who_cancels_waits_for_what_is_being_sealed(monkeypatch):
    began, goes_on = threading.Event(), threading.Event()

    class Slow(sealing.Sealer):
        def seal(self, header, payload, out):
            if header.size:
                began.set()
                goes_on.wait(PATIENCE)
            super().seal(header, payload, out)

    monkeypatch.setattr(lane, "Sealer", Slow)
    with End(1) as near, End(2) as far:
        ours, _ = join(near, far)
        near.send(ours, 1, bytes(MIB))
        assert began.wait(PATIENCE)
        cancelling = threading.Thread(target=ours.cancel, args=(name(1),))
        cancelling.start()
        cancelling.join(0.05)
        assert cancelling.is_alive()
        goes_on.set()
        cancelling.join(PATIENCE)
        assert not cancelling.is_alive()
        assert far.arrival().message == b"chunk 1"


def test_a_lane_that_finishes_sends_what_is_queued():
    with End(1) as near, End(2) as far:
        ours, _ = join(near, far)
        for number in range(10):
            near.send(ours, number, bytes(MIB))
        ours.finish()
        assert [len(far.arrival().memory) for _ in range(10)] == [MIB] * 10
        assert near.loss()
        assert far.loss()


def test_a_goodbye_waits_for_who_reads_late(monkeypatch):
    monkeypatch.setattr(lane, "PATIENCE", 0.2)
    with End(1) as end, Raw(end, PeerID(bytes(32))) as late:
        [connection] = late.lane._connections
        filled = 0
        for size in (1 << 16, 1):
            with suppress(BlockingIOError):
                while True:
                    filled += connection.socket.send(bytes(size), socket.MSG_DONTWAIT)
        late.lane.leave()
        late.lane.finish()
        time.sleep(0.5)
        while filled:
            filled -= len(late.socket.recv(min(filled, 1 << 20)))
        assert late.receive().message == b"shoal lane over"
        late.socket.sendall(late.frame(Header(0, bytes(NAME_BYTES), b"shoal lane over"), b""))
        assert end.loss() == ""  # it was left in order


def test_a_loss_is_told_once_after_all_that_had_arrived():
    with End(1) as end:
        told: queue.SimpleQueue[str] = queue.SimpleQueue()
        slowly = threading.Event()

        def came(message: bytes, memory: memoryview) -> None:
            slowly.wait(PATIENCE)
            told.put("chunk")

        with Raw(end, PeerID(b"7" * 32)) as raw:
            raw.lane.on_chunk, raw.lane._on_over = came, lambda reason: told.put("lost")
            for number in range(20):
                raw.socket.sendall(raw.chunk(number, bytes(100_000)))
            raw.socket.sendall(raw.chunk(20, bytes(100_000))[:-1])
        slowly.set()
        assert [told.get(timeout=PATIENCE) for _ in range(21)] == ["chunk"] * 20 + ["lost"]
        raw.lane.end()
    assert told.empty()


def test_the_end_of_one_connection_is_that_of_all_on_both_sides():
    with End(1) as near, End(2) as far:
        ours, theirs = join(near, far, 3)
        near.send(ours, 1, bytes(MIB))
        far.arrival()
        (connection, *_) = theirs._connections
        connection.socket.shutdown(socket.SHUT_WR)
        assert near.loss() == "the other side ended it"
        assert far.loss()
        assert not ours._connections
        assert not theirs._connections


def test_nobody_listens_there():
    with End(1) as near, socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
        closed.close()
        near.lane(PeerID(b"2" * 32)).dial(address, bytes(32), both_keys()[0])
        assert "refused" in near.loss()


def test_a_lane_that_ended_before_it_dialled_does_not_dial(monkeypatch):
    """Then there is no connection yet that could be shut down."""
    begun, goes_on = threading.Event(), threading.Event()
    prepare = tcp.prepare

    def slowly(connection: socket.socket, keepalive: int) -> None:
        begun.set()
        goes_on.wait(PATIENCE)
        prepare(connection, keepalive)

    monkeypatch.setattr(tcp, "prepare", slowly)
    with End(1) as near, crowd() as full:
        ours = near.lane(PeerID(b"2" * 32))
        ours.dial(full.getsockname(), bytes(32), both_keys()[0])
        assert begun.wait(PATIENCE)
        ours.end()
        started = time.monotonic()
        goes_on.set()
        assert near.loss() == "this side ended it"
        assert time.monotonic() - started < 5


def test_over_ipv6():
    with End(1) as near, End(2) as far:
        far.listener.close()
        far.listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
        ours, _ = join(near, far)
        near.send(ours, 1, b"over IPv6")
        assert bytes(far.arrival().memory) == b"over IPv6"


def test_a_lane_has_four_connections():
    with End(1) as near, End(2) as far:
        ours, _ = join(near, far, MAX_CONNECTIONS)
        ours.dial(far.listener.getsockname(), bytes(32), both_keys()[0])
        near.send(ours, 1, b"fine")
        assert bytes(far.arrival().memory) == b"fine"
        assert len(ours._connections) == MAX_CONNECTIONS


@pytest.mark.parametrize("which", ["shoal-lane-in", "shoal-lane-out"])
def test_a_process_that_can_not_have_more_threads_loses_the_lane_and_no_more(monkeypatch, which):
    start = threading.Thread.start

    def fail(thread: threading.Thread) -> None:
        if thread.name == which:
            raise RuntimeError("can't start new thread")
        start(thread)

    with End(1) as near, End(2) as far:
        before = descriptors()
        monkeypatch.setattr(threading.Thread, "start", fail)
        ours = near.lane(far.peer)
        near_keys, far_keys = both_keys()
        ours.dial(far.listener.getsockname(), bytes(32), near_keys)
        if which == "shoal-lane-out":
            far.accept(far.lane(near.peer), far_keys)
            assert far.loss() == "can't start new thread"
            assert near.loss()
        else:
            assert near.loss() == "can't start new thread"
        monkeypatch.undo()
        near.close()
        assert descriptors() == before - 1  # the listener
        assert not ours.connections


def test_scratch_is_bounded_for_each_peer_and_used_again():
    with End(1) as end, Raw(end, PeerID(b"7" * 32)) as raw, Raw(end, PeerID(b"8" * 32)) as other:
        frames = [raw.chunk(number, bytes([number]) * (4 * MIB)) for number in range(14)]

        def send() -> None:
            with suppress(OSError):  # of the last one, when the lane ends
                for frame in frames:
                    raw.socket.sendall(frame)

        sender = threading.Thread(target=send)
        sender.start()
        arrivals = [end.arrival() for _ in range(SCRATCH_BYTES // (4 * MIB))]
        other.socket.sendall(other.chunk(1, b"another peer's"))
        assert bytes(end.arrival().memory) == b"another peer's"
        assert end.arrivals.empty()
        for number in range(len(arrivals), 13):
            if number % 2:
                del arrivals[0]
            else:
                tensor = torch.frombuffer(arrivals.pop(0).memory, dtype=torch.uint8)  # which refers to it
                assert end.arrivals.empty()
                del tensor
            arrivals.append(end.arrival())
            assert arrivals[-1].memory[-1] == number
        raw.lane.end()  # with one more that waits for scratch
        assert end.loss() == "this side ended it"
        raw.close()
        sender.join(PATIENCE)


def test_many_tiny_chunks_take_no_more_scratch_than_a_few_large_ones():
    with End(1) as end, Raw(end, PeerID(b"7" * 32)) as raw:
        raw.socket.sendall(b"".join(raw.chunk(number, b"x") for number in range(700)))
        most = SCRATCH_BYTES // LEAST_SHARE
        arrivals = [end.arrival() for _ in range(most)]
        with pytest.raises(queue.Empty):
            end.arrivals.get(timeout=0.1)
        arrivals.clear()
        assert [end.arrival().memory[0] for _ in range(700 - most)] == [ord("x")] * (700 - most)


def test_peers_that_take_nothing_hold_up_no_other():
    with End(1) as near, End(2) as far:
        stalled = [Raw(near, PeerID(bytes([10 + n]) * 32)) for n in range(8)]
        memory = memoryview(bytearray(4 * MIB))
        for raw in stalled:
            for number in range(8):
                raw.lane.send(name(number), b"", memory)
        ours, _ = join(near, far)
        for number in range(20):
            started = time.monotonic()
            near.send(ours, number, memory[:MIB])
            far.arrival()
            assert time.monotonic() - started < 5
        for raw in stalled:
            raw.close()


@pytest.mark.timed
def test_an_upload_limit_holds_for_all_lanes_and_divides_them_evenly():
    rate = 4e6
    with End(1, upload=rate) as near:
        raws = [Raw(near, PeerID(bytes([10 + n]) * 32)) for n in range(4)]
        memory = memoryview(bytearray(2 * MIB))
        came, stop = [0] * len(raws), threading.Event()

        def take(number: int) -> None:
            while not stop.is_set() and (got := len(raws[number].socket.recv(1 << 16))):
                came[number] += got

        takers = [threading.Thread(target=take, args=(number,)) for number in range(len(raws))]
        started = time.monotonic()
        for raw in raws:
            for number in range(4):
                assert raw.lane.send(name(number), b"", memory)
        for taker in takers:
            taker.start()
        time.sleep(2)
        passed, seconds = sum(came), time.monotonic() - started
        shares = list(came)
        stop.set()
        near.close()
        for taker in takers:
            taker.join(PATIENCE)
        for raw in raws:
            raw.close()
    assert 0.7 * rate * seconds < passed < rate * seconds + 8 * Limit(rate).piece
    assert max(shares) < 1.5 * min(shares)


@pytest.mark.timed
def test_a_download_limit_holds_for_all_lanes():
    rate = 4e6
    with End(1) as near, End(2, download=rate) as far:
        lanes = [join(near, far)[0] for _ in range(3)]
        memory = memoryview(bytearray(MIB))
        before, started = [ours.moved for ours in lanes], time.monotonic()
        for ours in lanes:
            for number in range(8):
                assert ours.send(name(number), b"", memory)
        time.sleep(2)
        moved = sum(ours.moved for ours in lanes) - sum(before)
        seconds = time.monotonic() - started
    assert 0.7 * rate * seconds < moved < rate * seconds + 3 * 6 * Limit(rate).piece


@contextmanager
def crowd() -> Iterator[socket.socket]:
    """A listener for which the kernel answers nobody any more."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as stack:
        for _ in range(3):
            other = stack.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(server.getsockname())
        yield server


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_nothing_is_left_of_lanes_in_any_state():
    threads, before = set(threading.enumerate()), descriptors()
    with End(1) as near, End(2) as far, socket.create_server(("127.0.0.1", 0)) as mute, crowd() as full_crowd:
        join(near, far, 2)
        silent = Raw(near, PeerID(b"5" * 32), greets=False)
        near.lane(PeerID(b"6" * 32)).dial(mute.getsockname(), bytes(32), both_keys()[0])
        near.lane(PeerID(b"9" * 32))
        near.lane(PeerID(b"4" * 32)).dial(full_crowd.getsockname(), bytes(32), both_keys()[0])
        full, stalled = Raw(near, PeerID(b"7" * 32)), Raw(near, PeerID(b"8" * 32))
        full.socket.settimeout(1.0)
        for number in range(8):
            near.send(stalled.lane, number, bytes(MIB))
        with suppress(TimeoutError):  # until there is neither scratch nor room at the kernel
            for number in range(20):
                full.socket.sendall(full.chunk(number, bytes(4 * MIB)))
        assert len(set(threading.enumerate()) - threads) > 8
        started = time.monotonic()
        near.close()
        near.close()
        assert time.monotonic() - started < 2
        far.close()
        for raw in (silent, full, stalled):
            raw.close()
        assert near.out == SCRATCH_BYTES + 6 * 1024  # which this test has not let go
        while not near.arrivals.empty():
            near.arrival()
        assert near.out == 0
        assert near.lost.qsize() == 7
    assert set(threading.enumerate()) == threads
    assert descriptors() == before


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_lanes_that_end_in_the_middle_leave_nothing(seed):
    random = Random(seed)
    threads, before = set(threading.enumerate()), descriptors()
    with End(1) as near, End(2) as far:
        for _ in range(30):
            ours, theirs = join(near, far, random.randint(1, 3))
            sent = []
            for number in range(random.randint(1, 40)):
                for end, mine in ((near, ours), (far, theirs)):
                    sent.append(bytearray(random.choice((1, 70_000, MIB))))
                    end.send(mine, number, sent[-1])
                    while random.random() < 0.7 and not end.arrivals.empty():
                        end.arrival()
            how = random.randrange(4)
            if how == 0:
                ours.end()
            elif how == 1:
                theirs.end()
            else:
                for connection in list((ours, theirs)[how - 2]._connections)[:1]:
                    connection.shut()
            near.loss()
            far.loss()
            for memory in sent:
                memory.clear()  # which nobody refers to any more
            for end in (near, far):
                while not end.arrivals.empty():
                    end.arrival()
                assert end.lost.empty()
                assert end.out == 0
    assert set(threading.enumerate()) == threads
    assert descriptors() == before


def test_a_forked_child_holds_no_connection_open():
    with End(1) as near, Raw(near, PeerID(b"7" * 32)) as raw:
        raw.socket.sendall(raw.chunk(1, b"before"))
        assert bytes(near.arrival().memory) == b"before"
        read, write = os.pipe()
        number = raw.lane._connections[0].socket.fileno()
        child = os.fork()
        if child == 0:
            try:
                os.fstat(number)
            except OSError:
                os.read(read, 1)
                os._exit(0)
            os._exit(1)
        raw.socket.sendall(raw.chunk(2, b"after"))
        assert bytes(near.arrival().memory) == b"after"
        near.send(raw.lane, 1, b"both ways")
        assert raw.receive().message == b"chunk 1"
        near.close()
        raw.socket.settimeout(PATIENCE)
        while raw.socket.recv(1000):  # until the end, which comes although the child lives
            pass
        os.write(write, b"x")
        assert os.waitpid(child, 0)[1] == 0, "it had a copy"
        os.close(read)
        os.close(write)


def test_a_kernel_without_bbr_is_named_once(caplog, monkeypatch):
    congestion.has_bbr.cache_clear()
    monkeypatch.setattr(congestion, "SHORT_SECONDS", 0)
    monkeypatch.setattr(socket, "TCP_CONGESTION", 999)  # no such option
    assert not congestion.has_bbr()  # to tell the other side
    with End(1) as near, End(2) as far:
        ours, _ = join(near, far, 3)
        near.send(ours, 1, b"anyway")
        assert bytes(far.arrival().memory) == b"anyway"
    assert len([record for record in caplog.records if "BBR" in record.message]) == 1
    congestion.has_bbr.cache_clear()


def test_a_long_path_uses_bbr_where_the_kernel_has_it(monkeypatch):
    if not congestion.has_bbr():
        pytest.skip("this kernel has no BBR")
    used = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        for seconds in (10, 0):
            monkeypatch.setattr(congestion, "SHORT_SECONDS", seconds)
            with socket.socket() as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
                connection.connect(server.getsockname())
                congestion.suit(connection)
                option = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                used.append(option.partition(b"\0")[0])
    assert used == [b"reno", b"bbr"]

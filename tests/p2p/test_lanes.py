"""What users of lanes may rely on, over loopback."""

from __future__ import annotations

import fcntl
import gc
import os
import queue
import socket
import struct
import termios
import threading
import time
from contextlib import suppress
from random import Random

import pytest

from shoal.p2p import congestion, lane
from shoal.p2p.errors import MessageTooLarge, PeerUnreachable
from shoal.p2p.identity import PeerID
from shoal.p2p.lane import LEAST_SHARE, MAX_CONNECTIONS, SCRATCH_BYTES, WINDOW_BYTES
from shoal.p2p.limit import Limit
from shoal.p2p.sealing import MAX_MESSAGE_BYTES, MAX_PAYLOAD_BYTES, NAME_BYTES
from tests.p2p.lane_ends import PATIENCE, End, Raw, both_keys, join, name

MIB = 1 << 20


def nothing() -> None:
    pass


@pytest.mark.parametrize(("connections", "suite"), [(1, "aes-256-gcm"), (3, "aes-256-gcm"), (1, "chacha20-poly1305")])
def test_chunks_pass_both_ways_into_their_targets_or_scratch(connections, suite):
    sizes = [1, 100, 65_536, MIB + 1, MAX_PAYLOAD_BYTES]
    data = [os.urandom(size) for size in sizes]
    with End(1) as near, End(2) as far:
        lanes = join(near, far, connections, suite)
        for here, there, mine in ((near, far, lanes[0]), (far, near, lanes[1])):
            memory = [bytearray(size) for size in sizes]
            targets = [
                there.lanes.leases.register(name(n), here.peer, memoryview(memory[n])) for n in range(len(sizes))
            ]
            free = [here.send(mine, n, chunk) for n, chunk in enumerate(data)]  # into the targets
            free += [here.send(mine, n, chunk) for n, chunk in enumerate(data[:-1])]  # the same again: into scratch
            arrivals = [there.arrival() for _ in free]
            for placed in (True, False):
                came = [arrival for arrival in arrivals if (arrival.target is not None) == placed]
                assert len(came) == len(data) - (not placed)
                for arrival in came:
                    number = int(arrival.message.split()[1])
                    assert arrival.peer == here.peer
                    assert bytes(arrival.memory) == data[number]
                    assert arrival.target is (targets[number] if placed else None)
            assert memory == data
            for arrival in arrivals:
                arrival.release()
                assert arrival.target or not arrival.memory
            for number, freed in enumerate(free):
                assert freed.get(timeout=PATIENCE) == number % len(data)
                assert freed.empty()
        assert lanes[0].moved > 2 * 2 * sum(sizes[:-1])


def test_a_chunk_of_another_size_or_source_leaves_a_target_alone():
    with End(1) as near, End(2) as far:
        ours, _ = join(near, far)
        memory = bytearray(5)
        leases = far.lanes.leases
        leases.register(name(1), near.peer, memoryview(memory))
        leases.register(name(2), PeerID(b"3" * 32), memoryview(memory))
        near.send(ours, 1, b"more than 5")
        near.send(ours, 2, b"other")
        assert [far.arrival().target for _ in range(2)] == [None, None]
        assert memory == bytes(5)


def test_what_breaks_the_bounds_is_not_sent():
    with End(1) as near:
        unconnected = near.lanes.lane(PeerID(b"2" * 32))
        for size, message, length in (
            (0, 0, 24),
            (MAX_PAYLOAD_BYTES + 1, 0, 24),
            (1, MAX_MESSAGE_BYTES + 1, 24),
            (1, 0, 3),
        ):
            with pytest.raises(MessageTooLarge):
                unconnected.send(bytes(length), bytes(message), memoryview(bytes(size)), nothing)
        assert unconnected.send(name(1), bytes(MAX_MESSAGE_BYTES), memoryview(bytes(1)), nothing)


def test_a_window_of_bytes_waits_and_is_freed_at_the_end():
    freed: queue.SimpleQueue[int] = queue.SimpleQueue()
    with End(1) as near:
        unconnected = near.lanes.lane(PeerID(b"2" * 32))
        memory = memoryview(bytearray(3 * MIB))
        taken = [unconnected.send(name(n), b"", memory, lambda: freed.put(1)) for n in range(4)]
        assert taken == [True, True, False, False]
        assert unconnected.queued == 6 * MIB <= WINDOW_BYTES
        assert freed.empty()
        unconnected.end()
        assert [freed.get_nowait() for _ in range(2)] == [1, 1]
        assert near.loss() == "this side ended it"
        assert unconnected.send(name(9), b"", memory, lambda: freed.put(2))  # to nobody: it is free at once
        assert freed.get_nowait() == 2
    assert near.lost.empty()
    with pytest.raises(PeerUnreachable):
        near.lanes.lane(PeerID(b"2" * 32))


def test_what_waited_for_the_connection_is_sent_but_what_was_cancelled():
    freed = []
    with End(1) as near, End(2) as far:
        ours, theirs = near.lanes.lane(far.peer), far.lanes.lane(near.peer)
        for number in range(4):
            prefix = b"ab"[number % 2 :][:1]
            chunk_name = prefix + bytes([number]) + bytes(NAME_BYTES - 2)
            assert ours.send(chunk_name, bytes([number]), memoryview(bytes(10)), lambda n=number: freed.append(n))  # type: ignore[misc]
        ours.cancel(b"a")
        assert freed == [0, 2]
        near_keys, far_keys = both_keys()
        ours.dial(far.listener.getsockname(), far.lanes.invite(theirs, far_keys), near_keys)
        assert far.admit()
        assert [far.arrival().message for _ in range(2)] == [b"\1", b"\3"]
        assert freed == [0, 2, 1, 3]
        assert ours.queued == 0


def test_a_loss_is_told_once_after_all_that_had_arrived():
    with End(1) as end:
        told: queue.SimpleQueue[str] = queue.SimpleQueue()
        slowly = threading.Event()

        def arrived(arrival: lane.Arrival) -> None:
            slowly.wait(PATIENCE)
            told.put("chunk")

        end.lanes.on_arrival = arrived
        end.lanes.on_lost = lambda peer, reason: told.put("lost")
        with Raw(end, PeerID(b"7" * 32)) as raw:
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
        connection._socket.shutdown(socket.SHUT_WR)
        assert near.loss() == "the other side ended it"
        assert far.loss()
        assert not ours._connections
        assert not theirs._connections


def test_nobody_listens_there():
    with End(1) as near, socket.create_server(("127.0.0.1", 0)) as closed:
        address = closed.getsockname()
        closed.close()
        near.lanes.lane(PeerID(b"2" * 32)).dial(address, bytes(32), both_keys()[0])
        assert "refused" in near.loss()


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


def test_scratch_is_bounded_for_each_peer_and_used_again():
    with End(1) as end, Raw(end, PeerID(b"7" * 32)) as raw, Raw(end, PeerID(b"8" * 32)) as other:
        frames = [raw.chunk(number, bytes([number]) * (4 * MIB)) for number in range(10)]

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
        for number in range(len(arrivals), 9):
            if number % 2:
                arrivals.pop(0).release()
            else:
                del arrivals[0]  # forgotten: that is noticed, too
                gc.collect()
            arrivals.append(end.arrival())
            assert arrivals[-1].memory[-1] == number
        raw.lane.end()  # with one more that waits for scratch
        assert end.loss() == "this side ended it"
        raw.close()
        sender.join(PATIENCE)


def test_many_tiny_chunks_take_no_more_scratch_than_a_few_large_ones():
    with End(1) as end, Raw(end, PeerID(b"7" * 32)) as raw:
        raw.socket.sendall(b"".join(raw.chunk(number, b"x") for number in range(300)))
        most = SCRATCH_BYTES // LEAST_SHARE
        arrivals = [end.arrival() for _ in range(most)]
        with pytest.raises(queue.Empty):
            end.arrivals.get(timeout=0.1)
        for arrival in arrivals:
            arrival.release()
        assert [end.arrival().memory[0] for _ in range(300 - most)] == [ord("x")] * (300 - most)


def waiting_in_kernel(ours: lane.Lane) -> int:
    """Bytes that were sent and not acknowledged."""
    (nbytes,) = struct.unpack("i", fcntl.ioctl(ours._connections[0].fd, termios.TIOCOUTQ, bytes(4)))
    return nbytes


def test_peers_that_take_nothing_hold_up_no_other():
    with End(1) as near, End(2) as far:
        stalled = [Raw(near, PeerID(bytes([10 + n]) * 32)) for n in range(8)]
        memory = memoryview(bytearray(4 * MIB))
        for raw in stalled:
            while raw.lane.queued < 8 * MIB or waiting_in_kernel(raw.lane) < MIB:
                raw.lane.send(name(1), b"", memory, nothing)
                time.sleep(0.001)
        ours, _ = join(near, far)
        for number in range(20):
            started = time.monotonic()
            near.send(ours, number, memory[:MIB])
            far.arrival().release()
            assert time.monotonic() - started < 5
        for raw in stalled:
            raw.close()


@pytest.mark.alone
def test_an_upload_limit_holds_for_all_lanes_and_divides_them_evenly():
    rate = 4e6
    with End(1, upload=Limit(rate)) as near:
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
                assert raw.lane.send(name(number), b"", memory, nothing)
        for taker in takers:
            taker.start()
        time.sleep(2)
        passed, seconds = sum(came), time.monotonic() - started
        shares = list(came)
        stop.set()
        near.lanes.close()
        for taker in takers:
            taker.join(PATIENCE)
        for raw in raws:
            raw.close()
    assert 0.7 * rate * seconds < passed < rate * seconds + 8 * Limit(rate).piece
    assert max(shares) < 1.5 * min(shares)


@pytest.mark.alone
def test_a_download_limit_holds_for_all_lanes():
    rate = 4e6
    with End(1) as near, End(2, download=Limit(rate)) as far:
        lanes = [join(near, far)[0] for _ in range(3)]
        memory = memoryview(bytearray(MIB))
        before, started = [ours.moved for ours in lanes], time.monotonic()
        for ours in lanes:
            for number in range(8):
                assert ours.send(name(number), b"", memory, nothing)
        time.sleep(2)
        moved = sum(ours.moved for ours in lanes) - sum(before)
        seconds = time.monotonic() - started
    assert 0.7 * rate * seconds < moved < rate * seconds + 3 * 6 * Limit(rate).piece


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_nothing_is_left_of_lanes_in_any_state():
    threads, before = set(threading.enumerate()), descriptors()
    with End(1) as near, End(2) as far, socket.create_server(("127.0.0.1", 0)) as mute:
        join(near, far, 2)
        silent = Raw(near, PeerID(b"5" * 32), greets=False)
        near.lanes.lane(PeerID(b"6" * 32)).dial(mute.getsockname(), bytes(32), both_keys()[0])
        near.lanes.lane(PeerID(b"9" * 32))
        crowd = socket.create_server(("127.0.0.1", 0), backlog=0)
        waiting = [socket.socket() for _ in range(3)]
        for other in waiting:  # then the kernel answers nobody any more
            other.setblocking(False)
            other.connect_ex(crowd.getsockname())
        near.lanes.lane(PeerID(b"4" * 32)).dial(crowd.getsockname(), bytes(32), both_keys()[0])
        full = Raw(near, PeerID(b"7" * 32))
        full.socket.setblocking(False)
        stalled = Raw(near, PeerID(b"8" * 32))
        for number in range(8):
            near.send(stalled.lane, number, bytes(MIB))
        frame = memoryview(b"".join(full.chunk(number, bytes(4 * MIB)) for number in range(6)))
        while frame:
            try:
                frame = frame[full.socket.send(frame) :]
            except BlockingIOError:
                if full.lane._scratch == SCRATCH_BYTES:
                    break
        assert len(set(threading.enumerate()) - threads) > 8
        started = time.monotonic()
        near.lanes.close()
        near.lanes.close()
        assert time.monotonic() - started < 2
        far.lanes.close()
        for raw in (silent, full, stalled):
            raw.close()
        for opened in (crowd, *waiting):
            opened.close()
        assert near.lanes.buffers._out == SCRATCH_BYTES + 4 * 1024  # which this test has not released
        while not near.arrivals.empty():
            near.arrival().release()
        assert near.lanes.buffers._out == 0
        assert near.lost.qsize() == 7
    assert set(threading.enumerate()) == threads
    assert descriptors() == before


@pytest.mark.parametrize("seed", range(3))
def test_lanes_that_end_in_the_middle_free_all_memory_once_and_leave_nothing(seed):
    random = Random(seed)
    threads, before = set(threading.enumerate()), descriptors()
    with End(1) as near, End(2) as far:
        for _ in range(30):
            ours, theirs = join(near, far, random.randint(1, 3))
            frees = []
            for number in range(random.randint(1, 40)):
                for end, mine in ((near, ours), (far, theirs)):
                    free: queue.SimpleQueue[int] = queue.SimpleQueue()
                    data = memoryview(bytes(random.choice((1, 70_000, MIB))))
                    if mine.send(name(number), b"", data, lambda free=free: free.put(1)):  # type: ignore[misc]
                        frees.append(free)
                    while random.random() < 0.7 and not end.arrivals.empty():
                        end.arrival().release()
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
            for free in frees:
                assert free.get(timeout=PATIENCE) == 1
            for end in (near, far):
                while not end.arrivals.empty():
                    end.arrival().release()
            assert all(free.empty() for free in frees)
            assert near.lost.empty()
            assert far.lost.empty()
            assert near.lanes.buffers._out == far.lanes.buffers._out == 0
    assert set(threading.enumerate()) == threads
    assert descriptors() == before


def test_a_forked_child_holds_no_connection_open():
    with End(1) as near, Raw(near, PeerID(b"7" * 32)) as raw:
        raw.socket.sendall(raw.chunk(1, b"before"))
        assert bytes(near.arrival().memory) == b"before"
        read, write = os.pipe()
        number = raw.lane._connections[0].fd
        child = os.fork()
        if child == 0:
            near.lanes.close()  # as at exit: it does nothing here
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
        near.lanes.close()
        raw.socket.settimeout(PATIENCE)
        while raw.socket.recv(1000):  # until the end, which comes although the child lives
            pass
        os.write(write, b"x")
        assert os.waitpid(child, 0)[1] == 0, "it had a copy"
        os.close(read)
        os.close(write)


def test_a_kernel_without_bbr_is_named_once(caplog, monkeypatch):
    congestion._has_bbr.cache_clear()
    monkeypatch.setattr(congestion, "SHORT_MICROSECONDS", 0)
    monkeypatch.setattr(socket, "TCP_CONGESTION", 999)  # no such option
    with End(1) as near, End(2) as far:
        ours, _ = join(near, far, 3)
        near.send(ours, 1, b"anyway")
        assert bytes(far.arrival().memory) == b"anyway"
    assert len([record for record in caplog.records if "BBR" in record.message]) == 1
    congestion._has_bbr.cache_clear()


def test_a_long_path_uses_bbr_where_the_kernel_has_it(monkeypatch):
    if not congestion.has_bbr():
        pytest.skip("this kernel has no BBR")
    used = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        for microseconds in (10_000_000, 0):
            monkeypatch.setattr(congestion, "SHORT_MICROSECONDS", microseconds)
            with socket.socket() as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
                connection.connect(server.getsockname())
                congestion.suit(connection)
                option = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
                used.append(option.partition(b"\0")[0])
    assert used == [b"reno", b"bbr"]

"""What a changed line, or a peer that breaks every rule, can do to a lane: end it."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import suppress

import pytest

from shoal.p2p import lane
from shoal.p2p.identity import PeerID
from shoal.p2p.sealing import MAX_PAYLOAD_BYTES, SEALED_HEADER_BYTES, TAG_BYTES, Header
from tests.p2p.lane_ends import HELLO, End, Raw, both_keys, name

PEER = PeerID(b"7" * 32)
SIZE = 1000
PLACES = {
    "header": 0,
    "lengths": 5,
    "end of header": SEALED_HEADER_BYTES - TAG_BYTES - 1,
    "tag of header": SEALED_HEADER_BYTES - 1,
    "payload": SEALED_HEADER_BYTES,
    "middle of payload": SEALED_HEADER_BYTES + SIZE // 2,
    "end of payload": SEALED_HEADER_BYTES + SIZE - 1,
    "tag of payload": SEALED_HEADER_BYTES + SIZE,
    "end of tag": SEALED_HEADER_BYTES + SIZE + TAG_BYTES - 1,
}


def lost_after(sent: list[str], *, place: int = -1) -> tuple[str, int, bool]:
    """Send frames of the names: chunk, changed, again (the last one), later (the next but one), cut. Returns why the
    lane was lost, how many chunks arrived, and whether the target of the last one still waits."""
    with End(1) as end, Raw(end, PEER) as raw:
        memory = bytearray(SIZE)
        end.shared.leases.register(name(len(sent)), PEER, memoryview(memory))
        frame = b""
        for number, kind in enumerate(sent, 1):
            if kind == "later":
                raw.chunk(0, b"which is left out")
            if kind != "again":
                frame = raw.chunk(number, os.urandom(SIZE))
            if kind == "changed":
                frame = frame[:place] + bytes([frame[place] ^ 0x80]) + frame[place + 1 :]
            if kind == "cut":
                frame = frame[:place]
            raw.socket.sendall(frame)
        if "cut" in sent:
            raw.socket.shutdown(socket.SHUT_WR)
        reason = end.loss()
        waits = end.shared.leases.lease(name(len(sent)), PEER, SIZE) is not None
        assert end.lost.empty()
        return reason, end.arrivals.qsize(), waits


@pytest.mark.parametrize("place", PLACES)
def test_a_changed_byte_ends_the_lane_and_fills_no_target(place):
    assert lost_after(["chunk", "chunk", "changed"], place=PLACES[place]) == (
        "a frame does not open: its bytes were changed on the way",
        2,
        True,
    )


@pytest.mark.parametrize("sent", [["chunk", "again"], ["chunk", "later"]])
def test_a_replayed_or_left_out_frame_ends_the_lane(sent):
    reason, arrived, waits = lost_after(sent)
    assert "does not open" in reason
    assert (arrived, waits) == (1, True)


@pytest.mark.parametrize("place", [1, SEALED_HEADER_BYTES - 1, SEALED_HEADER_BYTES, SEALED_HEADER_BYTES + SIZE])
def test_a_cut_frame_is_lost_with_the_lane(place):
    assert lost_after(["chunk", "cut"], place=place) == ("the other side ended it", 1, True)


def test_lengths_are_bounded_before_anything_is_received():
    with End(1) as end, Raw(end, PEER) as raw:
        sealed = bytearray(SEALED_HEADER_BYTES + 1 + TAG_BYTES)
        raw.sealer.seal(Header(MAX_PAYLOAD_BYTES + 1, name(1), b""), memoryview(b"x"), memoryview(sealed))
        raw.socket.sendall(sealed[:SEALED_HEADER_BYTES])
        assert "bounds" in end.loss()
        assert end.out == 0


def test_a_chunk_without_bytes_ends_the_lane():
    with End(1) as end, Raw(end, PEER) as raw:
        raw.socket.sendall(raw.chunk(1, b""))
        assert end.loss() == "a chunk without bytes"


@pytest.mark.parametrize("first", ["garbage", "a chunk", "another's hello", "its own hello"])
def test_who_has_the_token_and_not_the_keys_is_given_nothing(first):
    with End(1) as end, Raw(end, PEER, greets=False) as raw:
        if first == "a chunk":
            frame = raw.chunk(1, bytes(SIZE))
        elif first == "another's hello":
            other = Raw(end, PEER, greets=False)
            frame = other.frame(HELLO, b"")
            other.close()
            end.loss()
        else:
            frame = bytes(SEALED_HEADER_BYTES)
        raw.socket.sendall(frame)
        assert end.loss() in ("the first frame is no hello", "a frame does not open: its bytes were changed on the way")
        with suppress(ConnectionResetError):
            assert raw.socket.recv(1) == b""  # not even a hello
        assert end.out == 0
        assert end.arrivals.empty()


@pytest.mark.parametrize("drips", [False, True])
def test_who_takes_too_long_to_greet_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, drips):
    monkeypatch.setattr(lane, "OPENING_SECONDS", 0.3)
    monkeypatch.setattr(lane, "PATIENCE", 0.3)
    with End(1) as end, Raw(end, PEER, greets=False) as raw:
        frame = raw.frame(HELLO, b"")
        while drips and end.lost.empty() and frame:
            try:
                raw.socket.sendall(frame[:1])
            except OSError:
                break
            frame = frame[1:]
            raw.socket.settimeout(0.05)
            try:
                assert raw.socket.recv(1) == b""
                break
            except TimeoutError:
                pass
        assert end.loss() in ("the other side did not answer in time", "the other side took too long")


def test_who_never_answers_a_dial_is_not_waited_for(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lane, "OPENING_SECONDS", 0.3)
    monkeypatch.setattr(lane, "PATIENCE", 0.3)
    with End(1) as end, socket.create_server(("127.0.0.1", 0)) as mute:
        end.lane(PEER).dial(mute.getsockname(), bytes(32), both_keys()[0])
        assert end.loss() == "the other side took too long"


@pytest.mark.parametrize("hoards", ["reading", "writing"])
def test_who_moves_nothing_while_others_wait_for_memory_goes_and_the_others_go_on(monkeypatch, hoards):
    """Who waits is not ended, nor is one that is slow, nor is anybody while nobody waits."""
    monkeypatch.setattr(lane, "PATIENCE", 0.3)
    monkeypatch.setattr(lane, "LEAST_BYTES", 2000)
    size = MAX_PAYLOAD_BYTES
    with End(1) as end, Raw(end, PEER) as one, Raw(end, PEER) as slow, Raw(end, PEER) as asks:
        end.shared.buffers._left = 2 * (size + 1024)  # for two chunks
        if hoards == "reading":
            one.socket.sendall(one.chunk(1, bytes(size))[: SEALED_HEADER_BYTES + 100])
        else:
            for number in range(8):
                one.lane.send(name(number), b"", memoryview(bytes(size)))
        frame = memoryview(slow.chunk(2, bytes(size)))
        slow.socket.sendall(frame[: size // 2])
        frame = frame[size // 2 :]
        while end.shared.buffers._left:  # until both have their memory
            time.sleep(0.01)
        time.sleep(0.7)
        assert end.lost.empty()
        sender = threading.Thread(target=asks.socket.sendall, args=(asks.chunk(3, bytes(size)),))
        sender.start()
        for start in range(0, 20_000, 1000):
            slow.socket.sendall(frame[start : start + 1000])
            time.sleep(0.05)
        assert end.arrival().memory.nbytes == size  # of the one that had waited
        sender.join()
        assert end.loss() == "it moved too slowly while others waited for memory"
        slow.socket.sendall(frame[20_000:])
        assert end.arrival().memory.nbytes == size
        assert end.lost.empty()
        assert one.lane.over.is_set()

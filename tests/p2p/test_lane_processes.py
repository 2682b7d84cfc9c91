"""Lanes to another process: one that dies, one whose GIL is held, one that ends in the middle."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from shoal.p2p.lane import Lane
from shoal.p2p.sealing import LaneKeys
from tests.forked import ForkedProcess
from tests.p2p.lane_ends import PATIENCE, End
from tests.p2p.lane_worker import HOG_SECONDS

pytestmark = pytest.mark.timed

CHUNK = bytes(4 << 20)


@contextmanager
def other_process(end: End, mode: str) -> Iterator[tuple[ForkedProcess, Lane]]:
    """A worker that is joined to `end` by a lane."""
    process = ForkedProcess("tests.p2p.lane_worker", mode, talk=True)
    try:
        ours, theirs = os.urandom(32), os.urandom(32)
        process.stdin.write(f"{theirs.hex()} {ours.hex()}\n")
        process.stdin.flush()
        port = process.stdout.readline()
        lane = end.lane(end.peer)
        lane.dial(("127.0.0.1", int(port)), bytes(32), LaneKeys(AESGCM, ours, theirs))
        yield process, lane
    finally:
        process.kill()
        process.wait(PATIENCE)
        process.stdin.close()
        process.stdout.close()


@pytest.mark.parametrize("mode", ["sends", "takes", "forks"])
def test_a_killed_process_is_lost_at_once_and_what_it_had_sent_arrives(mode):
    with End(1) as end, other_process(end, mode) as (process, lane):
        for number in range(3):
            if mode != "sends":
                end.send(lane, number, CHUNK)
                process.stdout.readline()
            else:
                end.arrival()
        process.kill()
        process.wait(PATIENCE)
        killed = time.monotonic()
        end.loss()
        assert time.monotonic() - killed < 1
        assert end.lost.empty()
        while not end.arrivals.empty():  # each of them whole
            assert bytes(end.arrival().memory) == CHUNK


@pytest.mark.long
def test_a_process_whose_gil_is_held_is_not_lost():
    with End(1) as end, other_process(end, "hogs") as (process, lane):
        end.send(lane, 0, CHUNK)
        assert process.stdout.readline() == "holds the GIL\n"
        for number in range(10):
            end.send(lane, 1 + number, CHUNK)
        started = time.monotonic()
        for _ in range(10):
            assert process.stdout.readline() == "took one\n"
        assert time.monotonic() - started > HOG_SECONDS / 2
        assert end.lost.empty()


def test_a_process_with_lanes_ends_when_it_has_nothing_more_to_do():
    with End(1) as end, other_process(end, "exits") as (process, lane):
        end.arrival()
        while lane._connections:  # until it is gone, both sides have something to send
            if lane._queued < 4 << 20:
                end.send(lane, 1, CHUNK)
            while not end.arrivals.empty():
                end.arrival()
            time.sleep(0.001)
        assert process.wait(2) == 0
        end.loss()

"""Traces are read, also those of replicas that were killed while they wrote."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal.health.trace import TraceEvent, TraceLine, read_trace

START = b'{"time": 1.0, "replica": "r0", "event": "start"}\n'
STEP = b'{"time":2.5,"replica":"r0","event":"step","epoch":1,"samples":64,"peers":2,"own":32,"loss":0.5,"more":[]}\n'


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "r0.jsonl"


def test_lines(trace: Path) -> None:
    trace.write_bytes(START + b"\n" + STEP)
    start, step = read_trace(trace)
    assert (start.time, start.replica, start.event, start.seconds) == (1.0, "r0", TraceEvent.START, 0.0)
    assert step == TraceLine(
        time=2.5, replica="r0", event=TraceEvent.STEP, epoch=1, samples=64, peers=2, own=32, loss=0.5
    )


@pytest.mark.parametrize("length", range(len(STEP)))
def test_what_a_killed_replica_has_not_written_to_its_end_is_left_out(trace: Path, length: int) -> None:
    torn = STEP[:length]
    trace.write_bytes(START + torn)
    assert len(list(read_trace(trace))) == 1 + (length == len(STEP) - 1)  # which lacks the end of the line only
    trace.write_bytes(torn + START)  # it was started anew, or the files of two are one
    assert [line.event for line in read_trace(trace)] == [TraceEvent.START]


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (b"epoch 3\n", "malformed"),
        (START.replace(b"start", b"stat"), "Invalid enum value 'stat'"),
        (START.replace(b'"r0"', b"0"), "Expected `str`, got `int`"),
        (START.replace(b"1.0", b"1e999"), "out of range"),
        (START.replace(b"r0", b"\xff"), "utf-8"),
        (START[:-2] + b', "more": ' + b"[" * 100_000 + b"\n", "maximum recursion"),
    ],
)
def test_a_line_that_is_no_event_is_named(trace: Path, bad: bytes, says: str) -> None:
    trace.write_bytes(START + bad + START)
    with pytest.raises(ValueError, match=rf"{re.escape(str(trace))}, line 2 is no event of a trace: .*{says}"):
        list(read_trace(trace))

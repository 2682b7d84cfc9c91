"""A health record is small and bounded, and whatever breaks a bound is no record."""

from __future__ import annotations

import msgspec
import pytest

from shoal.health.record import (
    MARK_EVERY,
    MAX_BYTES,
    MAX_LOST,
    MAX_REASON,
    MAX_UNREACHED,
    Fault,
    FaultKind,
    Joining,
    Lost,
    OtherTerms,
    PutOut,
    decode_health,
    encode_health,
    printable,
)
from tests.health.records import WELL, health, mark

FULL = health(
    version="v" * 64,
    torch="t" * 64,
    device="d" * 64,
    marks=tuple(mark(2**40 + every) for every in MARK_EVERY),
    faults=dict.fromkeys(FaultKind, 2**40),
    fault=Fault(FaultKind.ROUND, "r" * MAX_REASON, 2e9),
    unreached=(b"12345678",) * MAX_UNREACHED,
    refused=OtherTerms(b"12345678", "d" * MAX_REASON),
    cpu_seconds=1e9,
    memory=2**40,
    lost=(Lost(b"12345678", 2**40, True),) * MAX_LOST,
    put_out=PutOut(b"12345678", 2**40, "r" * MAX_REASON),
    joining=Joining(2**40, 2**40, 1e9),
    waits=1e9,
)


@pytest.mark.parametrize("record", [WELL, FULL], ids=["usual", "full"])
def test_what_is_written_is_read(record: object) -> None:
    assert decode_health(bytes(encode_health(record))) == record


def test_a_record_is_small() -> None:
    assert len(bytes(encode_health(WELL))) < 500
    assert len(bytes(encode_health(FULL))) < MAX_BYTES


@pytest.mark.parametrize(
    "differing",
    [
        {"loss": float("nan")},
        {"loss": float("inf")},
        {"samples_per_second": float("nan")},
        {"samples_behind": -1.0},
        {"epoch": -1},
        {"epoch": 2**60},
        {"terms": b"short"},
        {"version": "v" * 65},
        {"version": "\x1b[2J"},
        {"device": "left\u202eright"},
        {"unreached": (b"12345678",) * (MAX_UNREACHED + 1)},
        {"lost": (Lost(b"12345678", 1, False),) * (MAX_LOST + 1)},
        {"put_out": PutOut(b"12345678", 1, "two\nlines")},
        {"marks": tuple(mark(epoch) for epoch in range(len(MARK_EVERY) + 1))},
        {"fault": Fault(FaultKind.ROUND, "r" * (MAX_REASON + 1), 1.0)},
        {"fault": Fault(FaultKind.ROUND, "two\nlines", 1.0)},
        {"faults": {"an invention": 1}},
        {"joining": Joining(-1, 1, 0.0)},
        {"joining": Joining(1, 2**60, 0.0)},
        {"joining": Joining(1, 1, float("inf"))},
        {"waits": -1.0},
        {"waits": float("nan")},
    ],
    ids=lambda differing: next(iter(differing)),
)
def test_what_breaks_a_bound_is_no_record(differing: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not a health record"):
        decode_health(msgspec.msgpack.encode(health(**differing)))


@pytest.mark.parametrize(
    "record", [b"", b"\xc1", b"\x91" * 2000, msgspec.msgpack.encode([1] * 31), b"x" * (MAX_BYTES + 1)]
)
def test_what_is_no_record_at_all_is_refused(record: bytes) -> None:
    with pytest.raises(ValueError, match="health record"):
        decode_health(record)


def test_a_record_with_more_behind_it_counts_up_to_the_bound() -> None:
    """A later version may say more; but not without end."""
    fields = msgspec.to_builtins(WELL, builtin_types=(bytes,))
    for fewer in (2, 5):  # an earlier one said less
        assert decode_health(msgspec.msgpack.encode(fields[:-fewer])) == WELL
    assert decode_health(msgspec.msgpack.encode([*fields, "more"])) == WELL
    with pytest.raises(ValueError, match=f"at most {MAX_BYTES} count"):
        decode_health(msgspec.msgpack.encode([*fields, bytes(MAX_BYTES)]))


def test_a_reason_is_cut_and_cleaned_for_a_terminal() -> None:
    assert printable("one\ntwo\x1b[2J\u202e", 160) == "one two [2J "
    assert len(printable("ü" * 500, MAX_REASON).encode()) == MAX_REASON
    decode_health(
        bytes(encode_health(health(fault=Fault(FaultKind.ALONE, printable("\ud800ü" * 500, MAX_REASON), 1.0))))
    )

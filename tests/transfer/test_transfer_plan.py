"""The manifest of a state: what it says, and what is refused."""

from __future__ import annotations

import random
import subprocess
import sys

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.p2p.identity import PeerID
from shoal.p2p.transport import MAX_BUFFER_BYTES
from shoal.swarm.protocol.plan import ChunkSpan
from shoal.swarm.protocol.tip import Tip
from shoal.transfer.manifest import (
    CHUNK_ELEMENTS,
    ITEM_BYTES,
    LARGE_BYTES,
    MAX_CHUNKS,
    MAX_CODECS,
    MAX_LAYOUT_BYTES,
    MAX_RUNS,
    BufferShape,
    Manifest,
    choose,
    chunk_elements,
)

DIGESTS = [bytes([number]) * 32 for number in range(10)]
ANN, BOB, CYD, DAN = (PeerID(bytes([number]) * 32) for number in range(1, 5))


def manifest(epoch: int = 3, samples: float = 100.0, digest: int = 0, **changes: object) -> Manifest:
    fields = {
        "tip": Tip(epoch, bytes(32), samples),
        "layout": b"",
        "codecs": ("none", "float16"),
        "runs": ((CHUNK_ELEMENTS, 0), (1, 1), (5, 0)),
        "buffers": (BufferShape("float32", CHUNK_ELEMENTS + 1), BufferShape("int64", 0), BufferShape("bool", 5)),
        "scalars_nbytes": 10,
        "digests": bytes([digest]) * 4 * 32,
    }
    return Manifest(**(fields | changes))  # type: ignore[arg-type]


# -- manifest


def test_chunks_are_the_scalars_and_then_each_buffer():
    assert manifest().chunks == [
        ChunkSpan(0, 0, 10),
        ChunkSpan(1, 0, CHUNK_ELEMENTS),
        ChunkSpan(1, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 1),
        ChunkSpan(3, 0, 5),
    ]
    assert manifest().nbytes == 10 + 4 * (CHUNK_ELEMENTS + 1) + 5


@pytest.mark.parametrize("dtype", ITEM_BYTES)
@pytest.mark.parametrize("nbytes", [0, LARGE_BYTES - 1, 2 * LARGE_BYTES, 3 * LARGE_BYTES, 1 << 40])
def test_a_chunk_fits_into_a_message_and_a_large_state_has_many(dtype: str, nbytes: int):
    size = chunk_elements(nbytes, ITEM_BYTES[dtype])
    # Of a chunk of several codecs, the part of each is filled up to 8 bytes.
    padding = MAX_CODECS * 8 if ITEM_BYTES[dtype] % 8 else 0
    assert CHUNK_ELEMENTS <= size <= (MAX_BUFFER_BYTES - padding) // ITEM_BYTES[dtype]
    assert nbytes < LARGE_BYTES or nbytes // (size * ITEM_BYTES[dtype]) >= 16


def test_codecs_are_those_of_runs_through_all_buffers():
    assert list(manifest().spans) == [
        (0, 0, CHUNK_ELEMENTS, "none"),
        (0, CHUNK_ELEMENTS, CHUNK_ELEMENTS + 1, "float16"),
        (2, 0, 5, "none"),
    ]


def test_a_manifest_survives_the_wire_and_its_id_covers_every_field():
    original = manifest()
    assert Manifest.decode(original.encode()) == original
    others = [
        manifest(epoch=4),
        manifest(samples=101.0),
        manifest(digest=1),
        manifest(layout=b"x"),
        manifest(codecs=("none", "uniform_8bit")),
        manifest(runs=((CHUNK_ELEMENTS, 1), (1, 1), (5, 0))),
        manifest(scalars_nbytes=11),
    ]
    assert len({other.id for other in [original, *others]}) == 8


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"digests": bytes(3 * 32)}, "a state of 4 chunks has 128 bytes of digests, not 96"),
        ({"buffers": (BufferShape("float32", 1 << 60),)}, "buffers"),
        ({"buffers": (BufferShape("float32", 1 << 33),)}, "of digests"),
        ({"buffers": (BufferShape("object", 5),)}, "dtype 'object'"),
        ({"buffers": (BufferShape("float32", -5),)}, "buffers"),
        ({"buffers": (BufferShape("uint8", 0),) * 1000}, "buffers"),
        ({"scalars_nbytes": 1 << 40}, "scalars_nbytes"),
        ({"scalars_nbytes": 1 << 25}, "of digests"),
        ({"tip": Tip(1 << 60, bytes(32), 0.0)}, "Expected `int`"),
        ({"tip": Tip(1, bytes(31), 0.0)}, "length >= 32"),
        ({"format": 1}, "format 3, not 1"),
        ({"codecs": ("none",)}, "not among the 1 of the manifest"),
        ({"codecs": ("none", "x" * 33)}, "length <= 32"),
        ({"codecs": ("none",) * 65}, "codecs"),
        ({"runs": ((CHUNK_ELEMENTS + 1, 0),)}, "do not cover the buffers"),
        ({"runs": ((CHUNK_ELEMENTS, 0), (6, 0))}, "do not cover the buffers"),
        ({"runs": ((CHUNK_ELEMENTS + 1, 0), (5, 0), (1, 0))}, "do not cover the buffers"),
        ({"runs": ((CHUNK_ELEMENTS + 1, 0), (0, 0), (5, 0))}, "Expected `int` >= 1"),
        ({"runs": ((CHUNK_ELEMENTS + 1, 64), (5, 0))}, "runs"),
        ({"runs": ((1, 0),) * (1 << 17)}, "runs"),
    ],
)
def test_a_manifest_that_is_absurd_or_contradicts_itself_is_refused(changes: dict[str, object], complaint: str):
    fields = msgspec.structs.asdict(manifest()) | changes
    data = msgspec.msgpack.encode(fields)
    with pytest.raises(ValueError, match="not a manifest") as failure:
        Manifest.decode(data)
    assert complaint in str(failure.value)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_manifest_or_a_value_error(data: bytes):
    for garbage in (data, manifest().encode()[:40] + data, b"\x91" * 100_000):
        with pytest.raises(ValueError, match="not a manifest"):
            Manifest.decode(garbage)


@given(
    st.lists(st.tuples(st.integers(1, 1 << 34), st.integers(0, 15)), max_size=8),
    st.lists(st.integers(0, 1 << 20), max_size=6),
    st.lists(st.sampled_from(["none", "float16", "zip", ""]), max_size=4),
)
def test_runs_cover_the_buffers_or_are_refused(
    runs: list[tuple[int, int]], numels: list[int], codecs: list[str]
) -> None:
    buffers = tuple(BufferShape("float32", numel) for numel in numels)
    chunks = sum(-(-numel // CHUNK_ELEMENTS) for numel in numels) + 1
    fields = {"runs": tuple(runs), "buffers": buffers, "codecs": tuple(codecs), "digests": bytes(32 * chunks)}
    data = msgspec.msgpack.encode(msgspec.structs.asdict(manifest()) | fields)
    try:
        made = Manifest.decode(data)
    except ValueError:
        return
    covered = [0] * len(numels)
    for buffer, start, stop, name in made.spans:
        assert start == covered[buffer] < stop
        assert name in codecs
        covered[buffer] = stop
    assert covered == numels


@given(st.lists(st.integers(0, 1 << 16), max_size=5), st.randoms(use_true_random=False))
def test_runs_that_cover_the_buffers_are_taken(numels: list[int], rng: random.Random) -> None:
    runs = []
    for numel in numels:
        while numel:
            runs.append((taken := rng.randint(1, numel), rng.randrange(2)))
            numel -= taken
    buffers = tuple(BufferShape("float32", numel) for numel in numels)
    chunks = sum(-(-numel // CHUNK_ELEMENTS) for numel in numels) + 1
    made = manifest(runs=tuple(runs[: 1 << 16]), buffers=buffers, digests=bytes(32 * chunks))
    assert sum(stop - start for _, start, stop, _ in made.spans) == sum(numels)


def test_the_largest_manifest_fits_into_a_message():
    numels = [1 << 26] * 256
    runs = ((1 << 18, 0),) * MAX_RUNS
    largest = Manifest(
        Tip((1 << 52) - 1, bytes(32), 1e300), bytes(MAX_LAYOUT_BYTES), ("x" * 32,) * 16, runs,
        tuple(BufferShape("complex128", numel) for numel in numels), 0, bytes(32 * MAX_CHUNKS),
    )  # fmt: skip
    assert len(largest.encode()) <= MAX_BUFFER_BYTES
    assert sum(stop - start for _, start, stop, _ in largest.spans) == sum(numels)


def test_the_majoritys_state_is_chosen_and_ties_go_to_more_samples_then_epochs():
    common, rich, late = manifest(3, 100.0), manifest(3, 900.0), manifest(9, 900.0)
    assert choose([common, common, late]) == common
    assert choose([common, rich]) == rich
    assert choose([late, rich]) == late
    one, other = manifest(digest=1), manifest(digest=2)
    assert choose([one, other]).id == choose([other, one]).id == max(one.id, other.id)


def test_neither_imports_torch():
    script = "import sys, shoal.transfer.manifest, shoal.swarm.protocol.download; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)

"""`TopK`: which values it sends, how near they come back, what it refuses; and all of it is the same everywhere."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.compression import TopK

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


@st.composite
def codecs(draw: st.DrawFn) -> TopK:
    chunk = draw(st.sampled_from([2, 100, 128, 4096]))
    return TopK(draw(st.integers(1, min(chunk, 80))), chunk, draw(st.integers(1, 4)))


def through(codec: TopK, values: torch.Tensor) -> torch.Tensor:
    payload = codec.encode(values)
    assert len(payload) == codec.encoded_nbytes(len(values), values.dtype)
    return codec.decode(bytes(payload), values.dtype, len(values)).float()


def chosen(codec: TopK, values: torch.Tensor) -> list[int]:
    """The indices that are to be sent, in plain Python."""
    indices: list[int] = []
    for start in range(0, len(values), codec.chunk):
        part = values[start : start + codec.chunk].abs().tolist()
        count = math.ceil(len(part) * codec.k / codec.chunk)
        best = sorted(range(len(part)), key=lambda index: (-part[index], index))[:count]
        indices += sorted(start + index for index in best)
    return indices


def test_sizes() -> None:
    codec = TopK()
    assert codec.encoded_nbytes(4096, torch.float32) == 120
    assert codec.encoded_nbytes(1 << 18, torch.float32) == 64 * 120
    assert codec.encoded_nbytes((1 << 18) + 64, torch.bfloat16) == 64 * 120 + 8 + 2 + 1  # one more value of 64
    assert codec.encoded_nbytes(1 << 18, torch.int64) == 8 << 18
    assert all(codec.encoded_nbytes(n, dtype) <= n * dtype.itemsize for n in range(300) for dtype in FLOATS)


@settings(max_examples=100)
@given(codecs(), st.integers(0, 9000), st.integers(0, 99), st.sampled_from(FLOATS), st.booleans())
def test_the_largest_are_sent_and_of_equal_ones_the_first(
    codec: TopK, numel: int, seed: int, dtype: torch.dtype, ties: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    values = (values.round() if ties else values).to(dtype)
    decoded = through(codec, values)
    if codec.encoded_nbytes(numel, dtype) == numel * dtype.itemsize:
        assert torch.equal(decoded, values.float())
        return
    sent = torch.zeros(numel, dtype=torch.bool)
    sent[chosen(codec, values.float())] = True
    assert (decoded[~sent] == 0).all()
    assert (decoded[sent] * values[sent].float() >= 0).all(), "another sign came back"
    assert ((decoded != 0) <= (values != 0)).all() or ties, "what is not there was sent"


@pytest.mark.parametrize(("bits", "relative"), [(1, 0.0125), (2, 0.0045), (3, 0.0012), (4, 0.0004)])
def test_values_come_back_near(bits: int, relative: float) -> None:
    values = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    decoded = through(TopK(bits=bits), values)
    sent = decoded != 0
    assert int(sent.sum()) == 1024
    assert (decoded - values)[sent].square().mean() < relative * values[sent].square().mean()
    for start in range(0, len(values), 4096):
        assert decoded[start : start + 4096].abs().unique().numel() <= 1 + 2 ** (bits - 1)


def test_two_magnitudes_come_back_exactly() -> None:
    values = torch.zeros(4 * 4096)
    values[5::256], values[7::256] = 3.0, -0.125
    assert torch.equal(through(TopK(k=32), values), values)
    values[7::256] = -3.0
    assert torch.equal(through(TopK(k=200), values), values), "zeros that are sent are something else"
    assert not through(TopK(), torch.zeros(10_000)).any()
    assert torch.equal(through(TopK(k=4096), torch.full((10_000,), -7.5)), torch.full((10_000,), -7.5))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_what_is_not_finite_spoils_its_chunk_only(bad: float) -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(1))
    values[5000] = bad
    finite = through(TopK(), values).isfinite()
    assert not finite[4096:8192].any()
    assert finite[:4096].all()
    assert finite[8192:].all()


@settings(max_examples=100)
@given(codecs(), st.integers(0, 9000), st.sampled_from(FLOATS), st.integers(0, 2**32), st.sampled_from([0, 255, None]))
def test_any_bytes_are_elements_or_a_value_error(
    codec: TopK, numel: int, dtype: torch.dtype, seed: int, byte: int | None
) -> None:
    nbytes = codec.encoded_nbytes(numel, dtype)
    data = random.Random(seed).randbytes(nbytes) if byte is None else bytes([byte]) * nbytes
    try:
        decoded = codec.decode(data, dtype, numel)
    except ValueError as error:
        assert "index" in str(error) or "indices" in str(error)  # noqa: PT017  # it may as well be none
    else:
        assert decoded.shape == (numel,)


@settings(max_examples=60)
@given(codecs(), st.integers(0, 5000), st.sampled_from(FLOATS), st.integers(0, 2**32))
def test_any_bits_are_encoded(codec: TopK, numel: int, dtype: torch.dtype, seed: int) -> None:
    bits = bytearray(random.Random(seed).randbytes(numel * dtype.itemsize))
    values = torch.frombuffer(bits, dtype=dtype) if numel else torch.empty(0, dtype=dtype)
    decoded = codec.decode(codec.encode(values), dtype, numel)
    assert not (decoded.isfinite() & ~values.isfinite()).any(), "what was not finite has become so"


def with_indices(indices: list[int]) -> bytes:
    """A payload of one chunk of 1000 elements, of which 2 are sent."""
    packed = sum(index << (10 * place) for place, index in enumerate(indices))
    return torch.tensor([1.0, 2.0]).numpy().tobytes() + packed.to_bytes(3, "little") + b"\0"


def test_indices_that_nobody_has_encoded_are_refused() -> None:
    codec = TopK(2, 1000, 2)
    assert codec.decode(with_indices([3, 999]), torch.float32, 1000).nonzero().view(-1).tolist() == [3, 999]
    for indices, why in (([3, 1000], "beyond"), ([4, 4], "ascend"), ([9, 2], "ascend")):
        with pytest.raises(ValueError, match=why):
            codec.decode(with_indices(indices), torch.float32, 1000)


def test_bytes_do_not_depend_on_threads_or_places() -> None:
    values = torch.randn(1 << 17, generator=torch.Generator().manual_seed(2)).mul(8).round()
    expected = TopK().encode(values).tobytes()
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3 - min(threads, 2))
        assert TopK().encode(torch.cat([torch.zeros(3), values])[3:]).tobytes() == expected
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"k": 0}, "k=0"), ({"k": 5000}, "k=5000.* to 4096"), ({"chunk": 1}, "chunk=1"), ({"chunk": 1 << 17}, "to 65536"),
     ({"bits": 5}, "bits=5"), ({"bits": True}, "bits=True"), ({"k": 1.5}, "k=1.5")],
)  # fmt: skip
def test_numbers_that_make_no_sense_are_refused(options: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        TopK(**options)

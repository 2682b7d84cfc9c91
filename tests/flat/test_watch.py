"""Tests of `Watch`."""

from __future__ import annotations

import pytest
import torch

from shoal.flat import MemoryWatch, Watch

DTYPES = [torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64, torch.complex128]
LARGE = 4 * 32 * 1021 * 8  # bytes: four tables


def values(count: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nbytes", [0, 16, 48, 64, 8000, LARGE, LARGE + 48])
@pytest.mark.parametrize("start", [0, 1])
def test_every_element_counts(dtype: torch.dtype, nbytes: int, start: int) -> None:
    count = nbytes // dtype.itemsize
    tensor = values(count + start, dtype)[start:]
    watch = Watch()
    assert watch.is_written(tensor)  # nothing is known of it yet
    watch.keep(tensor)
    assert not watch.is_written(tensor)
    if not start:
        assert not watch.is_written(tensor.clone())
    for index in {0, count // 2, count - 1} if count else ():
        byte = tensor.view(torch.uint8)[index * dtype.itemsize :][:1]
        byte ^= 1
        assert watch.is_written(tensor)
        byte ^= 1
        assert not watch.is_written(tensor)
    watch.forget()
    assert watch.is_written(tensor)


@pytest.mark.parametrize("columns", [64, 509, 1020, 4072])
def test_rows_that_change_places_are_seen(columns: int) -> None:
    matrix = values(600 * columns, torch.bfloat16).view(600, columns)
    watch = Watch()
    watch.keep(matrix.view(-1))
    for other in (1, 2, 509, 599):
        order = [other, *range(1, 600)]
        order[other] = 0
        assert watch.is_written(matrix[order].view(-1)), other
    assert watch.is_written(matrix.flip(0).view(-1))


def test_nan_is_itself() -> None:
    watch = Watch()
    watch.keep(torch.full((5,), torch.nan))
    assert not watch.is_written(torch.full((5,), torch.nan))


def test_a_sparse_watch_sees_large_writes() -> None:
    tensor = values(LARGE, torch.float32)
    watch = Watch(sparse=True)
    watch.keep(tensor)
    assert not watch.is_written(tensor)
    for first in range(0, LARGE - 512, 5001):
        before = tensor[first : first + 512].clone()
        tensor[first : first + 512] += 1
        assert watch.is_written(tensor), first
        tensor[first : first + 512] = before


def test_memory_counts_as_written_until_it_is_kept() -> None:
    flat = [values(100, torch.float32), values(64, torch.bfloat16)]
    watch = MemoryWatch()
    assert watch.is_written(flat)
    assert not watch.is_on
    watch.keep(flat)
    assert not watch.is_written(flat)
    flat[1][3] = 9
    assert watch.is_written(flat)
    watch.forget()
    assert not watch.is_on


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_signs_that_change_are_seen(dtype: torch.dtype) -> None:
    tensor = values(LARGE // dtype.itemsize, dtype)
    watch = Watch()
    watch.keep(tensor)
    for span in (slice(None), slice(None, 1021 * 31), slice(5, 100_000), slice(1, None, 2)):
        tensor[span].neg_()
        assert watch.is_written(tensor), span
        tensor[span].neg_()
    assert not watch.is_written(tensor)

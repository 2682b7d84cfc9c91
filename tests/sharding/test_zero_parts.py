"""The pure parts of sharding: who owns what, boxes of checkpoints, options and states as data."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import shoal
from shoal.flat import Span
from shoal.sharding.flat_views import flat, flat_like, is_dense, shaped_like
from shoal.sharding.option_numbers import numbers_of, take_numbers
from shoal.sharding.partition import (
    ALIGNMENT,
    PARCEL_BYTES,
    Bucket,
    Size,
    buckets_of,
    cut_evenly,
    deal_greedily,
    parcels_of,
)
from shoal.sharding.sharded_state import boxes_of
from shoal.sharding.tree import decode, encode

SIZES = st.lists(
    st.builds(Size, st.integers(0, 3_000_000), st.just(4), st.sampled_from(["a", "b"])), min_size=1, max_size=30
)


@settings(max_examples=300)
@given(SIZES, st.integers(1, 4))
def test_shares_are_even_complete_and_aligned(sizes: list[Size], ranks: int) -> None:
    loads = [0] * ranks
    buckets = [Bucket(params, cut_evenly(sizes, params, loads)) for params in buckets_of(sizes, range(len(sizes)))]
    owned: dict[int, list[Span]] = {}
    for bucket in buckets:
        assert len({sizes[number].place for number in bucket.params}) == 1
        for share in bucket.shares:
            for part in share:
                owned.setdefault(part.tensor, []).append(part.span)
                assert part.span.start * 4 % ALIGNMENT == 0
    for number, size in enumerate(sizes):
        spans = sorted(owned.get(number, []))
        assert [span.start for span in spans] == [0, *(span.stop for span in spans[:-1])][: len(spans)]
        assert sum(map(len, spans)) == size.numel
    assert max(loads) - min(loads) <= ALIGNMENT
    assert sum(loads) == sum(size.nbytes for size in sizes)


def test_one_huge_embedding_is_divided_evenly() -> None:
    sizes = [Size(1_000_000 * 64, 4, None), *(Size(4096, 4, None) for _ in range(8))]
    loads, greedy = [0] * 4, [0] * 4
    for params in buckets_of(sizes, range(9)):
        cut_evenly(sizes, params, loads)
    deal_greedily(sizes, range(9), greedy)
    assert max(loads) * 4 / sum(loads) < 1.0001
    assert max(greedy) * 4 / sum(greedy) > 3.9


@given(SIZES, st.integers(1, 4))
def test_parcels_carry_every_element_once(sizes: list[Size], ranks: int) -> None:
    loads = [0] * ranks
    for params in buckets_of(sizes, range(len(sizes))):
        shares = cut_evenly(sizes, params, loads)
        parcels = parcels_of(shares, 4)
        assert all(0 < parcel.numel * 4 <= PARCEL_BYTES for parcel in parcels)
        for rank, share in enumerate(shares):
            sent = [part for parcel in parcels if parcel.owner == rank for part in parcel.slices]
            elements = sum(len(part.span) for part in share)
            assert sum(len(part.span) for part in sent) == elements
            assert {part.tensor for part in sent} == {part.tensor for part in share}


def test_greedy_gives_the_largest_first_to_the_least_loaded() -> None:
    sizes = [Size(numel, 4, None) for numel in (9, 7, 5, 3, 9, 7, 5, 3)]
    loads = [0, 0]
    deal_greedily(sizes, range(8), loads)
    assert loads == [96, 96]


@given(st.lists(st.integers(1, 6), max_size=4), st.data())
def test_boxes_are_the_span(shape: list[int], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    span = Span(start, data.draw(st.integers(start, numel)))
    whole = torch.arange(numel).view(shape)
    boxes = boxes_of(span, shape)
    found = []
    for box in boxes:
        index = tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))
        assert torch.equal(whole[index].reshape(-1), torch.arange(box.span.start, box.span.stop))
        found += whole[index].reshape(-1).tolist()
    assert found == list(range(span.start, span.stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_options_travel_as_numbers() -> None:
    rate = torch.tensor(0.25)
    ours: list[dict[str, Any]] = [{"params": [], "lr": 1, "betas": (0.9, 0.99), "amsgrad": True, "foreach": None}]
    theirs: list[dict[str, Any]] = [{"params": [], "lr": 0.5, "betas": (0.8, 0.7), "amsgrad": True, "foreach": None}]
    take_numbers(ours, numbers_of(theirs))
    assert ours == theirs
    with_tensor = [{"params": [], "lr": rate}]
    take_numbers(with_tensor, torch.tensor([0.125]))
    assert rate == 0.125


def test_states_travel_as_json_and_tensors() -> None:
    state = {"a": [1, 2.5, None, True, "x", (3, torch.ones(2, 2))], 5: {"nested": torch.zeros(()), "inf": math.inf}}
    tensors: list[torch.Tensor] = []
    data = json.loads(json.dumps(encode(state, tensors)))
    coming = iter(tensors)
    assert str(decode(data, lambda dtype, shape: next(coming))) == str(state)
    with pytest.raises(TypeError, match="holds a object"):
        encode({"a": object()}, [])
    for wrong in ({"what": 1}, {"a": 1, "b": 2}, {"tensor": ["nothing", []]}):
        with pytest.raises(ValueError, match=r"encoded value|no dtype"):
            decode(wrong, lambda dtype, shape: torch.empty(shape))


def test_elements_are_counted_in_the_order_of_memory() -> None:
    last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for tensor in (last, torch.randn(4, 5).t(), torch.randn(3, 1, 2), torch.randn(())):
        assert is_dense(tensor)
        assert flat(tensor).data_ptr() == tensor.data_ptr()
        assert torch.equal(shaped_like(flat(tensor), tensor), tensor)
        other = tensor.contiguous()
        assert torch.equal(flat_like(other, tensor), flat(tensor))
    for tensor in (torch.randn(4, 6)[:, ::2], torch.randn(3, 1).expand(3, 4), torch.eye(3).to_sparse()):
        assert not is_dense(tensor)


class Quasi(torch.optim.LBFGS):
    """A user's own."""


@pytest.mark.parametrize("refused", [torch.optim.LBFGS, Quasi, partial(torch.optim.LBFGS, lr=0.1)])
def test_what_makes_one_vector_of_all_parameters_is_refused(refused: Any) -> None:
    with pytest.raises(TypeError, match=r"(LBFGS|Quasi) makes one vector of all parameters"):
        shoal.ZeroRedundancyOptimizer([torch.zeros(3)], refused)


@pytest.mark.parametrize(
    ("form", "name"), [(shoal.functional.QHM, r"shoal\.QHM"), (shoal.functional.AdamW, r"torch\.optim\.AdamW")]
)
def test_a_functional_form_is_refused_by_the_name_of_its_class(form: Any, name: str) -> None:
    with pytest.raises(TypeError, match=rf"is the functional form of {name}: pass that"):
        shoal.ZeroRedundancyOptimizer([torch.zeros(3)], form, lr=0.1)
    with pytest.raises(TypeError, match=rf"is the functional form of {name}: pass that"):
        shoal.DistributedOptimizer(form, [], lr=0.1)


def test_an_optimizer_with_a_closure_is_not_for_workers() -> None:
    with pytest.raises(TypeError, match="Quasi evaluates the loss again and again in a step"):
        shoal.DistributedOptimizer(Quasi, [])

"""Layouts: aligned, without overlaps, in a stable order, the same for all that hold the same tensors."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.flat import Layout
from shoal.flat.layout import ALIGNMENT

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip
shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
tensor_lists = st.lists(
    st.builds(lambda dtype, shape: torch.empty(shape, dtype=dtype, device="meta"), st.sampled_from(DTYPES), shapes),
    max_size=12,
)


@given(tensor_lists)
def test_spans_are_aligned_inside_their_buffer_and_apart(tensors: list[torch.Tensor]) -> None:
    layout = Layout.of(tensors)
    ends = [0] * len(layout.buffers)
    for tensor, entry in zip(tensors, layout.entries, strict=True):
        buffer = layout.buffers[entry.buffer]
        assert (buffer.dtype, buffer.device, entry.shape) == (tensor.dtype, tensor.device, tuple(tensor.shape))
        assert len(entry.span) == tensor.numel()
        assert entry.span.start * tensor.element_size() % ALIGNMENT == 0
        # In order, so after everything before it; and no further from it than the alignment asks.
        gap = (entry.span.start - ends[entry.buffer]) * tensor.element_size()
        assert 0 <= gap < ALIGNMENT
        ends[entry.buffer] = entry.span.stop
    for buffer, end in zip(layout.buffers, ends, strict=True):
        assert 0 <= buffer.nbytes - end * buffer.dtype.itemsize < ALIGNMENT
        assert buffer.nbytes % ALIGNMENT == 0
    assert len({(buffer.dtype, buffer.device) for buffer in layout.buffers}) == len(layout.buffers)
    assert layout.nbytes == sum(buffer.nbytes for buffer in layout.buffers)


@given(tensor_lists)
def test_wire_form_brings_the_same_layout(tensors: list[torch.Tensor]) -> None:
    layout = Layout.of(tensors)
    assert Layout.from_wire(layout.to_wire(), device="meta") == layout
    assert Layout.from_wire(layout.to_wire()) == layout.on("cpu")


def test_buffers_are_in_the_order_of_their_first_tensor() -> None:
    layout = Layout.of([torch.zeros(1, dtype=dtype) for dtype in (torch.int64, torch.float32, torch.int64)])
    assert [buffer.dtype for buffer in layout.buffers] == [torch.int64, torch.float32]
    assert [entry.buffer for entry in layout.entries] == [0, 1, 0]


def test_devices_get_buffers_of_their_own_and_are_not_in_the_schema() -> None:
    split = Layout.of([torch.zeros(3), torch.zeros(5, device="meta"), torch.zeros(7)])
    together = Layout.of([torch.zeros(3), torch.zeros(5), torch.zeros(7)])
    assert [buffer.device.type for buffer in split.buffers] == ["cpu", "meta"]
    assert split.schema_hash == together.schema_hash
    assert split != together
    assert split.on("cpu") == together


def test_strides_do_not_matter() -> None:
    assert Layout.of([torch.zeros(4, 6).t()]) == Layout.of([torch.zeros(6, 4)])


@pytest.mark.parametrize(
    "tensors",
    [
        [torch.zeros(3, 2), torch.zeros(4)],
        [torch.zeros(4), torch.zeros(2, 3)],
        [torch.zeros(2, 3), torch.zeros(4).double()],
        [torch.zeros(2, 3), torch.zeros(4, 1)],
        [torch.zeros(2, 3)],
        [torch.zeros(2, 3), torch.zeros(4), torch.zeros(0)],
    ],
)
def test_schema_hash_tells_shapes_dtypes_order_and_number_apart(tensors: list[torch.Tensor]) -> None:
    assert Layout.of(tensors).schema_hash != Layout.of([torch.zeros(2, 3), torch.zeros(4)]).schema_hash


def test_schema_hash_is_the_same_in_every_process_and_version() -> None:
    # Peers of different releases compare it: a change here means a new WIRE_FORMAT.
    expected = "38b48e684b78e713280fdf738e5187672985ab3642fae9b681e791d5b91cf2cd"
    tensors = [torch.zeros(2, 3), torch.zeros((), dtype=torch.int64), torch.zeros(0, 4).bfloat16()]
    assert Layout.of(tensors).schema_hash.hex() == expected


def test_sparse_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tensor 1 is torch\.sparse_coo"):
        Layout.of([torch.zeros(2), torch.zeros(2, 2).to_sparse()])


def test_dtype_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tensor 0 is of torch\.float8_e4m3fn"):
        Layout.of([torch.zeros(2).to(torch.float8_e4m3fn)])


def test_layout_over_its_bound_is_refused() -> None:
    huge = torch.empty(2**40, device="meta")  # 4 TiB, the bound itself
    assert Layout.of([huge]).nbytes == 2**42
    with pytest.raises(ValueError, match="tensor 1"):
        Layout.of([huge, torch.zeros(1, device="meta")])


@pytest.mark.parametrize(
    ("wire", "message"),
    [
        (None, r"\[format, tensors\]"),
        ({}, r"\[format, tensors\]"),
        ([1], r"\[format, tensors\]"),
        ([2, []], "format 1, got 2"),
        ([True, []], "format 1, got True"),
        ([1.0, []], "format 1, got 1.0"),
        ([1, "float32"], "list, got str"),
        ([1, [["float32", [1]]] * (2**17 + 1)], "at most 131072 tensors"),
        ([1, ["ab"]], "tensor 0 of the layout is not"),
        ([1, [["float32", [1]], ["float32"]]], "tensor 1 of the layout is not"),
        ([1, [["float31", [1]]]], "unknown dtype 'float31'"),
        ([1, [[["float32"], [1]]]], "unknown dtype"),
        ([1, [["float32", "12"]]], "shape of tensor 0"),
        ([1, [["float32", [1] * 65]]], "at most 64 sizes"),
        ([1, [["float32", [-1]]]], "size -1"),
        ([1, [["float32", [True]]]], "size True"),
        ([1, [["float32", [2.0]]]], r"size 2\.0"),
        ([1, [["float32", [None]]]], "size None"),
        ([1, [["float32", [2**63]]]], "size 9223372036854775808"),
        ([1, [["uint8", [2**42, 2**42]]]], "multiplies to more"),
        ([1, [["uint8", [0] + [2**42] * 2]]], "multiplies to more"),
        ([1, [["float64", [2**40]]]], "bound"),
        ([1, [["float64", [2**38]]] * 3], "with tensor 2"),
    ],
)
def test_bad_layout_from_the_network_is_refused(wire: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout.from_wire(wire)


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["float32", "int8"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=20,
)
nearly_layouts = st.tuples(st.just(1), st.lists(st.tuples(st.sampled_from(["float32", "int8"]) | plain, plain)))


@given(plain | nearly_layouts)
def test_anything_from_the_network_is_a_layout_or_a_value_error(wire: object) -> None:
    try:
        layout = Layout.from_wire(wire, device="meta")
    except ValueError:
        return
    for entry in layout.entries:
        assert len(entry.span) == math.prod(entry.shape)
        assert entry.span.stop <= layout.buffers[entry.buffer].numel
        torch.empty(entry.shape, device="meta")  # a shape that torch can hold

"""Flat buffers: tensors live in them, their bytes are reachable, their padding is zero."""

from __future__ import annotations

import gc

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.flat import FlatBuffer, Layout, Span

MIXED = [
    torch.arange(6.0).reshape(2, 3),
    torch.tensor(7, dtype=torch.int64),
    torch.arange(20.0).reshape(4, 5).t(),  # not contiguous
    torch.zeros(0, 3),
    torch.tensor([1.5, -2.5]).bfloat16(),
    torch.tensor([True, False, True]),
    torch.arange(12.0).reshape(1, 3, 2, 2).to(memory_format=torch.channels_last),
    torch.ones(8)[::3],
    torch.zeros(0, dtype=torch.float64),  # alone in its buffer
]


def filled(tensors: list[torch.Tensor]) -> FlatBuffer:
    buffer = FlatBuffer(Layout.of(tensors))
    buffer.copy_from(tensors)
    return buffer


def padding(buffer: FlatBuffer) -> list[torch.Tensor]:
    """Per buffer, the elements that belong to no tensor."""
    masks = [torch.ones(len(flat), dtype=torch.bool) for flat in buffer.flat]
    for entry in buffer.layout.entries:
        masks[entry.buffer][entry.span.slice] = False
    return [flat[mask] for flat, mask in zip(buffer.flat, masks, strict=True)]


def test_views_have_the_values_and_shapes_in_the_order_given() -> None:
    for view, tensor in zip(filled(MIXED).views(), MIXED, strict=True):
        assert view.dtype == tensor.dtype
        assert view.is_contiguous()
        assert torch.equal(view, tensor)


def test_views_share_the_flat_memory() -> None:
    buffer = filled([torch.ones(3), torch.ones(2, 2)])
    buffer.flat[0].mul_(5)
    assert [view.sum().item() for view in buffer.views()] == [15, 20]
    buffer.views()[1].zero_()
    assert buffer.flat[0].sum() == 15


def test_memory_is_aligned() -> None:
    buffer = filled(MIXED)
    assert all(view.data_ptr() % 64 == 0 for view in buffer.views())


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from([torch.float32, torch.uint8, torch.bfloat16]))))
def test_padding_is_zero_after_copies(tensors: list[tuple[int, torch.dtype]]) -> None:
    ones = [torch.ones(numel, dtype=dtype) for numel, dtype in tensors]
    torch.full((4096,), 9.0)  # used memory for the allocator to hand out again
    buffer = filled(ones)
    assert all(not rest.any() for rest in padding(buffer))
    assert all(view.eq(1).all() for view in buffer.views())


def test_copy_converts_dtypes_and_is_unseen_by_autograd() -> None:
    buffer = FlatBuffer(Layout.of([torch.zeros(2)]))
    buffer.copy_from([torch.tensor([1.5, 2.5], dtype=torch.float64, requires_grad=True)])
    assert buffer.views()[0].tolist() == [1.5, 2.5]
    assert not buffer.flat[0].requires_grad


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ([torch.ones(2)], "2 tensors, got 1"),
        ([torch.ones(2), torch.ones(1, 3)], r"tensor 1 has shape \(1, 3\), but the layout has \(3,\)"),
    ],
)
def test_copy_of_the_wrong_tensors_changes_nothing(tensors: list[torch.Tensor], message: str) -> None:
    buffer = FlatBuffer(Layout.of([torch.ones(2), torch.ones(3)]))
    with pytest.raises(ValueError, match=message):
        buffer.copy_from(tensors)
    assert not buffer.flat[0].any()


def test_adopted_tensors_live_in_flat_memory() -> None:
    tensors = [tensor.clone() for tensor in MIXED]
    buffer = FlatBuffer.adopt(tensors)
    for tensor, before, view in zip(tensors, MIXED, buffer.views(), strict=True):
        assert torch.equal(tensor, before)
        assert tensor.data_ptr() == view.data_ptr()
    assert all(not rest.any() for rest in padding(buffer))


def test_adopted_module_trains_in_flat_memory() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1, bias=False))
    batch = torch.randn(5, 3)
    expected = model(batch)
    parameters = list(model.parameters())
    parameters[0].grad = torch.ones(4, 3)
    buffer = FlatBuffer.adopt(parameters)
    assert list(model.parameters()) == parameters
    assert parameters[0].grad is not None
    assert torch.equal(model(batch), expected)  # the same kernels, and before as after at multiples of 64 bytes
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = buffer.flat[0].clone()
    model(batch).square().sum().backward()
    optimizer.step()
    assert not torch.equal(buffer.flat[0], before)
    with torch.no_grad():
        buffer.flat[0].zero_()
    assert not model(batch).any()


def test_adopting_from_flat_memory_is_allowed() -> None:
    views = filled([torch.ones(16), torch.ones(16), torch.ones(0)]).views()  # without padding between them
    assert FlatBuffer.adopt(views).flat[0].sum() == 32


shared = torch.ones(4)


@pytest.mark.parametrize(
    "tensors",
    [
        [shared, torch.ones(2), shared],
        [shared, torch.ones(2), shared.detach()],
        [shared[1:], torch.ones(2), shared[:2]],
        [shared[2:3], torch.ones(2), shared],
        [shared[::2], torch.ones(2), shared.view(2, 2).t()],
    ],
    ids=["same object", "same memory", "overlap", "inside", "strided"],
)
def test_tied_tensors_are_refused_and_left_alone(tensors: list[torch.Tensor]) -> None:
    pointers = [tensor.data_ptr() for tensor in tensors]
    with pytest.raises(ValueError, match="tensors 0 and 2 share memory"):
        FlatBuffer.adopt(tensors)
    assert [tensor.data_ptr() for tensor in tensors] == pointers


def test_bytes_are_the_memory_of_the_span() -> None:
    buffer = filled([torch.tensor([1, 2, 3, 4], dtype=torch.int16), torch.tensor([1.0]).bfloat16()])
    data = buffer.bytes(0, Span(1, 3))
    assert (data.format, data.nbytes, data.readonly) == ("B", 4, False)
    assert data.tobytes() == b"\x02\x00\x03\x00"
    data[2] = 9
    assert buffer.views()[0].tolist() == [1, 2, 9, 4]
    buffer.flat[0][1] = 258
    assert data.tobytes() == b"\x02\x01\x09\x00"
    assert buffer.bytes(1, Span(0, 1)).tobytes() == b"\x80\x3f"
    assert buffer.bytes(1, Span(1, 1)).nbytes == 0


def test_bytes_keep_the_memory_alive() -> None:
    buffer = filled([torch.full((1 << 16,), 3, dtype=torch.uint8)])
    data = buffer.bytes(0, Span(0, 1 << 16))[1:]
    del buffer
    gc.collect()
    others = [torch.zeros(1 << 16, dtype=torch.uint8) for _ in range(8)]  # would get the memory, were it free
    assert data == b"\x03" * ((1 << 16) - 1)
    del others


@pytest.mark.parametrize(
    ("index", "span", "message"),
    [(2, Span(0, 1), "2 buffers, got buffer_index=2"), (-1, Span(0, 1), "got buffer_index=-1"),
     (0, Span(0, 17), "leaves buffer 0, which has 16 elements"), (1, Span(0, 1), "on meta; only CPU memory")],
)  # fmt: skip
def test_bytes_that_are_not_there_are_refused(index: int, span: Span, message: str) -> None:
    buffer = FlatBuffer(Layout.of([torch.zeros(2), torch.zeros(2, device="meta")]))
    with pytest.raises(ValueError, match=message):
        buffer.bytes(index, span)


def test_no_tensors_make_an_empty_buffer() -> None:
    buffer = FlatBuffer.adopt([])
    assert (buffer.flat, buffer.views()) == ([], [])

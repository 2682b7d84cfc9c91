"""Views that users meet have storages of their own, so whoever compares storages takes them for separate tensors."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_model, save_file, save_model
from torch import Tensor, nn, optim

from shoal.flat import ContiguousParams, FlatBuffer, Layout, own_storage
from tests.flat.test_contiguous_missing_gradients import four_layers, some_layers
from tests.flat.twins import small_model

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex128, torch.complex64,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def saved_size(tensor: Tensor) -> int:
    file = io.BytesIO()
    torch.save(tensor, file)
    return file.tell()


def trained(model: nn.Module, **options: Any) -> tuple[ContiguousParams, optim.Optimizer]:
    parameters = ContiguousParams(model)
    optimizer = optim.AdamW(parameters.contiguous(), **options)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 5)).sum().backward()
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_of_a_layout(dtype: torch.dtype) -> None:
    flat = torch.zeros(96, dtype=dtype)
    part = own_storage(flat[32:64])
    part.fill_(1)
    assert flat.bool().tolist() == [False] * 32 + [True] * 32 + [False] * 32
    assert (part.dtype, part.shape, part.requires_grad) == (dtype, (32,), False)
    assert part.data_ptr() == flat[32:].data_ptr()
    assert part.untyped_storage().nbytes() == 32 * dtype.itemsize
    assert part.untyped_storage().data_ptr() == part.data_ptr()
    del flat
    assert part.bool().all(), "it keeps the memory"


def test_no_elements_parts_that_require_gradients_and_the_meta_device() -> None:
    assert own_storage(torch.zeros(8)[3:3]).untyped_storage().nbytes() == 0
    assert not own_storage(nn.Parameter(torch.zeros(8))[2:4]).requires_grad
    assert own_storage(torch.zeros(8, device="meta")[2:4]).shape == (2,)


def test_views_of_a_flat_buffer() -> None:
    tensors = [torch.randn(3), torch.zeros(0, 2), torch.randn(4, 5), torch.tensor(2.0)]
    views = FlatBuffer(Layout.of(tensors)).views()
    assert [view.untyped_storage().nbytes() for view in views] == [12, 0, 80, 4]
    moved = [tensor.clone() for tensor in tensors]
    FlatBuffer.adopt(moved)
    assert [tensor.untyped_storage().nbytes() for tensor in moved] == [12, 0, 80, 4]
    assert all(map(torch.equal, moved, tensors))


def test_safetensors_save_the_model(tmp_path: Path) -> None:
    model, other = small_model(), small_model()
    parameters, optimizer = trained(model)
    save_model(model, str(tmp_path / "model"))
    load_model(other, str(tmp_path / "model"))
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    load_model(model, str(tmp_path / "model"))
    parameters.assert_buffer_is_valid()
    optimizer.zero_grad()
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    assert not any(map(torch.equal, before, model.parameters()))
    save_file({name: value.grad for name, value in model.named_parameters()}, str(tmp_path / "gradients"))


def test_safetensors_save_the_state_of_split_runs(tmp_path: Path) -> None:
    model = four_layers()
    parameters = ContiguousParams(model)
    optimizer = optim.AdamW(parameters.contiguous())
    for used in ((0, 1, 2, 3), (0, 3)):
        optimizer.zero_grad()
        some_layers(*used)(model, torch.ones(2, 5)).sum().backward()
        optimizer.step()
    assert len(parameters.contiguous()) == 3
    state = optimizer.state_dict()["state"]
    save_file({str(run): values["exp_avg"] for run, values in state.items()}, str(tmp_path / "state"))
    save_file(dict(zip("abc", parameters.contiguous(), strict=True)), str(tmp_path / "runs"))


def test_one_tensor_is_saved_with_its_own_size() -> None:
    model: Any = small_model()
    trained(model)
    plain = saved_size(nn.Parameter(torch.randn(7, 5)))
    assert saved_size(model[0].weight) == plain
    assert saved_size(model[0].weight.grad) == saved_size(torch.randn(7, 5))
    assert saved_size(model.state_dict()["0.weight"]) == saved_size(torch.randn(7, 5))


def test_copies_are_independent() -> None:
    model: Any = small_model()
    parameters, _ = trained(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.zero_()
    assert model[0].weight.any()
    with torch.no_grad():
        model[2].bias.fill_(5.0)
    assert (parameters.contiguous()[0] == 5).sum() == 3, "writes in place arrive"


def test_strides_are_kept() -> None:
    model: Any = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    ContiguousParams(model)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)
    assert model.weight.untyped_storage().nbytes() == model.weight.nbytes


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_cuda(tmp_path: Path) -> None:
    model = small_model().cuda()
    parameters = ContiguousParams(model)
    model(torch.ones(2, 5, device="cuda")).sum().backward()
    optim.AdamW(parameters.contiguous()).step()
    save_model(model, str(tmp_path / "model"))
    parameters.assert_buffer_is_valid()

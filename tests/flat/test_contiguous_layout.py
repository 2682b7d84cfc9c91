"""Which parameters can live in flat memory, and what stays as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from shoal.flat import ContiguousParams, FlatParameter


def parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape).to(dtype))


def test_one_buffer_per_dtype() -> None:
    mixed = [parameter(3), parameter(2, 2, dtype=torch.bfloat16), parameter(5), parameter(1, dtype=torch.float64)]
    values = [item.detach().clone() for item in mixed]
    parameters = ContiguousParams(mixed)
    runs = parameters.contiguous()
    assert [run.dtype for run in runs] == [torch.float32, torch.bfloat16, torch.float64]
    assert [len(run.members) for run in runs] == [2, 1, 1]
    assert all(map(torch.equal, mixed, values))
    assert all(ours is theirs for ours, theirs in zip(parameters.original(), mixed, strict=True))
    optimizer = optim.SGD(runs, lr=1.0)
    torch.stack([item.float().sum() for item in mixed]).sum().backward()
    optimizer.step()
    for item, value in zip(mixed, values, strict=True):
        assert torch.equal(item, value - 1)  # the step rounds once: 1.0 times 1.0 is exact


def test_flat_parameters_are_parameters_of_the_same_memory() -> None:
    weight = parameter(4, 4)
    (run,) = ContiguousParams([weight]).contiguous()
    assert isinstance(run, FlatParameter)
    assert isinstance(run, nn.Parameter)
    assert run.is_leaf
    assert run.requires_grad
    assert run.dim() == 1
    with torch.no_grad():
        run.fill_(2.0)
    assert (weight == 2).all()


def test_channels_last_is_kept_and_other_strides_become_contiguous() -> None:
    convolution: Any = nn.Conv2d(3, 8, 3)
    convolution.weight.data = convolution.weight.data.contiguous(memory_format=torch.channels_last)
    transposed = nn.Parameter(torch.randn(4, 6).t())
    strided = nn.Parameter(torch.randn(8, 8)[:, ::2])
    expanded = nn.Parameter(torch.randn(1, 3).expand(5, 3))
    all_of_them = [*convolution.parameters(), transposed, strided, expanded]
    values = [item.detach().clone() for item in all_of_them]
    strides = [torch.empty_like(item).stride() for item in all_of_them]
    parameters = ContiguousParams(all_of_them)
    assert [item.stride() for item in all_of_them] == strides
    assert convolution.weight.is_contiguous(memory_format=torch.channels_last)
    assert all(map(torch.equal, all_of_them, values))
    (convolution(torch.randn(1, 3, 5, 5)).sum() + sum(item.sum() for item in all_of_them)).backward()
    assert convolution.weight.grad.stride() == convolution.weight.stride()
    optim.SGD(parameters.contiguous(), lr=0.5, foreach=False).step()
    for item, value in zip(all_of_them, values, strict=True):
        assert torch.equal(item, value - 0.5 * item.grad)  # rounds once too: a half of a float is exact
    parameters.assert_buffer_is_valid()


def test_parameters_without_elements_and_without_dimensions() -> None:
    empty, scalar, last = parameter(0, 3), nn.Parameter(torch.tensor(2.0)), parameter(3)
    parameters = ContiguousParams([empty, scalar, last])
    optimizer = optim.Adam(parameters.contiguous(), lr=0.1)
    for _ in range(3):
        (empty.sum() + scalar * 2 + last.sum()).backward()
        parameters.assert_buffer_is_valid()
        optimizer.step()
        optimizer.zero_grad()
    assert scalar.item() == pytest.approx(1.7)
    assert empty.shape == (0, 3)


def test_only_parameters_without_elements() -> None:
    empty = parameter(0)
    parameters = ContiguousParams([empty])
    empty.sum().backward()
    optim.Adam(parameters.contiguous()).step()
    parameters.assert_buffer_is_valid()


@pytest.mark.parametrize(
    "optimizer_class",
    [
        optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Adagrad, optim.Adadelta,
        optim.RMSprop, optim.Rprop, optim.ASGD,
    ],
)  # fmt: skip
def test_integers_and_complex_numbers(optimizer_class: Any) -> None:
    torch.manual_seed(0)
    count = nn.Parameter(torch.arange(3), requires_grad=False)
    waves = [nn.Parameter(torch.randn(shape, dtype=torch.complex64)) for shape in ((3,), (), (2, 5))]
    twins = [nn.Parameter(wave.detach().clone()) for wave in waves]
    parameters = ContiguousParams([count, *waves])
    ours, theirs = optimizer_class(parameters.contiguous(), lr=0.1), optimizer_class(twins, lr=0.1)
    for items, optimizer in ((waves, ours), (twins, theirs)):
        for _ in range(3):
            whole = torch.cat([item.flatten() for item in items])
            (whole.abs().square() + 0.3 * whole.real + 0.7 * whole.imag).sum().backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(parameters.contiguous() if items is waves else items, 1.0)
            optimizer.step()
            optimizer.zero_grad()
    for wave, twin in zip(waves, twins, strict=True):
        torch.testing.assert_close(wave, twin, rtol=1e-5, atol=1e-6)  # kernels that round otherwise, three steps
    assert count.tolist() == [0, 1, 2]


def test_padding_stays_zero() -> None:
    torch.manual_seed(0)
    items = [parameter(3), parameter(17), parameter(1)]
    parameters = ContiguousParams(items)
    (run,) = parameters.contiguous()
    optimizer = optim.AdamW([run], weight_decay=0.1, lr=0.1)
    for _ in range(5):
        torch.stack([(item * item).sum() for item in items]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    used = torch.zeros(run.numel(), dtype=torch.bool)
    for member in run.members:
        used[member.span.slice] = True
    assert run.numel() == 64
    assert int(used.sum()) == 21
    assert not run[~used].any()


def test_tied_parameters_count_once() -> None:
    embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    parameters = ContiguousParams([*embedding.parameters(), *head.parameters()])
    assert len(parameters.original()) == 1
    head(embedding(torch.tensor([1]))).sum().backward()
    optim.SGD(parameters.contiguous(), lr=0.1).step()
    assert head.weight is embedding.weight
    parameters.assert_buffer_is_valid()


def test_names_and_modules_are_accepted() -> None:
    for given in (nn.Linear(2, 2), nn.Linear(2, 2).named_parameters(), iter(nn.Linear(2, 2).parameters())):
        assert len(ContiguousParams(given).original()) == 2
    groups = ContiguousParams([{"params": nn.Linear(2, 2).named_parameters(), "lr": 1.0}, {"params": parameter(2)}])
    assert [len(group["params"]) for group in groups.original()] == [2, 1]


def test_a_newer_contiguous_params_takes_over() -> None:
    model: Any = nn.Linear(3, 3)
    old = ContiguousParams(model)
    new = ContiguousParams(model)
    model(torch.ones(1, 3)).sum().backward()
    optim.SGD(new.contiguous(), lr=0.1).step()
    new.assert_buffer_is_valid()
    assert not old.buffer_is_valid()
    assert sum(len(parameter._post_accumulate_grad_hooks or ()) for parameter in model.parameters()) == 1
    with pytest.raises(ValueError, match="left the flat memory"):
        optim.SGD(old.contiguous(), lr=0.1).step()


shared = torch.zeros(10)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ([], ValueError, "no parameters"),
        (iter([]), ValueError, "no parameters"),
        (torch.zeros(3), TypeError, "iterable of parameters"),
        ([parameter(2), "weight"], TypeError, "parameter 1 is a str"),
        ([nn.Parameter(shared[:6]), nn.Parameter(shared[4:])], ValueError, "tensors 0 and 1 share memory"),
        ([parameter(2, 2).t() * 2], ValueError, "not a leaf"),
        (nn.Linear(2, 2, device="meta"), ValueError, "parameter 0 .'weight', shape .2, 2.. is on the meta device"),
        ([parameter(2, 2).detach().to_sparse()], ValueError, "tensor 0 is torch.sparse_coo"),
        ([{"params": [shared]}, {"params": [shared]}], ValueError, "parameter 1 of group 1 is in group 0 too"),
    ],
)
def test_what_cannot_be_moved_is_refused(given: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        ContiguousParams(given)


def test_nothing_is_changed_when_it_is_refused() -> None:
    first, second = nn.Parameter(shared[:6]), nn.Parameter(shared[4:])
    other = parameter(3)
    addresses = [item.data_ptr() for item in (other, first, second)]
    with pytest.raises(ValueError, match="share memory"):
        ContiguousParams([other, first, second])
    assert [item.data_ptr() for item in (other, first, second)] == addresses
    other.sum().backward()
    assert other._post_accumulate_grad_hooks is None

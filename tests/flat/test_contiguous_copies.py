"""What else happens to models: copies, pickles, compilation, the end of their life."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn, optim

from shoal.flat import ContiguousParams, FlatParameter
from tests.flat.twins import Twins, small_model


def trained() -> tuple[Any, ContiguousParams, optim.Optimizer]:
    model = small_model()
    parameters = ContiguousParams(model)
    optimizer = optim.Adam(parameters.contiguous())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return model, parameters, optimizer


def through_torch_save(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, through_torch_save, lambda model: pickle.loads(pickle.dumps(model))]
)
def test_copies_of_a_model_are_ordinary_models(duplicate) -> None:
    model, parameters, _ = trained()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    other = duplicate(model)
    assert all(type(parameter) is nn.Parameter for parameter in other.parameters())
    assert not any(parameter._post_accumulate_grad_hooks for parameter in other.parameters())
    other.zero_grad()
    optimizer = optim.SGD(other.parameters(), lr=0.1)
    other(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    assert not torch.equal(other[0].weight, model[0].weight)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    parameters.assert_buffer_is_valid()
    assert other[2].weight.data_ptr() != model[2].weight.data_ptr()
    with_flat_memory = ContiguousParams(other)
    with_flat_memory.assert_buffer_is_valid()


def test_state_dict_round_trip() -> None:
    model, parameters, _ = trained()
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = small_model()
    other.load_state_dict(torch.load(file))
    assert all(map(torch.equal, other.parameters(), model.parameters()))
    model.load_state_dict(other.state_dict())
    parameters.assert_buffer_is_valid()


def test_a_contiguous_params_is_not_copied() -> None:
    _, parameters, _ = trained()
    for duplicate in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="make a new one for the copy"):
            duplicate(parameters)


def test_copies_of_an_optimizer_have_ordinary_parameters() -> None:
    _, _, optimizer = trained()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        (parameter,) = other.param_groups[0]["params"]
        (run,) = optimizer.param_groups[0]["params"]
        assert type(parameter) is nn.Parameter
        assert torch.equal(parameter, run)
        assert parameter.data_ptr() != run.data_ptr()
        assert torch.equal(other.state[parameter]["exp_avg"], optimizer.state[run]["exp_avg"])


def test_models_are_freed_at_once() -> None:
    gc.collect()
    gc.disable()
    try:
        model, parameters, optimizer = trained()
        seen = [weakref.ref(parameter) for parameter in model.parameters()]
        (run,) = parameters.contiguous()
        memory = weakref.ref(run.grad.untyped_storage())
        del model, parameters, optimizer, run
        assert [ref() for ref in seen] == [None] * 4
        assert memory() is None
    finally:
        gc.enable()


def test_a_model_without_its_contiguous_params_is_an_ordinary_one() -> None:
    model, parameters, optimizer = trained()
    del parameters, optimizer
    gc.collect()
    model.zero_grad()
    model(torch.ones(2, 5)).sum().backward()
    assert all(parameter.grad.untyped_storage().nbytes() <= 35 * 4 for parameter in model.parameters())


def test_the_optimizer_alone_keeps_training() -> None:
    twins = Twins(optim.Adam, foreach=False)
    parameters = twins.parameters
    del twins.parameters
    twins.train(3)
    twins.parameters = parameters
    twins.assert_equal()
    runs = twins.flat_optimizer.param_groups[0]["params"]
    assert all(type(run) is FlatParameter for run in runs)


def test_hooks_of_the_user_see_the_gradient() -> None:
    model = small_model()
    seen = []
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    parameters = ContiguousParams(model)
    model[0].weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    model(torch.ones(2, 5)).sum().backward()
    assert len(seen) == 2
    assert all(torch.equal(gradient, model[0].weight.grad) for gradient in seen)
    parameters.assert_buffer_is_valid()


def test_compiled_models() -> None:
    """Equal to the bit as in `twins`: "aot_eager" calls the kernels that eager mode calls."""
    twins = Twins(optim.Adam, foreach=False)
    compiled = [torch.compile(model, backend="aot_eager") for model, _ in twins.both]
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(4, 5)
        for model in compiled:
            model(x).square().sum().backward()
        twins.step()
        twins.assert_equal()
        twins.zero_grad()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{"foreach": False}, {"fused": True}])
def test_a_compiled_step(options: dict[str, bool]) -> None:
    twins = Twins(optim.Adam, **options)
    step = torch.compile(twins.flat_optimizer.step, backend="eager")
    for seed in range(4):
        twins.backward(seed)
        if seed == 2:
            for model, _ in twins.both:
                model[0].bias.grad = None
        twins.plain_optimizer.step()
        step()
        twins.parameters.assert_buffer_is_valid()
        twins.zero_grad()
    assert twins.distance() < 1e-6


def test_optimizers_without_flat_parameters_are_not_touched() -> None:
    trained()
    model = small_model()
    optimizer = optim.Adam(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    assert optimizer.param_groups[0]["fused"] is None

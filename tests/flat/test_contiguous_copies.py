"""What else happens to models: copies, pickles, compilation, the end of their life."""

from __future__ import annotations

import copy
import gc
import io
import math
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


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_torch_save, pickle.dumps])
@pytest.mark.parametrize("what", ["optimizer", "pair", "groups", "run", "state", "scheduler", "module"])
def test_what_has_flat_parameters_is_not_copied(duplicate: Any, what: str) -> None:
    """The copy would train no model, and say nothing."""
    model, parameters, optimizer = trained()
    whole: Any = nn.Module()
    whole.model, whole.optimizer = model, optimizer
    originals: dict[str, Any] = {
        "optimizer": optimizer,
        "pair": (model, optimizer),
        "groups": optimizer.param_groups,
        "run": parameters.contiguous()[0],
        "state": optimizer.state,
        "scheduler": optim.lr_scheduler.StepLR(optimizer, 1),
        "module": whole,
    }
    with pytest.raises(TypeError, match=r"of ContiguousParams.contiguous\(\) is neither .* original_state_dict"):
        duplicate(originals[what])
    model(torch.ones(2, 5)).sum().backward()  # the original goes on
    before = model[0].weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, model[0].weight)


def test_a_shallow_copy_of_an_optimizer_trains_the_same_model() -> None:
    model, _, optimizer = trained()
    before = model[0].weight.detach().clone()
    model(torch.ones(2, 5)).sum().backward()
    copy.copy(optimizer).step()
    assert not torch.equal(before, model[0].weight)
    copy.copy(model)(torch.ones(2, 5)).sum().backward()
    assert model[0].weight.grad is not None
    with pytest.raises(TypeError, match="is neither copied nor pickled"):
        copy.copy(optimizer.param_groups[0]["params"][0])


def test_what_the_refusal_says_to_do_goes_on_where_the_original_was() -> None:
    model, parameters, optimizer = trained()
    other, state = copy.deepcopy((model, parameters.original_state_dict(optimizer)))
    others = ContiguousParams(other)
    second = optim.Adam(others.contiguous())
    others.load_original_state_dict(second, state)
    for net, stepped in ((model, optimizer), (other, second)):
        stepped.zero_grad()
        net(torch.ones(2, 5)).sum().backward()
        stepped.step()
    for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_moving_averages_of_a_model_are_kept() -> None:
    model, _, optimizer = trained()
    average = optim.swa_utils.AveragedModel(model, multi_avg_fn=optim.swa_utils.get_ema_multi_avg_fn(0.5))
    average.update_parameters(model)
    first = model[0].weight.detach().clone()
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    average.update_parameters(model)
    torch.testing.assert_close(average.module[0].weight, 0.5 * first + 0.5 * model[0].weight.detach())


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


@pytest.mark.long
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


@pytest.mark.long
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
        norms = [nn.utils.clip_grad_norm_(o.param_groups[0]["params"], 1.0, -math.inf) for _, o in twins.both]
        torch.testing.assert_close(*norms)
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

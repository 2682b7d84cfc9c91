"""What takes parameters or gradients out of flat memory is found, and said with the way out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_

from shoal.flat import ContiguousParams
from tests.flat.twins import Twins, small_model


def with_gradients(model: Any) -> None:
    model(torch.ones(2, 5)).sum().backward()


def replace_data(model: nn.Module) -> None:
    model[2].weight.data = torch.zeros(3, 7)


def replace_grad(model: nn.Module) -> None:
    model[2].weight.grad = torch.zeros(3, 7)


def replace_grad_data(model: nn.Module) -> None:
    model[2].weight.grad.data = torch.zeros(3, 7)


def replace_parameter(model: nn.Module) -> None:
    model[2].weight = nn.Parameter(torch.zeros(3, 7))


def delete_and_make(model: nn.Module) -> None:
    del model[2].weight
    model[2].weight = nn.Parameter(torch.zeros(3, 7))


def move_to_meta(model: nn.Module) -> None:
    model.to("meta")


def convert_and_return(model: nn.Module) -> None:
    model.double().float()


REPAIRABLE = [replace_data, replace_grad_data, convert_and_return]
BEYOND_REPAIR = [replace_parameter, delete_and_make, move_to_meta, nn.Module.half, nn.Module.double]


def test_it_is_valid_with_and_without_gradients() -> None:
    model = small_model()
    parameters = ContiguousParams(model)
    parameters.assert_buffer_is_valid()
    with_gradients(model)
    parameters.assert_buffer_is_valid()
    model[0].weight.grad = None
    parameters.assert_buffer_is_valid()
    model.float().to("cpu")
    parameters.assert_buffer_is_valid()


def test_a_gradient_may_be_anywhere() -> None:
    model: Any = small_model()
    parameters = ContiguousParams(model)
    with_gradients(model)
    replace_grad(model)
    parameters.assert_buffer_is_valid()
    parameters.make_params_contiguous()
    (run,) = parameters.contiguous()
    assert model[2].weight.grad is run.members[2].view
    assert not model[2].weight.grad.any()


def share_gradient(model: Any) -> None:
    model[2].weight.grad.share_memory_()


@pytest.mark.parametrize("share", [nn.Module.share_memory, share_gradient])
def test_what_is_shared_with_other_processes_is_not_flat(share: Callable[[nn.Module], object]) -> None:
    model = small_model()
    parameters = ContiguousParams(model)
    with_gradients(model)
    assert parameters.contiguous()[0].grad is not None, "and asking brings all gradients to flat memory"
    share(model)
    assert not parameters.buffer_is_valid()
    for ask in (parameters.assert_buffer_is_valid, parameters.make_params_contiguous):
        with pytest.raises(ValueError, match=r"share_memory\(\).* new ContiguousParams and a new optimizer"):
            ask()
    ContiguousParams(model).assert_buffer_is_valid()


@pytest.mark.parametrize("damage", REPAIRABLE)
def test_what_can_be_moved_back(damage: Callable[[nn.Module], object]) -> None:
    model: Any = small_model()
    parameters = ContiguousParams(model)
    optimizer = optim.SGD(parameters.contiguous(), lr=1.0)
    with_gradients(model)
    damage(model)
    assert not parameters.buffer_is_valid()
    label = r"parameter 0 \('0.weight', shape" if damage is convert_and_return else r"parameter 2 \('2.weight', shape"
    with pytest.raises(ValueError, match=rf"of {label}.* has left the flat memory.* make_params_contiguous\(\)"):
        parameters.assert_buffer_is_valid()
    values = [parameter.detach().clone() for parameter in model.parameters()]
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    parameters.make_params_contiguous()
    parameters.assert_buffer_is_valid()
    assert all(map(torch.equal, model.parameters(), values))
    optimizer.step()
    for parameter, value, gradient in zip(model.parameters(), values, gradients, strict=True):
        assert torch.equal(parameter, value - gradient)  # the step rounds once: 1.0 times a float is exact


@pytest.mark.parametrize("damage", BEYOND_REPAIR)
@pytest.mark.parametrize("gradients", [True, False])
def test_what_needs_new_flat_memory(damage: Callable[[nn.Module], object], gradients: bool) -> None:
    model = small_model()
    parameters = ContiguousParams(model)
    if gradients:
        with_gradients(model)
    damage(model)
    assert not parameters.buffer_is_valid()
    for check in (parameters.assert_buffer_is_valid, parameters.make_params_contiguous):
        with pytest.raises(ValueError, match=r"parameter \d \('\d.weight', .*new ContiguousParams and a new optimizer"):
            check()


def test_without_names_the_number_tells() -> None:
    model = small_model()
    parameters = ContiguousParams(model.parameters())
    replace_data(model)
    with pytest.raises(ValueError, match=r"memory of parameter 2 \(shape \(3, 7\)\)"):
        parameters.assert_buffer_is_valid()


def test_a_parameter_that_is_put_back_is_valid_again() -> None:
    model = small_model()
    parameters = ContiguousParams(model)
    own = model[0].weight
    model[0].weight = nn.Parameter(torch.zeros(7, 5))
    assert not parameters.buffer_is_valid()
    model[0].weight = own
    parameters.assert_buffer_is_valid()


@pytest.mark.parametrize("give", [list, lambda model: [{"params": model.parameters()}], nn.Module.parameters])
def test_modules_are_found_however_the_parameters_are_given(give: Callable[[Any], Any]) -> None:
    model = small_model()
    parameters = ContiguousParams(model.parameters() if give is list else give(model))
    move_to_meta(model)
    with pytest.raises(ValueError, match=r"parameter 0 .* was replaced: a module has another .* 'weight' now"):
        parameters.assert_buffer_is_valid()


def test_a_parameter_that_a_module_drops_or_renames_is_valid() -> None:
    model: Any = small_model()
    parameters = ContiguousParams(model)
    model[0].bias = None
    weight = model[2].weight
    del model[2].weight
    model[2].register_parameter("weight_orig", weight)  # as torch.nn.utils.prune does
    parameters.assert_buffer_is_valid()


def test_an_older_one_of_the_same_model_names_the_newer() -> None:
    model = small_model()
    older = ContiguousParams(model)
    newer = ContiguousParams(model)
    for check in (older.assert_buffer_is_valid, older.make_params_contiguous):
        with pytest.raises(ValueError, match=r"parameter 0 \('0.weight', .* was given to another ContiguousParams"):
            check()
    newer.assert_buffer_is_valid()


def test_other_modules_may_do_as_they_like() -> None:
    model, other = small_model(), small_model()
    parameters = ContiguousParams(model)
    replace_parameter(other)
    parameters.assert_buffer_is_valid()


@pytest.mark.parametrize("assign", [True, False])
def test_load_state_dict_keeps_flat_memory(assign: bool) -> None:
    twins = Twins(optim.Adam, foreach=False)
    twins.train(2)
    torch.manual_seed(5)
    checkpoint = {name: torch.randn_like(value) for name, value in twins.plain.state_dict().items()}
    weight = twins.flat[0].weight
    for model, _ in twins.both:
        model.load_state_dict({name: value.clone() for name, value in checkpoint.items()}, assign=assign)
        if model is twins.plain and assign:  # the optimizer has the old parameters
            state = twins.plain_optimizer.state_dict()
            twins.plain_optimizer = optim.Adam(model.parameters(), foreach=False)
            twins.plain_optimizer.load_state_dict(state)
    assert twins.flat[0].weight is weight
    assert torch.equal(weight, checkpoint["0.weight"])
    twins.assert_equal()
    twins.train(2, first=2)
    twins.assert_equal()


def test_assigning_another_dtype_replaces_and_is_found() -> None:
    model = small_model()
    parameters = ContiguousParams(model)
    model.load_state_dict({name: value.double() for name, value in model.state_dict().items()}, assign=True)
    assert model[0].weight.dtype is torch.float64
    with pytest.raises(ValueError, match=r"'0.weight', .* was replaced"):
        parameters.assert_buffer_is_valid()


@pytest.mark.parametrize("steps", [0, 1])
def test_a_step_of_a_model_that_was_moved_is_refused(steps: int) -> None:
    model = small_model()
    optimizer = optim.SGD(ContiguousParams(model).contiguous(), lr=0.1)
    for _ in range(steps):
        with_gradients(model)
        optimizer.step()
    model.double()
    model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    with pytest.raises(ValueError, match="parameter 0 has left the flat memory"):
        optimizer.step()


def test_clipping_gradients_of_a_model_that_was_moved_is_refused() -> None:
    model = small_model()
    parameters = ContiguousParams(model)
    model.double()
    model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    with pytest.raises(ValueError, match=r"a gradient of torch.float64 .* but its flat memory is of torch.float32"):
        clip_grad_norm_(parameters.contiguous(), 1.0)


def test_clipping_gradients_that_were_moved_with_the_model_is_refused() -> None:
    model = small_model()
    parameters = ContiguousParams(model)
    with_gradients(model)
    model.double()
    with pytest.raises(ValueError, match="parameter 0 has left the flat memory"):
        clip_grad_norm_(parameters.contiguous(), 1.0)


@pytest.mark.filterwarnings("ignore:.*is not known to be element-wise")
def test_an_optimizer_that_is_not_in_place_is_refused() -> None:
    class NotInPlace(optim.SGD):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                parameter.data = parameter.data - parameter.grad

    model = small_model()
    optimizer = NotInPlace(ContiguousParams(model).contiguous(), lr=0.1)
    with_gradients(model)
    optimizer.step()
    with pytest.raises(ValueError, match="in place"):
        optimizer.step()

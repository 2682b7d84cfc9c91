"""nn.RNN, LSTM and GRU keep their parameters in a list too, which is what their forward pass uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn, optim

from shoal.flat import ContiguousParams

KINDS = [nn.RNN, nn.LSTM, nn.GRU]


def outputs(model: nn.RNNBase) -> Any:
    return model(torch.ones(2, 3, 4))[0]


@pytest.mark.parametrize("kind", KINDS)
def test_assigned_values_are_trained(kind: type[nn.RNNBase]) -> None:
    torch.manual_seed(0)
    plain, flat = (kind(4, 5, num_layers=2, bidirectional=True) for _ in range(2))  # type: ignore[call-arg]
    parameters = ContiguousParams(flat)
    optimizers = [optim.SGD(plain.parameters(), lr=0.1), optim.SGD(parameters.contiguous(), lr=0.1)]
    flat.load_state_dict({name: value.clone() for name, value in plain.state_dict().items()}, assign=True)
    parameters.assert_buffer_is_valid()
    for _ in range(3):
        for model, optimizer in zip((plain, flat), optimizers, strict=True):
            optimizer.zero_grad()
            outputs(model).square().sum().backward()
            assert all(parameter.grad is not None for parameter in model.parameters())
            optimizer.step()
    for ours, theirs in zip(flat.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)
    parameters.assert_buffer_is_valid()


@pytest.mark.parametrize("kind", KINDS)
def test_another_parameter_in_the_list_is_found(kind: type[nn.RNNBase]) -> None:
    model = kind(4, 5)  # type: ignore[call-arg]
    parameters = ContiguousParams(model)
    parameters.assert_buffer_is_valid()
    model.float()  # makes a new list of the same parameters
    parameters.assert_buffer_is_valid()
    model._flat_weights[1] = nn.Parameter(torch.zeros(model.weight_hh_l0.shape))
    with pytest.raises(ValueError, match=r"parameter 1 \('weight_hh_l0', .*was replaced: .*'weight_hh_l0' now"):
        parameters.assert_buffer_is_valid()


def test_parameters_that_a_recurrent_module_names_are_known_to_torch() -> None:
    """`replacement` reads these two private attributes of torch."""
    model = nn.LSTM(4, 5)
    assert [getattr(model, name) for name in model._flat_weights_names] == model._flat_weights

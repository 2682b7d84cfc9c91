"""`ContiguousParams` and functional optimizers made within torch's modes train afterwards."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shoal

MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference": torch.inference_mode,
    "device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "fake": lambda: FakeTensorMode(allow_non_fake_inputs=False),
}


def backward(model: nn.Module) -> None:
    model(torch.arange(12.0).view(4, 3) / 12).square().mean().backward()


@pytest.mark.parametrize("mode", MODES)
def test_flat_memory_is_made_of_plain_tensors(mode: str) -> None:
    results = []
    for here in (torch.no_grad, MODES[mode]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        with here():
            parameters = shoal.ContiguousParams(model)
            flat = parameters.contiguous()
        optimizer = torch.optim.Adam(flat, lr=0.05)
        for number in range(4):
            backward(model)
            if number == 1:  # its run is split
                model[0].bias.grad = None
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            model[0].weight.data = model[0].weight.detach().clone()  # has left the flat memory
            with here():
                parameters.load_original_state_dict(optimizer, parameters.original_state_dict(optimizer))
                parameters.make_params_contiguous()
                parameters.contiguous()
                parameters.assert_buffer_is_valid()
        results.append([parameter.detach() for parameter in model.parameters()])
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.parametrize("mode", ["inference", "device", "autocast"])
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.NAdam, torch.optim.Rprop])
def test_functional_state_made_in_a_mode_is_trained_outside(kind: Any, mode: str) -> None:
    results = []
    for here in (torch.no_grad, MODES[mode]):
        parameters = [torch.ones(3), torch.ones(2)]
        optimizer = shoal.functional_optim_map[kind](lr=0.05)
        with here():
            state = optimizer.init(parameters)
            optimizer.step(parameters, [torch.ones(3, device="cpu"), torch.ones(2, device="cpu")], state)
        optimizer.step(parameters, [torch.ones(3), torch.ones(2)], state)
        results.append(parameters)
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_a_model_made_in_inference_mode_is_refused_by_name() -> None:
    with torch.inference_mode():
        model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"parameter 0 \('weight', shape \(2, 3\)\) is untrainable"):
        shoal.ContiguousParams(model)

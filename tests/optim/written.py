"""The ways in which users write into a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

Write = Callable[[nn.Module, Sequence[Tensor]], None]
"""Sets the parameters of a model to values."""


def each(write: Callable[[Tensor, Tensor], Any]) -> Write:
    def write_all(model: nn.Module, values: Sequence[Tensor]) -> None:
        for parameter, value in zip(model.parameters(), values, strict=True):
            write(parameter, value)

    return write_all


@torch.no_grad()
def copy(parameter: Tensor, value: Tensor) -> None:
    parameter.copy_(value)


@torch.inference_mode()
def copy_in_inference(parameter: Tensor, value: Tensor) -> None:
    parameter.copy_(value)


def set_data(parameter: Tensor, value: Tensor) -> None:
    parameter.data = value.clone()


@torch.no_grad()
def foreach(model: nn.Module, values: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(model.parameters()), list(values))


def vector(model: nn.Module, values: Sequence[Tensor]) -> None:
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(values), model.parameters())


def named(model: nn.Module, values: Sequence[Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for (name, _), value in zip(model.named_parameters(), values, strict=True)}


def load(model: nn.Module, values: Sequence[Tensor]) -> None:
    model.load_state_dict(named(model, values))


def load_assigned(model: nn.Module, values: Sequence[Tensor]) -> None:
    model.load_state_dict(named(model, values), assign=True)


@torch.inference_mode()
def load_in_inference(model: nn.Module, values: Sequence[Tensor]) -> None:
    model.load_state_dict(named(model, values))


def load_modules(model: nn.Module, values: Sequence[Tensor]) -> None:
    state = named(model, values)
    for name, module in list(model.named_children()) or [("", model)]:
        prefix = f"{name}." if name else ""
        part = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        module.load_state_dict(part, strict=False)


def load_distributed(model: nn.Module, values: Sequence[Tensor]) -> None:
    set_model_state_dict(model, named(model, values), options=StateDictOptions(strict=False))


WRITES: dict[str, Write] = {
    "p.copy_": each(copy),
    "p.copy_, inference_mode": each(copy_in_inference),
    "p.data.copy_": each(lambda parameter, value: parameter.data.copy_(value)),
    "p.data[:] =": each(lambda parameter, value: parameter.data.__setitem__(slice(None), value)),
    "p.data.lerp_": each(lambda parameter, value: parameter.data.lerp_(value, 1.0)),
    "p.data =": each(set_data),
    "numpy": each(lambda parameter, value: parameter.detach().numpy().__setitem__(slice(None), value.numpy())),
    "dlpack": each(lambda parameter, value: torch.from_dlpack(parameter.detach()).copy_(value)),
    "_foreach": foreach,
    "vector_to_parameters": vector,
}

LOADS: dict[str, Write] = {
    "load_state_dict": load,
    "load_state_dict(assign=True)": load_assigned,
    "load_state_dict, inference_mode": load_in_inference,
    "load_state_dict of submodules": load_modules,
    "set_model_state_dict": load_distributed,
}

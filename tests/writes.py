"""The ways in which user code writes values into a parameter. Most of them leave its version counter as it is."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Write = Callable[[Tensor, Tensor], None]


def _copy(parameter: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(values)


def _inference_copy(parameter: Tensor, values: Tensor) -> None:
    with torch.inference_mode():
        parameter.copy_(values)


def _assign(parameter: Tensor, values: Tensor) -> None:
    parameter.data = values.clone()


def _numpy(parameter: Tensor, values: Tensor) -> None:
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[parameter.element_size()]  # NumPy has no bfloat16
    parameter.detach().view(integers).numpy()[...] = values.view(integers).numpy()


def _foreach(parameter: Tensor, values: Tensor) -> None:
    torch._foreach_copy_([parameter.data], [values])


WRITES: dict[str, Write] = {
    "copy_": _copy,
    "copy_ in inference_mode": _inference_copy,
    "data.copy_": lambda parameter, values: parameter.data.copy_(values),  # type: ignore[dict-item,return-value]
    "data.lerp_": lambda parameter, values: parameter.data.lerp_(values, 1.0),  # type: ignore[dict-item,return-value]
    "data[:] =": lambda parameter, values: parameter.data.__setitem__(slice(None), values),
    "data =": _assign,
    "numpy": _numpy,
    "dlpack": lambda parameter, values: torch.from_dlpack(parameter.detach()).copy_(values),  # type: ignore[dict-item,return-value]
    "_foreach_copy_": _foreach,
    "vector_to_parameters": lambda parameter, values: torch.nn.utils.vector_to_parameters(
        values.reshape(-1).clone(), [parameter]
    ),
}

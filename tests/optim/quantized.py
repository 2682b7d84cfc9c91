"""An optimizer that keeps its momentum in 8 bits, in tensors of a class of its own, as torchao's do."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Eight(Tensor):
    """Whole numbers from -127 to 127, and the number by which all of them are multiplied."""

    codes: Tensor
    scale: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Eight:
        made: Any = Tensor._make_wrapper_subclass(cls, codes.shape, device=codes.device, dtype=dtype)  # type: ignore[attr-defined]
        made.codes, made.scale = codes, scale
        return made  # type: ignore[no-any-return]

    def __init__(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        assert codes.dtype is torch.int8
        self.per_scale = codes.numel() // scale.numel()

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], [self.dtype]

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, Tensor], rest: Any, shape: Any, stride: Any) -> Eight:
        return cls(parts["codes"], parts["scale"], *rest)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten._to_copy.default:
            own, given = args[0], kwargs or {}
            device = given.get("device")
            return cls(own.codes.to(device), own.scale.to(device), given.get("dtype") or own.dtype)
        if func is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].dtype)
        raise NotImplementedError(f"{cls.__name__} has no {func}")

    @classmethod
    def of(cls, values: Tensor) -> Eight:
        scale = values.abs().max().clamp_min(1e-12) / 127
        return cls((values / scale).round().to(torch.int8), scale.view(1), values.dtype)

    def values(self) -> Tensor:
        return self.codes.to(self.dtype) * self.scale


class Quantizing(torch.optim.Optimizer):
    """SGD with such a momentum."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                momentum = state["momentum"].values() if state else torch.zeros_like(parameter)
                momentum.mul_(0.9).add_(parameter.grad)
                state["momentum"] = Eight.of(momentum)
                parameter.add_(momentum, alpha=-group["lr"])

"""The flat gradient as its readers see it: a tensor whose norms are those of the parameters' gradients.

Padding and missing gradients are zeros in the flat gradient. They make no difference to a norm of positive order. But
the smallest element (order -inf) and every other norm of negative order would be 0. And `clip_grad_norm_` takes the
norm of the norms of all gradients, which for order 0 is the number of gradients that are not zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from shoal.flat._torch import foreach_norm, grad_of, make_subclass, read_data, without_subclasses


class _CopiedPlain(Tensor):
    """A tensor whose copies and pickles are plain tensors."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class FlatGradient(_CopiedPlain):
    """The gradient of a run. `detach()` and `.data` give the same; all other operations give plain tensors.

    Clipping reads `device` and calls `mul_` in each step, so they are here: `__torch_function__` takes 2 µs.

    Attributes:
        plain: the same memory as a plain tensor.
        parameters: the parameters of the run.
        views: the view of this tensor for each parameter.
        device: as of every tensor.
    """

    __slots__ = ("device",)
    device: torch.device
    plain: Tensor
    parameters: Sequence[Tensor]
    views: Sequence[Tensor]

    def __new__(cls, gradient: Tensor, parameters: Sequence[Tensor], views: Sequence[Tensor]) -> FlatGradient:
        """Makes it in the memory of a plain tensor."""
        self: FlatGradient = make_subclass(cls, gradient, False)
        self.plain, self.device = gradient, gradient.device
        self.parameters, self.views = parameters, views
        return self

    def mul_(self, other: Any) -> Tensor:
        """As of every tensor."""
        self.plain.mul_(other)
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _CLIPPING_NORM and not kwargs and len(args) == 2 and type(args[1]) is float and args[1] > 0:
            return func(args[0].plain, args[1])
        special = _SPECIAL.get(func)
        with without_subclasses():
            if special is not None:
                return special(func, args, kwargs or {})
            return func(*args, **kwargs) if kwargs else func(*args)


class NonzeroCount(_CopiedPlain):
    """The norm of order 0 of a flat gradient: the number of elements that are not zero.

    Attributes:
        each: that number for each parameter. Stacked with other norms, as in `clip_grad_norm_`, these take the place of
            the one number.
    """

    each: Tensor

    @staticmethod
    def of(each: Tensor) -> NonzeroCount:
        self: NonzeroCount = make_subclass(NonzeroCount, each.sum(), False)
        self.each = each
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with without_subclasses():
            if func in _CONVERSIONS:
                return NonzeroCount.of(func(args[0].each, *args[1:], **kwargs))
            if func is torch.stack:
                norms = args[0] if args else kwargs["tensors"]
                parts = [norm.each if type(norm) is NonzeroCount else norm.reshape(1) for norm in norms]
                return torch.cat(parts, out=kwargs.get("out"))
            return func(*args, **kwargs)


def _norm(func: Callable[..., Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """One of torch's functions of one tensor and the order of its norm."""
    # torch takes some arguments by numpy's names, too.
    names = _ARGUMENTS[func]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    gradient = next(given[name] for name in ("input", "x", "self", "a", "x1") if name in given)
    order = _number(given.get(names[1]))
    if type(gradient) is not FlatGradient or order > 0 or given.get("dim", given.get("axis")) is not None:
        return func(*args, **kwargs)
    pairs = zip(gradient.parameters, gradient.views, strict=True)
    gradients = [view for parameter, view in pairs if grad_of(parameter) is not None]
    if not gradients:
        return func(*args, **kwargs)
    norms = torch.stack([torch.linalg.vector_norm(each, order, dtype=given.get("dtype")) for each in gradients])
    keepdim = bool(given.get("keepdim", given.get("keepdims")))
    if order == 0 and given.get("out") is None and not keepdim:
        return NonzeroCount.of(norms)
    # The norm of order 1 of counts is their sum.
    total: Tensor = torch.linalg.vector_norm(norms, order or 1, keepdim=keepdim, out=given.get("out"))
    return total


def _number(order: Any) -> float:
    """The order of a norm; 2 if it is None or a name, which mean that norm for a vector."""
    try:
        return 2 if order is None else float(order)
    except ValueError:
        return 2


def _foreach_norm(func: Callable[..., list[Tensor]], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    given = {**dict(zip(("self", "ord"), args, strict=False)), **kwargs}
    if _number(given.get("ord")) > 0:
        return func(*args, **kwargs)
    tensors, order = given.pop("self"), given.pop("ord")
    return [_norm(torch.linalg.vector_norm, (each, order), given) for each in tensors]


def _alias(func: Callable[..., Tensor], args: Sequence[Any], kwargs: dict[str, Any]) -> FlatGradient:
    (gradient,) = args
    return FlatGradient(func(gradient), gradient.parameters, gradient.views)


_CLIPPING_NORM: Final = torch.linalg.vector_norm
"""The function that clipping calls."""

_ARGUMENTS: Final[dict[Any, Sequence[str]]] = {
    torch.linalg.vector_norm: ("input", "ord", "dim", "keepdim"),
    torch.linalg.norm: ("input", "ord", "dim", "keepdim"),
    torch.norm: ("input", "p", "dim", "keepdim", "out", "dtype"),
    Tensor.norm: ("input", "p", "dim", "keepdim", "dtype"),
}
"""The functions of one tensor and an order, and the names of their arguments."""

_ALIASES: Final = (Tensor.detach, torch.detach, read_data)
"""The functions whose result is the same tensor, without its graph."""

_SPECIAL: Final[dict[Any, Callable[..., Any]]] = {
    **dict.fromkeys(_ARGUMENTS, _norm),
    **dict.fromkeys(_ALIASES, _alias),
    foreach_norm: _foreach_norm,
}

_CONVERSIONS: Final = frozenset(
    {Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.double, Tensor.float, Tensor.half, Tensor.bfloat16, Tensor.type}
    | set(_ALIASES)
)
"""The functions of a norm whose result is the same norm, in another form."""

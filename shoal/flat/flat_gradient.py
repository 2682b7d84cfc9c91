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

from shoal.flat._torch import foreach_norm, grad_of, make_subclass, without_subclasses


class FlatGradient(Tensor):
    """The gradient of a run. All operations give plain tensors.

    Attributes:
        parameters: the parameters of the run.
        views: the view of this tensor for each parameter.
    """

    parameters: Sequence[Tensor]
    views: Sequence[Tensor]

    def __new__(cls, gradient: Tensor, parameters: Sequence[Tensor], views: Sequence[Tensor]) -> FlatGradient:
        """Makes it in the memory of a plain tensor."""
        self: FlatGradient = make_subclass(cls, gradient, False)
        self.parameters, self.views = parameters, views
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        norm = _NORMS.get(func)
        with without_subclasses():
            if norm is not None:
                return norm(func, *args, **(kwargs or {}))
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


class Count(Tensor):
    """The norm of order 0 of a flat gradient: the number of elements that are not zero.

    Attributes:
        each: that number for each parameter. Stacked with other norms, as in `clip_grad_norm_`, these take the place of
            the one number.
    """

    each: Tensor

    @staticmethod
    def of(each: Tensor) -> Count:
        self: Count = make_subclass(Count, each.sum(), False)
        self.each = each
        return self

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with without_subclasses():
            if func is Tensor.to:
                return Count.of(args[0].each.to(*args[1:], **(kwargs or {})))
            if func is torch.stack:
                return torch.cat([norm.each if type(norm) is Count else norm.reshape(1) for norm in args[0]])
            return func(*args, **(kwargs or {}))


def _norm(func: Callable[..., Tensor], gradient: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """One of torch's functions of one tensor and the order of its norm."""
    order = args[0] if args else kwargs.get("ord", kwargs.get("p"))
    if type(gradient) is not FlatGradient or not isinstance(order, int | float) or not order <= 0 or len(args) > 1:
        return func(gradient, *args, **kwargs)
    pairs = zip(gradient.parameters, gradient.views, strict=True)
    gradients = [view for parameter, view in pairs if grad_of(parameter) is not None]
    if not gradients or kwargs.get("dim") is not None:
        return func(gradient, *args, **kwargs)
    norms = torch.stack([func(each.reshape(-1), *args, **kwargs) for each in gradients])
    return torch.linalg.vector_norm(norms, order) if order else Count.of(norms)


def _foreach_norm(func: Callable[..., list[Tensor]], tensors: Sequence[Tensor], ord: float = 2, **kwargs: Any) -> Any:
    if ord > 0:
        return func(tensors, ord, **kwargs)
    return [_norm(torch.linalg.vector_norm, each, ord, **kwargs) for each in tensors]


_NORMS: Final[dict[Any, Callable[..., Any]]] = {
    **dict.fromkeys((torch.linalg.vector_norm, torch.linalg.norm, torch.norm, Tensor.norm), _norm),
    foreach_norm: _foreach_norm,
}

"""Tells when all gradients of a bucket have come, usually with one hook per bucket instead of one per parameter.

When a backward pass has many small parameters, hooks for all of them take most of its time, because hooks are Python.
But gradients come in nearly the same order in every pass. So it is enough to hook into the parameter whose gradient
came last: when its gradient comes again, the hook checks whether the others have come. Parameters whose gradients are
still missing get hooks of their own for the rest of the pass. Parameters that had no gradient keep their hooks, which
cost nothing until a gradient comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from shoal.sharding._torch import version_of


class Arrivals:
    """The gradients of one bucket, in each backward pass. At first it hooks into each parameter.

    Args:
        params: the parameters of the bucket, by number.
        tell: called with a parameter's number when a hooked gradient has come: always for the last one, not for all. It
            must not keep its receiver alive.
    """

    def __init__(self, params: Mapping[int, Tensor], tell: Callable[[int], None]) -> None:
        self._params = params
        self._tell = tell
        self._handles: dict[int, RemovableHandle] = {}
        self._narrow = False
        self._trains = False
        self._missing: set[int] | None = None  # missing in this pass; None before its first hook is called
        self._came: set[int] = set()
        self._last: int | None = None
        # sums that are in ``param.grad`` before the pass, and their versions
        self._before: dict[int, tuple[Tensor, int]] = {}

    def hook_all(self) -> None:
        """Hooks into all parameters that require a gradient now."""
        self._hook(self._training())
        self._narrow = False

    def hook_last(self) -> None:
        """Removes the hooks of the parameters whose gradients came before the last one in the last pass."""
        if self._last is None:
            self.hook_all()
            return
        seen = self._came - {self._last}
        for number in seen & self._handles.keys():
            self._handles.pop(number).remove()
        self._hook(number for number in self._training() if number not in seen)
        self._narrow = True

    def unhook(self) -> None:
        """Removes all hooks."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def remember_sums(self) -> None:
        """Notes the gradients in ``param.grad``, to which the next pass adds."""
        self._before = {n: (p.grad, version_of(p.grad)) for n, p in self._params.items() if p.grad is not None}

    def begin(self) -> None:
        """A pass begins, or its first gradients have come."""
        self._missing = None
        self._trains = any(param.requires_grad for param in self._params.values())

    def came(self, number: int) -> None:
        """The hook of this parameter was called."""
        if self._missing is None:
            training = self._training()
            self._missing = {n for n in training if not self._narrow or not self._is_here(n)}
            self._came = set(training) - self._missing
            self._hook(self._missing)
        self._missing.discard(number)
        self._came.add(number)
        self._last = number

    @property
    def complete(self) -> bool:
        """Whether every parameter that requires a gradient has its gradient of this pass."""
        return not self._trains if self._missing is None else not self._missing

    def forget_sums(self) -> None:
        """The sums in ``param.grad`` have been taken."""
        self._before = {}

    def _training(self) -> list[int]:
        return [number for number, param in self._params.items() if param.requires_grad]

    def _is_here(self, number: int) -> bool:
        gradient = self._params[number].grad
        if gradient is None or number not in self._before:
            return gradient is not None
        before, version = self._before[number]
        return gradient is not before or version_of(gradient) != version

    def _hook(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            if number not in self._handles:
                hook = partial(_called, self._tell, number)
                self._handles[number] = self._params[number].register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]


def _called(tell: Callable[[int], None], number: int, _: Tensor) -> None:
    tell(number)

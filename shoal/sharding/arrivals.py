"""When the gradients of a bucket are all there, as a rule told by one hook and not by one for every parameter.

Python for every parameter is what a backward pass of many small ones spends its time on. Gradients come in nearly the
same order in each pass, so it is enough to hook into the parameter whose gradient came last: when it comes again, a
look at the others says whether they are there. Those that are not get hooks of their own for the rest of the pass.
Parameters that had no gradient keep their hooks, which cost nothing until they get one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from shoal.sharding._torch import version_of


class Arrivals:
    """The gradients of one bucket, in each backward pass. Begins with a hook into each parameter.

    Args:
        params: of the bucket, by number.
        tell: called with a parameter's number when its gradient has come; not for each, but for the last of all.
            It must not keep alive whoever is told.
    """

    def __init__(self, params: Mapping[int, Tensor], tell: Callable[[int], None]) -> None:
        self._params = params
        self._tell = tell
        self._handles: dict[int, RemovableHandle] = {}
        self._narrow = False
        self._trains = False
        self._missing: set[int] | None = None  # in this pass; None before the first hook was called
        self._came: set[int] = set()
        self._last: int | None = None
        self._before: dict[int, tuple[Tensor, int]] = {}  # gradients that are summed up already, and their versions

    def hook_all(self) -> None:
        """Hooks into all parameters that require a gradient by now."""
        self._hook(self._training())
        self._narrow = False

    def hook_last(self) -> None:
        """Lets go of the parameters whose gradients came before the last one in the last pass."""
        if self._last is None:
            self.hook_all()
            return
        seen = self._came - {self._last}
        for number in seen & self._handles.keys():
            self._handles.pop(number).remove()
        self._hook(number for number in self._training() if number not in seen)
        self._narrow = True

    def unhook(self) -> None:
        """Lets go of all parameters."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def remember_sums(self) -> None:
        """Notes what is in ``param.grad``, to which the next pass adds."""
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
        """Whether every parameter that trains has its gradient of this pass."""
        return not self._trains if self._missing is None else not self._missing

    def forget_sums(self) -> None:
        """What was summed up has been taken."""
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

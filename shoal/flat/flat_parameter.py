"""One run of parameters as one parameter, for `torch.optim`."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import groupby, repeat
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.flat.elementwise import check_class
from shoal.flat.gradients import GradientViews, grad_of
from shoal.flat.span import Span

_set_slot = vars(torch._C.TensorBase)["grad"].__set__
_holders = torch.Tensor._use_count  # type: ignore[attr-defined]  # of a tensor in C++


class Presence(Enum):
    """Which parameters of a run have a gradient."""

    ALL = auto()
    NONE = auto()
    SOME = auto()


@dataclass(frozen=True, slots=True)
class Member:
    """One parameter of a run.

    Attributes:
        index: its number in `GradientViews`, which is the one that the user gave it by its place.
        span: its elements in the flat buffer, without the padding.
    """

    index: int
    parameter: Tensor
    view: Tensor
    span: Span


class FlatParameter(nn.Parameter):
    """A *run*: consecutive parameters of one flat buffer, with the padding between them, as one 1-D parameter.

    Its data are those of its parameters, in the same memory. Its `.grad` says what theirs say:

    * if all of them have a gradient, the flat gradient; if none has, None;
    * if some have, the flat gradient with zeros for the others, which makes norms and clipping right. An optimizer does
      not see this: before its step the run is split (`shoal.flat.step_hook`);
    * setting it to None does so for every one of them, so `optimizer.zero_grad()` works. A tensor is copied.

    Looking costs 30 ns per parameter, once in an optimizer's step and once in whatever else asks. Copies and pickles of
    it are ordinary parameters, independent of any model.

    Attributes:
        home: the gradients' home.
        members: its parameters, at least one, in the order of the flat buffer.
        parts: the shorter runs that have taken its place in optimizers; empty as long as it is whole.
        settled: what :meth:`settle` saw, while it holds.
    """

    home: GradientViews
    members: Sequence[Member]
    parts: list[FlatParameter]
    _gradient: Tensor
    _parameters: list[Tensor]
    _views: list[Tensor]
    _held: list[int]
    _padding: Tensor
    _cleaned: int
    _address: int
    settled: Presence | None

    def __new__(cls, data: Tensor, gradient: Tensor, members: Sequence[Member], home: GradientViews) -> FlatParameter:
        """Makes the run from its part of the flat buffer and of the flat gradient."""
        trained = any(member.parameter.requires_grad for member in members)
        self: FlatParameter = torch.Tensor._make_subclass(cls, data, trained)
        self.home = home
        self.members = members
        self.parts = []
        self._gradient = gradient
        self._parameters = [member.parameter for member in members]
        self._views = [member.view for member in members]
        self._held = [2] * len(members)
        self._padding = _padding(data.numel(), members).to(data.device)
        self._cleaned = gradient._version
        self._address = data.data_ptr()
        self.settled = None
        return self

    @property
    def start(self) -> int:
        """The first element of the run in the flat buffer."""
        return self.members[0].span.start

    def presence(self) -> Presence:
        """Which parameters have a gradient now. Gradients that are not in flat memory are brought there."""
        # A view is held by its Python object and by the parameter whose gradient it is: counting holders touches only
        # the views, and takes 59 µs for 2,000 of them after a step has emptied the caches; the look below takes 409.
        # It errs if the view was made another tensor's `.grad` and taken from its own parameter.
        if list(map(_holders, self._views)) == self._held or all(map(is_, map(grad_of, self._parameters), self._views)):
            return Presence.ALL
        grads = map(grad_of, self._parameters)
        strays = [
            member.index
            for member, grad in zip(self.members, grads, strict=True)
            if grad is not None and grad is not member.view
        ]
        if strays:
            self.home.bring_home(strays)
        has = [grad is not None for grad in map(grad_of, self._parameters)]
        return Presence.ALL if all(has) else Presence.SOME if any(has) else Presence.NONE

    def settle(self) -> Presence:
        """Looks once for a whole step of an optimizer that begins now: until `settled` is None or the next backward."""
        self.settled = self.presence()
        self.home.settled = True
        # Guards of compiled steps look at torch's own slot, past the property.
        _set_slot(self, None if self.settled is Presence.NONE else self._gradient)
        return self.settled

    def settle_as_usual(self) -> bool:
        """As :meth:`check_address` and :meth:`settle`, in less time; False, and nothing done, if not all is as usual.

        Usual is a whole run in its own memory, in which all parameters have a gradient.
        """
        address = self._address
        if (
            self.parts
            or self.data_ptr() != address
            or self._parameters[0].data_ptr() != address
            or list(map(_holders, self._views)) != self._held
        ):
            return False
        self.settled = Presence.ALL
        self.home.settled = True
        _set_slot(self, self._gradient)
        return True

    def split_by_presence(self) -> None:
        """Splits the run where a parameter with a gradient is beside one without."""
        self.split_by([grad is None for grad in map(grad_of, self._parameters)])

    def split_by(self, kinds: Sequence[object]) -> None:
        """Splits the run between neighbours of unequal kinds, one kind per parameter, into its `parts`."""
        pairs = zip(self.members, kinds, strict=True)
        runs = [[member for member, _ in run] for _, run in groupby(pairs, itemgetter(1))]
        if len(runs) == 1:
            return
        starts = [run[0].span.start - self.start for run in runs] + [self.numel()]
        data, gradient = self.detach(), self._gradient
        self.parts = [
            FlatParameter(data[start:stop], gradient[start:stop], run, self.home)
            for run, start, stop in zip(runs, starts, starts[1:], strict=False)
        ]

    def leaves(self) -> list[FlatParameter]:
        """The runs that are in its place now."""
        if not self.parts:
            return [self]
        return [leaf for part in self.parts for leaf in part.leaves()]

    def check_address(self) -> None:
        """Raises ValueError if the run or its first parameter has other memory: most moves of a model move them all."""
        first = self.members[0]
        if self.data_ptr() != self._address:
            raise ValueError(
                "the flat parameter itself was given other memory (`.data = …`): only optimizers that update their "
                "parameters in place work on contiguous()"
            )
        if first.parameter.data_ptr() != self._address and first.parameter.numel():
            raise ValueError(
                f"parameter {first.index} has left the flat memory, so this does not reach the model; "
                "assert_buffer_is_valid() of the ContiguousParams says more"
            )

    @property
    def grad(self) -> Tensor | None:
        """The flat gradient, of the run's shape; None if no parameter has a gradient.

        Raises:
            ValueError: as :meth:`check_address`, for then it is not that of the model.
        """
        if self.settled is not None and self.home.settled:
            presence = self.settled
        else:
            presence = self.presence()
            self.check_address()  # after it, for it says more of gradients with another dtype
            if self._padding.numel() and self._gradient._version != self._cleaned:
                # Clipping by a norm that is nan made zeros nan, and nothing else would ever write to these again.
                self._gradient.index_fill_(0, self._padding, 0)
                self._cleaned = self._gradient._version
        if presence is Presence.NONE:
            return None
        if presence is Presence.SOME:
            for parameter, view in zip(self._parameters, self._views, strict=True):
                if parameter.grad is None:
                    view.zero_()
        return self._gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.settled = None
        if value is not None and value is not self._gradient:
            self._gradient.copy_(value.detach())
        grads = repeat(None) if value is None else self._views
        deque(map(setattr, self._parameters, repeat("grad"), grads), maxlen=0)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """1.

        Raises:
            ValueError: if an optimizer asks that needs whole tensors. (torch's Muon asks when it is made, and would
                refuse the answer without the reason. Others are refused at their first step.)
        """
        if isinstance(asking := sys._getframe(1).f_locals.get("self"), Optimizer):
            check_class(type(asking))  # type: ignore[arg-type]
        return 1

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        copy = memo[id(self)] = nn.Parameter(self.detach().clone(), self.requires_grad)
        return copy

    def __reduce_ex__(self, protocol: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return nn.Parameter, (self.detach().clone(), self.requires_grad)


def _padding(numel: int, members: Sequence[Member]) -> Tensor:
    """The elements of a run that belong to no parameter."""
    start = members[0].span.start
    stops = [member.span.stop - start for member in members]
    nexts = [member.span.start - start for member in members[1:]] + [numel]
    gaps = [
        torch.arange(stop, following, device="cpu")
        for stop, following in zip(stops, nexts, strict=True)
        if stop < following
    ]
    return torch.cat(gaps) if gaps else torch.empty(0, dtype=torch.int64, device="cpu")

"""Several consecutive parameters as one parameter, for `torch.optim`."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import groupby, repeat
from operator import is_, is_not, itemgetter
from types import CodeType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.flat._torch import foreach_zero_, grad_of, make_subclass, set_grad_slot, version_of
from shoal.flat.elementwise import refuse_class
from shoal.flat.flat_gradient import FlatGradient
from shoal.flat.gradient_views import GradientViews, is_large, set_grads
from shoal.flat.memory_views import own_storage
from shoal.flat.span import Span

_ZERO_GRAD = inspect.unwrap(Optimizer.zero_grad).__code__


def _codes_of(function: Any) -> set[CodeType]:
    """The code of a function, and of the comprehensions in it."""
    code = inspect.unwrap(function).__code__
    return {code, *(part for part in code.co_consts if isinstance(part, CodeType))}


_CLIPPING = _codes_of(nn.utils.clip_grad_norm_)


class GradientPresence(Enum):
    """Which parameters of a run have a gradient."""

    HOME = auto()  # all, and all gradients are in flat memory
    ALL = auto()
    NONE = auto()
    SOME = auto()


@dataclass(frozen=True, slots=True)
class RunParameter:
    """One parameter of a run.

    Attributes:
        index: its number in `GradientViews`: its place among the parameters that the user gave.
        parameter: the parameter.
        view: the view of the flat gradient for this parameter.
        span: its elements in the flat buffer, without the padding.
    """

    index: int
    parameter: Tensor
    view: Tensor
    span: Span


@dataclass(frozen=True, slots=True)
class RunPiece:
    """A part of a run that a kernel steps by itself: a large parameter, or adjacent small ones.

    Attributes:
        tensor: the tensor that is stepped, with its gradient in `.grad`: the parameter itself, or a part of the run.
        start: its first element in the run.
    """

    tensor: Tensor
    start: int


class FlatParameter(nn.Parameter):
    """A *run*: consecutive parameters of one flat buffer, with the padding between them, as one 1-D parameter.

    Its data are those of its parameters, in the same memory. Its `.grad` follows from theirs:

    * If all parameters have a gradient, it is the flat gradient. Gradients that lie elsewhere are first copied into it,
    and all gradients are views of it then. If none has a gradient, it is None.
    * If some have one, it is the flat gradient with zeros for the others, so norms and clipping are right. An optimizer
    never sees this: before its step the run is split (`shoal.flat.step_hook`).
    * Setting it to None sets the gradients of all parameters to None, so `optimizer.zero_grad()` works. Setting it to a
    tensor copies the tensor.

    Reading it takes 0.2 µs per parameter, once in an optimizer's step and once for any other reader. A flat parameter
    is neither copied nor pickled: a copy would belong to no model.

    Attributes:
        home: the gradients' views in flat memory.
        members: its parameters, at least one, in the order of the flat buffer.
        parts: the shorter runs that have replaced it in optimizers; empty as long as it is not split.
        whole: the run as a plain tensor, whose `.grad` is the flat gradient.
        pieces: the large parameters of the run, and the parts between and beside them; empty if it has no large
            parameter.
    """

    home: GradientViews
    members: Sequence[RunParameter]
    parts: list[FlatParameter]
    whole: Tensor
    pieces: list[RunPiece]
    _gradient: Tensor
    _seen: FlatGradient
    _is_compiled: bool
    _parameters: list[Tensor]
    _views: list[Tensor]
    _large: list[RunParameter]
    _small: list[RunParameter]
    _small_parameters: list[Tensor]
    _small_views: list[Tensor]
    _padding: Tensor
    _has_padding: bool
    _cleaned: int
    _address: int

    def __new__(
        cls, data: Tensor, gradient: Tensor, members: Sequence[RunParameter], home: GradientViews
    ) -> FlatParameter:
        """Makes the run from its part of the flat buffer and of the flat gradient."""
        trained = any(member.parameter.requires_grad for member in members)
        data, gradient = own_storage(data), own_storage(gradient)
        self: FlatParameter = make_subclass(cls, data, trained)
        self.home = home
        self.members = members
        self.parts = []
        self.whole = data
        self.whole.grad = gradient
        self._parameters = [member.parameter for member in members]
        self._views = [member.view for member in members]
        self._gradient = gradient
        self._seen = FlatGradient(gradient, self._parameters, self._views)
        self._large = [member for member in members if is_large(member.view)]
        self._small = [member for member in members if not is_large(member.view)]
        self._small_parameters = [member.parameter for member in self._small]
        self._small_views = [member.view for member in self._small]
        self.pieces = _pieces(data, gradient, members) if self._large else []
        self._padding = _padding(data.numel(), members).to(data.device)
        self._has_padding = self._padding.numel() > 0
        self._cleaned = version_of(gradient)
        self._is_compiled = False
        self._address = data.data_ptr()
        return self

    @property
    def start(self) -> int:
        """The first element of the run in the flat buffer."""
        return self.members[0].span.start

    def presence(self) -> GradientPresence:
        """Which parameters have a gradient now, wherever the gradient lies."""
        self.home.settle()
        if _are_home(self._parameters, self._views):
            return GradientPresence.HOME
        has = list(map(is_not, map(grad_of, self._parameters), repeat(None)))
        return GradientPresence.ALL if all(has) else GradientPresence.SOME if any(has) else GradientPresence.NONE

    def collect(self) -> None:
        """Moves gradients that lie elsewhere to flat memory, so that the flat gradient is right."""
        self._bring_home(self.members)

    def can_be_stepped_in_pieces(self) -> bool:
        """Whether a fused kernel can read the gradients of large parameters where they lie, outside of flat memory.

        If so, the gradients of small parameters are moved to flat memory.
        """
        away = [member for member in self._large if grad_of(member.parameter) is not member.view]
        if not away or not all(map(self._can_be_stepped, away)):
            return False
        if not _are_home(self._small_parameters, self._small_views):
            self._bring_home(self._small)
        return True

    def _can_be_stepped(self, member: RunParameter) -> bool:
        grad, view = grad_of(member.parameter), member.view
        return (
            grad is not None
            and grad.layout is torch.strided
            and (grad.dtype, grad.device, grad.shape) == (view.dtype, view.device, view.shape)
            and grad.stride() == view.stride()
            and not grad.requires_grad
            and member.parameter.data_ptr() == self._address + (member.span.start - self.start) * view.itemsize
        )

    def _bring_home(self, members: Sequence[RunParameter]) -> None:
        strays = [
            member.index
            for member in members
            if (grad := grad_of(member.parameter)) is not None and grad is not member.view
        ]
        if strays:
            self.home.bring_home(strays)

    def split_by_presence(self) -> None:
        """Splits the run between each parameter with a gradient and a neighbour without one."""
        self.split_by([grad is None for grad in map(grad_of, self._parameters)])

    def split_by(self, kinds: Sequence[object]) -> None:
        """Splits the run into its `parts`, between neighbours of unequal kinds.

        Args:
            kinds: one kind per parameter.
        """
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
        """The runs that have replaced this one; itself if it is not split."""
        if not self.parts:
            return [self]
        return [leaf for part in self.parts for leaf in part.leaves()]

    def check_address(self) -> None:
        """Raises ValueError if the run or its first parameter has other memory. (Most moves of a model move all
        parameters.)
        """
        first = self._parameters[0]
        if self.data_ptr() != self._address:
            raise ValueError(
                "the flat parameter itself was given other memory (`.data = …`): only optimizers that update their "
                "parameters in place work on contiguous()"
            )
        if first.data_ptr() != self._address and first.numel():
            raise ValueError(
                f"parameter {self.members[0].index} has left the flat memory, so this does not reach the model; "
                "assert_buffer_is_valid() of the ContiguousParams says more"
            )

    @property
    def grad(self) -> Tensor | None:
        """The flat gradient, with the run's shape; None if no parameter has a gradient.

        Raises:
            ValueError: as :meth:`check_address`, because the gradient would not be that of the model.
        """
        asking = sys._getframe(1)
        if asking.f_code is _ZERO_GRAD and asking.f_locals.get("set_to_none"):
            self.check_address()
            return self._gradient  # the caller only drops it, so it need not be gathered
        self.home.settle()
        presence = None if _are_home(self._parameters, self._views) else self.presence()
        if presence is not None:
            if presence is GradientPresence.NONE:
                return None
            self.collect()
        self.check_address()  # after collect(), whose error says more about gradients with another dtype
        if self._has_padding and version_of(self._gradient) != self._cleaned:
            # Clipping by a NaN norm makes the padding NaN, and nothing else would ever write to it again.
            self._gradient.index_fill_(0, self._padding, 0)
            self._cleaned = version_of(self._gradient)
        if presence is not None and presence is GradientPresence.SOME:
            pairs = zip(self._parameters, self._views, strict=True)
            missing = [view for parameter, view in pairs if parameter.grad is None]
            self.home.free(missing)
            foreach_zero_(missing)
        # A compiled step checks that it reads what the compiler was shown.
        return self._seen if not self._is_compiled or asking.f_code in _CLIPPING else self._gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if value is not None and value is not self._gradient and value is not self._seen:
            self.home.free(self._views)
            self._gradient.copy_(value.detach())
        self.home.kept.clear()
        set_grads(self._parameters, None if value is None else self._views)

    def show_to_compiler(self) -> None:
        """Sets torch's own slot of `.grad`, which compiled steps read instead of the property.

        From now on `.grad` is a plain tensor, because torch's compiler can't trace a `FlatGradient`. Only
        `clip_grad_norm_` still gets that.
        """
        self._is_compiled = True
        set_grad_slot(self, self.grad)

    @property
    def ndim(self) -> int:  # type: ignore[override]
        """1.

        Raises:
            ValueError: if the caller is an optimizer that needs whole tensors. (torch's Muon reads `ndim` when it is
                made, and would refuse 1 without giving this reason. Other optimizers are refused at their first step.)
        """
        if isinstance(asking := sys._getframe(1).f_locals.get("self"), Optimizer):
            refuse_class(type(asking))  # type: ignore[arg-type]
        return 1

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self.__reduce_ex__(0)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a parameter of ContiguousParams.contiguous() is neither copied nor pickled, and neither is an optimizer "
            "of it: the copy would train no model. Copy or save the model, and original_state_dict(optimizer) of the "
            "ContiguousParams; make a new ContiguousParams and a new optimizer for the copy of the model, and load "
            "the state dict with load_original_state_dict()"
        )


def _are_home(parameters: Sequence[Tensor], views: Sequence[Tensor]) -> bool:
    """Whether the gradient of each parameter is its view."""
    return all(map(is_, map(grad_of, parameters), views))


def _padding(numel: int, members: Sequence[RunParameter]) -> Tensor:
    """The indices of the elements of a run that belong to no parameter."""
    start = members[0].span.start
    stops = [member.span.stop - start for member in members]
    nexts = [member.span.start - start for member in members[1:]] + [numel]
    gaps = [
        torch.arange(stop, following, device="cpu")
        for stop, following in zip(stops, nexts, strict=True)
        if stop < following
    ]
    return torch.cat(gaps) if gaps else torch.empty(0, dtype=torch.int64, device="cpu")


def _pieces(data: Tensor, gradient: Tensor, members: Sequence[RunParameter]) -> list[RunPiece]:
    """The run, cut at its large parameters."""
    first = members[0].span.start
    pieces: list[RunPiece] = []
    for large, group in groupby(members, lambda member: is_large(member.view)):
        of_kind = list(group)
        if large:
            pieces += [RunPiece(member.parameter, member.span.start - first) for member in of_kind]
        else:
            start, stop = of_kind[0].span.start - first, of_kind[-1].span.stop - first
            tensor = data[start:stop]
            tensor.grad = gradient[start:stop]
            pieces.append(RunPiece(tensor, start))
    return pieces

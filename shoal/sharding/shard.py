"""One rank's part of the optimizer: the user's class over the slices that this rank owns.

A slice that is a whole parameter is given to the optimizer as that parameter. Only where a share begins or ends inside
a parameter is it a view. So whatever torch.optim does per tensor (counters, skipping parameters without gradient) is
done per parameter here as well. Cuts are at multiples of 64 bytes. There torch's kernels round each element as they do
in the whole parameter: its unfused kernels with one thread, and its fused kernels with any number of threads.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.flat import Watch
from shoal.sharding.flat_views import flat, flat_like, shaped_like
from shoal.sharding.option_numbers import Groups
from shoal.sharding.partition import Slice

MASTER = "master_weights"
"""The name of the float32 copy of a parameter in the optimizer's state."""


class Piece:
    """One slice, and the tensor that the local optimizer steps for it.

    Attributes:
        part: which elements of which parameter.
        param: that parameter.
        local: the tensor that the optimizer sees: the parameter itself, a view of it, or a copy.
        is_copy: whether ``local`` is a copy, on another device or with another dtype.
    """

    def __init__(self, part: Slice, param: Tensor, *, alias: bool, device: torch.device, dtype: torch.dtype) -> None:
        self.part = part
        self.param = param
        self.whole = len(part.span) == param.numel()
        self.is_copy = device != param.device or dtype != param.dtype
        self.local = param
        self._watch, self._address = Watch(), -1
        if self.is_copy:
            pinned = param.is_cuda and device.type == "cpu"
            memory = torch.empty(len(part.span), dtype=dtype, device=device, pin_memory=pinned).copy_(self.home)
            self.local = nn.Parameter(memory.view(param.shape) if self.whole else memory)
            self._gradient = torch.empty_like(memory, pin_memory=pinned) if pinned else None
        elif alias or not self.whole:
            memory = param.detach() if self.whole else self.home
            self.local = nn.Parameter(memory, requires_grad=param.requires_grad)

    @property
    def home(self) -> Tensor:
        """The slice in the parameter's present memory, 1-D."""
        address = self.param.data_ptr()
        if address != self._address:
            self._home, self._address = flat(self.param)[self.part.span.slice], address
        return self._home

    def follow(self) -> None:
        """Points ``local``, where it is no copy, at the parameter's present memory."""
        if self.local is not self.param:
            self.local.data = self.param.detach() if self.whole else self.home

    def is_written(self) -> bool | Tensor:
        """Whether user code has written into the parameter since `keep`, see `Watch`."""
        return self._watch.is_written(self.home)

    def take_over(self) -> None:
        """Copies the elements of the parameter that differ from the copy, rounded. The others keep their precision."""
        home, local = self.home.to(self.local.device), self._flat_local
        local.copy_(torch.where(local.to(home.dtype) == home, local, home.to(local.dtype)))

    def take_gradient(self, gradient: Tensor | None) -> None:
        """Gives the local optimizer the gradient of this slice, 1-D; None to leave the slice alone."""
        if gradient is None:
            self.local.grad = None
        elif self.is_copy:
            if self._gradient is not None:
                gradient = self._gradient.copy_(gradient, non_blocking=True)
            gradient = gradient.to(self.local.device, self.local.dtype)
            self.local.grad = gradient.view(self.local.shape)
        else:
            self.local.grad = shaped_like(gradient, self.local) if self.whole else gradient

    def slice_gradient(self) -> Tensor | None:
        """This slice of the parameter's own ``grad``, 1-D; None if there is none."""
        if self.param.grad is None:
            return None
        return flat_like(self.param.grad, self.param)[self.part.span.slice]

    def write_back(self) -> None:
        """Copies the values of a copy back into the parameter, if the step updated it."""
        if self.is_copy and self.local.grad is not None:
            self.home.copy_(self._flat_local, non_blocking=True)

    def keep(self) -> None:
        """Regards the values of ``local`` as those of the parameter until someone writes to the parameter."""
        if self.is_copy:
            self._watch.keep(self.home)

    def forget(self) -> None:
        """``local`` got other values. It follows the parameter where these, rounded, are not the parameter's."""
        self._watch.forget()

    @property
    def _flat_local(self) -> Tensor:
        return self.local.detach().view(-1)


def follow(pieces: Sequence[Piece]) -> None:
    """Updates ``local`` of each piece to the parameter's present memory and values, in case user code has changed them.

    On each device this waits once, for the answers of all pieces.
    """
    answers: dict[torch.device, list[tuple[Piece, Tensor]]] = defaultdict(list)
    with torch.no_grad():
        for piece in pieces:
            if not piece.is_copy:
                piece.follow()
            elif isinstance(answer := piece.is_written(), Tensor):
                answers[answer.device].append((piece, answer))
            elif answer:
                piece.take_over()
        for asked in answers.values():
            for (piece, _), answer in zip(asked, torch.stack([answer for _, answer in asked]).tolist(), strict=True):
                if answer:
                    piece.take_over()


class Shard:
    """The local optimizer of this rank.

    Args:
        optimizer_class: any subclass of ``torch.optim.Optimizer``.
        defaults: its keyword arguments.
        alias: give it aliases of whole parameters, so that their gradients can be separate from the parameters' own.
        offload: keep state and copies of the slices on the CPU.
        master_weights: keep float32 copies of the slices of float16 and bfloat16 parameters.

    Attributes:
        optimizer: the local optimizer; not set before the first :meth:`add`.
        pieces: all slices, group by group.
    """

    def __init__(
        self,
        optimizer_class: Callable[..., Optimizer],
        defaults: dict[str, Any],
        *,
        alias: bool,
        offload: bool,
        master_weights: bool,
    ) -> None:
        self._make = optimizer_class
        self._defaults = defaults
        self._alias = alias
        self._offload = offload
        self._master_weights = master_weights
        self.pieces: list[list[Piece]] = []
        self.optimizer: Optimizer

    def add(self, groups: Groups, slices: Sequence[Sequence[Slice]], params: Sequence[Tensor]) -> None:
        """Adds parameter groups with the options of ``groups``. Each holds this rank's ``slices`` of the group,
        possibly none.
        """
        local_groups = []
        for group, owned in zip(groups, slices, strict=True):
            pieces = [self._piece(part, params[part.tensor]) for part in owned]
            options = {name: value for name, value in group.items() if name not in ("params", "param_names")}
            local_groups.append({**options, "params": [piece.local for piece in pieces]})
            self.pieces.append(pieces)
        if not hasattr(self, "optimizer"):
            try:
                self.optimizer = self._make(local_groups, **self._defaults)
            except (AttributeError, LookupError) as error:
                name = getattr(self._make, "__name__", "optimizer_class")
                raise TypeError(
                    f"{name} could not be made of the parameter groups of a rank, {{'params': […], …}}: {error!r:.200}"
                ) from error
            self._check_groups(local_groups)
        else:
            for local_group in local_groups:
                self.optimizer.add_param_group(local_group)

    def _check_groups(self, given: Sequence[dict[str, Any]]) -> None:
        """Check that the local optimizer has the groups that it was made of.

        Raises:
            ValueError: if it has others, or has them in another order.
        """
        own = [list(map(id, group["params"])) for group in self.optimizer.param_groups]
        for number, group in enumerate(given):
            if number >= len(own) or own[number] != list(map(id, group["params"])):
                raise ValueError(
                    f"{type(self.optimizer).__name__} has not the parameters of group {number} in its group {number}: "
                    "options, schedules and state dicts go by the order of the groups, so make the optimizer of all "
                    "groups, in the order in which they are given: Together(Muon(groups[:1]), AdamW(groups[1:]))"
                )

    def _piece(self, part: Slice, param: Tensor) -> Piece:
        device = torch.device("cpu") if self._offload else param.device
        low = self._master_weights and param.dtype in (torch.float16, torch.bfloat16)
        return Piece(part, param, alias=self._alias, device=device, dtype=torch.float32 if low else param.dtype)

    @property
    def all_pieces(self) -> list[Piece]:
        """The slices of all groups."""
        return [piece for pieces in self.pieces for piece in pieces]

    def follow(self) -> None:
        """Points the local optimizer at the present parameters. Call it once before a step, because the step writes to
        them.
        """
        follow(self.all_pieces)

    def prepare(self, gradients: Mapping[Slice, Tensor | None] | None = None) -> None:
        """Gives the local optimizer its gradients.

        Args:
            gradients: one for each slice, or None for the parameters' own.
        """
        with torch.no_grad():
            for piece in self.all_pieces:
                if gradients is not None:
                    piece.take_gradient(gradients.get(piece.part))
                elif piece.local is not piece.param:
                    piece.take_gradient(piece.slice_gradient())
        self._wait_for_copies()

    def finish(self, *, drop_gradients: bool = False) -> None:
        """After a step: writes copies back, and drops gradients.

        Args:
            drop_gradients: also drop gradients of whole parameters, which are the parameters' own.
        """
        with torch.no_grad():
            for piece in self.all_pieces:
                piece.write_back()
                if drop_gradients or piece.local is not piece.param:
                    piece.local.grad = None
        self._wait_for_copies()

    def settle(self) -> None:
        """After all ranks have the parameters: any later write to a parameter did not come from the step."""
        for piece in self.all_pieces:
            piece.keep()

    def state_of(self, piece: Piece) -> dict[str, Any]:
        """The optimizer's state of one slice. Master weights are one more entry."""
        follow([piece])
        state = dict(self.optimizer.state.get(piece.local, {}))
        if state and piece.local.dtype != piece.param.dtype:
            state[MASTER] = piece.local.detach()
        return state

    @property
    def of_none(self) -> dict[Any, Any]:
        """The optimizer's state that belongs to no parameter, such as a count of steps."""
        return {key: value for key, value in self.optimizer.state.items() if not isinstance(key, Tensor)}

    def load(self, states: Sequence[Sequence[dict[str, Any]]], of_none: dict[Any, Any], groups: Groups) -> None:
        """Replaces the state of every slice, in the order of ``pieces``, the state of no parameter, and the options of
        every group.
        """
        state: dict[Any, Any] = dict(of_none)
        packed = []
        number = 0
        with torch.no_grad():
            for pieces, values, group in zip(self.pieces, states, groups, strict=True):
                numbers = list(range(number, number + len(pieces)))
                number += len(pieces)
                packed.append({**group, "params": numbers})
                for index, piece, value in zip(numbers, pieces, values, strict=True):
                    rest = {name: entry for name, entry in value.items() if name != MASTER}
                    if rest:
                        state[index] = rest
                    if MASTER in value and piece.is_copy:
                        piece.local.copy_(value[MASTER])
                        piece.forget()
        self.optimizer.load_state_dict({"state": state, "param_groups": packed})

    def _wait_for_copies(self) -> None:
        if self._offload and torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()

"""The stand-in: what torch's step works on in the place of an optimizer of flat parameters, for one call.

torch's step hooks may replace the arguments of a step, and `self` is one of them. So a step gets a shallow copy of the
optimizer, in which each flat parameter is a plain tensor, or the *pieces* that its gradients can be stepped in without
being gathered. Its state is that of the optimizer: a piece's tensors are views of the run's. The optimizer itself, its
state dict and its hooks know of nothing, also if the step fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, Final

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from shoal.flat.flat_parameter import FlatParameter, Piece, Presence

_STEPPED_SO: Final = {
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Adagrad, optim.Adadelta,
    optim.RMSprop, optim.Rprop, optim.ASGD,
}  # fmt: skip
"""These step what is in `param_groups` and `state`, and keep nothing of their own. Of others, subclasses of these
included, nobody knows."""

_WITH_FUSED_KERNELS: Final = {optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad}

_CUTS = "_shoal_cuts"
"""The attribute of an optimizer for the state of pieces, by the run."""


@dataclass(frozen=True, slots=True)
class Cut:
    """The state of a run, cut for its pieces.

    Attributes:
        source: what was cut.
        states: one per piece. Numbers, such as `step`, are the run's own for the first, and copies for the others.
        numbers: per number the run's own, and all the copies.
    """

    source: list[object]
    states: list[dict[str, Any]]
    numbers: list[tuple[Tensor, Tensor]]


class _State(dict[Tensor, Any]):
    """The state of what is stepped: looked up in that of the optimizer when it is asked for."""

    def __init__(self, state: Mapping[Tensor, Any]) -> None:
        super().__init__()
        self.state = state
        self.runs: dict[int, FlatParameter] = {}  # by the id of the tensor that is stepped

    def __missing__(self, key: Tensor) -> Any:
        found = self[key] = self.state[self.runs.get(id(key), key)]
        return found


def can_stand_in(optimizer: Optimizer) -> bool:
    """Whether a step of this optimizer can be given a stand-in."""
    return type(optimizer) in _STEPPED_SO and not any(group.get("differentiable") for group in optimizer.param_groups)


def stand_in(optimizer: Optimizer) -> Optimizer:
    """What is stepped instead of this optimizer, once it is filled."""
    double: Optimizer = object.__new__(type(optimizer))
    vars(double).update(vars(optimizer))
    double.param_groups = []
    double.state = _State(optimizer.state)  # type: ignore[assignment]
    return double


def fill(double: Optimizer, optimizer: Optimizer, seen: Iterable[Presence]) -> None:
    """Gives a stand-in the optimizer's groups, with what is stepped in place of the runs.

    Args:
        double: the stand-in.
        optimizer: that which it stands in for.
        seen: which gradients its runs have, one after the other: all or none.
    """
    presences = iter(seen)
    state: Any = double.state
    double.param_groups.clear()
    for group in optimizer.param_groups:
        stepped: list[Tensor] = []
        for parameter in group["params"]:
            if type(parameter) is not FlatParameter:
                stepped.append(parameter)
            elif (presence := next(presences)) is not Presence.NONE:
                cut = _cut(optimizer, group, parameter) if presence is Presence.ALL and parameter.pieces else None
                if cut is not None and parameter.can_be_stepped_in_pieces():
                    pieces = [piece.tensor for piece in parameter.pieces]
                    state.update(zip(pieces, cut.states, strict=True))
                    stepped += pieces
                    continue
                if presence is Presence.ALL:
                    parameter.collect()
                stepped.append(parameter.whole)
                state.runs[id(parameter.whole)] = parameter
        double.param_groups.append({**group, "params": stepped})


def _cut(optimizer: Optimizer, group: dict[str, Any], run: FlatParameter) -> Cut | None:
    """The state of the pieces of a run; None if they cannot be stepped, as there is no state before the first step."""
    if not group.get("fused") or type(optimizer) not in _WITH_FUSED_KERNELS:
        return None
    state = optimizer.state.get(run, {})
    if group.get("momentum", 0) != 0:
        if state.get("momentum_buffer") is None:
            return None
    elif not state and type(optimizer) is not optim.SGD:
        return None
    cuts: dict[FlatParameter, Cut] = vars(optimizer).setdefault(_CUTS, {})
    cut = cuts.get(run)
    values = list(state.values())
    if cut is None or len(values) != len(cut.source) or not all(map(is_, values, cut.source)):
        cut = cuts[run] = _cut_state(state, run)
    for number, copies in cut.numbers:
        copies.copy_(number)
    return cut


def _cut_state(state: Mapping[str, Any], run: FlatParameter) -> Cut:
    states: list[dict[str, Any]] = [{} for _ in run.pieces]
    numbers = []
    for name, value in state.items():
        values: Sequence[Any] = [value] * len(run.pieces)
        if isinstance(value, Tensor) and value.shape == run.shape:
            values = [_part(value, piece) for piece in run.pieces]
        elif isinstance(value, Tensor):
            copies = torch.empty(len(run.pieces) - 1, dtype=value.dtype, device=value.device)
            numbers.append((value, copies))
            values = [value, *(copy.view(value.shape) for copy in copies)]
        for of_piece, part in zip(states, values, strict=True):
            of_piece[name] = part
    return Cut(list(state.values()), states, numbers)


def _part(value: Tensor, piece: Piece) -> Tensor:
    """A piece's elements of the state of its run."""
    tensor = piece.tensor
    return value[piece.start : piece.start + tensor.numel()].as_strided(tensor.shape, tensor.stride())

"""The stand-in: an object that torch's step uses for one call, in place of an optimizer of flat parameters.

torch's step hooks may replace the arguments of a step, and `self` is one of them. So a step gets a shallow copy of the
optimizer. In the copy, each flat parameter is a plain tensor, or the *pieces* whose gradients can be stepped without
being gathered. Its state is that of the optimizer: a piece's tensors are views of the run's. The optimizer itself, its
state dict and its hooks are not affected, even if the step fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, Final

import torch
from torch import Tensor, optim
from torch.optim import Optimizer

from shoal.flat.flat_parameter import FlatParameter, GradientPresence, RunPiece

_STEPPED_SO: Final = {
    optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.Adagrad, optim.Adadelta,
    optim.RMSprop, optim.Rprop, optim.ASGD,
}  # fmt: skip
"""These classes step the contents of `param_groups` and `state`, and keep nothing else. Other classes, subclasses of
these included, may keep more.
"""

_WITH_FUSED_KERNELS: Final = {optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad}

_CUTS = "_shoal_cuts"
"""The optimizer's attribute for the state of pieces, by run."""


@dataclass(frozen=True, slots=True)
class CutState:
    """The state of a run, cut for its pieces.

    Attributes:
        source: the values that were cut.
        states: one state per piece. The first piece has the run's own numbers, such as `step`; the others have copies.
        numbers: for each number, the run's own tensor, and all the copies.
    """

    source: list[object]
    states: list[dict[str, Any]]
    numbers: list[tuple[Tensor, Tensor]]


class _State(dict[Tensor, Any]):
    """The state for a step. An entry is looked up in the optimizer's state when it is read."""

    def __init__(self, state: Mapping[Tensor, Any]) -> None:
        super().__init__()
        self.state = state
        self.runs: dict[int, FlatParameter] = {}  # by the id of the stepped tensor

    def __missing__(self, key: Tensor) -> Any:
        found = self[key] = self.state[self.runs.get(id(key), key)]
        return found


def can_stand_in(optimizer: Optimizer) -> bool:
    """Whether a step of this optimizer can use a stand-in."""
    return type(optimizer) in _STEPPED_SO and not any(group.get("differentiable") for group in optimizer.param_groups)


def stand_in(optimizer: Optimizer) -> Optimizer:
    """An empty stand-in for this optimizer; `fill` gives it parameters."""
    double: Optimizer = object.__new__(type(optimizer))
    vars(double).update(vars(optimizer))
    double.param_groups = []
    double.state = _State(optimizer.state)  # type: ignore[assignment]
    return double


def fill(double: Optimizer, optimizer: Optimizer, seen: Iterable[GradientPresence]) -> None:
    """Gives a stand-in the optimizer's groups, with plain tensors or pieces in place of the runs.

    Args:
        double: the stand-in.
        optimizer: the optimizer for which it stands in.
        seen: for each of its runs in order, which gradients it has: all or none.
    """
    presences = iter(seen)
    state: Any = double.state
    double.param_groups.clear()
    for group in optimizer.param_groups:
        stepped: list[Tensor] = []
        for parameter in group["params"]:
            if type(parameter) is not FlatParameter:
                stepped.append(parameter)
            elif (presence := next(presences)) is not GradientPresence.NONE:
                cut = (
                    _cut(optimizer, group, parameter) if presence is GradientPresence.ALL and parameter.pieces else None
                )
                if cut is not None and parameter.can_be_stepped_in_pieces():
                    pieces = [piece.tensor for piece in parameter.pieces]
                    state.update(zip(pieces, cut.states, strict=True))
                    stepped += pieces
                    continue
                if presence is GradientPresence.ALL:
                    parameter.collect()
                stepped.append(parameter.whole)
                state.runs[id(parameter.whole)] = parameter
        double.param_groups.append({**group, "params": stepped})


def _cut(optimizer: Optimizer, group: dict[str, Any], run: FlatParameter) -> CutState | None:
    """The state of the pieces of a run; None if pieces can't be stepped, for example before the first step makes
    state.
    """
    if not group.get("fused") or type(optimizer) not in _WITH_FUSED_KERNELS:
        return None
    state = optimizer.state.get(run, {})
    if group.get("momentum", 0) != 0:
        if state.get("momentum_buffer") is None:
            return None
    elif not state and type(optimizer) is not optim.SGD:
        return None
    cuts: dict[FlatParameter, CutState] = vars(optimizer).setdefault(_CUTS, {})
    cut = cuts.get(run)
    values = list(state.values())
    if cut is None or len(values) != len(cut.source) or not all(map(is_, values, cut.source)):
        cut = cuts[run] = _cut_state(state, run)
    for number, copies in cut.numbers:
        copies.copy_(number)
    return cut


def _cut_state(state: Mapping[str, Any], run: FlatParameter) -> CutState:
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
    return CutState(list(state.values()), states, numbers)


def _part(value: Tensor, piece: RunPiece) -> Tensor:
    """The elements of a piece in the state of its run."""
    tensor = piece.tensor
    return value[piece.start : piece.start + tensor.numel()].as_strided(tensor.shape, tensor.stride())

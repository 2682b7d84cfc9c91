"""An optimizer that a framework has made, as a cluster of the framework's processes steps it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import shoal


class PiecesOfRanks:
    """A framework's optimizer in a cluster. Where ranks carry strands, it steps pieces of its parameters, which take
    the parameters' places in its groups: so it stays the object that the script's schedulers and hooks know.

    Args:
        optimizer: of parameters that are whole in each rank, as DistributedDataParallel has them.
        cluster: of the framework's processes.

    Attributes:
        params: its parameter groups, for `shoal.Optimizer`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, cluster: shoal.Cluster) -> None:
        self._optimizer, self._cluster = optimizer, cluster
        self._before = [dict(group) for group in optimizer.param_groups]
        self._state = dict(optimizer.state)
        self.params = [_named(group) for group in self._before]

    def make(self, params: Sequence[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimizer, of what this rank steps. `shoal.Optimizer` calls it.

        Raises:
            ValueError: if those are neither the parameters nor pieces of them.
        """
        wholes = [group["params"] for group in self._before]
        given = [[one[1] if isinstance(one, tuple) else one for one in group["params"]] for group in params]
        if [list(map(id, group)) for group in given] == [list(map(id, group)) for group in wholes]:
            return self._optimizer
        if self._cluster.strands == 1:
            raise ValueError(
                "the framework's optimizer has other parameters than the cluster steps, which are not whole in each "
                "rank: let the framework wrap the model in DistributedDataParallel"
            )
        state: dict[Any, Any] = {}
        for whole, pieces in zip(wholes, given, strict=True):
            for place, piece in enumerate(pieces):
                strand, number = divmod(place, len(whole))
                if held := self._state.get(whole[number]):  # Adagrad's sums are there before its first step
                    state[piece] = self._part(held, whole[number], strand, piece.numel())
        for group, named, pieces in zip(self._optimizer.param_groups, params, given, strict=True):
            group["params"] = pieces
            if "param_names" in group:
                group["param_names"] = [name for name, _ in named["params"]]
        self._optimizer.state = defaultdict(dict, state)
        return self._optimizer

    def _part(self, held: dict[str, Any], whole: Tensor, strand: int, elements: int) -> dict[str, Any]:
        """What the optimizer keeps of so many elements of a parameter: those in that strand of this rank's."""
        cluster = self._cluster
        number = cluster.rank * (cluster.strands // cluster.size) + strand
        first = number * whole.numel() // cluster.strands  # see `Strands`

        def cut(name: str, value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            is_counter = name == "step" and not value.dim()
            has_each = value.shape == whole.shape and not is_counter
            return (value.reshape(-1)[first : first + elements] if has_each else value).clone()

        return {name: cut(name, value) for name, value in held.items()}

    def give_back(self) -> None:
        """Give the optimizer the parameters that it had, with what it kept of them. Other options stay."""
        for group, before in zip(self._optimizer.param_groups, self._before, strict=True):
            group.update({name: before[name] for name in ("params", "param_names") if name in before})
        self._optimizer.state = defaultdict(dict, self._state)


def _named(group: dict[str, Any]) -> dict[str, Any]:
    """A parameter group as torch's optimizers take it: names stand beside their parameters."""
    names = group.get("param_names")
    options = {name: value for name, value in group.items() if name != "param_names"}
    return options if names is None else {**options, "params": list(zip(names, group["params"], strict=True))}

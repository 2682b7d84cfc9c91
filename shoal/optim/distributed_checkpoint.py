"""Saves and loads the strands of each rank of a cluster through `torch.distributed.checkpoint`.

The checkpoint names strands and parameters, and no ranks, so a cluster of any number of ranks can load it. It has every
tensor that the optimizer keeps after a step, even if there was no step yet. So a new optimizer finds each tensor that
it asks for. `Common` says which tensors are real state.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from torch import Tensor

from shoal.flat import without_hooks
from shoal.optim.group_options import KERNELS
from shoal.optim.plain import is_plain, plain, restored
from shoal.optim.state import Part, PartState, Scalars, scheduler_state
from shoal.optim.strand_drift import StrandDrift
from shoal.optim.strand_replica import StrandReplica

NO_STRANDS = (
    "strand_state() is of ranks that carry strands: make the optimizer with cluster=shoal.Cluster(strands=8), or save "
    "state_dict() at rank 0"
)
OWN = KERNELS | {"params", "param_names"}  # the options that each rank has for itself


class StrandState:
    """This rank's part of the state, which `torch.distributed.checkpoint` saves and loads. `Optimizer.strand_state`
    makes it.

    Args:
        give: returns the state. All ranks call it at once.
        take: continues from a state. All ranks call it at once.
    """

    def __init__(self, give: Callable[[], dict[str, Any]], take: Callable[[dict[str, Any]], None]) -> None:
        self._give, self._take = give, take

    def state_dict(self) -> dict[str, Any]:
        """A copy of this rank's part of the state, on the CPU. `torch.distributed.checkpoint` writes it, or reads the
        saved state into it.

        Raises:
            ValueError: if the optimizer keeps something that is not plain data; or if it has made no step, and Shoal
                can't make another optimizer of its class, to see which tensors it keeps.
        """
        return self._give()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state that `torch.distributed.checkpoint` has read.

        Args:
            state_dict: this rank's part of the state.

        Raises:
            ValueError: if it does not fit. Then nothing has changed.
        """
        self._take(state_dict)


class Rest(msgspec.Struct, frozen=True):
    """The part of an optimizer's state that is not tensors.

    Attributes:
        groups: the options of each parameter group.
        statistics: which tensors are real state: (parameter, name).
        values: everything else in the state: (parameter, name, value).
    """

    groups: list[dict[str, Any]]
    statistics: list[tuple[int, str]]
    values: list[tuple[int, str, Any]]


class Common(msgspec.Struct, frozen=True):
    """The part of the state that is the same at all ranks. Rank 0 makes it.

    Attributes:
        epoch, names: see `Replica.tip_of`.
        parameters: shape and dtype of each parameter of the model.
        extras: the number of extra tensors.
        scheduler: the state of the scheduler; None without one.
        stepped: the rest of the optimizer that steps the pieces, or their anchors.
        inner: with an outer optimizer, the rest of the inner optimizer.
        samples, steps: with an outer optimizer, the samples and inner steps behind the drift.
    """

    epoch: int
    names: dict[str, Any]
    parameters: list[tuple[list[int], str]]
    extras: int
    scheduler: dict[str, Any] | None
    stepped: Rest
    inner: Rest | None = None
    samples: float = 0.0
    steps: int = 0


_decode = msgspec.msgpack.Decoder(Common).decode


class StrandCheckpoint:
    """Saves and loads the strands of a rank. A call at rank 0 makes all ranks do so.

    Args:
        replica: the state of this rank's strands.

    Attributes:
        own: at other ranks, the state that this rank saves, or that it has loaded.
    """

    def __init__(self, replica: StrandReplica) -> None:
        self._replica, self._strands = replica, replica.strands
        self.own: dict[str, Any] = {}

    @property
    def _described(self) -> list[tuple[list[int], str]]:
        return [(list(parameter.shape), str(parameter.dtype)) for parameter in self._replica.described]

    def _common(self) -> Common:
        replica, drift = self._replica, self._replica.drift
        moved = {} if drift is None else drift.state_dict()
        return Common(
            replica.tip.epoch,
            replica.names(),
            self._described,
            len(replica.extra_tensors),
            scheduler_state(replica.scheduler),
            rest_of(replica.optimizer, replica.part(self._strands.mine[0]).parameters),
            None if drift is None else rest_of(drift.inner, _stepped_by(drift.inner)),
            moved.get("samples", 0.0),
            moved.get("steps", 0),
        )

    # -- saved

    def give(self) -> dict[str, Any]:
        """At rank 0: make all ranks prepare the state that they save, and return that of rank 0.

        Raises:
            ValueError: as `kept_tensors`, or if the optimizer keeps something that is not plain data.
        """
        common = msgspec.msgpack.encode(self._common())
        self._replica.crew.tell("give strands", common)
        return self._give_here(common)

    def give_here(self, common: bytes) -> None:
        """At another rank: set `own` to the state that it saves."""
        self.own = self._give_here(common)

    def _give_here(self, common: bytes) -> dict[str, Any]:
        replica = self._replica
        state: dict[str, Any] = {_key_of_common(len(self._strands.carriers)): common}
        with replica.locked():
            kept = kept_tensors(replica.optimizer, _on_cpu)
            for strand in self._strands.mine:
                own = replica.part(strand).parameters
                pieces = {str(number): _on_cpu(piece) for number, piece in enumerate(own)}
                state[f"strand {strand}"] = {"parameters": pieces, "statistics": by_name(kept, own)}
            if not self._strands.rank:
                state["extra tensors"] = {str(n): _on_cpu(tensor) for n, tensor in enumerate(replica.extra_tensors)}
            if replica.drift is not None:
                inner = replica.drift.inner
                state["inner"] = by_name(kept_tensors(inner, torch.clone), _stepped_by(inner))
        return state

    # -- loaded

    def check(self, state: dict[str, Any]) -> None:
        """At rank 0: check that all ranks can continue from what they have loaded.

        Raises:
            ValueError: if a rank can't.
        """
        self._replica.crew.tell("check strands")
        for reason in filter(None, [self._misfit(state), *self._replica.crew.hear()]):
            raise ValueError(reason)

    def check_here(self) -> str:
        """At another rank: the reason why it can't continue from `own`; "" if it can."""
        return self._misfit(self.own)

    def _misfit(self, state: dict[str, Any]) -> str:
        try:
            self._check(state, common_in(state, len(self._strands.carriers)))
        except ValueError as error:
            return str(error)
        return ""

    def _check(self, state: dict[str, Any], common: Common) -> None:
        replica, drift = self._replica, self._replica.drift
        if [(list(shape), dtype) for shape, dtype in common.parameters] != self._described:
            raise ValueError("the checkpoint is of other parameters than this model's")
        if (common.inner is None) != (drift is None):
            raise ValueError("the checkpoint is of a run with outer=, and this one is without, or the other way round")
        if (common.scheduler is None) != (replica.scheduler is None):
            raise ValueError("the checkpoint has a scheduler and this optimizer has none, or the other way round")
        known = {} if replica.scheduler is None else replica.scheduler.state_dict()
        if unknown := set(common.scheduler or ()) - set(known):
            raise ValueError(f"this optimizer's scheduler has no {', '.join(sorted(unknown))}")
        if not self._strands.rank and common.extras != len(state.get("extra tensors", ())):
            raise ValueError(f"the checkpoint has {common.extras} extra tensors, this optimizer another number")
        options_of(common.stepped, replica.optimizer)
        for strand in self._strands.mine:
            own, saved = replica.part(strand).parameters, state.get(f"strand {strand}", {})
            pieces = saved.get("parameters", {})
            if any(not _is_like(pieces.get(str(number)), mine) for number, mine in enumerate(own)):
                raise ValueError(f"strand {strand} is not in the state, or of another shape or dtype than here")
            tensors_in(saved.get("statistics", {}), common.stepped)
        if drift is not None and common.inner is not None:
            options_of(common.inner, drift.inner)
            tensors_in(state.get("inner", {}), common.inner)

    def take(self, state: dict[str, Any]) -> None:
        """At rank 0, after `check`: make all ranks continue from what they have loaded."""
        self._replica.crew.tell("take strands")
        self._take_here(state)
        self._replica.state_digest = self._replica.digest()

    def take_here(self) -> None:
        """At another rank: continue from `own`."""
        self._take_here(self.own)

    @torch.no_grad()
    def _take_here(self, state: dict[str, Any]) -> None:
        replica, drift = self._replica, self._replica.drift
        common = common_in(state, len(self._strands.carriers))
        rest = common.stepped
        scalars = Scalars(rest.groups, rest.statistics, rest.values, common.scheduler, extras=0)
        with replica.locked(), drift.quiet() if isinstance(drift, StrandDrift) else contextlib.nullcontext():
            parts = []
            for strand in self._strands.mine:
                own, saved = replica.part(strand).parameters, state[f"strand {strand}"]
                pieces = [saved["parameters"][str(number)] for number in range(len(own))]
                parts.append(PartState([*pieces, *tensors_in(saved["statistics"], rest)], scalars, Part(own, [])))
            replica.prepare(*parts)()
            for number, tensor in enumerate([] if self._strands.rank else replica.extra_tensors):
                tensor.copy_(state["extra tensors"][str(number)])
            if drift is not None and common.inner is not None:
                self._strands.gather_parameters()  # the user loads the model itself
                _load(drift.inner, state["inner"], common.inner)
                if drift.schedule is not None:
                    drift.schedule.rewind()
                anchors = [anchor.detach().clone() for anchor in replica.stepped]
                drift.load_state_dict({"anchor": anchors, "samples": common.samples, "steps": common.steps})
            replica.options.refresh()
            replica.take_names(replica.tip_of(common.epoch, common.names), common.names)
            replica.settle_load()
        self._strands.is_ahead = True


def _key_of_common(strands: int) -> str:
    """The key under which `Common` is saved. A checkpoint of another number of strands has no such key, and torch tells
    the user so."""
    return f"cut into {strands} strands"


def rest_of(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> Rest:
    """The part of the optimizer's state that is not tensors.

    Args:
        optimizer: the optimizer.
        parameters: for each parameter of the model, one tensor that the optimizer steps.

    Raises:
        ValueError: if the optimizer keeps something that is not plain data.
    """
    kept = [
        (number, name, value)
        for number, parameter in enumerate(parameters)
        for name, value in sorted(optimizer.state.get(parameter, {}).items())
    ]
    groups = [{k: v for k, v in group.items() if k not in OWN} for group in optimizer.param_groups]
    values = [(number, name, value) for number, name, value in kept if not isinstance(value, Tensor)]
    options = [(f"parameter group {number}: {k!r}", v) for number, group in enumerate(groups) for k, v in group.items()]
    state = [(f"state of parameter {number}: {name!r}", value) for number, name, value in values]
    rest = [
        (f"state of no parameter: {key!r:.40}", optimizer) for key in optimizer.state if not isinstance(key, Tensor)
    ]
    if odd := [where for where, value in (*options, *state, *rest) if not is_plain(value)]:
        raise ValueError(
            f"the state of {type(optimizer).__name__} can't be saved in a checkpoint of strands, which has tensors of "
            f"parameters and plain values only: {odd[0]}"
        )
    return Rest(
        [plain(group) for group in groups],
        [(number, name) for number, name, value in kept if isinstance(value, Tensor)],
        [(number, name, plain(value)) for number, name, value in values],
    )


def options_of(rest: Rest, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of `rest`, converted to the types of the optimizer's own options.

    Raises:
        ValueError: if they do not fit.
    """
    if len(rest.groups) != len(optimizer.param_groups):
        count = len(optimizer.param_groups)
        raise ValueError(f"the checkpoint has {len(rest.groups)} parameter groups, this optimizer {count}")
    return [
        {key: restored(value, mine.get(key), key) for key, value in saved.items()}
        for saved, mine in zip(rest.groups, optimizer.param_groups, strict=True)
    ]


def kept_tensors(
    optimizer: torch.optim.Optimizer, copied: Callable[[Tensor], Tensor]
) -> dict[Tensor, dict[str, Tensor]]:
    """A copy of each tensor that the optimizer keeps of each parameter. For parameters without state, the tensors that
    it would keep after a first step.

    Args:
        optimizer: the optimizer.
        copied: copies a tensor.

    Raises:
        ValueError: if the optimizer has made no step, and no other one of its class can be made.
    """
    kept = {p: held for p, held in optimizer.state.items() if isinstance(p, Tensor) and held}
    missing = [
        {**group, "params": [p for p in group["params"] if p.requires_grad and p not in kept]}
        for group in optimizer.param_groups
    ]
    kept |= _of_first_step(optimizer, [group for group in missing if group["params"]])
    return {
        parameter: {name: copied(value.detach()) for name, value in held.items() if isinstance(value, Tensor)}
        for parameter, held in kept.items()
    }


def _of_first_step(optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]]) -> dict[Tensor, dict[str, Any]]:
    """The state that the optimizer would keep of these parameters after a first step. Another optimizer of the same
    class makes this step, with zeros as parameters and gradients."""
    if not groups:
        return {}
    kind = type(optimizer)
    own = [parameter for group in groups for parameter in group["params"]]
    copies = [torch.zeros_like(parameter.detach()).requires_grad_() for parameter in own]
    for each in copies:
        each.grad = torch.zeros_like(each.detach())
    known, rest = inspect.signature(kind).parameters, iter(copies)
    try:
        options = copy.deepcopy(
            [{k: v for k, v in group.items() if k not in ("params", "param_names")} for group in groups]
        )
        stand_ins = [
            {**given, "params": [next(rest) for _ in group["params"]]}
            for given, group in zip(options, groups, strict=True)
        ]
        made: Any = kind(stand_ins, **{name: value for name, value in optimizer.defaults.items() if name in known})
        made.step()
    except Exception as error:
        raise ValueError(
            f"the optimizer has made no step, so it is not known which tensors it keeps, and no other {kind.__name__} "
            f"can be made to find out ({error}): make a step before, or save and load state_dict()"
        ) from error
    return {parameter: made.state.get(each, {}) for parameter, each in zip(own, copies, strict=True)}


def by_name(tensors: Mapping[Tensor, Mapping[str, Tensor]], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """The tensors of these parameters, by name and by the parameter's number as text."""
    found: dict[str, Any] = {}
    for number, parameter in enumerate(parameters):
        for name, value in sorted(tensors.get(parameter, {}).items()):
            found.setdefault(name, {})[str(number)] = value
    return found


def common_in(state: Mapping[str, Any], strands: int) -> Common:
    """The `Common` in a loaded state.

    Raises:
        ValueError: if the state has another number of strands, or is no such state.
    """
    key = _key_of_common(strands)
    if key not in state:
        raise ValueError(f"the state is not {key}: load a checkpoint with as many strands as it was saved with")
    try:
        return _decode(state[key])
    except (msgspec.MsgspecError, TypeError) as error:
        raise ValueError(f"no state of strands: {error}") from error


def tensors_in(saved: Mapping[str, Any], rest: Rest) -> list[Tensor]:
    """The tensors that are real state, in the order of `rest`.

    Raises:
        ValueError: if one is missing.
    """
    try:
        return [saved[name][str(number)] for number, name in rest.statistics]
    except KeyError as error:
        raise ValueError(f"the optimizer of the checkpoint keeps {error.args[0]}, which this one does not") from error


def _load(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], rest: Rest) -> None:
    """Load the state of an optimizer that steps the model's own parameters."""
    with without_hooks(optimizer):
        groups = optimizer.state_dict()["param_groups"]
    for group, options in zip(groups, options_of(rest, optimizer), strict=True):
        group.update(options)
    state: dict[int, dict[str, Any]] = {}
    for (number, name), tensor in zip(rest.statistics, tensors_in(saved, rest), strict=True):
        state.setdefault(number, {})[name] = tensor
    for number, name, value in rest.values:
        state.setdefault(number, {})[name] = value
    with without_hooks(optimizer):
        optimizer.load_state_dict({"state": state, "param_groups": groups})


def _stepped_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The optimizer's parameters in the order of its state dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_like(value: Any, mine: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == mine.shape and value.dtype == mine.dtype


def _on_cpu(tensor: Tensor) -> Tensor:
    """A copy of the tensor on the CPU."""
    return tensor.detach().to("cpu", copy=True)

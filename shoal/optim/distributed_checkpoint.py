"""What each rank of a cluster saves of its own strands through `torch.distributed.checkpoint`, and reads again.

The checkpoint names strands and parameters, and no ranks, so a cluster of any number of ranks reads it. It has every
tensor that the optimizer keeps once it has made a step, so that what a new optimizer asks for is there; `Common` says
which of them count.
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

from shoal.optim.group_options import KERNELS, plain, restored
from shoal.optim.state import Part, Scalars, scheduler_state
from shoal.optim.strand_drift import StrandDrift
from shoal.optim.strand_replica import StrandReplica

NO_STRANDS = (
    "strand_state() is of ranks that carry strands: make the optimizer with cluster=shoal.Cluster(strands=8), or save "
    "state_dict() at rank 0"
)
OWN = KERNELS | {"params", "param_names"}  # options that are each rank's


class StrandState:
    """What this rank saves and loads of its strands, for `torch.distributed.checkpoint`, see `Optimizer.strand_state`.

    Args:
        give: returns the state; a call of all ranks.
        take: continues from one; a call of all ranks, too.
    """

    def __init__(self, give: Callable[[], dict[str, Any]], take: Callable[[dict[str, Any]], None]) -> None:
        self._give, self._take = give, take

    def state_dict(self) -> dict[str, Any]:
        """A copy of this rank's part of the state, on the CPU; `torch.distributed.checkpoint` writes it, or reads the
        saved one into it.

        Raises:
            ValueError: if the optimizer has made no step, and none of its class can be made to see what it will keep.
        """
        return self._give()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what `torch.distributed.checkpoint` has read.

        Raises:
            ValueError: if it does not fit; then nothing has changed.
        """
        self._take(state_dict)


class Rest(msgspec.Struct, frozen=True):
    """Of an optimizer, what is not in tensors.

    Attributes:
        groups: the options of each parameter group.
        statistics: which tensors count: (parameter, name).
        values: what else it keeps: (parameter, name, value).
    """

    groups: list[dict[str, Any]]
    statistics: list[tuple[int, str]]
    values: list[tuple[int, str, Any]]


class Common(msgspec.Struct, frozen=True):
    """What all ranks have alike, as rank 0 has it.

    Attributes:
        epoch, names: see `Replica.take_names`.
        parameters: of the model: shape and dtype of each.
        extras: how many extra tensors there are.
        scheduler: its state; None without one.
        stepped: of the optimizer that steps the pieces, or their anchors.
        inner: with an outer optimizer, of the other one.
        samples, steps: with an outer optimizer, behind the drift.
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
    """What a rank saves and loads of its strands. At rank 0, all ranks do so at once.

    Args:
        replica: has the strands.

    Attributes:
        own: at another rank, what it saves, or what it has loaded.
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
        """At rank 0: what it saves, when all ranks do.

        Raises:
            ValueError: see `kept_tensors`; and if the optimizer keeps what is no plain data.
        """
        common = msgspec.msgpack.encode(self._common())
        self._replica.crew.tell("give strands", common)
        return self._give_here(common)

    def give_here(self, common: bytes) -> None:
        """At another rank: have `own` be what it saves."""
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
        """Look, at rank 0, whether all ranks can take what they have loaded.

        Raises:
            ValueError: if one can't.
        """
        self._replica.crew.tell("check strands")
        for reason in filter(None, [self._misfit(state), *self._replica.crew.hear()]):
            raise ValueError(reason)

    def check_here(self) -> str:
        """At another rank: why it can't take that; "" if it can."""
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
        """Continue from a checkpoint of which each rank has loaded its part, at rank 0, after `check`."""
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
            for strand in self._strands.mine:
                own, saved = replica.part(strand).parameters, state[f"strand {strand}"]
                pieces = [saved["parameters"][str(number)] for number in range(len(own))]
                replica.load_tensors([*pieces, *tensors_in(saved["statistics"], rest)], scalars, Part(own, []))
            for number, tensor in enumerate([] if self._strands.rank else replica.extra_tensors):
                tensor.copy_(state["extra tensors"][str(number)])
            if drift is not None and common.inner is not None:
                self._strands.gather_parameters()  # the model is the user's to load
                _load(drift.inner, state["inner"], common.inner)
                if drift.schedule is not None:
                    drift.schedule.rewind()
                anchors = [anchor.detach().clone() for anchor in replica.stepped]
                drift.load_state_dict({"anchor": anchors, "samples": common.samples, "steps": common.steps})
            replica.options.refresh()
            replica.take_names(common.epoch, common.names)
        self._strands.is_ahead = True


def _key_of_common(strands: int) -> str:
    """Under which `Common` is saved. A checkpoint of another number of strands has no such key, which is what torch
    tells its user."""
    return f"cut into {strands} strands"


def rest_of(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> Rest:
    """What the optimizer has besides tensors, given one tensor that it steps for each parameter of the model.

    Raises:
        ValueError: if that is no plain data.
    """
    kept = [
        (number, name, value)
        for number, parameter in enumerate(parameters)
        for name, value in sorted(optimizer.state.get(parameter, {}).items())
    ]
    try:
        return Rest(
            [plain({k: v for k, v in group.items() if k not in OWN}) for group in optimizer.param_groups],
            [(number, name) for number, name, value in kept if isinstance(value, Tensor)],
            [(number, name, plain(value)) for number, name, value in kept if not isinstance(value, Tensor)],
        )
    except TypeError as error:
        raise ValueError(f"the optimizer's state can't be saved: {error}") from error


def options_of(rest: Rest, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of `rest` in the types that the optimizer has.

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
    """A copy of each tensor that the optimizer keeps of each parameter; of those without any, what it will keep.

    Raises:
        ValueError: if it can't be seen what it will keep.
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
    """What the optimizer would keep of these parameters after a step with no gradient: another one of its class makes
    that step, of zeros."""
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
            f"the optimizer has made no step, and it can't be seen what it will keep, since no other {kind.__name__} "
            f"can be made ({error}): make a step before, or save and load state_dict()"
        ) from error
    return {parameter: made.state.get(each, {}) for parameter, each in zip(own, copies, strict=True)}


def by_name(tensors: Mapping[Tensor, Mapping[str, Tensor]], parameters: Sequence[Tensor]) -> dict[str, Any]:
    """The same under their names and the numbers of the parameters."""
    found: dict[str, Any] = {}
    for number, parameter in enumerate(parameters):
        for name, value in sorted(tensors.get(parameter, {}).items()):
            found.setdefault(name, {})[str(number)] = value
    return found


def common_in(state: Mapping[str, Any], strands: int) -> Common:
    """What all ranks have alike, of a loaded state.

    Raises:
        ValueError: if it is of another number of strands, or nothing of the kind.
    """
    key = _key_of_common(strands)
    if key not in state:
        raise ValueError(f"the state is not {key}: all that load a checkpoint have as many strands as who saved it")
    try:
        return _decode(state[key])
    except (msgspec.MsgspecError, TypeError) as error:
        raise ValueError(f"no state of strands: {error}") from error


def tensors_in(saved: Mapping[str, Any], rest: Rest) -> list[Tensor]:
    """Those tensors that count, in the order of `rest`.

    Raises:
        ValueError: if one is not there.
    """
    try:
        return [saved[name][str(number)] for number, name in rest.statistics]
    except KeyError as error:
        raise ValueError(f"the optimizer of the checkpoint keeps {error.args[0]}, which this one does not") from error


def _load(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], rest: Rest) -> None:
    """Load the state of an optimizer of the model's own parameters."""
    groups = optimizer.state_dict()["param_groups"]
    for group, options in zip(groups, options_of(rest, optimizer), strict=True):
        group.update(options)
    state: dict[int, dict[str, Any]] = {}
    for (number, name), tensor in zip(rest.statistics, tensors_in(saved, rest), strict=True):
        state.setdefault(number, {})[name] = tensor
    for number, name, value in rest.values:
        state.setdefault(number, {})[name] = value
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _stepped_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The optimizer's parameters in the order of its state dict."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _is_like(value: Any, mine: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == mine.shape and value.dtype == mine.dtype


def _on_cpu(tensor: Tensor) -> Tensor:
    """A copy of it there."""
    return tensor.detach().to("cpu", copy=True)

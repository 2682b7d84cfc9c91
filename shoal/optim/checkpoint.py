"""Saves and loads the state of a cluster whose ranks carry strands.

[Note: one form, two ways out] Each rank has, for each of its strands, the values of the pieces and what the optimizer
keeps of them. `StrandCheckpoint.save` gives that to `torch.distributed.checkpoint`. Such a checkpoint names strands and
parameters, and no ranks, so a cluster of any number of ranks can load it. It has every tensor that the optimizer keeps
after a step, even if there was no step yet. So a new optimizer finds each tensor that it asks for. `Common` says which
tensors are real state. `StrandCheckpoint.state_dict` gathers the same at rank 0, in the form of a single process.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from operator import itemgetter
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from shoal.cluster.strands import Strands
from shoal.cluster.whole import Placed, shared_by_all
from shoal.flat import (
    after_loading,
    after_saving,
    before_loading,
    before_saving,
    is_per_tensor,
    parameters_of,
    without_hooks,
)
from shoal.optim.as_saved import load_as_saved, load_exactly
from shoal.optim.drift import Drift
from shoal.optim.group_options import KERNELS
from shoal.optim.plain import is_plain, plain, restored
from shoal.optim.state import State, scheduler_state, with_scheduler_state
from shoal.optim.work import Work

NO_STRANDS = (
    "strand_state() is of ranks that carry strands: make the optimizer with cluster=shoal.Cluster(strands=8), or save "
    "state_dict() at rank 0"
)
OTHER_OUTER = "the checkpoint is of a run with outer=, and this one is without, or the other way round"
OF_PARAMETERS = frozenset({"params", "param_names"})
OWN = KERNELS | OF_PARAMETERS  # the options that each rank has for itself

StateDict = dict[str, Any]
Kept = dict[int, dict[str, Any]]
"""What an optimizer keeps of its parameters, by their number in it and by name."""
Spread = Strands | Placed
"""How the values of an optimizer's parameters lie at each rank."""


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
        epoch, names: see `State.tip_of`.
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


@dataclass(frozen=True, slots=True)
class WholeState:
    """A state dict of the whole cluster, which fits. At other ranks than 0 it has nothing.

    Attributes:
        loaded: the optimizers that continue from it: the user's own is the first.
        given: the state dict of each of these.
        drift: the anchor of each trained parameter, and the rest of the drift; None without one.
        rest: the epoch (or None), the names of the state, and the scheduler's state.
    """

    loaded: Sequence[torch.optim.Optimizer] = ()
    given: Sequence[StateDict | None] = (None, None)
    drift: dict[str, Any] | None = None
    rest: dict[str, Any] = field(default_factory=dict)


class Checkpoint(ABC):
    """Saves and loads the state of this peer, in the form of a single process. All ranks that have a part of the state
    call `state_dict` and `load_state_dict` at once. What may raise an error is called at rank 0 before."""

    @abstractmethod
    def before_saving(self) -> None:
        """At rank 0, before `state_dict`: call the users' hooks."""

    @abstractmethod
    def state_dict(self) -> StateDict:
        """The state dict at rank 0; {} at other ranks."""

    @abstractmethod
    def before_loading(self, state_dict: StateDict) -> Any:
        """At rank 0, before `load_state_dict`: check that the state fits. Returns what that takes.

        Raises:
            ValueError: if it does not fit.
        """

    @abstractmethod
    def load_state_dict(self, given: Any) -> None:
        """Continue from what `before_loading` has returned; at other ranks from `elsewhere`."""

    @abstractmethod
    def after_loading(self, given: Any) -> None:
        """At rank 0, after `load_state_dict`: call the users' hooks."""

    elsewhere: Any = None


class OwnCheckpoint(Checkpoint):
    """Saves and loads the state of a process that has all of it. The optimizers call hooks of users themselves.

    Args:
        state: the state.
        work: what the peer brings to rounds.
    """

    def __init__(self, state: State, work: Work) -> None:
        self._state, self._work = state, work

    def before_saving(self) -> None:
        """See `Checkpoint`."""

    def state_dict(self) -> StateDict:
        """See `Checkpoint`."""
        state = self._state.state_dict()
        state["shoal"] |= self._work.saved()
        return state

    def before_loading(self, state_dict: StateDict) -> StateDict:
        """See `Checkpoint`."""
        return state_dict

    def load_state_dict(self, given: StateDict) -> None:
        """See `Checkpoint`."""
        self._state.load_state_dict(given, self._work.load_saved)

    def after_loading(self, given: StateDict) -> None:
        """See `Checkpoint`."""


class StrandCheckpoint(Checkpoint):
    """Saves and loads the state of this rank's strands.

    Args:
        state: the state of this rank's strands.
        strands: the pieces.
    """

    elsewhere = WholeState()

    def __init__(self, state: State, strands: Strands) -> None:
        self._state, self._strands = state, strands

    # -- as the state dict of a single process, at rank 0. All ranks call `state_dict` and `load_state_dict` at once,
    # -- after rank 0 has called what may raise an error

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """The optimizers whose state dicts are in that of rank 0: the user's own is the first."""
        return [self._state.optimizer]

    def before_saving(self) -> None:
        """At rank 0, before `state_dict`: call the users' hooks."""
        for optimizer in self._optimizers:
            before_saving(optimizer)

    def state_dict(self) -> StateDict:
        """The state dict of the whole cluster at rank 0, where this calls the users' hooks; {} at other ranks."""
        found = self._gathered()
        return self._named(after_saving(self._state.optimizer, found)) if found else {}

    def _gathered(self) -> StateDict:
        state = self._state
        return gathered(self._strands, state.optimizer, state.parameters)

    def _named(self, found: StateDict) -> StateDict:
        """At rank 0: the state dict of the user's optimizer, with the names of the state."""
        state = self._state
        found["state"] = {**found["state"], "local_epoch": state.tip.epoch}
        found["shoal"] = state.names()
        if state.scheduler is not None:
            found["shoal"]["scheduler"] = state.scheduler.state_dict()
        return found

    def before_loading(self, state_dict: StateDict) -> WholeState:
        """At rank 0, before `load_state_dict`: call the users' hooks, and check that the state fits.

        Raises:
            ValueError: if it does not.
        """
        ours = dict(state_dict.get("shoal", {}))
        own = {**state_dict, "state": dict(state_dict["state"])}
        epoch = own["state"].pop("local_epoch", None)
        own.pop("shoal", None)
        ours["epoch"] = None if epoch is None else self._state.tip_of(epoch, ours).epoch
        given = self._given(own, ours)
        loaded = self._optimizers[: len(given)]
        for number, optimizer in enumerate(loaded):
            given[number] = before_loading(optimizer, given[number])
            check_fits(given[number], self._state.described_groups, self._strands.model)
        rest = {name: value for name, value in ours.items() if name not in ("outer", "drift")}
        return WholeState(loaded, given, ours["drift"] if len(given) > 1 else None, rest)

    def _given(self, own: StateDict, ours: Mapping[str, Any]) -> list[StateDict]:
        """At rank 0: the state dict for each of `_optimizers` that a state dict of the whole cluster has."""
        return [own]

    @torch.no_grad()
    def load_state_dict(self, given: WholeState) -> None:
        """Continue from a state dict of the whole cluster.

        Args:
            given: at rank 0, what `before_loading` has returned; at other ranks `WholeState()`.
        """
        state, strands = self._state, self._strands
        rest = shared_by_all(strands.group, given.rest)
        with state.locked():
            strands.gather_parameters()
            self._scatter(given)
            if state.scheduler is not None and "scheduler" in rest:
                state.scheduler.load_state_dict(rest["scheduler"])
            self._settle(rest["epoch"], rest)

    def after_loading(self, given: WholeState) -> None:
        """See `Checkpoint`."""
        for optimizer in given.loaded:
            after_loading(optimizer)

    def _scatter(self, whole: WholeState) -> None:
        """At all ranks: load what each optimizer keeps."""
        scatter(self._strands, self._state.optimizer, whole.given[0])

    def _settle(self, epoch: int | None, names: dict[str, Any]) -> None:
        """The state was loaded: continue from it."""
        state = self._state
        state.options.refresh()
        state.adopt_statistics()
        if epoch is not None:
            state.take_names(state.tip_of(epoch, names), names)
        self._strands.is_ahead = True

    # -- as each rank's part of a checkpoint of `torch.distributed`

    def common(self) -> bytes:
        """At rank 0: what is the same at all ranks, encoded.

        Raises:
            ValueError: if the optimizer keeps something that is not plain data.
        """
        return msgspec.msgpack.encode(self._common())

    def _common(self) -> Common:
        state = self._state
        return Common(
            state.tip.epoch,
            state.names(),
            self._described,
            len(state.extra_tensors),
            scheduler_state(state.scheduler),
            rest_of(state.optimizer, state.parts[0].parameters),
        )

    @property
    def _extras(self) -> list[Tensor]:
        """The extra tensors that this rank saves. They belong to the first part of the state."""
        return [tensor for part in self._state.parts for tensor in part.extras]

    @property
    def _described(self) -> list[tuple[list[int], str]]:
        return [(list(parameter.shape), str(parameter.dtype)) for parameter in self._state.described]

    def save(self, common: bytes) -> StateDict:
        """A copy of this rank's part.

        Args:
            common: from `common` of rank 0.

        Raises:
            ValueError: as `kept_tensors`.
        """
        state = self._state
        found: StateDict = {_key_of_common(len(self._strands.carriers)): common}
        with state.locked():
            kept = kept_tensors(state.optimizer, _on_cpu)
            for strand, part in zip(self._strands.mine, state.parts, strict=True):
                pieces = {str(number): _on_cpu(piece) for number, piece in enumerate(part.parameters)}
                found[f"strand {strand}"] = {"parameters": pieces, "statistics": by_name(kept, part.parameters)}
            if extras := self._extras:
                found["extra tensors"] = {str(number): _on_cpu(tensor) for number, tensor in enumerate(extras)}
        return found

    def misfit(self, given: StateDict) -> str:
        """The reason why this rank can't continue from its part; "" if it can."""
        try:
            self._check(given, common_in(given, len(self._strands.carriers)))
        except ValueError as error:
            return str(error)
        return ""

    def _check(self, given: StateDict, common: Common) -> None:
        state = self._state
        if [(list(shape), dtype) for shape, dtype in common.parameters] != self._described:
            raise ValueError("the checkpoint is of other parameters than this model's")
        self._check_inner(given, common.inner)
        with_scheduler_state(state.scheduler, common.scheduler, "the checkpoint")
        if common.extras != len(state.extra_tensors):
            raise ValueError(f"the checkpoint has {common.extras} extra tensors, this optimizer another number")
        for number, tensor in enumerate(self._extras):
            if not _is_like(given.get("extra tensors", {}).get(str(number)), tensor):
                raise ValueError(f"extra tensor {number} is not in the state, or of another shape or dtype than here")
        options_of(common.stepped, state.optimizer)
        for strand, part in zip(self._strands.mine, state.parts, strict=True):
            saved = given.get(f"strand {strand}", {})
            pieces = saved.get("parameters", {})
            if any(not _is_like(pieces.get(str(number)), mine) for number, mine in enumerate(part.parameters)):
                raise ValueError(f"strand {strand} is not in the state, or of another shape or dtype than here")
            for number, held in kept_in(saved.get("statistics", {}), common.stepped).items():
                mine = part.parameters[number]
                for name, value in held.items():
                    if is_of_parameter(name, value, mine) and value.shape != mine.shape:
                        raise ValueError(f"strand {strand} has {name!r} of another shape than its piece")

    def _check_inner(self, given: StateDict, inner: Rest | None) -> None:
        if inner is not None:
            raise ValueError(OTHER_OUTER)

    @torch.no_grad()
    def load(self, given: StateDict) -> None:
        """Continue from this rank's part. All ranks call this at once, after `misfit` was "" at all of them."""
        common = common_in(given, len(self._strands.carriers))
        with self._state.locked():
            self._load(given, common)
            self._settle(common.epoch, common.names)

    def _load(self, given: StateDict, common: Common) -> None:
        state, strands = self._state, self._strands
        kept: Kept = {}
        for strand, places in zip(strands.mine, strands.numbers, strict=True):
            saved = given[f"strand {strand}"]
            of_strand = kept_in(saved["statistics"], common.stepped)
            for number, place in enumerate(places):
                state.parameters[place].copy_(saved["parameters"][str(number)])
                kept[place] = of_strand.get(number, {})
        load_exactly(state.optimizer, kept, options_of(common.stepped, state.optimizer))
        if state.scheduler is not None:
            state.scheduler.load_state_dict(with_scheduler_state(state.scheduler, common.scheduler, "the checkpoint"))
        for number, tensor in enumerate(self._extras):
            tensor.copy_(given["extra tensors"][str(number)])


class OuterCheckpoint(StrandCheckpoint):
    """The same with an outer optimizer: it steps this rank's strands of the anchors, which the state has then.

    Args:
        state, strands: see `StrandCheckpoint`.
        drift: how far the model is from the anchors.
    """

    def __init__(self, state: State, strands: Strands, drift: Drift) -> None:
        super().__init__(state, strands)
        self._drift = drift

    @property
    def _optimizers(self) -> list[torch.optim.Optimizer]:
        return [self._drift.inner, *super()._optimizers]

    @property
    def _placed(self) -> Placed:
        return Placed(self._strands.group, parameters_of(self._drift.inner))

    def state_dict(self) -> StateDict:
        """See `Checkpoint`."""
        state, drift, stepped = self._state, self._drift, self._gathered()
        inner = gathered(self._placed, drift.inner, parameters_of(drift.inner))
        anchors = self._strands.collect({n: p.detach() for n, p in enumerate(state.parameters) if p.requires_grad})
        if not inner:
            return {}
        stepped = after_saving(state.optimizer, stepped)
        found = self._named(after_saving(drift.inner, inner))
        found["shoal"]["outer"] = stepped
        found["shoal"]["drift"] = {**drift.state_dict(), "anchor": list(anchors.values()), "residuals": []}
        return found

    def _given(self, own: StateDict, ours: Mapping[str, Any]) -> list[StateDict]:
        return [own, ours["outer"]] if "drift" in ours else [own]

    def _scatter(self, whole: WholeState) -> None:
        state, strands, drift = self._state, self._strands, self._drift
        scatter(self._placed, drift.inner, whole.given[0])
        self._rewind()
        for anchor, piece in zip(state.parameters, strands.pieces, strict=True):
            anchor.copy_(piece)
        moved = None if whole.drift is None else {name: whole.drift[name] for name in ("samples", "steps")}
        moved = shared_by_all(strands.group, moved)
        if moved is None:
            state.optimizer.state.clear()
            drift.reset()
            drift.forget_residuals()
            return
        scatter(strands, state.optimizer, whole.given[1])
        anchors = {n: like for n, like in enumerate(state.described) if like.requires_grad}
        if whole.drift is not None:
            each = zip(anchors.items(), whole.drift["anchor"], strict=True)
            anchors = {number: anchor.to("cpu", like.dtype) for (number, like), anchor in each}
        anchors = strands.deal(anchors)
        drift.load_state_dict({**moved, "anchor": [anchors[place] for place in sorted(anchors)]})

    def _rewind(self) -> None:
        if self._drift.schedule is not None:
            self._drift.schedule.rewind()

    def _common(self) -> Common:
        drift = self._drift
        inner, moved = rest_of(drift.inner, parameters_of(drift.inner)), drift.state_dict()
        return replace(super()._common(), inner=inner, samples=moved["samples"], steps=moved["steps"])

    def save(self, common: bytes) -> StateDict:
        """See `StrandCheckpoint`."""
        inner = self._drift.inner
        return super().save(common) | {"inner": by_name(kept_tensors(inner, torch.clone), parameters_of(inner))}

    def _check_inner(self, given: StateDict, inner: Rest | None) -> None:
        if inner is None:
            raise ValueError(OTHER_OUTER)
        options_of(inner, self._drift.inner)
        kept_in(given.get("inner", {}), inner)

    def _load(self, given: StateDict, common: Common) -> None:
        super()._load(given, common)
        drift, inner = self._drift, common.inner
        assert inner is not None  # see `_check_inner`
        self._strands.gather_parameters()  # the user loads the model itself
        load_exactly(drift.inner, kept_in(given["inner"], inner), options_of(inner, drift.inner))
        self._rewind()
        anchors = [anchor.detach().clone() for anchor in self._state.stepped]
        drift.load_state_dict({"anchor": anchors, "samples": common.samples, "steps": common.steps})


# -- between the pieces of all ranks and whole tensors at rank 0


def gathered(spread: Spread, optimizer: torch.optim.Optimizer, own: Sequence[Tensor]) -> StateDict:
    """Gather the state of an optimizer. All ranks call this at once.

    Args:
        spread: how the values lie.
        optimizer: the optimizer.
        own: its parameters.

    Returns:
        At rank 0, the state dict that an optimizer of the whole parameters would have; {} at other ranks.
    """
    kept = [optimizer.state.get(parameter, {}) for parameter in own]
    mine = {
        (name, number)
        for places in spread.numbers
        for number, place in enumerate(places)
        for name, value in kept[place].items()
        if spread.is_cut(name, value, own[place])
    }
    wholes: dict[str, dict[int, Tensor]] = {}
    for name, pairs in groupby(shared_by_all(spread.group, sorted(mine)), itemgetter(0)):
        values = {}
        for (_, number), places in product(list(pairs), spread.numbers):
            value, like = kept[places[number]].get(name), own[places[number]]
            values[places[number]] = value if spread.is_cut(name, value, like) else torch.zeros_like(like)
        wholes[name] = spread.collect(values)
    if spread.rank:
        return {}
    with without_hooks(optimizer):
        groups = optimizer.state_dict()["param_groups"]
    state = {
        number: {
            name: wholes[name][number] if spread.is_cut(name, value, own[place]) else copy.deepcopy(value)
            for name, value in kept[place].items()
        }
        for number, place in enumerate(spread.numbers[0])
        if kept[place]
    }
    return {"state": state, "param_groups": _numbered(spread.described_groups(groups))}


def scatter(spread: Spread, optimizer: torch.optim.Optimizer, whole: StateDict | None) -> None:
    """Load a state of the whole parameters, the reverse of `gathered`. All ranks call this at once.

    Args:
        spread, optimizer: see `gathered`.
        whole: at rank 0 the state dict, which stays as it is; None at other ranks.
    """
    skeleton: Kept = {}
    for number, held in ({} if whole is None else whole["state"]).items():
        skeleton[number] = {name: _told_of(name, value, spread.model[number]) for name, value in held.items()}
    told, given = shared_by_all(spread.group, (skeleton, [] if whole is None else whole["param_groups"]))
    wholes: dict[str, dict[int, Tensor]] = {}
    for number, held in told.items():
        for name in [name for name, value in held.items() if _is_elsewhere(value)]:
            wholes.setdefault(name, {})[number] = (told if whole is None else whole["state"])[number][name]
    dealt = {name: spread.deal(wholes[name]) for name in sorted(wholes)}
    state = {
        places[number]: {
            name: dealt[name][places[number]] if _is_elsewhere(value) else copy.deepcopy(value)
            for name, value in held.items()
        }
        for places in spread.numbers
        for number, held in told.items()
    }
    groups = [
        {name: value for name, value in options.items() if name not in OF_PARAMETERS}
        | {name: value for name, value in group.items() if name in OF_PARAMETERS}
        for group, options in zip(optimizer.param_groups, given, strict=True)
    ]
    with without_hooks(optimizer):
        load_as_saved(optimizer, {"state": state, "param_groups": _numbered(groups)})


def _numbered(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The groups with numbers in place of parameters, in the form of a state dict."""
    numbers = iter(range(sum(len(group["params"]) for group in groups)))
    return [{**group, "params": [next(numbers) for _ in group["params"]]} for group in groups]


def _told_of(name: str, value: object, parameter: Tensor) -> object:
    """What the other ranks hear of a value in a whole state: of a tensor like its parameter, one without memory. A
    counter gets the shape that torch gives new ones, which checkpoints of ranks have."""
    if not isinstance(value, Tensor):
        return value
    return value.to("meta") if is_of_parameter(name, value, parameter) else value.reshape(())


def _is_elsewhere(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def is_of_parameter(name: str, value: object, parameter: Tensor) -> bool:
    """Whether a value in a whole state should have an element for each element of its parameter. Counters, and other
    0-dim tensors beside a parameter that is none, are numbers for all of it."""
    if not isinstance(value, Tensor) or is_per_tensor(name, value):
        return False
    return value.dim() > 0 or parameter.dim() == 0


def check_fits(state: StateDict, groups: Sequence[dict[str, Any]], model: Sequence[Tensor]) -> None:
    """At rank 0: check that a torch optimizer's state dict is of these parameters.

    Raises:
        ValueError: if it has other groups, or a tensor for a parameter of another shape.
    """
    given = state["param_groups"]
    if [len(group["params"]) for group in given] != [len(group["params"]) for group in groups]:
        raise ValueError("the state dict has other parameter groups than this optimizer")
    for number, held in state["state"].items():
        for name, value in held.items():
            if is_of_parameter(name, value, model[number]) and value.shape != model[number].shape:
                raise ValueError(
                    f"the state dict has a {name} of shape {tuple(value.shape)} for parameter {number}, which is of "
                    f"shape {tuple(model[number].shape)}"
                )


# -- what a checkpoint of `torch.distributed` has


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


def kept_in(saved: Mapping[str, Any], rest: Rest) -> Kept:
    """A copy of what the optimizer keeps: the tensors that are real state, and the rest.

    Raises:
        ValueError: if a tensor is missing.
    """
    kept: Kept = {}
    try:
        for number, name in rest.statistics:
            kept.setdefault(number, {})[name] = saved[name][str(number)].detach().clone()
    except KeyError as error:
        raise ValueError(f"the optimizer of the checkpoint keeps {error.args[0]}, which this one does not") from error
    for number, name, value in rest.values:
        kept.setdefault(number, {})[name] = value
    return kept


def _is_like(value: Any, mine: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == mine.shape and value.dtype == mine.dtype


def _on_cpu(tensor: Tensor) -> Tensor:
    """A copy of the tensor on the CPU."""
    return tensor.detach().to("cpu", copy=True)

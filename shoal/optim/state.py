"""The state of one peer's training: parameters, optimizer, scheduler and extra tensors. The peer steps it, averages it,
copies it for newcomers and takes it over from others."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from shoal.averaging.exchange import Vector
from shoal.averaging.options import term_of
from shoal.compression import Compression, NoCompression, TensorRole, plan_codecs
from shoal.flat import FlatBuffer, Layout, names_of_members, parameters_of, pick_kernels
from shoal.flat.allocation import memory_for
from shoal.optim import tree
from shoal.optim.as_saved import load_as_saved
from shoal.optim.closures import Closure
from shoal.optim.contents import (
    FORM,
    NOT_SENT,
    Contents,
    Others,
    device_of,
    in_flat_memory,
    options_for,
    place,
    place_of,
)
from shoal.optim.division import Division, Undivided, name_of
from shoal.optim.eval_mode import EvalMode, Mode
from shoal.optim.group_options import GroupOptions, check_options, structure
from shoal.optim.host_copy import names_in
from shoal.optim.kept import Keeper, Kept
from shoal.optim.loads import hash_of
from shoal.optim.loss_steps import LossSteps, of_averages
from shoal.optim.own_form import check_form, give_form, has_torchs_form
from shoal.optim.pieces import OnHost, Pieces
from shoal.optim.placement import Placement
from shoal.optim.plain import is_plain, plain, plain_or, restored
from shoal.optim.result import StepResult
from shoal.optim.settings import Settings, Stepped
from shoal.p2p.errors import Refused
from shoal.swarm.protocol.line import Line, line_to
from shoal.swarm.protocol.messages import Begin
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.tip import Tip
from shoal.transfer.donor import Copies, EncodedState, FrozenState, Unsendable, encoded
from shoal.transfer.transfer import Downloaded, NoMemoryForState

log = logging.getLogger(__name__)

OWN_FORM = "optimizer"  # under "shoal" of a state dict: the optimizer's own one, if it has another form than torch's
IN_EVAL = "in_eval"  # there, too: whether the wrapped optimizer was in eval mode
OTHERS = "\0others"  # the kind of the tensors of the tree: no statistic has that name
TENSORS_OF_ADAM = 3  # the parameters and two moments
SCALARS_BYTES = 1 << 16  # of a small state: options, counts of steps

TENSORS_OF_OPTIMIZER = 16
"""Limits the size of a download: the parameter itself, and 15 tensors of its shape, in float32 or in the parameter's
dtype. Few optimizers keep more; `max_state_bytes` is for these."""

MANIFEST_BYTES = 1 << 26
"""The allowance for the options, counters and padding of a downloaded state."""

WANTED_SECONDS = 120.0
"""After a newcomer has asked for a state that the user had changed meanwhile, each step makes a copy for so long."""

AS_OBJECT = "shoal.travels() says how objects of a class are sent"

PLAIN = frozenset({Tensor, int, float, bool, str, bytes, type(None)})
"""The types of values that travel for certain."""
PLAIN_OPTIONS = PLAIN | {tuple, list}
"""Those of options. `check_options` looks into lists."""

MakePieces = Callable[[Sequence[Tensor], Sequence[Tensor], Placement], Pieces]
Load = Callable[["State", dict[str, Any], dict[str, Any]], None]
Index = Annotated[int, msgspec.Meta(ge=0)]
Groups = Sequence[dict[str, Any]]
Name = Annotated[str, msgspec.Meta(max_length=256)]


class Scalars(msgspec.Struct, frozen=True):
    """The part of a state that is not tensors, as plain data.

    Attributes:
        groups: the options of each parameter group (learning rate, momentum, …), of a release before `tree`.
        statistics: the tensors of the optimizer's state, in the order of the layout: (parameter, name).
        values: everything else in the optimizer's state, of a release before `tree`: (parameter, name, value).
        scheduler: the scheduler's state; None without a scheduler.
        extras: the number of extra tensors, which end the layout.
        tree: everything else that the optimizer keeps, see `Contents`; b"" in a state of a release before.
        tensors: the number of tensors of the tree, which follow the statistics.
    """

    groups: list[dict[Name, Any]]
    statistics: list[tuple[Index, Name]]
    values: list[tuple[Index, Name, Any]]
    scheduler: dict[Name, Any] | None
    extras: int
    tree: bytes = b""
    tensors: Index = 0


@dataclass(frozen=True, slots=True)
class StatePart:
    """A part of a state, which is copied and loaded by itself: parameters, with the optimizer's state of them, and
    extra tensors. Every part has also all of the state that is not tensors."""

    parameters: Sequence[Tensor]
    extras: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class PartState:
    """The state of a part.

    Attributes:
        tensors: in the order of a snapshot.
        scalars: the rest.
        part: the part.
    """

    tensors: Sequence[Tensor]
    scalars: Scalars
    part: StatePart

    @classmethod
    def of(cls, state: Downloaded, part: StatePart) -> PartState:
        """The downloaded state of a part.

        Raises:
            ValueError: if it is no state.
            NoMemoryForState: if there is no memory to decode it.
        """
        try:
            with memory_for("the state that was downloaded", NoMemoryForState):
                return cls(state.tensors(), _scalars.decode(state.scalars), part)
        except RecursionError as error:
            raise ValueError(f"the state is nested too deeply: {error}") from error


@dataclass(frozen=True, slots=True)
class _Checked:
    """What a state of a part sets, apart from the optimizer's state.

    Attributes:
        pairs: this peer's parameters and extra tensors, each with its values.
        part: the part.
        others: what else the optimizer keeps, with the options in the types that they have here.
        scheduled: the scheduler's state; {} without a scheduler.
    """

    pairs: list[tuple[Tensor, Tensor]]
    part: StatePart
    others: Others
    scheduled: dict[str, Any]


class TrainingState:
    """The parameters of one peer, its optimizer's state, its scheduler and its extra tensors.

    Args:
        optimizer: the local optimizer.
        scheduler: a scheduler that is stepped once per global epoch, or None.
        extra_tensors: other tensors that newcomers get.
        flat: move the parameters into flat memory now (`parameter.data` becomes a view of it), and the tensors of the
            optimizer's state after the first step. If False, all tensors stay where they are.
        pinned: keep the parameters in pinned host memory, which a GPU reaches directly.
        frozen: whether frozen parameters are part of the state.
        division: how the state is divided into parts; not at all when None.

    Attributes:
        division: as given; never None.
        parameters: the optimizer's parameters that are part of the state.
        parts: the parts of the state that are here, see `Division`; of extra tensors, the run's first part has all.
        memory: with `flat`, the flat memory of the parameters.
        was_taken_whole: whether the optimizer holds all of the state that was loaded last.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        extra_tensors: Sequence[Tensor],
        *,
        flat: bool = True,
        pinned: bool = False,
        frozen: bool = True,
        division: Division | None = None,
    ) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler
        self.extra_tensors = list(extra_tensors)
        own = parameters_of(optimizer)
        self.parameters: list[Tensor] = [parameter for parameter in own if frozen or parameter.requires_grad]
        self._is_flat = flat
        if flat:
            self.memory = FlatBuffer.adopt(self.parameters, pinned=pinned)
        self.division: Division = Undivided(own) if division is None else division
        self.parts = [
            StatePart(parameters, [] if number else self.extra_tensors)
            for number, parameters in zip(self.division.mine, self.division.divided(self.parameters), strict=True)
        ]
        # At the last `adopt_statistics`: the tensors in the optimizer's state, and those that are in flat memory.
        self._found: list[Tensor] = []
        self._held: list[Tensor] = []
        self._keeps_more = self._keeps_shared = False  # whether not all of its state is plain values, and tensors there
        self.was_taken_whole = True
        self.adopt_statistics()

    def adopt_statistics(self) -> None:
        """Move new tensors of the optimizer's state into flat memory. Sparse ones, such as the momentum that SGD makes
        of sparse gradients, become dense before. The optimizer steps with either."""
        state = self.optimizer.state
        own = [state[parameter] for parameter in self.parameters if parameter in state]
        kept = [value for values in own for value in values.values()]
        found = [value for value in kept if isinstance(value, Tensor)]
        self._keeps_more = len(state) > len(own) or not PLAIN.issuperset(map(type, kept))
        if _are_same(found, self._found):
            return
        for index, name, value in list(self._kept()):
            if isinstance(value, Tensor) and value.layout is not torch.strided:
                self.optimizer.state[self.parameters[index]][name] = value.to_dense()
        tensors = self._statistics()
        if not _are_same(tensors, self._held):
            if self._is_flat and not self._can_adopt(tensors):
                return  # the next call tries again
            self._held = tensors
        self._found = [value for _, _, value in self._kept() if isinstance(value, Tensor)]
        self._keeps_shared = len(tensors) < len(self._found)

    def why_it_cannot_travel(self, *, at_start: bool = False) -> str:
        """The name of what newcomers can't be sent, and where the optimizer keeps it; "" if there is nothing.

        Args:
            at_start: look at everything. Later on, plain values and tensors in flat memory need no look.
        """
        options = [value for group in self._options() for value in group.values()]
        has_more = self._keeps_more or self._keeps_shared or not PLAIN_OPTIONS.issuperset(map(type, options))
        if not (at_start or has_more):
            return ""
        try:
            contents = Contents.of(self.optimizer, self.parameters, self._options(), with_form=at_start)
            contents.encoded(contents.with_places(self.parameters), names_of(self.optimizer, self.parameters))
        except tree.CannotTravel as error:
            return str(error)
        return ""

    def _can_adopt(self, tensors: list[Tensor]) -> bool:
        """Move the tensors into flat memory, if there is memory for that. They work where they are, too, and a step
        that was made must not fail for it."""
        try:
            with memory_for("the optimizer's state in one piece", MemoryError):
                FlatBuffer.adopt(tensors)
        except MemoryError as error:
            log.info("%s: it stays where the optimizer has made it", error)
            return False
        return True

    def digest(self) -> bytes:
        """The blake3 hash of the parameters of each part that is here, 32 bytes each."""
        return b"".join(map(hash_of, self.division.hashed(self.parameters, self.memory.flat)))

    def _statistics(self) -> list[Tensor]:
        return [tensor for _, _, tensor in in_flat_memory(list(self._kept()))]

    def _kept(self, parameters: Sequence[Tensor] | None = None) -> Iterator[tuple[int, str, Any]]:
        """Yield (parameter's number, name, value) of everything in the optimizer's state of these parameters; of all
        parameters when None."""
        for index, parameter in enumerate(self.parameters if parameters is None else parameters):
            for name, value in self.optimizer.state.get(parameter, {}).items():
                yield index, name, value

    def statistics(self, name: str) -> list[Tensor | None]:
        """The tensors called `name` in the optimizer's state, one for each parameter; None for a parameter without
        one. (Several optimizers in one keep other tensors of some parameters than of others.)

        Raises:
            ValueError: if the optimizer has state of parameters, but of none a tensor of this name and the parameter's
                shape, or only complex ones.
        """
        held = [self.optimizer.state.get(parameter, {}) for parameter in self.parameters]
        found = [
            value if _is_statistic(value := of.get(name), parameter) else None
            for of, parameter in zip(held, self.parameters, strict=True)
        ]
        if any(held) and all(value is None for value in found):
            pairs = [(key, value, p) for of, p in zip(held, self.parameters, strict=True) for key, value in of.items()]
            alike = dict.fromkeys(key for key, value, parameter in pairs if _is_statistic(value, parameter))
            raise ValueError(
                f"average_opt_statistics has {name!r}, and {names_of_members(self.optimizer)} keeps no such tensor of "
                f"real numbers and of its parameter's shape; it keeps {', '.join(alike) or 'none'}"
            )
        return found

    # -- copies for newcomers

    def snapshot(
        self,
        tip: Tip,
        compression: Compression,
        averaged: Collection[str] = (),
        groups: Groups | None = None,
        part: StatePart | None = None,
        values: Sequence[Tensor] | None = None,
    ) -> FrozenState:
        """Copy the state, or a part of it, for a newcomer.

        Args:
            tip: the name of the state.
            compression: the codec with which the tensors are sent.
            averaged: names of statistics that peers average. All others are sent exactly, because no average would make
                them equal again.
            groups: the options of the parameter groups; by default those that the groups hold now.
            part: the part to copy; when None, the first, which is all of the state of a single process.
            values: the values of the parameters, if the parameters have others now.

        Raises:
            ValueError: if the optimizer holds something that is not plain data, or if the compression has no codec for
                a tensor.
        """
        part = self.parts[0] if part is None else part
        options = self._options() if groups is None else groups
        contents = Contents.of(self.optimizer, part.parameters, options)
        # Statistics with the same name follow each other. So few codec spans suffice, even for many parameters.
        tensors = contents.with_places(part.parameters)
        count = len(tensors)
        encoded_tree = contents.encoded(tensors, names_of(self.optimizer, part.parameters))
        others = [tensor.detach().view(tree.carrier(tensor.dtype)) for tensor in tensors[count:]]
        dense = [tensor.detach() for tensor in [*tensors[:count], *others, *part.extras]]
        if values is not None:
            dense[: len(values)] = [value.detach() for value in values]
        memory = Copies.of(dense).memory
        scalars = Scalars(
            groups=[],
            statistics=[(index, name) for index, name, _ in contents.statistics],
            values=[],
            scheduler=scheduler_state(self.scheduler),
            extras=len(part.extras),
            tree=encoded_tree,
            tensors=len(others),
        )
        described = [("", TensorRole.PARAMETER)] * len(part.parameters)
        described += [(name, TensorRole.OPTIMIZER) for _, name, _ in contents.statistics]
        described += [(OTHERS, TensorRole.OPTIMIZER)] * len(others)
        described += [("", TensorRole.UNSPECIFIED)] * len(part.extras)
        kinds, roles = zip(*described, strict=True)
        exact = {n for n, (kind, role) in enumerate(described) if role is TensorRole.OPTIMIZER and kind not in averaged}
        codecs = plan_codecs(compression, memory.layout, roles, exact=exact, kinds=kinds)
        return FrozenState.of(tip, memory, scalars, codecs)

    def load(self, state: Downloaded) -> None:
        """Take over a downloaded state of one part. Raises as `prepare`, and then nothing has changed."""
        self.prepare(PartState.of(state, self.parts[0]))()

    def prepare(self, *given: PartState) -> Callable[[], None]:
        """Prepare to take over the state of parts: check that it fits, and allocate all the memory that it needs.
        Nothing changes yet.

        Returns:
            A function that takes the state over. It allocates no memory for tensors.

        Raises:
            ValueError: if the state does not fit its part.
            NoMemoryForState: if there is no memory for it.
        """
        with memory_for("the state that this peer would load", NoMemoryForState):
            kept: dict[Tensor, dict[Any, Any]] = {}
            try:
                checked = [self._checked(each, kept) for each in given]
            except (TypeError, LookupError, AttributeError, ArithmeticError) as error:  # of what anybody may have sent
                raise ValueError(f"the state can't be read: {error!r:.200}") from error
            pairs = [pair for each in checked for pair in each.pairs]
            moved, memory = self._memory_for_statistics([each.part for each in given], kept)
            views = [] if memory is None else memory.views()
            if moved:  # each gets its values where it moves to
                values, moving = {id(own): value for own, value in pairs}, set(map(id, moved))
                pairs = [(own, value) for own, value in pairs if id(own) not in moving]
                pairs += [(view, values.get(id(one), one)) for view, one in zip(views, moved, strict=True)]

        @torch.no_grad()
        def load() -> None:
            for own, value in pairs:
                own.copy_(value)
            for one, view in zip(moved, views, strict=True):
                one.data = view
            if memory is not None:
                self._held = moved
            for parameter in (parameter for each in given for parameter in each.part.parameters):
                self.optimizer.state.pop(parameter, None)
                if parameter in kept:
                    self.optimizer.state[parameter] = kept[parameter]
            for key in [key for key in self.optimizer.state if not isinstance(key, Tensor)]:
                del self.optimizer.state[key]
            for each in checked:
                self.optimizer.state.update(each.others.rest)
                for group, options in zip(self.optimizer.param_groups, each.others.groups, strict=True):
                    group.update(options)
                give_form(self.optimizer, each.others.form)
                if self.scheduler is not None:
                    self.scheduler.load_state_dict(each.scheduled)
            changed = [where for each in checked if (where := self._where_changed(each))]
            self.was_taken_whole = not changed
            if changed:
                log.warning(
                    "the optimizer does not hold what was loaded into it: %s differs. %s changes what is put into its "
                    "state or its options, so this peer may compute other numbers than those from which it has them",
                    changed[0],
                    type(self.optimizer).__qualname__,
                )

        return load

    def _where_changed(self, given: _Checked) -> str:
        """The first place where the optimizer does not hold what was just loaded, type by type; "" if there is none."""
        part = given.part
        try:
            now = Contents.of(self.optimizer, part.parameters, self._options())
            tensors, names = now.with_places(part.parameters), names_of(self.optimizer, part.parameters)
            wanted = given.others.as_tree
            if now.encoded([*tensors], names) == tree.encode(wanted, [*tensors]):
                return ""
        except Exception as error:  # noqa: BLE001 (it holds something that can't be looked at)
            return str(error)
        return place_of(names, tree.difference(wanted, now.others) or ())

    def _checked(self, given: PartState, kept: dict[Tensor, dict[Any, Any]]) -> _Checked:
        """Check that the state of a part fits it, and add the optimizer's state after the load to `kept`, by parameter.

        Raises:
            ValueError: if it does not.
        """
        tensors, scalars, part = given.tensors, given.scalars, given.part
        count, extras, mine = len(part.parameters), len(part.extras), self._options()
        parameters = len(tensors) - len(scalars.statistics) - scalars.tensors - scalars.extras
        if parameters != count or scalars.extras != extras:
            told = f"{parameters} parameters and {scalars.extras} extra tensors"
            raise ValueError(f"the state has {told}; this peer has {count} and {extras}")
        copied = [*tensors[:count], *tensors[len(tensors) - extras :]]
        pairs = list(zip([*part.parameters, *part.extras], copied, strict=True))
        for index, (own, theirs) in enumerate(pairs):
            if own.shape != theirs.shape or own.dtype != theirs.dtype:
                raise ValueError(
                    f"tensor {index} of the state is {theirs.dtype} of shape {tuple(theirs.shape)}, and this peer's is "
                    f"{own.dtype} of shape {tuple(own.shape)}: do all peers train the same model?"
                )
        if any(i >= count for i, _ in scalars.statistics) or any(i >= count for i, _, _ in scalars.values):
            raise ValueError(f"the state has statistics of a parameter that does not exist: there are {count}")
        statistics = self._take_statistics(given, kept)
        others = self._others_of(given, [own for own, _ in statistics])
        if len(others.groups) != len(mine):
            raise ValueError(f"the state has {len(others.groups)} parameter groups, this peer {len(mine)}")
        others = dataclasses.replace(others, groups=options_for(self.optimizer, mine, others.groups))
        are_statistics = {id(tensor) for tensor, _ in statistics}
        for index, values in others.values.items():
            held = kept.setdefault(part.parameters[index], {})
            if held.keys() & values.keys() or any(id(value) in are_statistics for value in values.values()):
                raise ValueError(f"the state of parameter {index} has a statistic twice")
            held.update(values)
        scheduled = with_scheduler_state(self.scheduler, scalars.scheduler, "the state")
        return _Checked([*pairs, *statistics], part, others, scheduled)

    def _others_of(self, given: PartState, statistics: Sequence[Tensor]) -> Others:
        """What the optimizer keeps beside the statistics, which will be these."""
        scalars, parameters = given.scalars, given.part.parameters
        if not scalars.tree:
            return Others.of_older(scalars.groups, scalars.values)
        end = len(given.tensors) - scalars.extras
        theirs = [tensor.clone() for tensor in given.tensors[end - scalars.tensors : end]]
        mine = Contents.of(self.optimizer, parameters, self._options()).others
        tensors, kinds = [*parameters, *statistics, *theirs], tree.kinds_of(self.optimizer)
        own = len(parameters) + len(statistics)
        others = Others.decoded(scalars.tree, tensors, mine, len(parameters), kinds, own)
        place(others, self.optimizer, parameters, tensors[:own])
        check_form(self.optimizer, mine.get(FORM), others.form)
        return others

    def _options(self) -> list[dict[str, Any]]:
        """The present options of the parameter groups that newcomers get."""
        return [{k: v for k, v in group.items() if k not in NOT_SENT} for group in self.optimizer.param_groups]

    def _take_statistics(self, given: PartState, kept: dict[Tensor, dict[Any, Any]]) -> list[tuple[Tensor, Tensor]]:
        """Add the statistics after the load to `kept`, by parameter and name: the tensors that the optimizer has
        already, and new ones where it has none that fit. Returns the tensors, each with its values."""
        scalars, parameters, pairs = given.scalars, given.part.parameters, []
        count = len(parameters)
        values = given.tensors[count : count + len(scalars.statistics)]
        options = {own: group for group in self.optimizer.param_groups for own in group["params"]}
        for (index, name), theirs in zip(scalars.statistics, values, strict=True):
            parameter = parameters[index]
            mine = self.optimizer.state.get(parameter, {}).get(name)
            if not isinstance(mine, Tensor) or mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                device = device_of(theirs, parameter, options.get(parameter, {}))
                # In flat memory, a new tensor gets its memory there: until then, one element stands for all.
                mine = (
                    torch.empty((), dtype=theirs.dtype, device=device).expand(theirs.shape)
                    if self._is_flat
                    else torch.empty_like(theirs, device=device)
                )
            pairs.append((mine, theirs))
            if name in kept.setdefault(parameter, {}):
                raise ValueError(f"the state of parameter {index} has {name!r:.60} twice")
            kept[parameter][name] = mine
        return pairs

    def _memory_for_statistics(
        self, loaded: Sequence[StatePart], kept: dict[Tensor, dict[Any, Any]]
    ) -> tuple[list[Tensor], FlatBuffer | None]:
        """Allocate flat memory for the tensors of the optimizer's state after a load, unless they are there already.

        Args:
            loaded: the parts that are loaded.
            kept: the state that the optimizer will keep of their parameters.

        Returns:
            The tensors that are to move, and the memory for them; [] and None if there are none.
        """
        if not self._is_flat:
            return [], None
        replaced = {parameter for part in loaded for parameter in part.parameters}
        held = [
            value
            for _, _, value in in_flat_memory(
                [
                    (index, name, value)
                    for index, parameter in enumerate(self.parameters)
                    for name, value in (kept if parameter in replaced else self.optimizer.state)
                    .get(parameter, {})
                    .items()
                ]
            )
        ]
        return ([], None) if _are_same(held, self._held) else (held, FlatBuffer.for_adoption(held))


class State(TrainingState):
    """This peer's state in a run, with its name in the run and its steps.

    One thread at a time changes it. Other threads may take snapshots meanwhile.

    Args:
        stepped: the optimizer and the scheduler that are stepped once per epoch; and the copy of the parameters on the
            host that this optimizer steps, if it does not step the model itself.
        users: the optimizer and the scheduler that the user has given: with an outer optimizer, the inner ones.
        extra_tensors: see `TrainingState`. Floating-point ones are averaged, too.
        settings: the settings of the `Optimizer`.
        division: how the state is divided into parts.
        pieces: makes the way between the optimizer's parameters (or what they are copies of) and the model, given
            these, the frozen parameters, and their placement.
        keeper: keeps the state that this peer leaves.

    Attributes:
        tip: the name of the state.
        line: the lineages through which this state went, the tip's last.
        state_digest: the blake3 hash of the parameters, 32 bytes for each part.
        trained, frozen: the model's parameters that require gradients, and the others.
        param_names: the names of `parameters`, if the user has given any.
        stepped: the optimizer's own parameters that belong to `trained`.
        pieces: what is stepped, and the way between that and the model.
        of_model: the same, but for copies on the host: what they are copies of.
        shared: the averaged part of the state: parameters and statistics.
        buffers: the extra tensors that are averaged.
        model_memory: the flat memory of the model's parameters.
        options: the options of the parameter groups: this peer's own, and the run's.
        grad_norm: the norm of the last averaged gradient (or drift) before it was clipped; None without
            `max_grad_norm`.

    Raises:
        ValueError: if there is nothing to train, if the optimizer keeps something that newcomers can't be sent, or as
            `FlatBuffer.adopt`.
    """

    def __init__(
        self,
        stepped: Stepped,
        users: Stepped,
        extra_tensors: Sequence[Tensor],
        settings: Settings,
        division: Division,
        pieces: MakePieces,
        keeper: Keeper,
    ) -> None:
        optimizer, scheduler, host = stepped
        self._settings, self.wrapped, self.users_scheduler = settings, users.optimizer, users.scheduler
        self.keeper = keeper
        self._averaged = settings.average_opt_statistics
        self.grad_norm: float | None = None
        self._made: FrozenState | None = None  # a copy of the state that the last step has made
        self._wanted_until = 0.0  # steps make such copies until then
        # Held while the state changes, and while it is copied; but not while a local step calls the user's closure.
        self._lock = threading.Lock()
        self._is_mid_step = False  # whether a local step is at its closure
        self._step_ended = threading.Condition(self._lock)  # of such a step
        self._steps = LossSteps(optimizer, of_epochs=not settings.use_local_updates)
        self.line = Line()
        self.options = GroupOptions(optimizer, scheduler, host)
        given = stepped.given
        if not any(parameter.requires_grad for parameter in given):
            raise ValueError("no parameter of the optimizer has requires_grad=True: there is nothing to train")
        pinned, frozen = host is not None and host.pinned, settings.sends_frozen or division.always_sends_frozen
        super().__init__(optimizer, scheduler, extra_tensors, pinned=pinned, frozen=frozen, division=division)
        model, memory = (self.parameters, self.memory) if host is None else (host.model, host.memory)
        self.param_names = names_of(optimizer, self.parameters)
        self.model_memory = memory
        self.trained = [parameter for parameter in model if parameter.requires_grad]
        self.frozen = [parameter for parameter in given if not parameter.requires_grad]
        self.stepped = [parameter for parameter in self.parameters if parameter.requires_grad]
        self._sent_frozen = [parameter for parameter in model if not parameter.requires_grad]
        placement = Placement(model, memory, extra_tensors, self.param_names)
        self.of_model = pieces(model, self.frozen, placement)
        self.pieces = self.of_model if host is None else OnHost(self.of_model, host, self.memory)
        self._not_stepped = [parameter for parameter in self.parameters if not parameter.requires_grad]
        self.frozen_pairs = list(zip(self._sent_frozen, self._not_stepped, strict=True))
        compression = settings.state_averaging_compression
        kinds = [name for name in ("", *self._averaged) for _ in self.parameters]
        roles = [TensorRole.OPTIMIZER if name else TensorRole.PARAMETER for name in kinds]
        layout = Layout.of(self.parameters * (1 + len(self._averaged)))
        self.shared = SharedTensors(self._shared_tensors, layout, compression, roles, kinds)
        extras = [tensor for tensor in self.extra_tensors if tensor.is_floating_point()]
        unspecified = [TensorRole.UNSPECIFIED] * len(extras)
        self.buffers = SharedTensors(lambda: extras, Layout.of(extras), compression, unspecified)
        self.tip, self.state_digest = Tip.genesis(settings.run_id), self.digest()
        self._eval = EvalMode(self.wrapped, self.options)
        if what := self.why_it_cannot_travel(at_start=True):
            raise ValueError(f"{what}: peers that join the run could not have it. {AS_OBJECT}")

    @property
    def tip(self) -> Tip:
        """The name of the state. To set it says that the new state follows from the one before."""
        return self._tip

    @tip.setter
    def tip(self, tip: Tip) -> None:
        self._tip = tip
        self.line.went_to(tip)

    def locked(self) -> AbstractContextManager[object]:
        """A context within which no other thread changes the state or copies it."""
        return self._lock

    @property
    def described(self) -> Sequence[Tensor]:
        """Tensors like the model's parameters, whose shapes and dtypes peers compare."""
        return self.division.described(self.parameters)

    @property
    def is_divided(self) -> bool:
        """Whether the state has several parts. Then peers average no part of it, and all have its frozen parameters."""
        return self.division.always_sends_frozen

    @property
    def described_trained(self) -> Sequence[Tensor]:
        """Tensors like the model's parameters that are trained, whose shapes and dtypes peers compare."""
        return [each for each in self.described if each.requires_grad] if self.is_divided else self.trained

    def named(self, by_rank: Sequence[bytes]) -> bytes:
        """One hash of the whole state.

        Args:
            by_rank: the digest of each rank's parts.
        """
        return name_of(self.division.carriers, by_rank) if self.is_divided else by_rank[0]

    @property
    def described_names(self) -> list[str]:
        """The names of `described`, if the user has given any."""
        return self.division.described_names(self.param_names)

    @property
    def described_groups(self) -> list[dict[str, Any]]:
        """The parameter groups of `described`, whose structure peers compare."""
        return self.division.described_groups(self.optimizer.param_groups)

    def agreed(self) -> dict[str, str]:
        """What must be equal in a run, by name: `Settings.agreed`, and what the user's optimizer and scheduler are."""
        return self._settings.agreed() | {
            "optimizer": term_of(names_of_members(self.wrapped)),
            "scheduler": type(self.users_scheduler).__name__,
            "param_groups": term_of(structure(self.described_groups)),
        }

    @property
    def max_nbytes(self) -> int:
        """The largest size of a part of this model's state, in bytes."""
        return self._settings.max_state_bytes or self._nbytes_with(TENSORS_OF_OPTIMIZER) + MANIFEST_BYTES

    @property
    def usual_nbytes(self) -> int:
        """The size of a part of this model's state with Adam, in bytes, or a little more."""
        return self._nbytes_with(TENSORS_OF_ADAM) + SCALARS_BYTES

    def _nbytes_with(self, tensors: int) -> int:
        own = sum(max(4, p.element_size()) * p.numel() for p in [*self.trained, *self._sent_frozen])
        return tensors * (own // len(self.parts)) + sum(t.element_size() * t.numel() for t in self.extra_tensors)

    @property
    def is_averaged_whole(self) -> bool:
        """Whether an average of the state includes everything on which a step depends. Then peers have the same state
        after it."""
        names = {name for _, name, value in self._kept() if isinstance(value, Tensor) and value.dim()}
        return names <= set(self._averaged)

    def take_over(self, *, whole: bool = True) -> None:
        """Continue from the model's parameters as other code has set them, in whatever way. Do not call this while a
        step is under way in the background, because the parameters on the host are newer than the model's.

        The digest stays: it is that of what the last step has made, in every mode. Only at the start of a run, when
        each peer has made its own parameters, the peers compare those.

        Args:
            whole: whether trained parameters are those of the model, too, see `Work.follows_model`.
        """
        with self._lock:
            self.pieces.gather(anew=True)
            self.pieces.follow(whole=whole)
            if not self.tip.epoch:
                self.state_digest = self.digest()

    @contextlib.contextmanager
    def keeping_model(self, yes: bool) -> Iterator[None]:
        """If `yes`, the model has the same values after this context as before, whatever sets it within."""
        model = [*self.trained, *self._sent_frozen] if yes else []
        values = [parameter.detach().clone() for parameter in model]
        try:
            with self.pieces.expecting_writes() if yes else contextlib.nullcontext():
                yield
        finally:
            with torch.no_grad():
                for parameter, value in zip(model, values, strict=True):
                    parameter.copy_(value)

    # -- steps

    def step(self, gradients: AbstractContextManager[None], result: StepResult) -> None:
        """End an epoch: set the state to its average if it was averaged, make the optimizer's step with the averaged
        gradients, and step the scheduler. If the optimizer steps copies, the model stays as it is.

        Args:
            gradients: within, the averages are in the `.grad` of the stepped tensors.
            result: what the step is made with.
        """
        with self._lock, self.pieces.set_aside(self.optimizer):
            if result.with_state:
                self.shared.put(keep_changes=False)
            with gradients, self.options.of_run(result.options):
                self.grad_norm = result.norm
                self._pick_kernels()
                with of_averages(self.optimizer):
                    if result.loss is None:
                        self.optimizer.step()
                    else:
                        self._steps.make_with(result.loss)
            self._end_epoch(result.tip, self.digest)

    def take_average(self, result: StepResult) -> None:
        """End an epoch without a step, after local steps: set the state to its average if it was averaged, but for the
        changes since it was copied for the round, and step the scheduler."""
        with self._lock:
            if result.with_state:
                self.shared.put(keep_changes=True)
            self.options.record()
            of_average = result.with_state
            self._end_epoch(result.tip, lambda: hash_of(self.shared.outputs.flat) if of_average else self.digest())

    def _end_epoch(self, tip: Tip, digest: Callable[[], bytes]) -> None:
        self.options.step_scheduler()
        self._adopt_new_statistics()
        self.tip, self.state_digest = (
            tip,
            digest(),
        )  # before the lock is released: a newcomer's copy is compared with it
        self._copy_if_wanted()

    @property
    def is_in_eval(self) -> bool:
        """Whether the model has the parameters of the wrapped optimizer's eval mode."""
        return self._eval.is_on

    def to_mode(self, mode: Mode, around: Callable[[], AbstractContextManager[None]]) -> None:
        """Call the wrapped optimizer's own `train` or `eval`, see `EvalMode`. They change the model's parameters.

        Args:
            around: makes the context within which the wrapped optimizer has the model's parameters.

        Raises:
            MemoryError: if there is no memory for a copy of the parameters.
        """
        found = b"" if self.is_in_eval else self.digest()
        with self._lock, around():
            if mode == "eval":
                self._eval.begin()
            elif not self._eval.end() and self.digest() != found:
                self._is_rewritten()

    @property
    def is_in_train(self) -> bool:
        """Whether the wrapped optimizer is known to be in train mode."""
        return self._eval.is_in_train

    def _is_rewritten(self) -> None:
        """The parameters are others now. After the first step, that makes them another state."""
        before, self.state_digest = self.state_digest, self.digest()
        if self.tip.epoch and self.state_digest != before:
            self.tip = self.tip.rewritten(self.state_digest)

    def step_locally(self, closure: Closure | None = None) -> None:
        """Make the local optimizer's step with this peer's own `.grad` and options; the epoch goes on.

        Args:
            closure: the user's closure, or None. While the optimizer calls it, other threads may have the lock, but
                newcomers wait for the end of the step.
        """
        with self._lock:
            self.options.enforce()
            self._pick_kernels()
            if closure is None:
                self.optimizer.step()
            else:
                self._is_mid_step = True
                try:
                    self._steps.make(closure, self._unlocked)
                finally:
                    self._is_mid_step = False
                    self._step_ended.notify_all()
            self._adopt_new_statistics()

    @contextlib.contextmanager
    def _unlocked(self) -> Iterator[None]:
        self._lock.release()
        try:
            yield
        finally:
            self._lock.acquire()

    def _pick_kernels(self) -> None:
        # On the host, torch's default kernel passes over the parameters once for each operation. Its fused kernels are
        # as exact and round differently. They make the same bits with any number of threads, because they divide the
        # work between cache lines.
        if all(parameter.device.type == "cpu" for parameter in self.stepped):
            pick_kernels(self.optimizer)

    def _adopt_new_statistics(self) -> None:
        self.adopt_statistics()
        for name in self._averaged:
            self.statistics(name)  # raises if there is no such statistic

    # -- in rounds

    def take(self, rules: Rules) -> None:
        """Copy for the next round the tensors that the trainer continues to change."""
        epoch = self.tip.epoch
        if rules.due_sizes and rules.is_due(epoch):
            self.buffers.take()
        if rules.state_always and rules.may_average_state(epoch):
            self.shared.take()

    def vectors(self, begin: Begin, rules: Rules) -> list[Vector]:
        """The vectors of the state that a round averages."""
        if begin.with_state and not rules.state_always:
            self.shared.take()  # with `state_always`, `take` has copied it before the JOIN
        parts: list[Vector] = [self.buffers] if rules.due_sizes and rules.is_due(begin.tip.epoch) else []
        return [*parts, self.shared] if begin.with_state else parts

    def put(self, rules: Rules, tip: Tip, *, is_averaged: bool) -> None:
        """Set the extra tensors to their average, if the round before `tip` has averaged them."""
        if is_averaged and rules.due_sizes and rules.is_due(tip.epoch - 1):
            self.buffers.put(keep_changes=True)

    def _shared_tensors(self) -> list[Tensor | None]:
        tensors: list[Tensor | None] = [*self.parameters]
        for name in self._averaged:
            tensors += self.statistics(name)
        return tensors

    # -- sent to newcomers, taken over from others, saved and loaded

    def copy_for_newcomer(self, *, rewritten: bool = False) -> FrozenState:
        """A snapshot of the state after the last epoch. In the modes without a copy, the user may have written to the
        parameters since, and then they are no longer the state of that tip.

        Args:
            rewritten: if they are not, return them as another state, see `Tip.rewritten`.

        Raises:
            Rewritten: if they are not. Then the next steps make copies.
            ValueError: if the optimizer holds something that can't be sent.
        """
        with self._lock:
            self._step_ended.wait_for(lambda: not self._is_mid_step)
            if self._made is not None and self._made.tip == self.tip:
                return self._made
            snapshot, digest = self._copy_now(), self.state_digest
        if self._settings.use_local_updates or (found := self._digest_of(snapshot)) in (None, digest):
            return snapshot
        if rewritten and found is not None:
            return dataclasses.replace(snapshot, tip=snapshot.tip.rewritten(found))
        self._wanted_until = time.monotonic() + WANTED_SECONDS
        raise Rewritten("the model was written to since the last step: ask after the next one")

    def copy_of_part(self, number: int) -> FrozenState:
        """A snapshot of one of several parts, after the last epoch. What the user has written to the model since is not
        in it, since the optimizer steps pieces of their own.

        Args:
            number: the number of the part in the run.

        Raises:
            ValueError: if the optimizer holds something that can't be sent.
        """
        with self._lock:
            return self._copy_now(self.parts[self.division.mine.index(number)])

    def _copy_now(self, part: StatePart | None = None) -> FrozenState:
        compression, averaged = self._settings.load_state_compression, self._averaged
        return self.snapshot(self.tip, compression, averaged, self.options.at_tip, part, self._values_in_train())

    def _values_in_train(self) -> list[Tensor] | None:
        """The values of the parameters in train mode; None if they have these values now.

        Raises:
            Rewritten: if this peer is in eval mode, in which its optimizer has another state, too.
        """
        values = self._eval.in_train(self.parameters)
        if values is not None and self._eval.changes_state:
            raise Rewritten("eval() of this peer's optimizer has changed its state: ask after train()")
        return values

    def _digest_of(self, snapshot: FrozenState) -> bytes | None:
        """The digest of a snapshot of the whole state, in which the parameters come first; None if they are on several
        devices, and so in another order."""
        layout = self.memory.layout
        if len(layout.buffers) != len(layout.on("cpu").buffers):
            return None
        pairs = zip(snapshot.buffers, layout.buffers, strict=False)
        return hash_of(buffer[: spec.numel] for buffer, spec in pairs)

    def _copy_if_wanted(self) -> None:
        """Copy the state that a step has made for newcomers, if the user changes it before they can be served."""
        self._made = None
        if time.monotonic() < self._wanted_until:
            with contextlib.suppress(ValueError, MemoryError), memory_for("a copy of the state", MemoryError):
                self._made = self._copy_now()

    def exact_copy(self) -> Kept:
        """An uncompressed copy of the state after the last epoch, with the line of states that leads to it.

        Raises:
            ValueError: if the optimizer holds something that is not plain data, or if the state has several parts.
        """
        if len(self.division.carriers) > 1:
            raise ValueError("a cluster whose ranks carry strands keeps no state that it leaves")
        with self._lock:
            values = self._values_in_train()
            copied = self.snapshot(self.tip, NoCompression(), (), self.options.at_tip, values=values)
            return Kept(copied, self.line.lineages)

    def keep(self) -> str:
        """Keep this state, which this peer leaves, see `Keeper.keep_copy`."""
        return self.keeper.keep_copy(self.nbytes, self.exact_copy)

    @property
    def nbytes(self) -> int:
        """The approximate size of the state in bytes."""
        kept = [value for _, _, value in self._kept() if isinstance(value, Tensor)]
        return sum(t.element_size() * t.numel() for t in [*self.parameters, *kept, *self.extra_tensors])

    def make_ready(self, state: Sequence[Downloaded]) -> Callable[[], None]:
        """Prepare to take over a downloaded state, see `prepare`.

        Args:
            state: the parts of one state, in the order of `parts`.

        Returns:
            A function that takes the state over.

        Raises:
            ValueError: if the state does not fit this model, or if a module has replaced a parameter.
            NoMemoryForState: if there is no memory for it.
        """
        with self._lock:
            self.pieces.gather()
        take = self.prepare(*self._parts_of(state))

        def load() -> None:
            with self._lock:
                take()
                self.options.refresh()
                self.line.take_over(state[0].line, state[0].manifest.tip)
                self.tip = state[0].manifest.tip
                self.state_digest = self.digest()

        return load

    def _parts_of(self, state: Sequence[Downloaded]) -> list[PartState]:
        """The states of the parts, which were downloaded.

        Raises:
            ValueError: if a part is no state.
            NoMemoryForState: if there is no memory to decode one.
        """
        return [self._without_frozen(PartState.of(*each)) for each in zip(state, self.parts, strict=True)]

    def _without_frozen(self, state: PartState) -> PartState:
        """The state without frozen parameters, which a kept state of an older release has."""
        scalars, all_of_them = state.scalars, [] if self._not_stepped else parameters_of(self.optimizer)
        others = len(scalars.statistics) + scalars.tensors + scalars.extras
        if len(state.tensors) - others != len(all_of_them) or not self.frozen:
            return state
        places = [number for number, parameter in enumerate(all_of_them) if parameter.requires_grad]
        new = {old: number for number, old in enumerate(places)}
        if any(old not in new for old, *_ in [*scalars.statistics, *scalars.values]):
            return state  # it is refused
        tensors = [*(state.tensors[place] for place in places), *state.tensors[len(all_of_them) :]]
        renumbered = msgspec.structs.replace(
            scalars,
            statistics=[(new[old], name) for old, name in scalars.statistics],
            values=[(new[old], name, value) for old, name, value in scalars.values],
        )
        return PartState(tensors, renumbered, state.part)

    def state_dict(self) -> dict[str, Any]:
        """The wrapped optimizer's state dict, with the epoch in `["state"]["local_epoch"]` and everything else under
        "shoal"."""
        state = self.wrapped.state_dict()
        own = {} if has_torchs_form(state) else {OWN_FORM: state}
        if own:
            state = {"state": {}, "param_groups": []}
        state["state"] = {**state["state"], "local_epoch": self.tip.epoch}
        state["shoal"] = self.names() | own | ({IN_EVAL: True} if self.is_in_eval else {})
        if self.scheduler is not None:
            state["shoal"]["scheduler"] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any], load: Load) -> None:
        """Continue from a copy of a state dict. The parameters are those of the model.

        The dict is from `state_dict`, or from the wrapped optimizer. With the latter the epoch stays; if the parameters
        are not those of the tip, the tip changes, and the state that had it outranks this one. A dict of hivemind
        has an epoch and nothing else of this class. It counts as `target_batch_size` samples for each epoch.

        Args:
            state_dict: the dict.
            load: loads the wrapped optimizer, see `Work.load_saved`.
        """
        given = tree.copy_of(state_dict)
        epoch = given["state"].pop("local_epoch", None) if has_torchs_form(given) else None
        ours = given.pop("shoal", {})
        given = ours.get(OWN_FORM, given)
        tip = None if epoch is None else self.tip_of(epoch, ours)
        with self._lock:
            self.pieces.gather()
            load(self, given, ours)
            self._eval.forget()
            if self.scheduler is not None and "scheduler" in ours:
                self.scheduler.load_state_dict(ours["scheduler"])
            self.options.refresh()
            self.adopt_statistics()
            in_eval = self._leave_eval() if ours.get(IN_EVAL) is True else None
            if tip is not None:
                self.take_names(tip, ours)
            before, self.state_digest = self.state_digest, self.digest()
            if tip is None and self.tip.epoch and self.state_digest != before:
                self.tip = self.tip.rewritten(self.state_digest)
            if in_eval is not None:
                self._return_to_eval(in_eval)

    def load_stepped(self, given: dict[str, Any]) -> None:
        """Load the state dict of the optimizer that makes the steps of epochs, within `load_state_dict`.

        Raises:
            ValueError: for options that peers can't compare. Then nothing has changed.
        """
        if has_torchs_form(given):
            check_options(given["param_groups"])
        load_as_saved(self.optimizer, given)
        self.follow_model()

    def follow_model(self) -> None:
        """Set all parameters to the model's, within `load_state_dict`."""
        self.pieces.gather(anew=True)
        self.pieces.follow()

    @torch.no_grad()
    def _leave_eval(self) -> list[Tensor]:
        """The state that was loaded is of eval mode: go to train mode. Returns the parameters of eval mode."""
        loaded = [parameter.detach().clone() for parameter in parameters_of(self.wrapped)]
        self._eval.end()
        return loaded

    @torch.no_grad()
    def _return_to_eval(self, loaded: Sequence[Tensor]) -> None:
        """Go back, with the parameters that were loaded: the way there and back has rounded."""
        self._eval.begin()
        for parameter, value in zip(parameters_of(self.wrapped), loaded, strict=True):
            parameter.copy_(value)

    def names(self) -> dict[str, Any]:
        """The tip and the line, for a state dict."""
        named = {"lineage": self.tip.lineage, "samples": self.tip.samples, "line": self.line.to_wire()}
        return {**named, "pin": self.tip.pin} if self.tip.pin else named

    def tip_of(self, epoch: Any, named: dict[str, Any]) -> Tip:
        """The tip of a state dict, from its `local_epoch` and the rest of its names.

        Raises:
            ValueError: if they are no such names.
        """
        number = plain_or(epoch)
        if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number == number // 1:
            raise ValueError(
                f'["state"]["local_epoch"] of the state dict is {epoch!r:.60}: give the number of an epoch'
            )
        lineage, pin = named.get("lineage", self.tip.lineage), plain_or(named.get("pin", 0))
        samples = plain_or(named.get("samples", number * self._settings.target))
        try:
            return msgspec.convert((int(number), lineage, samples, pin), Tip, strict=True)
        except (msgspec.ValidationError, ValueError) as error:
            raise ValueError(f'["shoal"] of the state dict does not name a state: {error}') from error

    def take_names(self, tip: Tip, named: dict[str, Any]) -> None:
        """Continue from a tip, and from the line of a state dict."""
        self.line.take_over(line_to(tip, named.get("line", b"")), tip)
        self.tip = tip


def names_of(optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> list[str]:
    """The names that users gave to these parameters of an optimizer; [] if they gave none."""
    names = names_in(optimizer.param_groups)
    chosen = set(map(id, parameters))
    pairs = zip(names, parameters_of(optimizer), strict=False)
    return [name for name, parameter in pairs if id(parameter) in chosen]


def _are_same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))


def _is_statistic(value: object, parameter: Tensor) -> bool:
    """Whether something in the optimizer's state can be averaged: real numbers, one for each of the parameter's."""
    return isinstance(value, Tensor) and value.shape == parameter.shape and not value.is_complex()


class Rewritten(Refused):
    """This peer's parameters are not those of its tip, because the user has written to them."""


async def for_newcomer(take: Callable[[], FrozenState]) -> EncodedState:
    """Encode the state that `take` copies. Runs on the reactor.

    Raises:
        Unsendable: if the state can't be sent.
    """
    try:
        # In one expression, so that the copy is freed before the encoded state is returned.
        return await asyncio.to_thread(lambda: encoded(take()))
    except ValueError as error:
        raise Unsendable(str(error)) from error


class SharedTensors(Vector):
    """Tensors that rounds average: a copy of them for the round, and their average.

    Args:
        tensors: returns the tensors of this peer; None in place of a tensor that this peer does not have.
        layout: the layout of the tensors.
        compression: the codec of the tensors in a round.
        roles: the role of each tensor.
        kinds: the kind of each tensor among those of its role. If None, all are of the same kind.
    """

    def __init__(
        self,
        tensors: Callable[[], Sequence[Tensor | None]],
        layout: Layout,
        compression: Compression,
        roles: Sequence[TensorRole],
        kinds: Sequence[str] | None = None,
    ) -> None:
        self._tensors, self._roles, layout = tensors, tuple(roles), layout.on("cpu")
        super().__init__(layout, plan_codecs(compression, layout, roles, kinds=kinds))

    @torch.no_grad()
    def take(self) -> None:
        """Copy the tensors for the next round. A tensor that this peer does not have counts as zeros."""
        for mine, tensor in zip(self.inputs.views(), self._tensors(), strict=True):
            mine.zero_() if tensor is None else mine.copy_(tensor)

    @torch.no_grad()
    def put(self, *, keep_changes: bool) -> None:
        """Set the tensors to their average. With `keep_changes`, do so by the delta rule, see `put_average`."""
        views = zip(self._tensors(), self.outputs.views(), self.inputs.views(), self._roles, strict=True)
        for tensor, average, mine, role in views:
            if tensor is not None:
                put_average(tensor, average, mine if keep_changes else None, role)


@torch.no_grad()
def put_average(tensor: Tensor, average: Tensor, before: Tensor | None, role: TensorRole | None) -> None:
    """Set a tensor to its average.

    With `before`, the delta rule applies: the tensor becomes its average plus its change since `before`, where that is
    finite. A statistic of the optimizer may have decayed by more than its average, and the rule would make it negative.
    A negative second moment becomes NaN in an optimizer that takes its root. So if neither the average nor the present
    value is negative anywhere, no element of a statistic becomes smaller than both.

    Args:
        tensor: the tensor to set.
        average: its average, on the CPU.
        before: a copy of the tensor from the beginning of the round. None: there is no delta rule.
        role: the role of the tensor.
    """
    if before is None:
        tensor.copy_(average)
        return
    if not tensor.is_floating_point():  # a counter may be too large for the average's dtype
        tensor.add_((average - before).to(tensor.device, tensor.dtype))
        return
    now = tensor.detach().to(average.device, average.dtype, copy=True)
    moved = average + (now - before).nan_to_num_(0.0, 0.0, 0.0)
    if role is TensorRole.OPTIMIZER and (average >= 0).all() and (now >= 0).all():
        moved = torch.maximum(moved, torch.minimum(average, now))
    tensor.copy_(moved)


def scheduler_state(scheduler: LRScheduler | None) -> dict[str, Any] | None:
    """The plain data in a scheduler's state. It omits the functions that torch leaves there: each peer has its own."""
    if scheduler is None:
        return None
    return {key: plain(value) for key, value in scheduler.state_dict().items() if is_plain(value)}


def with_scheduler_state(scheduler: LRScheduler | None, given: dict[str, Any] | None, where: str) -> dict[str, Any]:
    """The state that a scheduler should load, after `scheduler_state` of another one; {} without schedulers.

    Args:
        scheduler: the scheduler, or None.
        given: that state.
        where: what that state is in, for errors.

    Raises:
        ValueError: if only one of the two is there, or if the state does not fit.
    """
    if (scheduler is None) != (given is None):
        raise ValueError(f"{where} has a scheduler and this peer has none, or the other way round")
    if scheduler is None or given is None:
        return {}
    state = dict(scheduler.state_dict())
    if unknown := set(given) - set(state):
        raise ValueError(f"this peer's scheduler has no {', '.join(sorted(unknown))}")
    return state | {key: restored(value, state[key], key) for key, value in given.items()}


_scalars = msgspec.msgpack.Decoder(Scalars)

"""The options of the wrapped optimizer's parameter groups (learning rate, momentum, …). JOIN carries this peer's own
options, and BEGIN carries the run's, with which every peer steps.

[Note: whose options are in the groups when]
Between steps the groups hold this peer's own options: what its user, a scheduler of a framework or `scheduler=` wrote.
They are this peer's vote. The step of an epoch is made with the options that won the vote. Afterwards the groups hold
this peer's own options again. A lost vote does not replace them, because a vote has to last. Otherwise a user who
changes the learning rate of one peer after the other would never get a majority. And a scheduler that multiplies the
present rate would continue from a rate that it did not make (`CosineAnnealingLR` grows without bound from a rate that
is too large near the end of its period). Changes that the step itself makes in the groups stay. A downloaded state
replaces a peer's own options by those of the other peers.

In the modes with a delayed step, the groups are those of the copy on the host, and the step is made in the background.
Meanwhile, users read and write options that are set aside (`HostCopy.aside`), so that no write reaches a step that is
under way.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Any

import msgspec
import torch
from blake3 import blake3
from torch.optim.lr_scheduler import LRScheduler

from shoal.optim import tree
from shoal.optim._torch import writes_of
from shoal.optim.host_copy import HostCopy
from shoal.optim.own_form import unsaved_options
from shoal.optim.plain import WANTED, are_alike, can_hold, is_plain, plain_or, restored, with_plain_numbers
from shoal.swarm.protocol.messages import MAX_OPTIONS_BYTES

log = logging.getLogger(__name__)

# Options that choose how a step is computed, and not what it computes. Each machine has its own.
KERNELS = frozenset({"foreach", "fused", "capturable", "differentiable"})
# Notes of torch's schedulers in the groups, and the names of parameters: no step reads them.
NOTES = frozenset(
    {"params", "param_names", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
)
HASH_BYTES = 16
OF_GROUPS = " of groups "
EVERYTHING = "the options"  # the name of one hash of all options, if one hash for each option would be too long

Columns = dict[str, list[Any]]
"""The values of each option, one for each group that has it, as plain data."""
Entry = tuple[list[Any], bytes] | bytes
"""An option in a message. It is either its distinct values, with the index of each group's value (b"" if there is only
one value), or the hash of its column."""


class GroupOptions:
    """Reads and writes the options of an optimizer's parameter groups.

    The trainer's thread uses it, except that `of_run` and `step_scheduler` may run in the thread that makes the step.

    Args:
        optimizer: the wrapped optimizer. If its class names options in `own_options`, each peer has its own.
        scheduler: the argument `scheduler=` of `Optimizer`, or None.
        host: the copy of the parameters on the host that the optimizer steps, or None.

    Attributes:
        at_tip: the options that newcomers get, one dictionary for each group: those after the last epoch's step, with
            the values that `scheduler=` has set since.

    Raises:
        ValueError: with the name of an option that has no plain value.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None = None, host: HostCopy | None = None
    ) -> None:
        self._optimizer, self._scheduler, self._host = optimizer, scheduler, host
        unsaved = unsaved_options(optimizer)
        check_options(optimizer.param_groups, {name for group in optimizer.param_groups for name in group} - unsaved)
        of_class = unsaved | set(getattr(optimizer, "own_options", ()))
        self._left_out = KERNELS | (NOTES - set(optimizer.defaults)) | of_class
        self._holders: dict[str, list[int]] = {}  # for each option, the groups that have it
        for index, group in enumerate(optimizer.param_groups):
            for name in group:
                if name not in self._left_out:
                    self._holders.setdefault(name, []).append(index)
        self._names = {self._label(name): name for name in self._holders}
        self._first = {name: self._column(name) for name in self._holders}
        self._scheduled = {"lr": self._first["lr"]} if scheduler is not None and "lr" in self._first else {}
        self._found_own: set[str] = set()  # this peer's alone, because `train` or `eval` has changed them
        self._told: set[str] = set()  # the options for which a warning was logged
        self._watched = scheduler is None
        self._epoch = self._changes = 0
        self._is_current = True  # whether the user had a chance to set the options for the epoch that ends
        self.refresh()

    # -- this peer's own

    def own(self, epoch: int) -> bytes:
        """This peer's own options at the end of `epoch`, encoded for JOIN. Values of `scheduler=` are put back if other
        code has changed them.

        Raises:
            ValueError: with the name of an option that has no plain value since the last call.
        """
        self._is_current = epoch == self._epoch
        self.enforce()
        check_options(self._optimizer.param_groups, self._holders)
        return pack(self._columns())

    @contextlib.contextmanager
    def finding_own(self) -> Iterator[None]:
        """The options that change within this context are this peer's alone from now on, for example whether a
        schedule-free optimizer trains: they are not compared, and no round sets them. Newcomers get what `record` and
        `record_own` have seen last."""
        before = {name: self._column(name) for name in self._holders}
        yield
        for name in [name for name, values in before.items() if not _are_equal(self._column(name), values)]:
            del self._names[self._label(name)], self._holders[name]
            self._left_out |= {name}
            self._found_own.add(name)

    def record_own(self) -> None:
        """From now on, give newcomers the present values of the options that `finding_own` has found."""
        for group, recorded in zip(self._optimizer.param_groups, self.at_tip, strict=True):
            recorded.update({name: _copied(group[name]) for name in self._found_own if name in group})

    def enforce(self) -> None:
        """Put back the values of `scheduler=` where other code has overwritten them."""
        for name, values in self._scheduled.items():
            if self._column(name) == values:
                continue
            if "scheduler=" not in self._told:
                self._told.add("scheduler=")
                log.warning(
                    "%s of the parameter groups was set to %s, and scheduler= has made it %s: scheduler= wins, and "
                    "what else sets it has no effect. If that is the scheduler of a framework (Trainer, Lightning), "
                    "give one of the two only",
                    name,
                    shown(self._column(name)),
                    shown(values),
                )
            for group, value in zip(self._groups(name), values, strict=True):
                _put_plain(group, name, value)

    def refresh(self) -> None:
        """Take the present values of the groups as this peer's own, and as those of `scheduler=`. Call it after another
        state was loaded."""
        self._scheduled = {name: self._column(name) for name in self._scheduled}
        self._rates = self._visible_rates()
        self.record()

    def record(self) -> None:
        """From now on, give newcomers the present values of the groups."""
        self.at_tip = [
            {key: _copied(value) for key, value in group.items() if key not in KERNELS | {"params", "param_names"}}
            for group in self._optimizer.param_groups
        ]

    # -- the run's

    def misfit(self, options: bytes) -> str:
        """Why this peer's groups can't have the encoded options; "" if they can."""
        try:
            self._columns_of(options)
        except ValueError as error:
            return str(error)
        return ""

    def fits(self, options: bytes) -> bool:
        """Whether this peer's groups can have the encoded options."""
        return not self.misfit(options)

    def unknown_of(self, options: bytes) -> str:
        """The name of an option that differs here and of which the message has only a hash; "" if there is none."""
        own: Columns | None = None
        for name, told in self._columns_of(options).items():
            if isinstance(told, bytes):
                own = own or self._columns()
                if _hash(own if name == EVERYTHING else self._column(name)) != told:
                    return name
        return ""

    @contextlib.contextmanager
    def of_run(self, options: bytes) -> Iterator[None]:
        """Within this context, the groups hold the run's options, for the step, with Python's numbers: numpy's round
        otherwise in a few operations. Afterwards they hold this peer's own options again.

        A warning names each option that differs from this peer's own, once. There is no warning if the epoch began in
        the same call of `step` that ends it, for example after a download. Then no scheduler of the user has run for
        this epoch yet.

        Args:
            options: the run's options, encoded; b"" leaves this peer's own in the groups.
        """
        replaced: list[tuple[dict[str, Any], str, Any, Any]] = []
        for name, values in (self._columns_of(options) if options else {}).items():
            own = self._column(name) if name in self._holders else []
            if isinstance(values, bytes):
                continue
            if not _are_equal(own, values) and None not in own:
                self._tell_difference(name, own, values)
            for group, mine, value in zip(self._groups(name), own, values, strict=True):
                given = group[name]
                group[name] = with_plain_numbers(given)
                is_other = not _are_equal(mine, value)
                if is_other:
                    _put_plain(group, name, value)
                if is_other or group[name] is not given:
                    kept = mine if group[name] is given else given  # a tensor that was written in place
                    if given is not None:  # else this peer has not made the first step, which sets the option
                        replaced.append((group, name, kept, plain_or(group[name])))
        try:
            yield
            self.record()
        finally:
            for group, name, kept, value in replaced:
                if _are_equal(plain_or(group[name]), value):  # otherwise the step itself has changed it
                    put(group, name, kept)

    def adopt(self, options: bytes) -> None:
        """Set this peer's options to the run's encoded ones, but not those that `scheduler=` sets: it was stepped."""
        for name, values in (self._columns_of(options) if options else {}).items():
            if not isinstance(values, bytes) and name not in self._scheduled:
                for group, value in zip(self._groups(name), values, strict=True):
                    _put_plain(group, name, value)
        self._rates = self._visible_rates()

    def _tell_unknown(self, label: str) -> None:
        """Warn once if other groups than this peer's have an option. One that all of them have may appear here, too, in
        the first step."""
        name, of_groups, groups = label.partition(OF_GROUPS)
        if not of_groups or name in self._told or name in self._left_out:
            return
        self._told.add(name)
        log.warning(
            "at most peers of the run, %.80s is an option of parameter groups %.80s, and not here: make the groups "
            "alike on all peers",
            name,
            groups,
        )

    def _tell_difference(self, name: str, own: Sequence[Any], values: Sequence[Any]) -> None:
        if name in self._told or not self._is_current:
            return
        self._told.add(name)
        log.warning(
            "%s is %s here, and %s at most peers of the run: the epochs' steps are made with theirs. Set it alike on "
            "all peers. A scheduler that is stepped after each batch follows this peer's own steps: wrap it in "
            "shoal.EpochScheduler, or give it as scheduler=",
            name,
            shown(own),
            shown(values),
        )

    # -- schedulers

    def step_scheduler(self) -> None:
        """Step `scheduler=`, from the values that it has set itself."""
        if self._scheduler is None:
            return
        self.enforce()
        before = {name: self._column(name) for name in self._holders}
        self._scheduler.step()
        after = {name: self._column(name) for name in self._holders}
        self._scheduled = {n: after[n] for n in after if n in self._scheduled or after[n] != before[n]}
        for name in self._scheduled:
            for index, value in zip(self._holders[name], after[name], strict=True):
                self.at_tip[index][name] = value

    def look(self, epoch: int) -> None:
        """Warn once if the learning rates change more than once in an epoch, because then they follow this peer's own
        steps. Called at the beginning of each `step`, with the epoch of the model's parameters."""
        if epoch != self._epoch:
            self._epoch, self._changes = epoch, 0
        if not self._watched:
            return
        rates = self._visible_rates()
        if rates != self._rates:
            self._rates, self._changes = rates, self._changes + 1
            if self._changes > 1:
                self._watched = False
                log.warning(
                    "lr of the parameter groups changes between steps of one epoch, as by a scheduler that is stepped "
                    "after each batch: it follows this peer's own steps, of which other peers make more or fewer. Wrap "
                    "it in shoal.EpochScheduler, or give it as scheduler="
                )

    # -- the groups

    def _visible_rates(self) -> list[Any]:
        """The learning rates that users see. A tensor is represented by its count of writes, because its value may be
        on a device."""
        if not self._watched:
            return []
        aside = None if self._host is None else self._host.aside
        rates = [group.get("lr") for group in aside or self._optimizer.param_groups]
        return [writes_of(rate) if isinstance(rate, torch.Tensor) else rate for rate in rates]

    def _groups(self, name: str) -> list[dict[str, Any]]:
        return [self._optimizer.param_groups[index] for index in self._holders[name]]

    def _column(self, name: str) -> list[Any]:
        return [plain_or(group.get(name)) for group in self._groups(name)]

    def _columns(self) -> Columns:
        """The columns of a message."""
        return {label: self._column(name) for label, name in self._names.items()}

    def _label(self, name: str) -> str:
        """Names an option in a message: with its groups, where only some groups have it."""
        holders = self._holders[name]
        is_common = len(holders) == len(self._optimizer.param_groups)
        return name if is_common else f"{name}{OF_GROUPS}{', '.join(map(str, holders))}"

    def _columns_of(self, options: bytes) -> dict[str, list[Any] | bytes]:
        """The columns (or hashes) of a message, without options that this peer's groups do not have.

        Raises:
            ValueError: if the message can't be decoded, or has options that no step here can have.
        """
        columns: dict[str, list[Any] | bytes] = {}
        for label, entry in unpack(options).items():
            if label == EVERYTHING and isinstance(entry, bytes):
                columns[EVERYTHING] = entry
            elif (name := self._names.get(label)) is None:
                self._tell_unknown(label)
            elif isinstance(entry, bytes):
                columns[name] = entry
            else:
                groups = self._groups(name)
                own = [plain_or(group.get(name), otherwise=plain_or) for group in groups]
                if plain_or not in own:  # else it has no plain value here, and is not compared
                    column = _spread(entry, len(groups), name)
                    columns[name] = [self._usable(name, *each) for each in enumerate(zip(column, own, strict=True))]
        return columns

    def _usable(self, name: str, place: int, values: tuple[Any, Any]) -> Any:
        """The run's value of an option, for the group of that place. None takes nothing away.

        Raises:
            ValueError: if no step here can have it.
        """
        value, own = values
        if value is None or own is None or value is own:
            return own if value is None else value
        mine = self._groups(name)[place].get(name)
        # An option may have become another kind of value since the start (None at first, a number later).
        if not are_alike(value, own) and not are_alike(value, self._first[name][place]):
            raise ValueError(f"{name} is {value!r:.40}, and {mine!r:.40} at this peer")
        if isinstance(mine, Enum):
            restored(value, mine, name)  # raises if there is no such member
        return value


# -- options in messages


def pack(columns: Mapping[str, list[Any]]) -> bytes:
    """Encode columns for JOIN, in at most 1 kB. If they do not fit, hashes replace the longest columns. A peer that
    differs then learns the name of the option, but not the value."""
    entries: dict[str, Entry] = {name: _entry(columns[name]) for name in sorted(columns)}
    sizes = {name: len(_encode(entry)) for name, entry in entries.items()}
    packed = _encode(entries)
    for name in sorted(sizes, key=lambda name: (sizes[name], name), reverse=True):
        if len(packed) <= MAX_OPTIONS_BYTES:
            return packed
        entries[name] = _hash(columns[name])
        packed = _encode(entries)
    return packed if len(packed) <= MAX_OPTIONS_BYTES else _encode({EVERYTHING: _hash(columns)})


def unpack(options: bytes) -> dict[str, Entry]:
    """Decode the columns that `pack` has encoded.

    Raises:
        ValueError: if `options` is anything else.
    """
    try:
        return _decoder.decode(options)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"not the options of parameter groups: {error}") from error


def check_options(groups: Iterable[Mapping[str, Any]], names: Iterable[str] | None = None) -> None:
    """Check that newcomers can get the options of parameter groups. Peers compare those that have plain values.

    Args:
        groups: the parameter groups.
        names: the options to check; all when None.

    Raises:
        ValueError: with the name of an option that can't be sent.
    """
    for number, group in enumerate(groups):
        for name in group if names is None else group.keys() & set(names):
            if name != "params" and name not in KERNELS and not is_plain(group[name]):
                try:
                    tree.encode(group[name], [], partial(_shown_below, name))
                except tree.CannotTravel as error:
                    raise ValueError(
                        f"parameter group {number} has {name!r} = {group[name]!r:.60}, and {error}: newcomers get the "
                        f"options of parameter groups, so give {WANTED}, or a tensor"
                    ) from error


def _shown_below(name: str, path: tree.Path) -> str:
    return tree.shown((name, *path))


def structure(groups: Sequence[Mapping[str, Any]]) -> str:
    """Describe the groups as text that must be equal in a run: how many tensors each group has. Options are not in it:
    classes add some, and set some that were None, in their first step, which this peer may have made before."""
    return ", ".join(f"{len(group['params'])} tensors" for group in groups)


def shown(values: Sequence[Any]) -> str:
    """The distinct values, for a log line."""
    distinct = list(dict.fromkeys(repr(value) for value in values))
    return ", ".join(distinct[:4]) + (f" and {len(distinct) - 4} more" if len(distinct) > 4 else "")


def _entry(column: Sequence[Any]) -> Entry:
    encoded = [_encode(value) for value in column]
    distinct = dict(zip(encoded, column, strict=True))
    if len(distinct) > 256:
        return _hash(list(column))
    places = {one: place for place, one in enumerate(distinct)}
    return list(distinct.values()), bytes(places[one] for one in encoded) if len(distinct) > 1 else b""


def _spread(entry: tuple[list[Any], bytes], count: int, name: str) -> list[Any]:
    values, which = entry
    if len(values) == 1 and not which:
        return values * count
    if len(which) != count or any(place >= len(values) for place in which):
        raise ValueError(f"{name} is not told for {count} groups")
    return [values[place] for place in which]


def _hash(what: Any) -> bytes:
    return blake3(_encode(what)).digest(length=HASH_BYTES)


# -- values


@torch.no_grad()
def put(group: dict[str, Any], name: str, value: Any) -> None:
    """Set an option to a value of its type. A tensor is written in place: a CUDA graph may hold its address."""
    mine = group[name]
    if isinstance(mine, torch.Tensor) and isinstance(value, int | float | torch.Tensor):
        mine.fill_(value)
    else:
        group[name] = value


def _copied(value: Any) -> Any:
    """The value as it is now, whatever is written into it later."""
    return copy.deepcopy(value) if isinstance(value, list | dict | set | deque | torch.Tensor) else value


def _put_plain(group: dict[str, Any], name: str, value: Any) -> None:
    """Set an option to a plain value, in the type that it has here if that is of the same kind."""
    mine = group[name]
    if isinstance(mine, torch.Tensor) and can_hold(mine, value):
        put(group, name, value)
        return
    with contextlib.suppress(ValueError):
        value = restored(value, mine, name)
    group[name] = value


def _are_equal(value: Any, mine: Any) -> bool:
    """Whether two plain values are equal. NaN equals itself here."""
    return bool(value == mine) or _encode(value) == _encode(mine)


_encode = msgspec.msgpack.Encoder(order="deterministic").encode
_decoder = msgspec.msgpack.Decoder(dict[str, tuple[list[Any], bytes] | bytes])

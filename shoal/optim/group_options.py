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
import logging
import numbers
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch
from blake3 import blake3
from torch.optim.lr_scheduler import LRScheduler

from shoal.optim._torch import writes_of
from shoal.optim.host_copy import HostCopy
from shoal.swarm.protocol.messages import MAX_OPTIONS_BYTES

log = logging.getLogger(__name__)

# Options that choose how a step is computed, and not what it computes. Each machine has its own.
KERNELS = frozenset({"foreach", "fused", "capturable", "differentiable"})
# Notes of torch's schedulers in the groups, and the names of parameters: no step reads them.
NOTES = frozenset(
    {"params", "param_names", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
)
HASH_BYTES = 16
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
        optimizer: the wrapped optimizer.
        scheduler: the argument `scheduler=` of `Optimizer`, or None.
        host: the copy of the parameters on the host that the optimizer steps, or None.

    Attributes:
        at_tip: the options that newcomers get, one dictionary for each group: those after the last epoch's step, with
            the values that `scheduler=` has set since.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None = None, host: HostCopy | None = None
    ) -> None:
        self._optimizer, self._scheduler, self._host = optimizer, scheduler, host
        left_out = KERNELS | (NOTES - set(optimizer.defaults))
        self._holders: dict[str, list[int]] = {}  # for each option, the groups that have it
        for index, group in enumerate(optimizer.param_groups):
            for name, value in group.items():
                if name not in left_out and is_plain(value):
                    self._holders.setdefault(name, []).append(index)
        self._first = {name: self._column(name) for name in self._holders}
        self._scheduled = {"lr": self._first["lr"]} if scheduler is not None and "lr" in self._first else {}
        self._told: set[str] = set()  # the options for which a warning was logged
        self._watched = scheduler is None
        self._epoch = self._changes = 0
        self._is_current = True  # whether the user had a chance to set the options for the epoch that ends
        self.refresh()

    # -- this peer's own

    def own(self, epoch: int) -> bytes:
        """This peer's own options at the end of `epoch`, encoded for JOIN. Values of `scheduler=` are put back if other
        code has changed them."""
        self._is_current = epoch == self._epoch
        self.enforce()
        return pack({name: self._column(name) for name in self._holders})

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
                put(group, name, value)

    def refresh(self) -> None:
        """Take the present values of the groups as this peer's own, and as those of `scheduler=`. Call it after another
        state was loaded."""
        self._scheduled = {name: self._column(name) for name in self._scheduled}
        self._rates = self._visible_rates()
        self.record()

    def record(self) -> None:
        """From now on, give newcomers the present values of the groups."""
        self.at_tip = [
            {key: _plain(value, otherwise=value) for key, value in group.items() if key not in KERNELS | {"params"}}
            for group in self._optimizer.param_groups
        ]

    # -- the run's

    def fits(self, options: bytes) -> bool:
        """Whether this peer's groups can have the encoded options."""
        try:
            self._columns_of(options)
        except ValueError:
            return False
        return True

    def unknown_of(self, options: bytes) -> str:
        """The name of an option that differs here and of which the message has only a hash; "" if there is none."""
        own: Columns | None = None
        for name, told in self._columns_of(options).items():
            if isinstance(told, bytes):
                own = own or {name: self._column(name) for name in self._holders}
                if _hash(own if name == EVERYTHING else own[name]) != told:
                    return name
        return ""

    @contextlib.contextmanager
    def of_run(self, options: bytes) -> Iterator[None]:
        """Within this context, the groups hold the run's options, for the step. Afterwards they hold this peer's own
        options again.

        A warning names each option that differs from this peer's own, once. There is no warning if the epoch began in
        the same call of `step` that ends it, for example after a download. Then no scheduler of the user has run for
        this epoch yet."""
        replaced: list[tuple[dict[str, Any], str, Any, Any]] = []
        for name, values in self._columns_of(options).items():
            own = self._column(name) if name in self._holders else []
            if isinstance(values, bytes) or own == values:
                continue
            self._tell_difference(name, own, values)
            for group, mine, value in zip(self._groups(name), own, values, strict=True):
                if mine != value:
                    kept = mine if isinstance(group[name], torch.Tensor) else group[name]
                    replaced.append((group, name, kept, value))
                    put(group, name, value)
        try:
            yield
            self.record()
        finally:
            for group, name, kept, value in replaced:
                if _plain(group[name]) == value:  # otherwise the step itself has changed it
                    put(group, name, kept)

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
        return [_plain(group.get(name)) for group in self._groups(name)]

    def _columns_of(self, options: bytes) -> dict[str, list[Any] | bytes]:
        """The columns (or hashes) of a message, without options that this peer's groups do not have.

        Raises:
            ValueError: if the message can't be decoded, or has options that no step here can have.
        """
        columns: dict[str, list[Any] | bytes] = {}
        for name, entry in unpack(options).items():
            if isinstance(entry, bytes):
                if name in self._holders or name == EVERYTHING:
                    columns[name] = entry
            elif name in self._holders:
                columns[name] = column = _spread(entry, len(self._holders[name]), name)
                if not _are_alike(column, self._first[name]):
                    raise ValueError(f"{name} is {shown(column)}, and {shown(self._first[name])} at this peer")
        return columns


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


def structure(groups: Sequence[Mapping[str, Any]]) -> str:
    """Describe the groups as text that must be equal in a run: how many tensors each group has, which options only some
    groups have, and which options are None."""
    names = [set(group) - KERNELS - NOTES for group in groups]
    common = set.intersection(*names)
    described = []
    for group, own in zip(groups, names, strict=True):
        special = sorted(own - common) + sorted(f"{name} None" for name in own & common if group[name] is None)
        described.append(f"{len(group['params'])} tensors" + "".join(f" with {one}" for one in special))
    return ", ".join(described)


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


def plain(value: Any) -> Any:
    """Return `value` as plain data that can be sent. Tensors with one element become numbers.

    Raises:
        TypeError: with the name of a type that can't be sent.
    """
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, numbers.Real):  # numpy's
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    raise TypeError(f"there is a {type(value).__name__} in it")


def restored(value: Any, mine: Any, name: str) -> Any:
    """Convert `value`, which another peer has made with `plain`, to the type of `mine`, this peer's own value.

    Raises:
        ValueError: with the `name`, if the two are of different kinds (number, text, list, dict).
    """
    if isinstance(mine, torch.Tensor):
        if not isinstance(value, int | float):
            raise ValueError(f"{name} is {value!r:.40}, and a number at this peer")
        return torch.full_like(mine, value)
    kinds: tuple[Any, ...] = (bool, (int, float), str, bytes, (list, tuple), dict)
    for kind in kinds:
        if isinstance(mine, kind):
            if not isinstance(value, kind):
                raise ValueError(f"{name} is {value!r:.40}, and {mine!r:.40} at this peer")
            break
    return type(mine)(value) if isinstance(mine, tuple | Counter) else value


def is_plain(value: Any) -> bool:
    """Whether a value can be sent."""
    try:
        return type(value) is float or bool(_encode(plain(value)))
    except (TypeError, ValueError, OverflowError):
        return False


def _plain(value: Any, otherwise: Any = None) -> Any:
    """Return the value as plain data, or `otherwise` if it can't be sent."""
    return plain(value) if is_plain(value) else otherwise


def _are_alike(value: Any, mine: Any) -> bool:
    """Whether two plain values are of the same kind, so that a step can have one if it can have the other."""
    if isinstance(value, list) and isinstance(mine, list):
        return len(value) == len(mine) and all(map(_are_alike, value, mine))
    if isinstance(value, dict) and isinstance(mine, dict):
        return value.keys() == mine.keys() and all(_are_alike(value[key], mine[key]) for key in mine)
    return type(value) is type(mine) or {type(value), type(mine)} == {int, float}


@torch.no_grad()
def put(group: dict[str, Any], name: str, value: Any) -> None:
    """Set an option to a value. A tensor is written in place: a CUDA graph may hold its address."""
    mine = group[name]
    if isinstance(mine, torch.Tensor) and isinstance(value, int | float | torch.Tensor):
        mine.fill_(value)
    else:
        group[name] = tuple(value) if isinstance(mine, tuple) else value


_encode = msgspec.msgpack.Encoder(order="deterministic").encode
_decoder = msgspec.msgpack.Decoder(dict[str, tuple[list[Any], bytes] | bytes])

"""All that a peer must share for another to go on where it is: parameters, optimizer state, scheduler."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Annotated, Any

import msgspec
import torch
from blake3 import blake3
from torch.optim.lr_scheduler import LRScheduler

from shoal.compression import Compression, TensorRole, plan_codecs
from shoal.flat import FlatBuffer, Layout, bytes_of
from shoal.optim.group_options import KERNELS
from shoal.optim.plain import plain, restored
from shoal.swarm.protocol.tip import Tip
from shoal.transfer.donor import Snapshot
from shoal.transfer.transfer import Downloaded

Name = Annotated[str, msgspec.Meta(max_length=256)]


class Statistic(msgspec.Struct, array_like=True, frozen=True):
    """Which tensor of the optimizer's state follows in the layout: `optimizer.state[parameter][name]`."""

    parameter: Annotated[int, msgspec.Meta(ge=0)]
    name: Name


class Scalars(msgspec.Struct, frozen=True):
    """What is not a tensor, as plain data.

    Attributes:
        groups: of each parameter group, its options (learning rate, momentum, …).
        statistics: the tensors of the optimizer's state, in the order of the layout.
        values: what else is in the optimizer's state: (parameter, name, value).
        scheduler: the scheduler's state; None without a scheduler.
        extras: how many extra tensors end the layout.
    """

    groups: list[dict[Name, Any]]
    statistics: list[Statistic]
    values: list[tuple[int, Name, Any]]
    scheduler: dict[Name, Any] | None
    extras: int


class TrainingState:
    """The state of one peer's training, kept flat: the parameters, and the optimizer's state once there is any.

    The parameters move into flat memory (`parameter.data` becomes a view of it), and so do the tensors of the
    optimizer's state after the first step.

    Args:
        optimizer: the local optimizer.
        scheduler: stepped once per global epoch, or None.
        extra_tensors: shared with the rest.
        pinned: have the parameters in host memory that a GPU can reach directly.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        extra_tensors: Sequence[torch.Tensor],
        *,
        pinned: bool = False,
    ) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler
        self.extra_tensors = list(extra_tensors)
        self.parameters: list[torch.Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self.memory = FlatBuffer.adopt(self.parameters, pinned=pinned)
        self._held: list[torch.Tensor] = []  # the tensors of the optimizer's state that are in flat memory
        self.adopt_statistics()

    def adopt_statistics(self) -> None:
        """Move the tensors of the optimizer's state into flat memory, if there are new ones."""
        tensors = [self.optimizer.state[self.parameters[s.parameter]][s.name] for s in self._statistics()]
        if len(tensors) != len(self._held) or any(a is not b for a, b in zip(tensors, self._held, strict=True)):
            FlatBuffer.adopt(tensors)
            self._held = tensors

    def digest(self) -> bytes:
        """The blake3 hash of the parameters, 32 bytes; they are copied to the host for it if need be."""
        hasher = blake3()
        for flat in self.memory.flat:
            hasher.update(bytes_of(flat.detach().cpu()))
        return hasher.digest()

    def statistic_names(self) -> set[str]:
        """Of the tensors in the optimizer's state that have more than one element."""
        found = (self.optimizer.state[self.parameters[s.parameter]][s.name] for s in self._statistics())
        return {s.name for s, tensor in zip(self._statistics(), found, strict=True) if tensor.dim()}

    def statistics(self, name: str) -> list[torch.Tensor | None]:
        """The tensors of that name in the optimizer's state, one for each parameter; None where it has none.

        Raises ValueError if the optimizer has a state, but none of this name and the parameter's shape.
        """
        found: list[torch.Tensor | None] = []
        for parameter in self.parameters:
            held = self.optimizer.state.get(parameter, {})
            value = held.get(name)
            if held and not (isinstance(value, torch.Tensor) and value.shape == parameter.shape):
                alike = [key for key, v in held.items() if isinstance(v, torch.Tensor) and v.shape == parameter.shape]
                raise ValueError(
                    f"average_opt_statistics has {name!r}, and {type(self.optimizer).__name__} keeps no such tensor of "
                    f"its parameter's shape; it keeps {', '.join(alike) or 'none'}"
                )
            found.append(value)
        return found

    def snapshot(
        self,
        tip: Tip,
        compression: Compression,
        averaged: Collection[str] = (),
        groups: Sequence[dict[str, Any]] | None = None,
    ) -> Snapshot:
        """A copy of everything, for a newcomer, to be sent so. Statistics whose names are not in `averaged` are sent
        exactly: nothing would make them equal again. `groups` are the options of the parameter groups to send; by
        default those that they hold now.

        Raises ValueError if the optimizer holds something that is not plain data, or if the compression has no codec
        for a tensor."""
        # Those of one name after the other: few runs of a codec, however many parameters there are.
        statistics = sorted(self._statistics(), key=lambda one: one.name)
        tensors = [*self.parameters]
        tensors += [self.optimizer.state[self.parameters[s.parameter]][s.name] for s in statistics]
        tensors += self.extra_tensors
        memory = FlatBuffer(Layout.of(tensors).on("cpu"), recycled=True)
        memory.copy_from([tensor.detach() for tensor in tensors])
        if groups is None:
            groups = [self._options(group) for group in self.optimizer.param_groups]
        values = [
            (index, name, value)
            for index, parameter in enumerate(self.parameters)
            for name, value in sorted(self.optimizer.state.get(parameter, {}).items())
            if not isinstance(value, torch.Tensor)
        ]
        try:
            scalars = Scalars(
                groups=[plain(group) for group in groups],
                statistics=statistics,
                values=[(index, name, plain(value)) for index, name, value in values],
                scheduler=_scheduler_state(self.scheduler),
                extras=len(self.extra_tensors),
            )
        except TypeError as error:
            raise ValueError(f"the optimizer's state can't be shared: {error}") from error
        layout = msgspec.msgpack.encode(memory.layout.to_wire())
        roles = [TensorRole.PARAMETER] * len(self.parameters) + [TensorRole.OPTIMIZER] * len(statistics)
        roles += [TensorRole.UNSPECIFIED] * len(self.extra_tensors)
        kinds = [""] * len(self.parameters) + [one.name for one in statistics] + [""] * len(self.extra_tensors)
        first = len(self.parameters)
        exact = {first + number for number, one in enumerate(statistics) if one.name not in averaged}
        codecs = plan_codecs(compression, memory.layout, roles, exact=exact, kinds=kinds)
        return Snapshot(tip, layout, memory.flat, msgspec.msgpack.encode(scalars), codecs)

    def load(self, state: Downloaded) -> None:
        """Take over a downloaded state. Raises ValueError, and changes nothing, if it does not fit this model."""
        layout = Layout.from_wire(msgspec.msgpack.decode(state.manifest.layout))
        scalars = _scalars.decode(state.scalars)
        if [(b.numel, b.dtype) for b in layout.buffers] != [(b.numel(), b.dtype) for b in state.buffers]:
            raise ValueError("the state's layout does not describe its buffers")
        tensors = [state.buffers[e.buffer][e.span.slice].view(e.shape) for e in layout.entries]
        pairs = self._pairs(scalars, tensors)
        groups = self._fitting_groups(scalars)
        count = len(self.parameters)
        if any(s.parameter >= count for s in scalars.statistics) or any(v[0] >= count for v in scalars.values):
            raise ValueError(f"the state has statistics of a parameter that does not exist: there are {count}")
        if (self.scheduler is None) != (scalars.scheduler is None):
            raise ValueError("the state has a scheduler and this peer has none, or the other way round")
        scheduled: dict[str, Any] = {}
        if self.scheduler is not None and scalars.scheduler is not None:
            mine = self.scheduler.state_dict()
            if unknown := set(scalars.scheduler) - set(mine):
                raise ValueError(f"this peer's scheduler has no {', '.join(sorted(unknown))}")
            scheduled = mine | {key: restored(value, mine.get(key), key) for key, value in scalars.scheduler.items()}
        with torch.no_grad():
            for tensor, theirs in pairs:
                tensor.copy_(theirs)
            self._load_statistics(scalars, tensors[count : count + len(scalars.statistics)])
        for group, options in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(options)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(scheduled)

    def _pairs(self, scalars: Scalars, tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(this peer's, the state's) of all tensors but the optimizer's. Raises ValueError if they don't fit."""
        count, extras = len(self.parameters), len(self.extra_tensors)
        if len(tensors) != count + len(scalars.statistics) + scalars.extras or scalars.extras != extras:
            raise ValueError(
                f"the state has {len(tensors) - len(scalars.statistics) - scalars.extras} parameters and "
                f"{scalars.extras} extra tensors; this peer has {count} and {extras}"
            )
        pairs = [
            *zip(self.parameters, tensors[:count], strict=True),
            *zip(self.extra_tensors, tensors[len(tensors) - extras :], strict=True),
        ]
        for index, (mine, theirs) in enumerate(pairs):
            if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                raise ValueError(
                    f"tensor {index} of the state is {theirs.dtype} of shape {tuple(theirs.shape)}, and this peer's is "
                    f"{mine.dtype} of shape {tuple(mine.shape)}: do all peers train the same model?"
                )
        return pairs

    def _fitting_groups(self, scalars: Scalars) -> list[dict[str, Any]]:
        """The state's options of the parameter groups. Raises ValueError if they are not such as this peer's."""
        mine = [self._options(group) for group in self.optimizer.param_groups]
        if len(scalars.groups) != len(mine):
            raise ValueError(f"the state has {len(scalars.groups)} parameter groups, this peer {len(mine)}")
        return [
            {key: restored(value, ours.get(key), key) for key, value in theirs.items()}
            for ours, theirs in zip(mine, scalars.groups, strict=True)
        ]

    def _options(self, group: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in group.items() if key != "params" and key not in KERNELS}

    def _statistics(self) -> list[Statistic]:
        return [
            Statistic(index, name)
            for index, parameter in enumerate(self.parameters)
            for name, value in sorted(self.optimizer.state.get(parameter, {}).items())
            if isinstance(value, torch.Tensor)
        ]

    def _load_statistics(self, scalars: Scalars, tensors: Sequence[torch.Tensor]) -> None:
        """Copy into what is there, and allocate what is not; drop what the state does not have."""
        kept: dict[int, dict[str, Any]] = {}
        for statistic, tensor in zip(scalars.statistics, tensors, strict=True):
            parameter = self.parameters[statistic.parameter]
            mine = self.optimizer.state.get(parameter, {}).get(statistic.name)
            if not isinstance(mine, torch.Tensor) or mine.shape != tensor.shape or mine.dtype != tensor.dtype:
                # As torch does: statistics live with their parameter, but step counts (0-d) stay on the host.
                mine = torch.empty_like(tensor, device=parameter.device if tensor.dim() else "cpu")
            mine.copy_(tensor)
            kept.setdefault(statistic.parameter, {})[statistic.name] = mine
        for index, name, value in scalars.values:
            kept.setdefault(index, {})[name] = value
        for index, parameter in enumerate(self.parameters):
            if index in kept:
                self.optimizer.state[parameter] = kept[index]
            else:
                self.optimizer.state.pop(parameter, None)
        self.adopt_statistics()


def _scheduler_state(scheduler: LRScheduler | None) -> dict[str, Any] | None:
    """What of a scheduler's state is plain data; functions that torch left in it are each peer's own."""
    if scheduler is None:
        return None
    state = {}
    for key, value in scheduler.state_dict().items():
        try:
            state[key] = plain(value)
        except TypeError:
            continue
    return state


_scalars = msgspec.msgpack.Decoder(Scalars)

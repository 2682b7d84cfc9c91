"""All that a peer must share for another to go on where it is: parameters, optimizer state, scheduler, in flat memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
import torch
from blake3 import blake3
from torch.optim.lr_scheduler import LRScheduler

from shoal.averaging.donor import Snapshot
from shoal.averaging.tip import Tip
from shoal.averaging.transfer import Downloaded
from shoal.flat import FlatBuffer, Layout, bytes_of

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

    The parameters move into flat memory (`parameter.data` becomes a view of it), and so do the tensors of the optimizer's
    state after the first step.

    Args:
        optimizer: the local optimizer.
        scheduler: stepped once per global epoch, or None.
        extra_tensors: shared with the rest.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None, extra_tensors: Sequence[torch.Tensor]
    ) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler
        self.extra_tensors = list(extra_tensors)
        self.parameters: list[torch.Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self.memory = FlatBuffer.adopt(self.parameters)
        self._statistics_memory: FlatBuffer | None = None
        self.adopt_statistics()

    def adopt_statistics(self) -> None:
        """Move the tensors of the optimizer's state into flat memory, if there are new ones."""
        tensors = [self.optimizer.state[self.parameters[s.parameter]][s.name] for s in self._statistics()]
        held = len(self._statistics_memory.layout.entries) if self._statistics_memory is not None else 0
        if len(tensors) != held:
            self._statistics_memory = FlatBuffer.adopt(tensors)

    def digest(self) -> bytes:
        """The blake3 hash of the parameters, 32 bytes; they are copied to the host for it if need be."""
        hasher = blake3()
        for flat in self.memory.flat:
            hasher.update(bytes_of(flat.detach().cpu()))
        return hasher.digest()

    def snapshot(self, tip: Tip) -> Snapshot:
        """A copy of everything, for a newcomer. Raises ValueError if the optimizer or the scheduler holds something that
        is not plain data."""
        statistics = self._statistics()
        tensors = [*self.parameters]
        tensors += [self.optimizer.state[self.parameters[s.parameter]][s.name] for s in statistics]
        tensors += self.extra_tensors
        memory = FlatBuffer(Layout.of(tensors).on("cpu"))
        memory.copy_from([tensor.detach() for tensor in tensors])
        scalars = Scalars(
            groups=[{k: v for k, v in group.items() if k != "params"} for group in self.optimizer.param_groups],
            statistics=statistics,
            values=[
                (index, name, value)
                for index, parameter in enumerate(self.parameters)
                for name, value in sorted(self.optimizer.state.get(parameter, {}).items())
                if not isinstance(value, torch.Tensor)
            ],
            scheduler=_plain(self.scheduler.state_dict()) if self.scheduler is not None else None,
            extras=len(self.extra_tensors),
        )
        try:
            encoded = msgspec.msgpack.encode(scalars)
        except TypeError as error:
            raise ValueError(f"the state of the optimizer or scheduler can't be shared: {error}") from error
        return Snapshot(tip, msgspec.msgpack.encode(memory.layout.to_wire()), memory.flat, encoded)

    def load(self, state: Downloaded) -> None:
        """Take over a downloaded state. Raises ValueError, and changes nothing, if it does not fit this model."""
        layout = Layout.from_wire(msgspec.msgpack.decode(state.manifest.layout))
        scalars = _scalars.decode(state.scalars)
        if [(b.numel, b.dtype) for b in layout.buffers] != [(b.numel(), b.dtype) for b in state.buffers]:
            raise ValueError("the state's layout does not describe its buffers")
        tensors = [state.buffers[e.buffer][e.span.slice].view(e.shape) for e in layout.entries]
        count = len(self.parameters)
        ours = [*self.parameters]
        expected = count + len(scalars.statistics) + scalars.extras
        if len(tensors) != expected or scalars.extras != len(self.extra_tensors):
            raise ValueError(
                f"the state has {len(tensors)} tensors, {scalars.extras} of them extra; this peer has {count} "
                f"parameters and {len(self.extra_tensors)} extra tensors"
            )
        pairs = [
            *zip(ours, tensors, strict=False),
            *zip(self.extra_tensors, tensors[expected - scalars.extras :], strict=True),
        ]
        for index, (mine, theirs) in enumerate(pairs):
            if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
                raise ValueError(
                    f"tensor {index} of the state is {theirs.dtype} of shape {tuple(theirs.shape)}, and this peer's is "
                    f"{mine.dtype} of shape {tuple(mine.shape)}: do all peers train the same model?"
                )
        if len(scalars.groups) != len(self.optimizer.param_groups):
            raise ValueError(
                f"the state has {len(scalars.groups)} parameter groups, this peer {len(self.optimizer.param_groups)}"
            )
        if any(s.parameter >= count for s in scalars.statistics) or any(v[0] >= count for v in scalars.values):
            raise ValueError(f"the state has statistics of a parameter that does not exist: there are {count}")
        with torch.no_grad():
            for mine, theirs in pairs:
                mine.copy_(theirs)
            self._load_statistics(scalars, tensors[count : count + len(scalars.statistics)])
        for group, options in zip(self.optimizer.param_groups, scalars.groups, strict=True):
            group.update(_like(group, options))
        if self.scheduler is not None and scalars.scheduler is not None:
            self.scheduler.load_state_dict(_like(self.scheduler.state_dict(), scalars.scheduler))

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
        self._statistics_memory = None
        self.adopt_statistics()


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """What of a scheduler's state is plain data; functions that torch left in it are not shared."""
    plain = {}
    for key, value in state.items():
        try:
            msgspec.msgpack.encode(value)
        except TypeError:
            continue
        plain[key] = value
    return plain


def _like(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """`theirs`, with lists turned back into the tuples that `mine` has (msgpack knows only lists), and into tensors."""
    result = dict(mine)
    for key, value in theirs.items():
        old = mine.get(key)
        if isinstance(old, torch.Tensor):
            result[key] = torch.full_like(old, value)
        else:
            result[key] = tuple(value) if isinstance(old, tuple) and isinstance(value, list) else value
    result.pop("params", None)
    return result


_scalars = msgspec.msgpack.Decoder(Scalars)

"""The state of one peer's training: parameters, optimizer, scheduler and extra tensors; how it is stepped, averaged,
copied for newcomers and taken over from others."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Annotated, Any

import msgspec
import torch
from blake3 import blake3
from torch.optim.lr_scheduler import LRScheduler

from shoal.compression import Compression, NoCompression, TensorRole, plan_codecs
from shoal.flat import FlatBuffer, Layout, bytes_of, pick_kernels
from shoal.optim.group_options import KERNELS, GroupOptions, plain, restored
from shoal.optim.placement import HostCopy, Placement
from shoal.optim.settings import Settings
from shoal.swarm.protocol.tip import Tip
from shoal.transfer.donor import Snapshot
from shoal.transfer.transfer import Downloaded

MANIFEST_BYTES = 1 << 26
"""For the options, counters and padding of a downloaded state."""

AsGrad = Callable[[Sequence[torch.Tensor], float | None], AbstractContextManager[None]]
Name = Annotated[str, msgspec.Meta(max_length=256)]


class Statistic(msgspec.Struct, array_like=True, frozen=True):
    """Names the tensor `optimizer.state[parameter][name]` of a layout."""

    parameter: Annotated[int, msgspec.Meta(ge=0)]
    name: Name


class Scalars(msgspec.Struct, frozen=True):
    """The part of a state that is not tensors, as plain data.

    Attributes:
        groups: the options of each parameter group (learning rate, momentum, …).
        statistics: the tensors of the optimizer's state, in the order of the layout.
        values: everything else in the optimizer's state: (parameter, name, value).
        scheduler: the scheduler's state; None without a scheduler.
        extras: the number of extra tensors, which end the layout.
    """

    groups: list[dict[Name, Any]]
    statistics: list[Statistic]
    values: list[tuple[int, Name, Any]]
    scheduler: dict[Name, Any] | None
    extras: int


class TrainingState:
    """The parameters of one peer, its optimizer's state, its scheduler and its extra tensors.

    Args:
        optimizer: the local optimizer.
        scheduler: stepped once per global epoch, or None.
        extra_tensors: shared with newcomers beside the rest.
        flat: move the parameters into flat memory now (`parameter.data` becomes a view of it), and the tensors of the
            optimizer's state after the first step. If False, all tensors stay where they are.
        pinned: have the parameters in host memory that a GPU can reach directly.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        extra_tensors: Sequence[torch.Tensor],
        *,
        flat: bool = True,
        pinned: bool = False,
    ) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler
        self.extra_tensors = list(extra_tensors)
        self.parameters: list[torch.Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self._memory = FlatBuffer.adopt(self.parameters, pinned=pinned) if flat else None
        self._held: list[torch.Tensor] = []  # the tensors of the optimizer's state that are in flat memory
        self.adopt_statistics()

    @property
    def memory(self) -> FlatBuffer:
        """The flat memory of the parameters."""
        assert self._memory is not None
        return self._memory

    def adopt_statistics(self) -> None:
        """Move new tensors of the optimizer's state into flat memory."""
        if self._memory is None:
            return
        tensors = [tensor for _, tensor in self._statistics()]
        if len(tensors) != len(self._held) or any(a is not b for a, b in zip(tensors, self._held, strict=True)):
            FlatBuffer.adopt(tensors)
            self._held = tensors

    def digest(self) -> bytes:
        """The blake3 hash of the parameters, 32 bytes. Parameters on a device are copied to the host for it."""
        return _hash_of([flat.detach().cpu() for flat in self.memory.flat])

    def _statistics(self) -> list[tuple[Statistic, torch.Tensor]]:
        """The tensors of the optimizer's state."""
        return [
            (Statistic(index, name), value)
            for index, parameter in enumerate(self.parameters)
            for name, value in sorted(self.optimizer.state.get(parameter, {}).items())
            if isinstance(value, torch.Tensor)
        ]

    def statistics(self, name: str) -> list[torch.Tensor | None]:
        """The tensors of that name in the optimizer's state, one for each parameter; None where it has none.

        Raises:
            ValueError: if the optimizer has a state, but no tensor of this name and the parameter's shape.
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

    # -- as newcomers get it

    def snapshot(
        self,
        tip: Tip,
        compression: Compression,
        averaged: Collection[str] = (),
        groups: Sequence[dict[str, Any]] | None = None,
    ) -> Snapshot:
        """A copy of everything, for a newcomer.

        Args:
            tip: names the state.
            compression: how the tensors are sent.
            averaged: names of statistics that are averaged. All others are sent exactly, because nothing would make
                them equal again.
            groups: the options of the parameter groups; by default those that they hold now.

        Raises:
            ValueError: if the optimizer holds something that is not plain data, or if the compression has no codec for
                a tensor.
        """
        # Statistics of one name follow each other: then few runs of a codec suffice, however many parameters there are.
        statistics = sorted(self._statistics(), key=lambda one: one[0].name)
        first, extras = len(self.parameters), self.extra_tensors
        tensors = [*self.parameters, *(tensor for _, tensor in statistics), *extras]
        memory = FlatBuffer(Layout.of(tensors).on("cpu"), recycled=True)
        memory.copy_from([tensor.detach() for tensor in tensors])
        values = [
            (index, name, value)
            for index, parameter in enumerate(self.parameters)
            for name, value in sorted(self.optimizer.state.get(parameter, {}).items())
            if not isinstance(value, torch.Tensor)
        ]
        try:
            scalars = Scalars(
                groups=[plain(group) for group in (self._options() if groups is None else groups)],
                statistics=[one for one, _ in statistics],
                values=[(index, name, plain(value)) for index, name, value in values],
                scheduler=_scheduler_state(self.scheduler),
                extras=len(extras),
            )
        except TypeError as error:
            raise ValueError(f"the optimizer's state can't be shared: {error}") from error
        layout = msgspec.msgpack.encode(memory.layout.to_wire())
        roles = [TensorRole.PARAMETER] * first + [TensorRole.OPTIMIZER] * len(statistics)
        roles += [TensorRole.UNSPECIFIED] * len(extras)
        kinds = [""] * first + [one.name for one, _ in statistics] + [""] * len(extras)
        exact = {first + number for number, (one, _) in enumerate(statistics) if one.name not in averaged}
        codecs = plan_codecs(compression, memory.layout, roles, exact=exact, kinds=kinds)
        return Snapshot(tip, layout, memory.flat, msgspec.msgpack.encode(scalars), codecs)

    def load(self, state: Downloaded) -> None:
        """Take over a downloaded state.

        Raises:
            ValueError: if it does not fit this model; then nothing has changed.
        """
        try:
            tensors, scalars = state.tensors(), _scalars.decode(state.scalars)
        except RecursionError as error:
            raise ValueError(f"the state is nested too deeply: {error}") from error
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
        """(this peer's tensor, the state's) of all tensors but the optimizer's.

        Raises:
            ValueError: if they do not fit.
        """
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
        """The state's options of the parameter groups.

        Raises:
            ValueError: if their types or their number differ from this peer's.
        """
        mine = self._options()
        if len(scalars.groups) != len(mine):
            raise ValueError(f"the state has {len(scalars.groups)} parameter groups, this peer {len(mine)}")
        return [
            {key: restored(value, ours.get(key), key) for key, value in theirs.items()}
            for ours, theirs in zip(mine, scalars.groups, strict=True)
        ]

    def _options(self) -> list[dict[str, Any]]:
        """What newcomers get of the parameter groups as they are now."""
        left_out = KERNELS | {"params"}
        return [{k: v for k, v in group.items() if k not in left_out} for group in self.optimizer.param_groups]

    def _load_statistics(self, scalars: Scalars, tensors: Sequence[torch.Tensor]) -> None:
        """Copy into the tensors that are there, allocate the others, and drop those that the state does not have."""
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


class Replica(TrainingState):
    """This peer's state in a run: which state of the run it is, and the steps that it makes.

    One thread at a time changes it; others may take snapshots meanwhile.

    Args:
        optimizer, scheduler, extra_tensors: see `TrainingState`. Extra tensors of floating point are averaged, too.
        settings: of the `Optimizer`.
        host: the copy on the host from whose groups the optimizer is made, if it steps there.

    Attributes:
        tip: names the state of the parameters.
        state_digest: the blake3 hash of the parameters, 32 bytes.
        trained, frozen: the model's parameters that require gradients, and the others.
        shared: the averaged part of the state: parameters and statistics.
        buffers: the extra tensors that are averaged.
        placement: of the model's parameters.
        options: of the parameter groups: this peer's own, and the run's.

    Raises:
        ValueError: if there is nothing to train, or as `FlatBuffer.adopt`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        extra_tensors: Sequence[torch.Tensor],
        settings: Settings,
        host: HostCopy | None = None,
    ) -> None:
        self._settings, self._host = settings, host
        self._lock = threading.Lock()  # held while the state changes, and while it is copied
        self.options = GroupOptions(optimizer, scheduler, host)
        super().__init__(optimizer, scheduler, extra_tensors, pinned=host is not None and host.pinned)
        model, memory = (self.parameters, self.memory) if host is None else (host.model, host.memory)
        names = [name for group in optimizer.param_groups for name in group.get("param_names", ())]
        self.placement = Placement(model, memory, extra_tensors, names, copied=host is not None)
        self.trained = [parameter for parameter in model if parameter.requires_grad]
        self.frozen = [parameter for parameter in model if not parameter.requires_grad]
        self._stepped = [parameter for parameter in self.parameters if parameter.requires_grad]
        if not self.trained:
            raise ValueError("no parameter of the optimizer has requires_grad=True: there is nothing to train")
        compression = settings.state_averaging_compression or NoCompression()
        kinds = [name for name in ("", *settings.average_opt_statistics) for _ in self.parameters]
        roles = [TensorRole.OPTIMIZER if name else TensorRole.PARAMETER for name in kinds]
        layout = Layout.of(self.parameters * (1 + len(settings.average_opt_statistics))).on("cpu")
        self.shared = SharedTensors(layout, compression, roles, kinds)
        extras = [tensor for tensor in self.extra_tensors if tensor.is_floating_point()]
        self.buffers = SharedTensors(Layout.of(extras).on("cpu"), compression, [TensorRole.UNSPECIFIED] * len(extras))
        self._extras: list[torch.Tensor | None] = [*extras]
        self.tip, self.state_digest = Tip.genesis(settings.run_id), self.digest()

    @property
    def max_nbytes(self) -> int:
        """The largest size of a state of this model: no optimizer is known that keeps more than 15 tensors like each
        parameter, all in float32 or all in the parameter's dtype."""
        own = sum(max(4, p.element_size()) * p.numel() for p in [*self.trained, *self.frozen])
        return 16 * own + sum(t.element_size() * t.numel() for t in self.extra_tensors) + MANIFEST_BYTES

    @property
    def is_averaged_whole(self) -> bool:
        """Whether everything on which a step depends is averaged with the state: then peers are alike after it."""
        names = {one.name for one, tensor in self._statistics() if tensor.dim()}
        return names <= set(self._settings.average_opt_statistics)

    def take_over(self) -> None:
        """Continue from what other code has set as the model's parameters, see `Placement.take_over`. Not to be called
        while a step is under way in the background: the parameters on the host are newer than the model's then."""
        with self._lock:
            changed = self.placement.take_over()
            if changed and self._host is not None:
                self._host.fetch(self.memory)
        if changed:
            self.state_digest = self.digest()

    # -- steps

    def step(self, as_grad: AsGrad, tip: Tip, options: bytes, *, with_state: bool) -> None:
        """Make the step of an epoch: set the state to its average if it was averaged, make the local optimizer's step
        with the averaged gradients, and step the scheduler.

        An optimizer on the host leaves the model's parameters as they are until `publish`.

        Args:
            as_grad: makes averaged gradients the `.grad` of parameters, clipped to a norm; see `EpochGradients`.
            tip: names the state after the step.
            options: the run's options, see `GroupOptions`.
            with_state: whether the state was averaged.
        """
        with self._lock, self.options.set_aside():
            if with_state:
                self.shared.put(self._shared_tensors(), keep_changes=False)
            with as_grad(self._stepped, self._settings.max_grad_norm), self.options.of_run(options):
                self._step()
            self._end_epoch(tip)
        self.state_digest = self.digest()

    def step_locally(self) -> None:
        """Make the local optimizer's step with this peer's own `.grad` and options; the epoch goes on."""
        with self._lock:
            self.options.enforce()
            self._step()
            self._adopt_new_statistics()

    def _step(self) -> None:
        # On the host, torch's default kernel passes over the parameters once for every operation. Its fused kernels are
        # as exact but round differently, alike with any number of threads: they divide the work between cache lines.
        if all(parameter.device.type == "cpu" for parameter in self._stepped):
            pick_kernels(self.optimizer)
        self.optimizer.step()

    def end_epoch(self, tip: Tip, *, with_state: bool) -> None:
        """End an epoch of local steps: set the state to its average if it was averaged, keep what has changed in it
        since it was taken, and step the scheduler; `tip` names the state then."""
        with self._lock:
            if with_state:
                self.shared.put(self._shared_tensors(), keep_changes=True)
            self.options.record()
            self._end_epoch(tip)
        self.state_digest = self.shared.digest() if with_state else self.digest()

    def _end_epoch(self, tip: Tip) -> None:
        self.options.step_scheduler()
        self._adopt_new_statistics()
        self.tip = tip

    def _adopt_new_statistics(self) -> None:
        self.adopt_statistics()
        for name in self._settings.average_opt_statistics:
            self.statistics(name)  # raises if there is none

    def publish(self) -> None:
        """Set the model's parameters to those that the optimizer has on the host."""
        if self._host is not None:
            self.placement.restore()
            self._host.publish(self.memory)

    # -- what is averaged

    def take_state(self) -> None:
        """Bring the state as it is now to the next round."""
        self.shared.take(self._shared_tensors())

    def take_buffers(self) -> None:
        """Bring the extra tensors as they are now to the next round."""
        self.buffers.take(self._extras)

    def put_buffers(self) -> None:
        """Set the extra tensors to their average, and keep what has changed in them since they were taken."""
        self.buffers.put(self._extras, keep_changes=True)

    def _shared_tensors(self) -> list[torch.Tensor | None]:
        tensors: list[torch.Tensor | None] = [*self.parameters]
        for name in self._settings.average_opt_statistics:
            tensors += self.statistics(name)
        return tensors

    # -- given to newcomers, taken from others, saved and loaded

    def copy_for_newcomer(self) -> Snapshot:
        """A snapshot of the state after the last epoch.

        Raises:
            ValueError: if the optimizer holds something that can't be sent.
        """
        compression = self._settings.load_state_compression or NoCompression()
        with self._lock:
            return self.snapshot(self.tip, compression, self._settings.average_opt_statistics, self.options.at_tip)

    def load(self, state: Downloaded) -> None:
        """See `TrainingState.load`."""
        with self._lock:
            self.placement.take_over()
            super().load(state)
            self.options.refresh()
            self.tip = state.manifest.tip
            self.publish()
        self.state_digest = self.digest()

    def state_dict(self) -> dict[str, Any]:
        """The local optimizer's state dict, with `["state"]["local_epoch"]`, and beside it under "shoal" the rest."""
        state = self.optimizer.state_dict()
        state["state"] = {**state["state"], "local_epoch": self.tip.epoch}
        state["shoal"] = {"lineage": self.tip.lineage, "samples": self.tip.samples}
        if self.scheduler is not None:
            state["shoal"]["scheduler"] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a copy of a dict of `state_dict`, or of the local optimizer's own: then at the present tip.

        A dict that has an epoch and nothing else of Shoal (hivemind's) counts `target_batch_size` samples for each
        epoch. The parameters are the model's.
        """
        given = copy.deepcopy(state_dict)
        epoch = given["state"].pop("local_epoch", None)
        ours = given.pop("shoal", {})
        with self._lock:
            self.placement.take_over()
            self.optimizer.load_state_dict(given)
            if self.scheduler is not None and "scheduler" in ours:
                self.scheduler.load_state_dict(ours["scheduler"])
            self.options.refresh()
            self.adopt_statistics()
            if self._host is not None:
                self._host.fetch(self.memory)
            if epoch is not None:
                samples = ours.get("samples", epoch * self._settings.target_batch_size)
                self.tip = Tip(epoch, ours.get("lineage", self.tip.lineage), float(samples))
        self.state_digest = self.digest()


class SharedTensors:
    """Tensors that rounds average: a copy of what they were when they were taken, and their average. Both are allocated
    at the first round that averages them.

    Args:
        layout: of the tensors, on the CPU.
        compression: how they travel.
        roles: of each tensor.
        kinds: of each tensor, among those of its role; None: all are of one kind.
    """

    def __init__(
        self,
        layout: Layout,
        compression: Compression,
        roles: Sequence[TensorRole],
        kinds: Sequence[str] | None = None,
    ) -> None:
        self.layout, self._roles = layout, tuple(roles)
        self.codecs = plan_codecs(compression, layout, roles, kinds=kinds)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each flat buffer."""
        return tuple(spec.numel for spec in self.layout.buffers)

    @cached_property
    def mine(self) -> FlatBuffer:
        """What this peer brings."""
        return FlatBuffer(self.layout)

    @cached_property
    def averaged(self) -> FlatBuffer:
        """What all peers get."""
        return FlatBuffer(self.layout)

    @torch.no_grad()
    def take(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Copy the tensors as they are now. A tensor that this peer does not have counts as zeros."""
        for mine, tensor in zip(self.mine.views(), tensors, strict=True):
            mine.zero_() if tensor is None else mine.copy_(tensor)

    @torch.no_grad()
    def put(self, tensors: Sequence[torch.Tensor | None], *, keep_changes: bool) -> None:
        """Set the tensors to their average; with `keep_changes` by the delta rule, see `put_average`."""
        views = zip(tensors, self.averaged.views(), self.mine.views(), self._roles, strict=True)
        for tensor, average, mine, role in views:
            if tensor is not None:
                put_average(tensor, average, mine if keep_changes else None, role)

    def digest(self) -> bytes:
        """The blake3 hash of the average, 32 bytes."""
        return _hash_of(self.averaged.flat)


@torch.no_grad()
def put_average(
    tensor: torch.Tensor, average: torch.Tensor, before: torch.Tensor | None, role: TensorRole | None
) -> None:
    """Set a tensor to its average.

    Args:
        before: what the tensor was when it was taken, for the delta rule: the tensor becomes its average plus what has
            changed in it since, where that is finite. None: it becomes its average.
        role: of the tensor. By the delta rule, no statistic becomes less than both its average and what it is now, if
            neither has a negative value. More may have decayed here than the average is, and an optimizer that divides
            by the root makes NaN of a negative second moment.
    """
    if before is None:
        tensor.copy_(average)
        return
    now = tensor.detach().to(average.device, average.dtype, copy=True)
    moved = average + (now - before).nan_to_num_(0.0, 0.0, 0.0)
    if role is TensorRole.OPTIMIZER and (average >= 0).all() and (now >= 0).all():
        moved = torch.maximum(moved, torch.minimum(average, now))
    tensor.copy_(moved)


def _hash_of(flat: Iterable[torch.Tensor]) -> bytes:
    hasher = blake3()
    for tensor in flat:
        hasher.update(bytes_of(tensor))
    return hasher.digest()


def _scheduler_state(scheduler: LRScheduler | None) -> dict[str, Any] | None:
    """The plain data in a scheduler's state. Functions that torch leaves in it are each peer's own."""
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

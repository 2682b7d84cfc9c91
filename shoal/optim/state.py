"""The state of one peer's training (parameters, optimizer, scheduler and extra tensors): how it is stepped, averaged,
copied for newcomers and taken over from others."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import torch
from blake3 import blake3
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from shoal.averaging.exchange import Vector
from shoal.compression import Compression, NoCompression, TensorRole, plan_codecs
from shoal.flat import FlatBuffer, Layout, bytes_of, pick_kernels
from shoal.optim.drift import Drift
from shoal.optim.group_options import KERNELS, GroupOptions, is_plain, plain, restored
from shoal.optim.host_copy import HostCopy
from shoal.optim.kept import Kept
from shoal.optim.placement import Placement
from shoal.optim.settings import Settings
from shoal.p2p.errors import Refused
from shoal.swarm.protocol.line import Line, line_to
from shoal.swarm.protocol.tip import Tip
from shoal.transfer.donor import EncodedState, Snapshot, encoded
from shoal.transfer.transfer import Downloaded

log = logging.getLogger(__name__)

TENSORS_OF_OPTIMIZER = 16
"""No optimizer is known that keeps more than 15 tensors like each parameter, all in float32 or all in the parameter's
dtype; and the parameter itself."""

MANIFEST_BYTES = 1 << 26
"""For the options, counters and padding of a downloaded state."""

AsGrad = Callable[[Sequence[Tensor], float | None], AbstractContextManager[None]]
Index = Annotated[int, msgspec.Meta(ge=0)]
Groups = Sequence[dict[str, Any]]
Name = Annotated[str, msgspec.Meta(max_length=256)]


class Scalars(msgspec.Struct, frozen=True):
    """The part of a state that is not tensors, as plain data.

    Attributes:
        groups: the options of each parameter group (learning rate, momentum, …).
        statistics: the tensors of the optimizer's state, in the order of the layout: (parameter, name).
        values: everything else in the optimizer's state: (parameter, name, value).
        scheduler: the scheduler's state; None without a scheduler.
        extras: the number of extra tensors, which end the layout.
    """

    groups: list[dict[Name, Any]]
    statistics: list[tuple[Index, Name]]
    values: list[tuple[Index, Name, Any]]
    scheduler: dict[Name, Any] | None
    extras: int


@dataclass(frozen=True, slots=True)
class Part:
    """What of a state is copied or loaded: parameters, with what the optimizer keeps of them, and extra tensors. The
    rest of a state, which is not tensors, goes with every part."""

    parameters: Sequence[Tensor]
    extras: Sequence[Tensor]


class TrainingState:
    """The parameters of one peer, its optimizer's state, its scheduler and its extra tensors.

    Args:
        optimizer: the local optimizer.
        scheduler: stepped once per global epoch, or None.
        extra_tensors: shared with newcomers beside the rest.
        flat: move the parameters into flat memory now (`parameter.data` becomes a view of it), and the tensors of the
            optimizer's state after the first step. If False, all tensors stay where they are.
        pinned: have the parameters in host memory that a GPU can reach directly.

    Attributes:
        memory: the flat memory of the parameters, with `flat`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        extra_tensors: Sequence[Tensor],
        *,
        flat: bool = True,
        pinned: bool = False,
    ) -> None:
        self.optimizer, self.scheduler = optimizer, scheduler
        self.extra_tensors = list(extra_tensors)
        self.parameters: list[Tensor] = [p for group in optimizer.param_groups for p in group["params"]]
        self._is_flat = flat
        if flat:
            self.memory = FlatBuffer.adopt(self.parameters, pinned=pinned)
        self._whole = Part(self.parameters, self.extra_tensors)
        self._held: list[Tensor] = []  # the tensors of the optimizer's state that are in flat memory
        self.adopt_statistics()

    def adopt_statistics(self) -> None:
        """Move new tensors of the optimizer's state into flat memory."""
        if not self._is_flat:
            return
        tensors = [value for _, _, value in self._kept() if isinstance(value, Tensor)]
        if len(tensors) != len(self._held) or any(a is not b for a, b in zip(tensors, self._held, strict=True)):
            FlatBuffer.adopt(tensors)
            self._held = tensors

    def digest(self) -> bytes:
        """The blake3 hash of the parameters, 32 bytes. Parameters on a device are copied to the host for it."""
        return hash_of([flat.detach().cpu() for flat in self.memory.flat])

    def _kept(self, parameters: Sequence[Tensor] | None = None) -> Iterator[tuple[int, str, Any]]:
        """(parameter, name, value) of everything in the optimizer's state, of all parameters or of these."""
        for index, parameter in enumerate(self.parameters if parameters is None else parameters):
            for name, value in sorted(self.optimizer.state.get(parameter, {}).items()):
                yield index, name, value

    def statistics(self, name: str) -> list[Tensor | None]:
        """The tensors of that name in the optimizer's state, one for each parameter; None where it has none.

        Raises:
            ValueError: if the optimizer has a state, but no tensor of this name and the parameter's shape.
        """
        found: list[Tensor | None] = []
        for parameter in self.parameters:
            held = self.optimizer.state.get(parameter, {})
            value = held.get(name)
            if held and not (isinstance(value, Tensor) and value.shape == parameter.shape):
                alike = [key for key, v in held.items() if isinstance(v, Tensor) and v.shape == parameter.shape]
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
        groups: Groups | None = None,
        part: Part | None = None,
    ) -> Snapshot:
        """A copy of everything, or of a part of it, for a newcomer.

        Args:
            tip: names the state.
            compression: how the tensors are sent.
            averaged: names of statistics that are averaged. All others are sent exactly, because nothing would make
                them equal again.
            groups: the options of the parameter groups; by default those that they hold now.
            part: what of it; None: all.

        Raises:
            ValueError: if the optimizer holds something that is not plain data, or if the compression has no codec for
                a tensor.
        """
        part = self._whole if part is None else part
        # Statistics of one name follow each other: then few runs of a codec suffice, however many parameters there are.
        held = sorted(self._kept(part.parameters), key=lambda one: one[1])
        statistics = [one for one in held if isinstance(one[2], Tensor)]
        tensors = [*part.parameters, *(tensor for _, _, tensor in statistics), *part.extras]
        memory = FlatBuffer(Layout.of(tensors).on("cpu"), recycled=True)
        memory.copy_from([tensor.detach() for tensor in tensors])
        try:
            scalars = Scalars(
                groups=[plain(group) for group in (self._options() if groups is None else groups)],
                statistics=[(index, name) for index, name, _ in statistics],
                values=[(i, name, plain(v)) for i, name, v in held if not isinstance(v, Tensor)],
                scheduler=scheduler_state(self.scheduler),
                extras=len(part.extras),
            )
        except TypeError as error:
            raise ValueError(f"the optimizer's state can't be shared: {error}") from error
        described = [("", TensorRole.PARAMETER)] * len(part.parameters)
        described += [(name, TensorRole.OPTIMIZER) for _, name, _ in statistics]
        described += [("", TensorRole.UNSPECIFIED)] * len(part.extras)
        kinds, roles = zip(*described, strict=True)
        exact = {n for n, (kind, role) in enumerate(described) if role is TensorRole.OPTIMIZER and kind not in averaged}
        codecs = plan_codecs(compression, memory.layout, roles, exact=exact, kinds=kinds)
        layout = msgspec.msgpack.encode(memory.layout.to_wire())
        return Snapshot(tip, layout, memory.flat, msgspec.msgpack.encode(scalars), codecs)

    def load(self, state: Downloaded) -> None:
        """Take over a downloaded state.

        Raises:
            ValueError: if it does not fit this model; then nothing has changed.
        """
        self.load_part(state, self._whole)

    def load_part(self, state: Downloaded, part: Part) -> None:
        """Take over a downloaded state of that part.

        Raises:
            ValueError: if it does not fit this model; then nothing has changed.
        """
        try:
            tensors, scalars = state.tensors(), _scalars.decode(state.scalars)
        except RecursionError as error:
            raise ValueError(f"the state is nested too deeply: {error}") from error
        self.load_tensors(tensors, scalars, part)

    def load_tensors(self, tensors: Sequence[Tensor], scalars: Scalars, part: Part) -> None:
        """Take over a state of that part: its tensors as they are in a snapshot, and the rest.

        Raises:
            ValueError: if it does not fit this model; then nothing has changed.
        """
        count, extras, mine = len(part.parameters), len(part.extras), self._options()
        if len(tensors) != count + len(scalars.statistics) + scalars.extras or scalars.extras != extras:
            parameters = len(tensors) - len(scalars.statistics) - scalars.extras
            given = f"{parameters} parameters and {scalars.extras} extra tensors"
            raise ValueError(f"the state has {given}; this peer has {count} and {extras}")
        copied = [*tensors[:count], *tensors[len(tensors) - extras :]]
        pairs = list(zip([*part.parameters, *part.extras], copied, strict=True))
        for index, (own, theirs) in enumerate(pairs):
            if own.shape != theirs.shape or own.dtype != theirs.dtype:
                raise ValueError(
                    f"tensor {index} of the state is {theirs.dtype} of shape {tuple(theirs.shape)}, and this peer's is "
                    f"{own.dtype} of shape {tuple(own.shape)}: do all peers train the same model?"
                )
        if len(scalars.groups) != len(mine):
            raise ValueError(f"the state has {len(scalars.groups)} parameter groups, this peer {len(mine)}")
        groups = [
            {key: restored(value, ours.get(key), key) for key, value in given.items()}
            for ours, given in zip(mine, scalars.groups, strict=True)
        ]
        if any(i >= count for i, _ in scalars.statistics) or any(i >= count for i, _, _ in scalars.values):
            raise ValueError(f"the state has statistics of a parameter that does not exist: there are {count}")
        if (self.scheduler is None) != (scalars.scheduler is None):
            raise ValueError("the state has a scheduler and this peer has none, or the other way round")
        scheduled: dict[str, Any] = {}
        if self.scheduler is not None and scalars.scheduler is not None:
            scheduled = dict(self.scheduler.state_dict())
            if unknown := set(scalars.scheduler) - set(scheduled):
                raise ValueError(f"this peer's scheduler has no {', '.join(sorted(unknown))}")
            scheduled |= {key: restored(value, scheduled[key], key) for key, value in scalars.scheduler.items()}
        with torch.no_grad():
            for tensor, theirs in pairs:
                tensor.copy_(theirs)
            self._load_statistics(scalars, tensors[count : count + len(scalars.statistics)], part.parameters)
        for group, options in zip(self.optimizer.param_groups, groups, strict=True):
            group.update(options)
        if self.scheduler is not None:
            self.scheduler.load_state_dict(scheduled)

    def _options(self) -> list[dict[str, Any]]:
        """What newcomers get of the parameter groups as they are now."""
        left_out = KERNELS | {"params"}
        return [{k: v for k, v in group.items() if k not in left_out} for group in self.optimizer.param_groups]

    def _load_statistics(self, scalars: Scalars, tensors: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        """Copy into the tensors that are there, allocate the others, and drop those that the state does not have."""
        kept: dict[int, dict[str, Any]] = {}
        for (index, name), tensor in zip(scalars.statistics, tensors, strict=True):
            parameter = parameters[index]
            mine = self.optimizer.state.get(parameter, {}).get(name)
            if not isinstance(mine, Tensor) or mine.shape != tensor.shape or mine.dtype != tensor.dtype:
                # As torch does: statistics live with their parameter, but step counts (0-d) stay on the host.
                mine = torch.empty_like(tensor, device=parameter.device if tensor.dim() else "cpu")
            mine.copy_(tensor)
            kept.setdefault(index, {})[name] = mine
        for index, name, value in scalars.values:
            kept.setdefault(index, {})[name] = value
        for index, parameter in enumerate(parameters):
            self.optimizer.state.pop(parameter, None)
            if index in kept:
                self.optimizer.state[parameter] = kept[index]
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
        line: the lineages that this state went through, the tip's last.
        state_digest: the blake3 hash of the parameters, 32 bytes.
        trained, frozen: the model's parameters that require gradients, and the others.
        stepped: the optimizer's own of those that are trained.
        drift: how far the model is from the parameters, where these are the anchor of an outer optimizer; else None.
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
        extra_tensors: Sequence[Tensor],
        settings: Settings,
        host: HostCopy | None = None,
    ) -> None:
        self._settings, self._host = settings, host
        self.drift: Drift | None = None
        self._lock = threading.Lock()  # held while the state changes, and while it is copied
        self.line = Line()
        self.options = GroupOptions(optimizer, scheduler, host)
        super().__init__(optimizer, scheduler, extra_tensors, pinned=host is not None and host.pinned)
        model, memory = (self.parameters, self.memory) if host is None else (host.model, host.memory)
        names = [name for group in optimizer.param_groups for name in group.get("param_names", ())]
        self.placement = Placement(model, memory, extra_tensors, names, copied=host is not None)
        self.trained = [parameter for parameter in model if parameter.requires_grad]
        self.frozen = [parameter for parameter in model if not parameter.requires_grad]
        self.stepped = [parameter for parameter in self.parameters if parameter.requires_grad]
        self._not_stepped = [parameter for parameter in self.parameters if not parameter.requires_grad]
        if not self.trained:
            raise ValueError("no parameter of the optimizer has requires_grad=True: there is nothing to train")
        compression = settings.state_averaging_compression
        kinds = [name for name in ("", *settings.average_opt_statistics) for _ in self.parameters]
        roles = [TensorRole.OPTIMIZER if name else TensorRole.PARAMETER for name in kinds]
        layout = Layout.of(self.parameters * (1 + len(settings.average_opt_statistics)))
        self.shared = SharedTensors(self._shared_tensors, layout, compression, roles, kinds)
        extras = [tensor for tensor in self.extra_tensors if tensor.is_floating_point()]
        unspecified = [TensorRole.UNSPECIFIED] * len(extras)
        self.buffers = SharedTensors(lambda: extras, Layout.of(extras), compression, unspecified)
        self.tip, self.state_digest = Tip.genesis(settings.run_id), self.digest()

    @property
    def tip(self) -> Tip:
        """See the class. Whoever sets it says that this state follows from the one before."""
        return self._tip

    @tip.setter
    def tip(self, tip: Tip) -> None:
        self._tip = tip
        self.line.went_to(tip)

    def locked(self) -> AbstractContextManager[object]:
        """Within, nobody else changes the state or copies it."""
        return self._lock

    @property
    def in_backward(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The trained parameters, which get gradients in a backward pass, and those that may get none."""
        return self.trained, self.frozen

    @property
    def described(self) -> Sequence[Tensor]:
        """The model's parameters, as peers compare them: by shape and dtype."""
        return self.parameters

    @property
    def described_groups(self) -> list[dict[str, Any]]:
        """The parameter groups, as peers compare them."""
        return self.optimizer.param_groups

    @property
    def max_nbytes(self) -> int:
        """The largest size of a state of this model."""
        own = sum(max(4, p.element_size()) * p.numel() for p in [*self.trained, *self.frozen])
        return (
            TENSORS_OF_OPTIMIZER * own + sum(t.element_size() * t.numel() for t in self.extra_tensors) + MANIFEST_BYTES
        )

    @property
    def is_averaged_whole(self) -> bool:
        """Whether everything on which a step depends is averaged with the state: then peers are alike after it."""
        names = {name for _, name, value in self._kept() if isinstance(value, Tensor) and value.dim()}
        return names <= set(self._settings.average_opt_statistics)

    def take_over(self) -> None:
        """Continue from what other code has set as the model's parameters, see `Placement.take_over`. Not to be called
        while a step is under way in the background: the parameters on the host are newer than the model's then."""
        with self._lock:
            changed = self.placement.take_over()
            if self.drift is not None:  # what changes the model is drift, once there are epochs
                changed = changed and not (self.tip.epoch or self.drift.has_moved)
            if changed and self._host is not None:
                self._host.copy(self._host.memory, self.memory)
        if changed:
            self.state_digest = self.digest()

    # -- steps

    def step(self, as_grad: AsGrad | None, tip: Tip, options: bytes, *, with_state: bool) -> None:
        """End an epoch: set the state to its average if it was averaged, make the local optimizer's step with the
        averaged gradients, and step the scheduler. With local updates there is only the rest to do, and what has
        changed in the state since it was taken is kept.

        An optimizer on the host leaves the model's parameters as they are until `publish`.

        Args:
            as_grad: makes averaged gradients the `.grad` of parameters, clipped to a norm; see `EpochGradients`. None
                with local updates.
            tip: names the state after the step.
            options: the run's options, see `GroupOptions`.
            with_state: whether the state was averaged.
        """
        host, is_local = self._host, as_grad is None
        with self._lock, contextlib.nullcontext() if host is None else host.set_aside(self.optimizer):
            if with_state:
                self.shared.put(keep_changes=is_local)
            if as_grad is None:
                self.options.record()
            else:
                with as_grad(self.stepped, self._settings.max_grad_norm), self.options.of_run(options):
                    self._step()
            self.options.step_scheduler()
            self._adopt_new_statistics()
            self.tip = tip
        self.state_digest = hash_of(self.shared.outputs.flat) if with_state and is_local else self.digest()

    def step_locally(self) -> None:
        """Make the local optimizer's step with this peer's own `.grad` and options; the epoch goes on."""
        with self._lock:
            self.options.enforce()
            self._step()
            self._adopt_new_statistics()

    def _step(self) -> None:
        # On the host, torch's default kernel passes over the parameters once for every operation. Its fused kernels are
        # as exact but round differently, alike with any number of threads: they divide the work between cache lines.
        if all(parameter.device.type == "cpu" for parameter in self.stepped):
            pick_kernels(self.optimizer)
        self.optimizer.step()

    def _adopt_new_statistics(self) -> None:
        self.adopt_statistics()
        for name in self._settings.average_opt_statistics:
            self.statistics(name)  # raises if there is none

    def publish(self) -> None:
        """Set the model's parameters to those that the optimizer has on the host."""
        if self.drift is not None:
            self.placement.take_over()
            self.drift.publish()
            with torch.no_grad():
                for frozen, kept in zip(self.frozen, self._not_stepped, strict=True):
                    frozen.copy_(kept)
        elif self._host is not None:
            self.placement.restore()
            self._host.copy(self.memory, self._host.memory)

    def _shared_tensors(self) -> list[Tensor | None]:
        tensors: list[Tensor | None] = [*self.parameters]
        for name in self._settings.average_opt_statistics:
            tensors += self.statistics(name)
        return tensors

    # -- given to newcomers, taken from others, saved and loaded

    def copy_for_newcomer(self) -> Snapshot:
        """A snapshot of the state after the last epoch.

        Raises:
            ValueError: if the optimizer holds something that can't be sent.
        """
        compression, averaged = self._settings.load_state_compression, self._settings.average_opt_statistics
        with self._lock:
            return self.snapshot(self.tip, compression, averaged, self.options.at_tip)

    def exact_copy(self) -> Kept:
        """A copy of the state after the last epoch, uncompressed, with the line that leads to it.

        Raises:
            ValueError: if the optimizer holds something that is not plain data.
        """
        with self._lock:
            return Kept(self.snapshot(self.tip, NoCompression(), (), self.options.at_tip), self.line.lineages)

    @property
    def nbytes(self) -> int:
        """About the size of the state."""
        kept = [value for _, _, value in self._kept() if isinstance(value, Tensor)]
        return sum(t.element_size() * t.numel() for t in [*self.parameters, *kept, *self.extra_tensors])

    def load(self, state: Downloaded, *, keeps_drift: bool = False) -> None:
        """See `TrainingState.load`.

        Args:
            keeps_drift: what the model has moved from the anchor stays, and is of the new one.
        """
        with self._lock:
            self.placement.take_over()
            if self.drift is not None and keeps_drift:
                self.drift.remember()
            try:
                self._take(state)
            except ValueError:
                if self.drift is not None:
                    self.drift.forget()
                raise
            self.options.refresh()
            self.line.take_over(state.line, state.manifest.tip)
            self.tip = state.manifest.tip
            self.publish()
        self.state_digest = self.digest()

    def _take(self, state: Downloaded) -> None:
        """Take over the tensors of a downloaded state."""
        super().load(state)

    def state_dict(self) -> dict[str, Any]:
        """The local optimizer's state dict, with `["state"]["local_epoch"]`, and beside it under "shoal" the rest."""
        drift = self.drift
        state = self.optimizer.state_dict() if drift is None else drift.inner.state_dict()
        state["state"] = {**state["state"], "local_epoch": self.tip.epoch}
        state["shoal"] = self.names()
        if self.scheduler is not None:
            state["shoal"]["scheduler"] = self.scheduler.state_dict()
        if drift is not None:
            state["shoal"]["outer"] = copy.deepcopy(self.optimizer.state_dict())
            state["shoal"]["drift"] = drift.state_dict()
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
            if self.drift is None:
                self.optimizer.load_state_dict(given)
            else:
                self._load_outer(self.drift, given, ours)
            if self.scheduler is not None and "scheduler" in ours:
                self.scheduler.load_state_dict(ours["scheduler"])
            self.options.refresh()
            self.adopt_statistics()
            if self._host is not None and self.drift is None:
                self._host.copy(self._host.memory, self.memory)
            if epoch is not None:
                self.take_names(epoch, ours)
        self.state_digest = self.digest()

    def names(self) -> dict[str, Any]:
        """The tip and the line, as a state dict has them."""
        named = {"lineage": self.tip.lineage, "samples": self.tip.samples, "line": self.line.to_wire()}
        return {**named, "pin": self.tip.pin} if self.tip.pin else named

    def take_names(self, epoch: int, named: dict[str, Any]) -> None:
        """Continue from the tip and the line of a state dict."""
        samples = named.get("samples", epoch * self._settings.target)
        tip = Tip(epoch, named.get("lineage", self.tip.lineage), float(samples), named.get("pin", 0))
        self.line.take_over(line_to(tip, named.get("line", b"")), tip)
        self.tip = tip

    def _load_outer(self, drift: Drift, inner: dict[str, Any], ours: dict[str, Any]) -> None:
        """Load the inner optimizer's state, and the outer one's with the anchor if they were saved; else the anchor is
        the model as it is."""
        assert self._host is not None
        drift.inner.load_state_dict(inner)
        if drift.schedule is not None:
            drift.schedule.rewind()
        drift.reset()
        self._host.copy(self._host.memory, self.memory)
        if "drift" in ours:
            self.optimizer.load_state_dict(ours["outer"])
            drift.load_state_dict(ours["drift"])


async def for_newcomer(take: Callable[[], Snapshot]) -> EncodedState:
    """The state that `take` copies, encoded; on the reactor.

    Raises:
        Refused: if it can't be sent.
    """
    try:
        # In one expression, so that the copy is let go of before the encoded state is returned.
        return await asyncio.to_thread(lambda: encoded(take()))
    except ValueError as error:
        log.warning("a newcomer can't have this peer's state: %s", error)
        raise Refused(str(error)) from error


class SharedTensors(Vector):
    """Tensors that rounds average: a copy of what they were when they were taken, and their average.

    Args:
        tensors: gives the tensors of this peer; None in place of one that it does not have.
        layout: of the tensors.
        compression: how they travel.
        roles: of each tensor.
        kinds: of each tensor, among those of its role; None: all are of one kind.
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
        """Bring the tensors as they are now to the next round. A tensor that this peer does not have counts as
        zeros."""
        for mine, tensor in zip(self.inputs.views(), self._tensors(), strict=True):
            mine.zero_() if tensor is None else mine.copy_(tensor)

    @torch.no_grad()
    def put(self, *, keep_changes: bool) -> None:
        """Set the tensors to their average; with `keep_changes` by the delta rule, see `put_average`."""
        views = zip(self._tensors(), self.outputs.views(), self.inputs.views(), self._roles, strict=True)
        for tensor, average, mine, role in views:
            if tensor is not None:
                put_average(tensor, average, mine if keep_changes else None, role)


@torch.no_grad()
def put_average(tensor: Tensor, average: Tensor, before: Tensor | None, role: TensorRole | None) -> None:
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
    if not tensor.is_floating_point():  # a counter may be too large for the average's dtype
        tensor.add_((average - before).to(tensor.device, tensor.dtype))
        return
    now = tensor.detach().to(average.device, average.dtype, copy=True)
    moved = average + (now - before).nan_to_num_(0.0, 0.0, 0.0)
    if role is TensorRole.OPTIMIZER and (average >= 0).all() and (now >= 0).all():
        moved = torch.maximum(moved, torch.minimum(average, now))
    tensor.copy_(moved)


def hash_of(tensors: Iterable[Tensor]) -> bytes:
    """The blake3 hash of tensors on the CPU, 32 bytes."""
    hasher = blake3()
    for tensor in tensors:
        hasher.update(bytes_of(tensor))
    return hasher.digest()


def scheduler_state(scheduler: LRScheduler | None) -> dict[str, Any] | None:
    """The plain data in a scheduler's state. Functions that torch leaves in it are each peer's own."""
    if scheduler is None:
        return None
    return {key: plain(value) for key, value in scheduler.state_dict().items() if is_plain(value)}


_scalars = msgspec.msgpack.Decoder(Scalars)

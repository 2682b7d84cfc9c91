"""This peer's copy of what is trained: its state, which state of the run that is, and the steps that it makes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from shoal.compression import Compression, NoCompression, TensorRole
from shoal.flat import Layout, pick_kernels
from shoal.optim.gradients import Gradients
from shoal.optim.group_options import GroupOptions
from shoal.optim.offload import HostCopy
from shoal.optim.placement import Placement
from shoal.optim.shared import SharedTensors
from shoal.optim.state import TrainingState
from shoal.swarm.protocol.tip import Tip
from shoal.transfer.donor import Snapshot
from shoal.transfer.transfer import Downloaded

MANIFEST_BYTES = 1 << 26
"""For the options, counters and padding of a downloaded state."""


class Replica:
    """One thread at a time changes it; others may take snapshots meanwhile.

    Args:
        optimizer: the local optimizer.
        scheduler: stepped with it, or None.
        extra_tensors: shared with newcomers beside the rest; those of floating point are averaged too.
        tip: of the state that the parameters are at now.
        host: whose groups the optimizer is made of, if it steps on the host.
        statistics: names of the optimizer's statistics that belong to the state that is averaged.
        compression: how the state travels when it is averaged.

    Attributes:
        tip: of the state that the parameters are at.
        digest: the blake3 hash of the parameters, 32 bytes.
        trained, frozen: the model's parameters that require gradients, and the others.
        shared: what is averaged of the state: the parameters and the statistics.
        buffers: the extra tensors that are averaged.
        placement: of the model's parameters.
        options: of the parameter groups: this peer's own, and the run's.

    Raises ValueError if there is nothing to train, or as `FlatBuffer.adopt`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        extra_tensors: Sequence[torch.Tensor],
        tip: Tip,
        *,
        host: HostCopy | None = None,
        statistics: Sequence[str] = (),
        compression: Compression | None = None,
    ) -> None:
        self._optimizer, self._scheduler, self._host = optimizer, scheduler, host
        self.options = GroupOptions(optimizer, scheduler, host)
        pinned = host is not None and host.pinned
        self._state = TrainingState(optimizer, scheduler, extra_tensors, pinned=pinned)
        self._lock = threading.Lock()  # held while the state changes, and while it is copied
        model = self._state.parameters if host is None else host.model
        memory = self._state.memory if host is None else host.memory
        names = [name for group in optimizer.param_groups for name in group.get("param_names", ())]
        self.placement = Placement(model, memory, extra_tensors, names, copied=host is not None)
        self.trained = [parameter for parameter in model if parameter.requires_grad]
        self.frozen = [parameter for parameter in model if not parameter.requires_grad]
        self._stepped = [parameter for parameter in self._state.parameters if parameter.requires_grad]
        if not self.trained:
            raise ValueError("no parameter of the optimizer has requires_grad=True: there is nothing to train")
        self._statistics, self._extras = tuple(statistics), [t for t in extra_tensors if t.is_floating_point()]
        compression = compression or NoCompression()
        parameters = self._state.parameters
        roles = [TensorRole.PARAMETER] * len(parameters)
        roles += [TensorRole.OPTIMIZER] * len(parameters) * len(self._statistics)
        kinds = [name for name in ("", *self._statistics) for _ in parameters]
        layout = Layout.of(parameters * (1 + len(self._statistics))).on("cpu")
        self.shared = SharedTensors(layout, compression, roles, kinds)
        layout = Layout.of(self._extras).on("cpu")
        self.buffers = SharedTensors(layout, compression, [TensorRole.UNSPECIFIED] * len(self._extras))
        self.tip = tip
        self.digest = self._state.digest()

    @property
    def max_nbytes(self) -> int:
        """What a state of this model may take: an optimizer that keeps more than 15 tensors like each parameter, all in
        float32 or all in the parameter's dtype, is not known."""
        own = sum(max(4, p.element_size()) * p.numel() for p in [*self.trained, *self.frozen])
        return 16 * own + sum(t.element_size() * t.numel() for t in self._state.extra_tensors) + MANIFEST_BYTES

    @property
    def is_averaged_whole(self) -> bool:
        """Whether all on which a step depends is averaged with the state: then peers are alike after it."""
        return all(name in self._statistics for name in self._state.statistic_names())

    def take_over(self) -> None:
        """Go on from what other code has set as the model's parameters, see `Placement.take_over`. Not while a step is
        under way in the background: the optimizer's parameters on the host are newer than the model's then."""
        with self._lock:
            changed = self.placement.take_over()
            if changed and self._host is not None:
                self._host.fetch(self._state.memory)
        if changed:
            self.digest = self._state.digest()

    # -- steps

    def step(self, gradients: Gradients, tip: Tip, options: bytes, *, with_state: bool, max_norm: float | None) -> None:
        """Set the state to its average if that was averaged, then make the local optimizer's step with the averaged
        gradients and the run's `options` (see `GroupOptions`), and the scheduler's; the state is `tip` then. The
        model's parameters are not those of the optimizer on the host before `publish`."""
        with self._lock, self.options.set_aside():
            if with_state:
                self.shared.put(self._shared_tensors(), keep_changes=False)
            with gradients.as_grad(self._stepped, max_norm), self.options.of_run(options):
                self._step()
            self._end_epoch(tip)
        self.digest = self._state.digest()

    def step_locally(self) -> None:
        """Make the local optimizer's step with this peer's own `.grad` and options; the epoch goes on."""
        with self._lock:
            self.options.enforce()
            self._step()
            self._adopt_statistics()

    def _step(self) -> None:
        # On the host torch's default goes over the parameters once for every operation. Its fused kernels are as exact
        # but round otherwise, alike with any number of threads: they divide the work where cache lines begin.
        if all(parameter.device.type == "cpu" for parameter in self._stepped):
            pick_kernels(self._optimizer)
        self._optimizer.step()

    def end_epoch(self, tip: Tip, *, with_state: bool) -> None:
        """After steps of this peer's own: set the state to its average if that was averaged, keeping what has changed
        in it since it was taken, and make the scheduler's step; the state is `tip` then."""
        with self._lock:
            if with_state:
                self.shared.put(self._shared_tensors(), keep_changes=True)
            self.options.record()
            self._end_epoch(tip)
        self.digest = self.shared.digest() if with_state else self._state.digest()

    def _end_epoch(self, tip: Tip) -> None:
        self.options.step_scheduler()
        self._adopt_statistics()
        self.tip = tip

    def _adopt_statistics(self) -> None:
        self._state.adopt_statistics()
        for name in self._statistics:
            self._state.statistics(name)  # raises if there is no such

    def publish(self) -> None:
        """Set the model's parameters to those that the optimizer has on the host."""
        if self._host is not None:
            self.placement.restore()
            self._host.publish(self._state.memory)

    # -- what is averaged

    def take_state(self) -> None:
        """Make what the state is now what this peer brings to a round."""
        self.shared.take(self._shared_tensors())

    def take_buffers(self) -> None:
        """The same of the extra tensors."""
        self.buffers.take(self._extras)

    def put_buffers(self) -> None:
        """Set the extra tensors to their average, and keep what has changed in them since they were taken."""
        self.buffers.put(self._extras, keep_changes=True)

    def _shared_tensors(self) -> list[torch.Tensor | None]:
        tensors: list[torch.Tensor | None] = [*self._state.parameters]
        for name in self._statistics:
            tensors += self._state.statistics(name)
        return tensors

    # -- handed over, saved and loaded

    def snapshot(self, compression: Compression) -> Snapshot:
        """A copy for a newcomer, to be sent so. Raises ValueError if the optimizer holds something that can't be
        sent."""
        with self._lock:
            return self._state.snapshot(self.tip, compression, self._statistics, self.options.at_tip)

    def load(self, state: Downloaded) -> None:
        """Take over a downloaded state. Raises ValueError, and changes nothing, if it does not fit."""
        with self._lock:
            self.placement.take_over()
            self._state.load(state)
            self.options.refresh()
            self.tip = state.manifest.tip
            self.publish()
        self.digest = self._state.digest()

    def state_dict(self) -> dict[str, Any]:
        """The local optimizer's state dict, with `["state"]["local_epoch"]`, and beside it under "shoal" the rest."""
        state = self._optimizer.state_dict()
        state["state"] = {**state["state"], "local_epoch": self.tip.epoch}
        state["shoal"] = {"lineage": self.tip.lineage, "samples": self.tip.samples}
        if self._scheduler is not None:
            state["shoal"]["scheduler"] = self._scheduler.state_dict()
        return state

    def load_state_dict(self, state_dict: dict[str, Any], samples_per_epoch: float) -> None:
        """Go on from a copy of a dict of `state_dict`, or of the local optimizer's own: then at the present tip. One
        that has an epoch but no more (hivemind's) is taken to have made `samples_per_epoch` in each. The parameters are
        the model's."""
        given = copy.deepcopy(state_dict)
        epoch = given["state"].pop("local_epoch", None)
        ours = given.pop("shoal", {})
        with self._lock:
            self.placement.take_over()
            self._optimizer.load_state_dict(given)
            if self._scheduler is not None and "scheduler" in ours:
                self._scheduler.load_state_dict(ours["scheduler"])
            self.options.refresh()
            self._state.adopt_statistics()
            if self._host is not None:
                self._host.fetch(self._state.memory)
            if epoch is not None:
                samples = ours.get("samples", epoch * samples_per_epoch)
                self.tip = Tip(epoch, ours.get("lineage", self.tip.lineage), float(samples))
        self.digest = self._state.digest()

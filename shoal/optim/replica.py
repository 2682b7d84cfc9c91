"""This peer's copy of what is trained: its state, which state of the run that is, and the steps that it makes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from shoal.averaging.donor import Snapshot
from shoal.averaging.tip import Tip
from shoal.averaging.transfer import Downloaded
from shoal.compression import Compression
from shoal.optim.gradients import GradientBuffers
from shoal.optim.state import TrainingState

MANIFEST_BYTES = 1 << 26
"""For the options, counters and padding of a downloaded state."""


class Replica:
    """Only the trainer's thread changes it; others may take snapshots meanwhile.

    Args:
        optimizer: the local optimizer.
        scheduler: stepped with it, or None.
        extra_tensors: shared with newcomers beside the rest.
        tip: of the state that the parameters are at now.

    Attributes:
        tip: of the state that the parameters are at.
        digest: the blake3 hash of the parameters, 32 bytes.
        trained, frozen: the parameters that require gradients, and the others.

    Raises ValueError if there is nothing to train, or as `FlatBuffer.adopt`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        extra_tensors: Sequence[torch.Tensor],
        tip: Tip,
    ) -> None:
        self._optimizer, self._scheduler = optimizer, scheduler
        self._state = TrainingState(optimizer, scheduler, extra_tensors)
        self._lock = threading.Lock()  # held while the state changes, and while it is copied
        self.trained = [parameter for parameter in self._state.parameters if parameter.requires_grad]
        self.frozen = [parameter for parameter in self._state.parameters if not parameter.requires_grad]
        if not self.trained:
            raise ValueError("no parameter of the optimizer has requires_grad=True: there is nothing to train")
        self.tip = tip
        self.digest = self._state.digest()

    @property
    def max_nbytes(self) -> int:
        """What a state of this model may take: an optimizer that keeps more than 15 tensors like each parameter, all in
        float32 or all in the parameter's dtype, is not known."""
        own = sum(max(4, p.element_size()) * p.numel() for p in [*self.trained, *self.frozen])
        return 16 * own + sum(t.element_size() * t.numel() for t in self._state.extra_tensors) + MANIFEST_BYTES

    def step(self, gradients: GradientBuffers, tip: Tip) -> None:
        """Make the local optimizer's step with the averaged gradients, and the scheduler's; the state is `tip` then."""
        with self._lock:
            with gradients.as_grad():
                self._optimizer.step()
            if self._scheduler is not None:
                self._scheduler.step()
            self._state.adopt_statistics()
            self.tip = tip
        self.digest = self._state.digest()

    def snapshot(self, compression: Compression) -> Snapshot:
        """A copy for a newcomer, to be sent so. Raises ValueError if the optimizer holds something that can't be
        sent."""
        with self._lock:
            return self._state.snapshot(self.tip, compression)

    def load(self, state: Downloaded) -> None:
        """Take over a downloaded state. Raises ValueError, and changes nothing, if it does not fit."""
        with self._lock:
            self._state.load(state)
            self.tip = state.manifest.tip
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
        that has an epoch but no more (hivemind's) is taken to have made `samples_per_epoch` in each."""
        given = copy.deepcopy(state_dict)
        epoch = given["state"].pop("local_epoch", None)
        ours = given.pop("shoal", {})
        with self._lock:
            self._optimizer.load_state_dict(given)
            if self._scheduler is not None and "scheduler" in ours:
                self._scheduler.load_state_dict(ours["scheduler"])
            self._state.adopt_statistics()
            if epoch is not None:
                samples = ours.get("samples", epoch * samples_per_epoch)
                self.tip = Tip(epoch, ours.get("lineage", self.tip.lineage), float(samples))
        self.digest = self._state.digest()

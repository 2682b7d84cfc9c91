"""The local state of a `TrainingStateAverager`, which three kinds of threads change: the trainer's, that which steps in
the background, and those of rounds."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

import torch

from shoal.averaging.averager import DecentralizedAverager
from shoal.optim.local_state import LocalState


class GuardedState:
    """Whoever changes the optimizer's tensors holds `lock`, and where rounds work on these tensors themselves, the
    averager's lock too, in this order.

    Args:
        local: the state.
        averager: whose rounds read and write `local.averaged`.

    Attributes:
        lock: may be held by users, to read and change the tensors.
    """

    def __init__(self, local: LocalState, averager: DecentralizedAverager) -> None:
        self._local, self._averager = local, averager
        self.lock = threading.RLock()

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """Within, nobody else changes it."""
        with self.lock, self._averager.get_tensors() if self._local.reuse else contextlib.nullcontext():
            yield

    def step(self, scaler: torch.amp.GradScaler | None) -> None:
        """Step the optimizer. Raises ValueError if the model has other parameters now."""
        self._local.check()
        with self.still():
            step: Callable[[], object] = self._local.optimizer.step
            step() if scaler is None else scaler.step(self._local.optimizer)

    def publish(self) -> bool:
        """Give the model the optimizer's parameters; whether that was done: not while a round may be writing them."""
        with self.lock:
            if not self._local.reuse:
                self._local.publish()
                return True
            if not self._averager.lock_averaged_tensors.acquire(blocking=False):
                return False
            try:
                self._local.publish()
                return True
            finally:
                self._averager.lock_averaged_tensors.release()

    # -- between the optimizer and a round

    def take(self, *, keep: bool) -> list[torch.Tensor] | None:
        """Bring what is now to where it is averaged; with `keep`, a copy of that, for `put`."""
        with self.lock, self._averager.get_tensors() as averaged:
            self._local.take()
            return [tensor.clone() for tensor in averaged] if keep else None

    def put(self, before: list[torch.Tensor] | None) -> None:
        """Set the tensors to their averages; with `before`, keep what has changed in them since then."""
        with self.lock, self._averager.get_tensors():
            self._local.put(before)

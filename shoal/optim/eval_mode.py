"""The eval mode that some optimizers have, schedule-free ones for example: the model has other parameters then.

[Note: what a peer is in eval mode] The state of a run is that of train mode. In eval mode a peer keeps the parameters
of train mode beside the model. Its digest, its vote and what it gives newcomers come from these, and `train` puts them
back to the bit; the optimizer's own way back rounds. A peer in eval mode makes no step and joins no round. If a round
falls due, the others wait for this peer as for any that is between two steps, and then begin without it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from shoal.flat import parameters_of, users_modes
from shoal.flat.allocation import memory_for
from shoal.interrupts import users_handlers
from shoal.optim._torch import writes_of
from shoal.optim.group_options import GroupOptions
from shoal.optim.tree import tensors_in

Mode = Literal["train", "eval"]


class EvalMode:
    """Calls `train` and `eval` of the optimizer that the user has given.

    Args:
        optimizer: that optimizer.
        options: the options that peers compare.

    Attributes:
        is_in_train: whether the optimizer is known to be in train mode. Frameworks call `train` before each batch.
        changes_state: whether the last `begin` has changed the optimizer's state, and not only the parameters.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, options: GroupOptions) -> None:
        self._optimizer, self._options = optimizer, options
        self._kept: list[Tensor] | None = None  # the parameters of train mode
        self.is_in_train = self.changes_state = False

    @property
    def is_on(self) -> bool:
        """Whether the model has the parameters of eval mode."""
        return self._kept is not None

    def in_train(self, parameters: Sequence[Tensor]) -> list[Tensor] | None:
        """The values that these parameters have in train mode; None if they have these now, or if they are not of this
        optimizer."""
        if self._kept is None:
            return None
        kept = dict(zip(map(id, parameters_of(self._optimizer)), self._kept, strict=True))
        return [kept[id(parameter)] for parameter in parameters] if id(parameters[0]) in kept else None

    @torch.no_grad()
    def begin(self) -> None:
        """Go to eval mode. If the optimizer raises an error, the parameters stay as they are.

        Raises:
            MemoryError: if there is no memory for a copy of the parameters.
        """
        if self.is_on:
            return
        own = parameters_of(self._optimizer)
        with memory_for("a copy of the parameters of train mode", MemoryError):
            kept = [parameter.detach().clone() for parameter in own]
        before = self._look_of_state()
        try:
            self._call("eval")
        except BaseException:  # the user's code, or a signal
            self.is_in_train = False  # the class may believe that it is in eval mode
            with contextlib.suppress(Exception):  # the user hears why `eval` failed; `train` can be called again
                self._call("train")
                self.is_in_train = True
            self._put(own, kept)
            raise
        self._kept, self.is_in_train = kept, False
        self.changes_state = before != self._look_of_state()

    @torch.no_grad()
    def end(self) -> bool:
        """Go to train mode, with the parameters that it had.

        Returns:
            Whether it had any. If not, the optimizer's own way may have led from eval mode to others: the user has
            given it in eval mode, or has loaded a state of eval mode.
        """
        self._call("train")
        self._options.record_own()
        self.is_in_train = True
        if self._kept is None:
            return False
        self._put(parameters_of(self._optimizer), self._kept)
        self._kept = None
        return True

    def forget(self) -> None:
        """Another state was loaded into the optimizer."""
        self._kept, self.is_in_train = None, False

    def _call(self, mode: Mode) -> None:
        with self._options.finding_own(), users_handlers(), users_modes():
            getattr(self._optimizer, mode)()

    def _look_of_state(self) -> list[tuple[int, int, float]]:
        """Tells whether the state is another one. Writes through `.data` are not counted, hence the sums."""
        tensors = [one for one in tensors_in([*self._optimizer.state.values()]) if type(one) is Tensor]
        sums = [float(tensor.sum(dtype=torch.float64)) if tensor.is_floating_point() else 0.0 for tensor in tensors]
        return [(id(tensor), writes_of(tensor), each) for tensor, each in zip(tensors, sums, strict=True)]

    @staticmethod
    def _put(own: Sequence[Tensor], values: Sequence[Tensor]) -> None:
        for parameter, value in zip(own, values, strict=True):
            parameter.copy_(value)

"""The tensors that are stepped at this rank, and the way between them and the model."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor

from shoal.flat import FlatBuffer
from shoal.optim.host_copy import HostCopy
from shoal.optim.placement import Placement

log = logging.getLogger(__name__)


class Pieces(ABC):
    """The tensors that this rank steps, and the model that gets their values.

    Attributes:
        placement: where the tensors are that users write to.
        model: the parameters of the model, in the order of the optimizer.
        in_backward: the parameters that get gradients in a backward pass, and those that must not get any.
    """

    placement: Placement
    model: Sequence[Tensor]
    in_backward: tuple[Sequence[Tensor], Sequence[Tensor]]

    def name_of(self, what: int | Tensor) -> str:
        """See `Placement`."""
        return self.placement.name_of(what)

    # -- what was written since

    def check(self) -> None:
        """See `Placement.check`."""
        self.placement.check()

    def check_groups(self) -> None:
        """See `Placement.check_groups`."""
        self.placement.check_groups()

    @abstractmethod
    def gather(self, *, anew: bool = False) -> None:
        """Set the pieces to what other code has made of the model, unless they are newer. A collective.

        Args:
            anew: also if nothing that is known has changed the model, because the user may have written to it.

        Raises:
            ValueError: as `check`. Then nothing has changed.
        """

    def follow(self, *, whole: bool = True) -> None:  # noqa: B027 (only copies follow)
        """Set copies to what they are copies of. Not while a step is under way in the background: the copies are newer
        then.

        Args:
            whole: if False, only copies of frozen parameters follow.
        """

    @abstractmethod
    def spread(self) -> None:
        """The pieces were changed: the model gets their values, now or at the end of the call."""

    def model_was_changed(self) -> None:  # noqa: B027 (only strands are apart from it)
        """Inner steps have changed the model."""

    def set_aside(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """A context within which the optimizer steps the pieces, perhaps in another thread, while users read and write
        its options."""
        return contextlib.nullcontext()

    def expecting_writes(self) -> AbstractContextManager[None]:
        """A context within which nobody is warned that a step overwrites what was written to the model."""
        return contextlib.nullcontext()


class Own(Pieces):
    """The parameters of the model itself, in flat memory.

    Args:
        model: the parameters.
        frozen: parameters of the model that are not part of the state.
        placement: where they are.
    """

    def __init__(self, model: Sequence[Tensor], frozen: Sequence[Tensor], placement: Placement) -> None:
        self.model, self.placement = model, placement
        self.in_backward = [p for p in model if p.requires_grad], frozen

    def gather(self, *, anew: bool = False) -> None:
        """See `Pieces`. Parameters that were moved to other memory come back."""
        self.placement.take_over()

    def spread(self) -> None:
        """See `Pieces`. They are the model."""


class OnHost(Pieces):
    """Copies on the host of other pieces, which stay where they are, with the gradients.

    Args:
        of: the other pieces.
        host: the copies.
        memory: the flat memory of the copies.
    """

    def __init__(self, of: Pieces, host: HostCopy, memory: FlatBuffer) -> None:
        self._of, self._host, self._memory = of, host, memory
        self.model, self.placement, self.in_backward = of.model, of.placement, of.in_backward
        pairs = zip(host.model, memory.views(), strict=True)
        self._frozen = [(model, copy) for model, copy in pairs if not model.requires_grad]
        self._told_of_writes = False  # whether a warning has told of writes during a step in the background

    def gather(self, *, anew: bool = False) -> None:
        """See `Pieces`."""
        self._of.gather(anew=anew)

    def follow(self, *, whole: bool = True) -> None:
        """See `Pieces`."""
        if whole:
            self._host.follow(self._memory)
            return
        with torch.no_grad():
            for frozen, copy in self._frozen:
                copy.copy_(frozen)

    def set_aside(self, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
        """See `Pieces`."""
        return self._host.set_aside(optimizer)

    @contextlib.contextmanager
    def expecting_writes(self) -> Iterator[None]:
        """See `Pieces`."""
        told, self._told_of_writes = self._told_of_writes, True
        try:
            yield
        finally:
            self._told_of_writes = told

    def spread(self) -> None:
        """See `Pieces`."""
        had_others = self.placement.restore()
        was_written = self._host.publish(self._memory)
        if (had_others or was_written) and not self._told_of_writes:
            self._told_of_writes = True
            log.warning(
                "what was written into the model while a step was under way in the background is overwritten by "
                "that step: call optimizer.state_dict() before you write, which waits for the step (this is said "
                "once)"
            )


class Cut(Protocol):
    """Pieces of parameters, and the way between them and the model. See `Strands`."""

    is_ahead: bool

    def gather_parameters(self) -> None: ...


class StrandPieces(Pieces):
    """The pieces of parameters that belong to the strands of this rank, in memory of their own.

    Args:
        strands: the pieces.
        model: the parameters that get gradients in a backward pass: the pieces, or the model's.
        placement: where the pieces are, or their copies.
    """

    def __init__(self, strands: Cut, model: Sequence[Tensor], placement: Placement) -> None:
        self._strands, self.placement, self.model = strands, placement, model
        self.in_backward = [p for p in model if p.requires_grad], [p for p in model if not p.requires_grad]
        self._is_current = False  # whether the pieces equal the model, or are newer

    def gather(self, *, anew: bool = False) -> None:
        """See `Pieces`."""
        self.placement.take_over()
        if not self._strands.is_ahead and (anew or not self._is_current):
            self._strands.gather_parameters()
        self._is_current = True

    def spread(self) -> None:
        """See `Pieces`."""
        self._strands.is_ahead = self._is_current = True

    def model_was_changed(self) -> None:
        """See `Pieces`."""
        self._is_current = False

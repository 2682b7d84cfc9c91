"""What a rank brings to the rounds of a run, and what becomes of their result."""

from __future__ import annotations

import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import msgspec
from torch import Tensor
from torch.optim import Optimizer

from shoal.averaging.exchange import Vector
from shoal.flat import grad_of
from shoal.optim.closures import Closure, NotUsed
from shoal.optim.grad_scaler import GradScaler
from shoal.optim.pieces import Pieces
from shoal.optim.result import StepResult
from shoal.swarm.protocol.loss import Loss

log = logging.getLogger(__name__)


class Batch(msgspec.Struct, frozen=True):
    """What one call of `Optimizer.step` brings.

    Attributes:
        samples: the number of samples; `.grad` is the mean over them.
        scaler: the scaler of the gradients, or None.
        loss: in a cluster, the mean loss of the samples of all ranks, or None.
        closure: the closure of the samples, or None. If nobody has called it yet, the step that is made here calls it,
            and the gradients are those that it leaves.
    """

    samples: float
    scaler: GradScaler | None = None
    loss: Loss | None = None
    closure: Closure | None = None

    @classmethod
    def of_ranks(cls, samples: float, loss: Loss | None) -> Batch:
        """The batches of all ranks of a cluster, which have evaluated their closures."""
        return cls(samples, loss=loss, closure=None if loss is None else Closure(None, loss))


class Stepper(Protocol):
    """The state that `Work` steps with the result of a round. See `State`."""

    def step(self, gradients: Any, result: StepResult) -> None: ...
    def take_average(self, result: StepResult) -> None: ...


class Loadable(Protocol):
    """The state while a checkpoint is loaded. See `State`."""

    def load_stepped(self, given: dict[str, Any]) -> None: ...
    def follow_model(self) -> None: ...


class Work(ABC):
    """What this rank brings to the rounds of a run: gradients, local steps, or the drift of its model.

    The trainer's thread calls all methods. The thread that ends an epoch in the background calls `vectors`, `norms` and
    `step`; and on loan, while the trainer waits in another optimizer, also `freeze`, `drop` and `go_on`.

    Args:
        optimizer: the `shoal.Optimizer`, which a `GradScaler` takes.
        pieces: the tensors that this rank steps, and the parameters that get gradients.

    Attributes:
        loss: the mean loss of the samples that `freeze` has taken; None if some have none.
    """

    steps_per_epoch: int | None = None
    """The number of inner steps after which this rank has its part of an epoch; None if samples are counted."""
    result_may_wait = False
    """Whether the result of a round in the background is applied only after a number of steps."""
    result_is_due = True
    """Whether the result of a round in the background may be applied now."""
    has_moved = False
    """Whether the model may have a drift that no round has averaged."""
    wrapped: Optimizer
    """The optimizer that the user has given."""
    has_any_threads = False
    """Whether the step with its averages has the same bits with any number of threads, by a fused kernel."""
    steps_at_once = False
    """Whether each batch steps the wrapped optimizer, which may call the closure of the batch."""
    shares_state = True
    """Whether the step of an epoch is made by all peers alike, so that like peers have the same state after it."""
    has_anchor = False
    """Whether the model drifts from an anchor."""
    is_at_start = False
    """Whether the model is still the anchor of all that it will drift from."""
    follows_model = True
    """Whether the state is that of the model, as users have written it. If not, only its frozen parameters are."""
    was_loaded = False
    """Whether a checkpoint was loaded into the model after the start, and no call has said what it means."""
    holds_every_batch = False
    """Whether autograd has added each batch to those before it, also one that is not used."""
    called = ("gradients", "it joins without them")
    """For messages: what it brings, and what happens if that is not finite."""

    def __init__(self, optimizer: Optimizer, pieces: Pieces) -> None:
        self._optimizer, self._pieces = optimizer, pieces
        self._warned = False  # whether a warning has said that no parameter has a gradient
        self.loss: Loss | None = None

    @contextlib.contextmanager
    def of_wrapped(self) -> Iterator[None]:
        """Within, the parameters of the wrapped optimizer are the model's. Afterwards the model has those."""
        yield
        self._pieces.spread()

    # -- within an epoch

    @property
    @abstractmethod
    def samples(self) -> float:
        """The number of samples that it has accumulated in this epoch."""

    @property
    def progress(self) -> float:
        """The progress in this epoch: inner steps if they are counted, else samples."""
        return self.samples

    @property
    def has_its_part(self) -> bool:
        """Whether inner steps are counted and this rank has made its own of this epoch."""
        of_epoch = self.steps_per_epoch
        return of_epoch is not None and self.progress >= of_epoch

    def add(self, batch: Batch) -> bool:
        """Use the parameters' `.grad`.

        Returns:
            Whether the samples count. They do not if no parameter has a gradient, or if the gradients overflowed.

        Raises:
            ValueError: if a parameter has a gradient that was frozen when the optimizer was made, if the model's
                parameters were replaced, or if gradients that are accumulated in `.grad` were cleared.
        """
        closure = batch.closure
        if not self.samples:  # once an epoch, before any gradient of wrong parameters is used
            self._pieces.check()
        try:
            if closure is None or closure.is_evaluated:
                self._check_gradients(batch.samples)
            else:
                closure.after_first = lambda: self._check_gradients(batch.samples)
            self._use(batch)
        except NotUsed:
            return False
        return True

    @abstractmethod
    def _use(self, batch: Batch) -> None:
        """Use the gradients, or those that the closure leaves in the step that is made here.

        Raises:
            NotUsed: if they overflowed, or if the closure has left none.
        """

    def _check_gradients(self, samples: float) -> None:
        """Look at the gradients of a batch.

        Raises:
            ValueError: if a frozen parameter has one.
            NotUsed: if no parameter has one.
        """
        trained, frozen = self._pieces.in_backward
        for parameter in frozen:
            if grad_of(parameter) is not None:
                raise ValueError(
                    "a parameter that was frozen (requires_grad=False) when the optimizer was made has a gradient now; "
                    "the peers do not average it: make a new optimizer, under a new run_id, after thawing parameters"
                )
        for parameter in trained:
            if grad_of(parameter) is not None:
                return
        self._pieces.check()  # modules may have other parameters now
        if not self._warned:
            self._warned = True
            log.warning(
                "step was told of %g samples, and no parameter has a gradient: they do not count; call backward() "
                "before step(), zero_grad() after it, and step(batch_size=0) where there are no samples (this is "
                "said once)",
                samples,
            )
        raise NotUsed

    def _admit(self, scaler: GradScaler | None) -> None:
        """Let the scaler unscale the gradients. Raises NotUsed if they overflowed."""
        if scaler is not None and not scaler.admits(self._optimizer):
            log.info("the gradients overflowed (grad_scaler): they are not used")
            raise NotUsed

    def skip(self) -> None:  # noqa: B027
        """The batch of this step is not used, and stays in no sum."""

    @abstractmethod
    def reset(self) -> None:
        """Drop all that this rank has accumulated."""

    def begin(self, epoch: int) -> None:  # noqa: B027
        """The next batches belong to `epoch`."""

    def refuse_load(self) -> None:  # noqa: B027
        """Refuse to go on from a checkpoint that was loaded into the model alone, if that has no meaning.

        Raises:
            RuntimeError: if there is one. Nothing has changed then.
        """

    def settle_load(self) -> None:  # noqa: B027
        """What was loaded into the model belongs to the state now."""

    # -- into a round

    @abstractmethod
    def freeze(self) -> bool:
        """Take what this rank has accumulated, for the round of the epoch. Returns whether all of it is finite.

        Raises:
            ValueError: if gradients that are accumulated in `.grad` were cleared.
        """

    def drop(self) -> None:
        """Drop what `freeze` has taken, and bring nothing, because it is not finite at some rank."""
        self.reset()

    def vectors(self, epoch: int) -> Sequence[Vector]:
        """The vectors that the rounds at the end of this epoch average, one for each part of the state."""
        return []

    @property
    def all_vectors(self) -> Sequence[Sequence[Vector]]:
        """The vectors of all epochs, for each turn in which they are averaged."""
        return []

    def go_on(self) -> None:
        """Accumulate for the next epoch, while a round in the background averages this one."""
        self.reset()

    def again(self, samples: float) -> tuple[float, bool]:
        """A round in the background has failed: prepare another.

        Args:
            samples: what this rank brought to the failed one.

        Returns:
            The samples that it brings now, and whether all of it is finite.
        """
        return samples, True

    def take_back(self) -> None:  # noqa: B027
        """What was taken was in no round, and counts for the next one."""

    # -- out of a round

    def norms(self) -> list[float]:
        """The norm of the averages, one for each part of the state."""
        return []

    def copy_to_keep(self) -> Sequence[Tensor]:
        """What `remember` needs, if what this rank has accumulated shall outlast another state."""
        return []

    def remember(self, kept: Sequence[Tensor] = ()) -> None:  # noqa: B027
        """The state is about to change without this rank's contribution, which is kept."""

    @abstractmethod
    def step(self, state: Stepper, result: StepResult) -> None:
        """End an epoch: step the state with the average, and with the options of the result."""

    def apply(self, *, used: bool, is_accumulating: bool) -> None:
        """Let the model continue from the state after the step that ends an epoch.

        Args:
            used: whether the average has this rank's contribution.
            is_accumulating: whether this rank already accumulates for the next epoch.
        """
        self._pieces.spread()
        if not is_accumulating:
            self.reset()

    def publish(self) -> None:
        """Let the model continue from another state."""
        self._pieces.spread()

    def apply_last(self, *, used: bool | None) -> None:
        """The optimizer was shut down: let the model continue from the last step.

        Args:
            used: as for `apply`; None if there was no step.
        """
        self._pieces.spread()

    def use_theirs(self) -> None:  # noqa: B027
        """Another state has this rank's contribution to the last round already."""

    def restart(self, *, keeps: bool) -> None:
        """Begin anew on another state.

        Args:
            keeps: whether what this rank has done on the state before counts on this one, if that has a meaning.
        """
        self.reset()

    def abandon(self, *, used: bool) -> None:  # noqa: B027
        """The others have another state after the round, which this rank downloads."""

    # -- what peers compare

    @property
    def is_exact(self) -> bool:
        """Whether the step after a round has the same bits on every machine."""
        return False

    def terms(self) -> dict[str, str]:
        """The options that must be equal in a run, by name."""
        return {}

    def schemas(self) -> list[bytes]:
        """The shapes and orders that must be equal in a run."""
        return [vector.layout.schema_hash for turn in self.all_vectors for vector in turn]

    # -- saved and loaded

    def saved(self) -> dict[str, Any]:
        """What a checkpoint keeps of it, beside the wrapped optimizer."""
        return {}

    def load_saved(self, state: Loadable, given: dict[str, Any], ours: dict[str, Any]) -> None:
        """Continue from a checkpoint.

        Args:
            state: the state that is loaded, too.
            given: the state dict of the wrapped optimizer.
            ours: what else the checkpoint has.
        """
        state.load_stepped(given)

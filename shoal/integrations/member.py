"""A peer of a run whose training loop belongs to a framework."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

import shoal
from shoal.flat import without_hooks
from shoal.integrations.pieces import PiecesOfRanks
from shoal.integrations.ranks import LaunchedRanks
from shoal.integrations.terms import JoinTerms, refuse_many


class Joiner:
    """Joins the run with the optimizer that a framework has made.

    Args:
        terms: of the run.
        optimizer: a torch optimizer of this peer's parameters, which are on their device by now.
        max_grad_norm: the norm to which the average is clipped; None or 0: it is not.
        ranks: that are the peer together. All of them make it at once, and all calls but `logs` and `saw`.

    Attributes:
        optimizer: the `shoal.Optimizer` around it, for the framework to step.
        num_peers: the number of members of the last round, in the process that speaks.

    Raises:
        ValueError: as `shoal.Optimizer`.
        AveragingError: if the run refuses this peer.
    """

    def __init__(
        self, terms: JoinTerms, optimizer: torch.optim.Optimizer, max_grad_norm: float | None, ranks: LaunchedRanks
    ) -> None:
        refuse_many([optimizer])
        options = dict(terms.options)
        self._tell: Callable[[Any], None] | None = options.pop("on_event", None)
        if max_grad_norm and not terms.clips_locally:
            options["max_grad_norm"] = float(max_grad_norm)
        self.num_peers, self._speaks = 1, ranks.speaks
        self._losses: torch.Tensor | float = 0.0  # the sum of those since the last epoch
        self._batches = 0  # how many they are
        run: dict[str, Any] = {
            "dht": terms.dht,
            "run_id": terms.run_id,
            "target_batch_size": terms.target_batch_size,
            **options,
        }
        self._pieces: PiecesOfRanks | None = None
        if ranks.cluster is None:
            self.optimizer = shoal.Optimizer(optimizer=optimizer, **run)
        else:
            self._pieces = pieces = PiecesOfRanks(optimizer, ranks.cluster)
            given: dict[str, Any] = {"optimizer": pieces.make, "params": pieces.params, "cluster": ranks.cluster}
            try:
                self.optimizer = shoal.Optimizer(**given, **run)
            except BaseException:  # Ctrl-C, too: the framework's optimizer must not keep the pieces
                pieces.give_back()
                raise
        self.optimizer.on_event = self._heard

    def _heard(self, event: Any) -> None:
        if isinstance(event, shoal.EpochReport):
            self.num_peers = event.num_peers
            if self._batches:
                self.optimizer.report(loss=self._losses / self._batches)
                self._losses, self._batches = 0.0, 0
        if self._tell is not None:
            self._tell(event)

    @property
    def epoch(self) -> int:
        """The epoch of the run."""
        return self.optimizer.local_epoch

    def logs(self) -> dict[str, float]:
        """What is logged beside the framework's own values: the run's epoch and, in the process that speaks, the number
        of peers."""
        return {"run_epoch": float(self.epoch)} | ({"run_peers": float(self.num_peers)} if self._speaks else {})

    def saw(self, loss: torch.Tensor) -> None:
        """Count the loss of a batch. At the end of each epoch the mean is told to whoever watches the run; a GPU is
        waited for then only."""
        if self._speaks:
            self._losses = self._losses + loss.detach()
            self._batches += 1

    def begin_at(self, epoch: int) -> None:
        """Take the present state for the run's after so many epochs of `target_batch_size` samples, where a checkpoint
        does not say more."""
        with contextlib.ExitStack() as quiet:
            for each in (self.optimizer, self.optimizer.optimizer) if self._speaks else ():
                quiet.enter_context(without_hooks(each))
            state = self.optimizer.state_dict()
            state.pop("shoal", None)  # which the other ranks of a cluster do not have
            state["state"]["local_epoch"] = epoch
            self.optimizer.load_state_dict(state)

    def finish(self) -> None:
        """Leave the run at the end of training, when no other peer is behind (`shoal.Optimizer.finish`)."""
        self.optimizer.finish()

    def leave(self) -> None:
        """Leave the run now; the parameters stay usable."""
        self.optimizer.shutdown()

    def give_back(self) -> None:
        """Leave, and give the framework's optimizer back as it came: it is to join anew."""
        self.leave()
        if self._pieces is not None:
            self._pieces.give_back()


def own_scaler(scaler: torch.amp.GradScaler, device: str) -> shoal.GradScaler:
    """A `shoal.GradScaler` with the state of torch's, for the same device type."""
    made = shoal.GradScaler(device, enabled=scaler.is_enabled())
    if scaler.is_enabled():
        made.load_state_dict(scaler.state_dict())
    return made

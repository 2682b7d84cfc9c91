"""What all ranks do around a checkpoint: they settle the epoch, call the users' hooks, save or load together."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Any, cast

from torch.optim import Optimizer

from shoal.cluster.question import Question
from shoal.cluster.team import Team
from shoal.flat import after_loading, after_saving, before_loading, before_saving
from shoal.optim.checkpoint import Checkpoint, StrandCheckpoint
from shoal.optim.epoch import Epoch, EpochState
from shoal.optim.rounds import Rounds
from shoal.optim.state import State

BEFORE_SAVING = Question("hooks before saving", NoneType, NoneType)
PREPARED = Question("prepared to save", NoneType, NoneType)
GIVEN = Question("given", NoneType, NoneType)
COMMON = Question("common", bool, bytes)
MISFITS = Question("misfits", str, list[str])


class Saving:
    """Saves and loads the state of this rank, with its part in the epoch. All ranks that have a part of the state make
    each call at once.

    Args:
        optimizer: the `shoal.Optimizer`, whose hooks are called around those of the wrapped one.
        team: the ranks.
        epoch, state, rounds: those of this rank.
        checkpoint: the form in which the state is saved.
    """

    def __init__(
        self, optimizer: Optimizer, team: Team, epoch: Epoch, state: State, rounds: Rounds, checkpoint: Checkpoint
    ) -> None:
        self._optimizer, self._team, self._epoch, self._state = optimizer, team, epoch, state
        self._rounds, self._checkpoint = rounds, checkpoint

    # -- whole, at rank 0

    def state_dict(self) -> dict[str, Any]:
        """See `shoal.Optimizer`. Hooks of users are called at rank 0."""
        hooked, checkpoint = self._optimizer, self._checkpoint
        self._team.decided(BEFORE_SAVING, lambda _: before_saving(hooked))
        self._epoch.settle()
        self._epoch.take_over_at_start()
        self._team.decided(PREPARED, lambda _: checkpoint.before_saving())
        state = checkpoint.state_dict()

        def save() -> dict[str, Any]:
            state["shoal"]["grad_averager"] = self._rounds.carried()
            return after_saving(hooked, state)

        return self._team.at_first(save)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `shoal.Optimizer` and `state_dict`."""
        hooked, checkpoint, epoch = self._optimizer, self._checkpoint, self._epoch
        given = checkpoint.elsewhere

        def prepare() -> None:
            nonlocal given
            found = before_loading(hooked, state_dict)
            given = checkpoint.before_loading(found)
            if epoch.state is not EpochState.CLOSED:
                self._load_carried(found.get("shoal", {}).get("grad_averager", {}))

        def load() -> None:
            checkpoint.load_state_dict(given)
            self._rounds.work.settle_load()

        with self._state.keeping_model(epoch.is_busy):  # it was loaded before, and a step may be under way
            epoch.take_result(wait=True)
        self._team.decided(GIVEN, lambda _: prepare())
        epoch.continue_from(load)
        self._team.at_first(lambda: checkpoint.after_loading(given))
        self._team.at_first(lambda: after_loading(hooked))

    def _load_carried(self, state: Mapping[str, Any]) -> None:
        try:
            self._rounds.load_carried(state)
        except ValueError as error:
            raise ValueError(
                f"the state dict was saved with another grad_averager_factory: {error}; to go on without what that "
                'averager kept, remove state_dict["shoal"]["grad_averager"]'
            ) from error

    # -- the part of each rank, for `torch.distributed.checkpoint`

    def own_part(self) -> dict[str, Any]:
        """This rank's part of the state. Each rank calls its own hooks."""
        before_saving(self._optimizer)
        self._epoch.take_result(wait=True)
        checkpoint = cast(StrandCheckpoint, self._checkpoint)
        common = self._team.decided(COMMON, lambda _: checkpoint.common(), True)  # after the hooks of all ranks
        return after_saving(self._optimizer, checkpoint.save(common))

    def load_own_part(self, state: dict[str, Any]) -> None:
        """Continue from this rank's part of a state.

        Raises:
            ValueError: if a rank can't. Then nothing has changed.
        """
        checkpoint = cast(StrandCheckpoint, self._checkpoint)
        given = before_loading(self._optimizer, state)
        self._team.refuse(MISFITS, checkpoint.misfit(given))

        def load() -> None:
            checkpoint.load(given)
            self._rounds.work.settle_load()

        self._epoch.continue_from(load)
        after_loading(self._optimizer)

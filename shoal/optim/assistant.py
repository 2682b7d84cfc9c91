"""What an auxiliary does in a step: it trains nothing, and takes part in the rounds of those who do."""

from __future__ import annotations

import logging
from collections.abc import Callable

from shoal.optim.epochs import Epochs
from shoal.optim.machine import Machine
from shoal.optim.progress import RunProgress
from shoal.optim.replica import Replica
from shoal.optim.reports import Event, report_of
from shoal.optim.run import Run
from shoal.optim.settings import Settings
from shoal.optim.vector import EpochVector
from shoal.swarm.protocol.contribution import Contribution
from shoal.swarm.protocol.errors import AveragingError, Rejected
from shoal.swarm.protocol.tip import Tip

log = logging.getLogger(__name__)


class Assistant:
    """Holds no state of the run: its replica only says at which one the others are.

    Args:
        settings: of the optimizer.
        run, vector: whose rounds, and what they average.
        epochs, replica, tracker: follow the others.
        tell: called with what has happened.
    """

    def __init__(
        self,
        settings: Settings,
        run: Run,
        vector: EpochVector,
        epochs: Epochs,
        replica: Replica,
        tracker: RunProgress,
        tell: Callable[[Event], None],
    ) -> None:
        self._settings, self._run, self._vector, self._tell = settings, run, vector, tell
        self._epochs, self._replica, self._tracker = epochs, replica, tracker
        self._machine = Machine(run.me).name

    def step(self) -> None:
        """Take part in the next round; without one within `matchmaking_time`, in none. Raises Rejected if the run goes
        by other terms."""
        settings = self._settings
        try:
            self._move(self._run.catch_up())
            self._tracker.report_local_progress(0.0)
            if not self._run.wait_for_call(settings.matchmaking_time):
                return
            outcome = self._run.average(
                Contribution(0.0, self._vector.open, settings.matchmaking_time, machine=self._machine),
                settings.averaging_timeout,
            )
        except Rejected:
            raise
        except AveragingError as error:
            log.info("no round to assist in: %s", error)
            return
        self._move(outcome.commit.next_tip)
        self._tell(report_of(outcome, self._replica.tip.epoch, self._replica.digest))

    def _move(self, tip: Tip) -> None:
        self._epochs.applied = self._replica.tip = tip
        self._epochs.count_from(tip)

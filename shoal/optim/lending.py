"""Lends an optimizer to its rounds while its thread waits in another one, see `shoal.optim.turns`."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future

from shoal.optim.epoch import Epoch
from shoal.optim.run import Run
from shoal.optim.turns import Turn
from shoal.p2p.errors import P2PError
from shoal.swarm.protocol.errors import AveragingError
from shoal.swarm.protocol.messages import Presence, Progress
from shoal.swarm.protocol.tip import Tip

log = logging.getLogger(__name__)


class Lending:
    """Decides when one optimizer is lent.

    If its round is called while its thread waits in another optimizer, it closes its epoch on its own thread, averages
    there, and applies the result in its next `step`. Until then it can't end another epoch. If the next round is called
    by then, it calls the thread back. If the thread can't leave its wait, or if this optimizer can't be lent at all, it
    says so, and rounds begin without it. If inner steps are counted, it also says that it makes none meanwhile.

    Args:
        epoch: takes the optimizer from epoch to epoch.
        run: its run.
        trainer: the lock that a thread holds while it is in the optimizer.
        because: the option because of which no other thread may end its epochs; "" if one may.
        counts_steps: whether the run counts inner steps.

    Attributes:
        run_id: the name of the run.
        is_at_work: whether the optimizer's own thread is closing an epoch now.
    """

    def __init__(self, epoch: Epoch, run: Run, trainer: threading.RLock, *, because: str, counts_steps: bool) -> None:
        self.run_id, self._epoch, self._run, self._trainer = run.run_id, epoch, run, trainer
        self._because, self._can_be_lent, self._counts_steps = because, not because, counts_steps
        self._turn: Turn | None = None
        self._watching: Future[None] | None = None
        self._said: tuple[Tip, Presence] | None = None  # what it has said since the present wait began
        self.is_at_work = False

    def belongs_here(self) -> None:
        """The calling thread trains this optimizer."""
        turn = Turn.of_this_thread()
        if turn is self._turn:
            return
        if self._turn is not None:
            self._turn.remove(self)
        self._turn = turn
        turn.add(self)

    def watch(self) -> None:
        """From now on, look whenever the run has news: the thread has several optimizers."""
        if self._watching is None and not self._run.is_over:
            self._watching = self._run.dht.submit(self._watch())
            if self._because:
                log.warning(
                    "this thread trains several models, and that of the run %r has %s: while the thread waits in "
                    "another run, rounds of this one begin without it; leave that option out, or train the models in "
                    "one run",
                    self.run_id,
                    self._because,
                )

    def tell_waiting(self) -> None:
        """See `Member`."""
        if not self._run.is_over:
            self._run.dht.reactor.loop.call_soon_threadsafe(self._look, True)

    def close(self) -> None:
        """The optimizer is shut down."""
        if self._turn is not None:
            self._turn.remove(self)
        if self._watching is not None:
            self._watching.cancel()

    # -- on the reactor

    async def _watch(self) -> None:
        while True:
            await self._run.swarm.news()
            self._look()

    def _look(self, begins: bool = False) -> None:
        """Do what is due, if the thread waits in another optimizer.

        Args:
            begins: whether a wait has just begun.
        """
        if begins:
            self._said = None
        turn, epoch = self._turn, self._epoch
        if turn is None or not turn.is_waiting or not turn.is_alone(self) or not self._is_free():
            return
        if self._can_be_lent and epoch.can_end:
            epoch.on_own_thread(self._take_part)
        elif epoch.needs_trainer or not self._can_be_lent:
            if not (epoch.needs_trainer and turn.call_back()):
                self._say(Presence.AWAY)
        elif self._counts_steps:
            self._say(Presence.LENT)

    def _is_free(self) -> bool:
        """Whether no thread is in the optimizer."""
        if not self._trainer.acquire(blocking=False):
            return False
        self._trainer.release()
        return True

    def _say(self, presence: Presence) -> None:
        """Tell the coordinator, once for each tip."""
        said = self._run.swarm.tip, presence
        if self._said != said:
            self._said = said
            self._run.dht.node.spawn(self._report(Progress(said[0], 0.0, 0.0, counted=False, presence=presence)))

    async def _report(self, report: Progress) -> None:
        try:
            await self._run.swarm.report(report)
        except (P2PError, AveragingError, TimeoutError) as error:
            log.debug("could not say that the trainer waits in another optimizer: %s", error)

    # -- on the optimizer's own thread

    def _take_part(self) -> None:
        turn = self._turn
        if turn is None:
            return
        self.is_at_work = True  # before the lock is held, and until it is free again
        try:
            with turn.borrowed(self._trainer) as may:
                if may:
                    self._epoch.end_on_loan()
        finally:
            self.is_at_work = False

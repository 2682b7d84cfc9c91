"""Averages one strand of a run, in rounds of the ranks that carry it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from shoal.averaging.averager import DecentralizedAverager
from shoal.averaging.control import Hold, StepControl
from shoal.averaging.exchange import Infos, Vector
from shoal.dht.dht import DHT
from shoal.dht.records import get_dht_time
from shoal.flat import FlatBuffer, Layout
from shoal.optim.settings import Settings
from shoal.swarm.directory import DHTDirectory, Directory
from shoal.swarm.protocol.contribution import Outcome
from shoal.swarm.protocol.errors import AveragingError, Rejected
from shoal.swarm.protocol.tip import LAST_EPOCH, Tip
from shoal.swarm.swarm import Swarm

LEAST_PATIENCE = 1.0  # the shortest time in seconds that a round waits for a member that has not joined


class _OfStrand(DHTDirectory):
    """The list of the ranks that carry a strand. It reports no others, so nobody is warned of being alone here: the run
    itself gives this warning."""

    def others(self) -> int:
        return 0


class StrandAverager(DecentralizedAverager):
    """A rank's part in the rounds of a strand. The ranks that carry a strand have a run of their own for it. This rank
    is in that run from `run_in_background` to `shutdown`, possibly several times.

    The tips of a strand's run follow from the tips of the run (`of_strand`). So a rank that comes too late for a round
    fetches the same result that the others have, and no rank averages with ranks at another epoch.

    Args:
        vector: the vector that rounds average. They read its inputs and write its outputs.
        strand: the number of the strand.
        of: the number of strands.
        fragment: the number of the fragment, if an outer optimizer averages the model in fragments; else 0.
        tip: returns the tip of the cluster's state.
        settings: the settings of the optimizer.
        dht: the DHT of this rank.
    """

    def __init__(
        self, vector: Vector, strand: int, of: int, fragment: int, tip: Callable[[], Tip], settings: Settings, dht: DHT
    ) -> None:
        self._given, self._agreed, self._tip = vector, settings.agreed(), tip
        super().__init__(
            vector.inputs.views(),
            dht,
            start=False,
            prefix=f"{settings.run_id}/strand/{strand}.{of}" + (f"/{fragment}" if fragment else ""),
            allow_state_sharing=False,
            **settings.for_averager(),
        )
        self.in_step, self._patience = True, settings.matchmaking_time
        self._place = replace(self._place, keeps_state=True)  # a member that misses a round fetches its result
        self._rules = replace(self._rules, brings_samples=False)

    def _directory(self, run_id: str) -> Directory:
        return _OfStrand(self.dht.dht_node, run_id)

    def _make_vector(self, layout: Layout, infos: Infos | None, error_feedback: float | None) -> Vector:
        return self._given

    def _adopt(self) -> FlatBuffer:
        return self._given.inputs

    def _first_tip(self) -> Tip:
        return of_strand(self._tip())

    def _next_tip(self, swarm: Swarm) -> Tip:
        tip = self._first_tip()
        if swarm.tip != tip:
            swarm.move(tip, made=swarm.tip.epoch + 1 == tip.epoch)
        return tip

    def _is_final(self, error: AveragingError) -> bool:
        """Whether a round ends with this error. If a member says that others are at another epoch, it may lie, so the
        round continues. The run itself tells this peer when it has to give up the round."""
        return isinstance(error, Rejected)

    def agreed_options(self) -> dict[str, str]:
        """See `DecentralizedAverager`. It also has the options of the run."""
        return super().agreed_options() | self._agreed

    def begin(self, weight: float) -> StepControl:
        """Join the next round with this weight."""
        return self.step(weight=weight, scheduled_time=get_dht_time() + self._patience, wait=False)

    async def _aggregate(self, swarm: Swarm, control: StepControl, hold: Hold, deadline: float) -> Outcome:
        tip = swarm.tip
        if swarm.behind is not None and not await swarm.learn_of_round() and swarm.tip == tip:
            swarm.forget_behind()
        contribution = self._contribution(self._vector, control, hold, self._read)
        outcome = await self._average(swarm, control, contribution, deadline)
        # A member that hangs stays connected and does not join. So each wait for it is half as long as the last.
        was_long = outcome.matchmaking_seconds > 0.9 * self._patience
        patience = self._patience / 2 if was_long else 2 * self._patience
        self._patience = min(max(patience, LEAST_PATIENCE), self.min_matchmaking_time)
        await self._hold_until(deadline, control, hold)
        self._vector.settle(outcome)
        return outcome


def of_strand(tip: Tip) -> Tip:
    """The tip of each strand's run that belongs to `tip` of the run. The epochs of a strand's run count double: 2 k
    before the strand's round of epoch k, and 2 k + 1 after it. That round brings no samples, so the tip of the next
    epoch outranks both."""
    return Tip(min(2 * tip.epoch, LAST_EPOCH - 1), tip.lineage, tip.samples)

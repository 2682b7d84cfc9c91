"""One strand of a run, which those that carry it average in rounds of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shoal.averaging.averager import DecentralizedAverager
from shoal.averaging.control import Hold, StepControl
from shoal.averaging.exchange import Infos, Vector
from shoal.dht.dht import DHT
from shoal.dht.records import get_dht_time
from shoal.flat import FlatBuffer, Layout
from shoal.optim.settings import PLACE_TIMES, Settings
from shoal.swarm.directory import DHTDirectory, Directory
from shoal.swarm.protocol.contribution import Outcome
from shoal.swarm.protocol.errors import AveragingError, Rejected
from shoal.swarm.protocol.tip import LAST_EPOCH, Tip
from shoal.swarm.swarm import Swarm

LEAST_PATIENCE = 1.0  # seconds that a round waits at least for a member that may come
MORE_THAN_A_ROUND = 2.0**60  # samples


class _OfStrand(DHTDirectory):
    """Where those are listed that carry a strand. Who is alone there is alone in the run, which says so."""

    def others(self) -> int:
        return 0


class StrandAverager(DecentralizedAverager):
    """A rank's part in the rounds of a strand. It is in the strand's run from `run_in_background` to `shutdown`, as
    often as need be.

    The states of a strand's run follow from those of the run (`of_strand`). So who comes to a round when it is over
    fetches its result, as the others have it, and no rank averages with those of another epoch.

    Args:
        vector: what rounds average: its inputs are read, and its outputs written.
        strand, of: the strand, and how many there are.
        fragment: of the model, with an outer optimizer that averages it in several.
        tip: of the cluster's state.
        settings: of the optimizer.
        dht: of this rank.
    """

    def __init__(
        self, vector: Vector, strand: int, of: int, fragment: int, tip: Callable[[], Tip], settings: Settings, dht: DHT
    ) -> None:
        self._given, self._agreed, self._tip = vector, settings.agreed(), tip
        same = ("allreduce_timeout", "next_chunk_timeout", "shutdown_timeout", "client_mode")
        options: dict[str, Any] = {name: getattr(settings, name) for name in same}
        options |= {name: value for name, value in settings.averager_opts.items() if name in PLACE_TIMES}
        super().__init__(
            vector.inputs.views(),
            dht,
            start=False,
            prefix=f"{settings.run_id}/strand/{strand}.{of}" + (f"/{fragment}" if fragment else ""),
            min_group_size=1,
            min_matchmaking_time=settings.matchmaking_time,
            compression=settings.grad_compression,
            bandwidth=settings.averager_opts.get("bandwidth"),
            allow_state_sharing=False,
            **options,
        )
        self.in_step, self._patience = True, settings.matchmaking_time
        self._place = replace(self._place, keeps_state=True)  # who misses a round fetches its result

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
        """Whether others are at another epoch is not told by those who carry a strand, of whom one may lie: the run
        knows, and the round is given up then."""
        return isinstance(error, Rejected)

    def agreed_options(self) -> dict[str, str]:
        """See `DecentralizedAverager`; the terms of the run, too."""
        return super().agreed_options() | self._agreed

    def begin(self, weight: float) -> StepControl:
        """Join the next round with that weight."""
        return self.step(weight=weight, scheduled_time=get_dht_time() + self._patience, wait=False)

    async def _aggregate(self, swarm: Swarm, control: StepControl, hold: Hold, deadline: float) -> Outcome:
        if swarm.behind is not None:
            await swarm.learn_of_round()
        contribution = self._contribution(self._vector, control, hold, self._read)
        outcome = await self._average(swarm, control, contribution, deadline)
        # A member that stands still is connected, and does not come: each wait for it is half of the last.
        was_long = outcome.matchmaking_seconds > 0.9 * self._patience
        patience = self._patience / 2 if was_long else 2 * self._patience
        self._patience = min(max(patience, LEAST_PATIENCE), self.min_matchmaking_time)
        await self._hold_until(deadline, control, hold)
        self._vector.settle(outcome)
        return outcome


def of_strand(tip: Tip) -> Tip:
    """The state of each strand's run from which the round is made that leads on from that state of the run. Half an
    epoch later the strand's round is made, and the run's is not."""
    # That of the next epoch outranks both, whatever the rounds weigh.
    return Tip(min(2 * tip.epoch, LAST_EPOCH - 1), tip.lineage, tip.epoch * MORE_THAN_A_ROUND)

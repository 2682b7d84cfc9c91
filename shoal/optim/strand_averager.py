"""Averages one strand of a run, in rounds of the ranks that carry it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from threading import Lock

from shoal.averaging.control import DEFAULT_TIMEOUT, StepControl
from shoal.averaging.engine import Attempt, Engine
from shoal.averaging.exchange import Vector, encoded_bytes
from shoal.averaging.options import described, term_of
from shoal.averaging.runs import Runs
from shoal.dht.dht import DHT
from shoal.dht.records import get_dht_time
from shoal.optim.settings import Settings
from shoal.swarm.directory import DHTDirectory
from shoal.swarm.protocol.contribution import Outcome, encode_gathered
from shoal.swarm.protocol.errors import Rejected
from shoal.swarm.protocol.messages import Terms
from shoal.swarm.protocol.plan import largest_chunk
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.tip import LAST_EPOCH, Tip
from shoal.swarm.swarm import Swarm

LEAST_PATIENCE = 1.0  # the shortest time in seconds that a round waits for a member that has not joined


class _OfStrand(DHTDirectory):
    """The list of the ranks that carry a strand. It reports no others, so nobody is warned of being alone here: the run
    itself gives this warning."""

    def others(self) -> int:
        return 0


class StrandAverager:
    """A rank's part in the rounds of a strand. The ranks that carry a strand have a run of their own for it. This rank
    is in that run from `enter` to `leave`, possibly several times.

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

    Attributes:
        dht: as given.
        engine: makes the rounds.
    """

    def __init__(
        self, vector: Vector, strand: int, of: int, fragment: int, tip: Callable[[], Tip], settings: Settings, dht: DHT
    ) -> None:
        self.dht, self._vector, self._tip = dht, vector, tip
        self._patience = self._longest = settings.matchmaking_time
        self._shutdown_timeout = settings.shutdown_timeout
        rules = Rules(
            sizes=vector.sizes,
            matchmaking_time=settings.matchmaking_time,
            round_timeout=settings.allreduce_timeout,
            chunk_elements=largest_chunk(buffer.dtype.itemsize for buffer in vector.layout.buffers),
            element_bytes=encoded_bytes([vector]),
            brings_samples=False,
        )
        # A member that misses a round fetches its result.
        place = settings.place([described("averaged_tensors", vector.inputs.views())], keeps_state=True)
        agreed = {"compression": term_of(settings.grad_compression.spec), "target_group_size": "None"}
        terms = Terms(agreed | settings.agreed(), vector.layout.schema_hash)
        run_id = f"{settings.run_id}/strand/{strand}.{of}" + (f"/{fragment}" if fragment else "")
        runs = Runs(dht, rules, lambda: terms, lambda: place)

        def enter(beside: ExitStack) -> Swarm:
            return runs.swarm(run_id, _OfStrand(dht.dht_node, run_id))

        # If a member says that others are at another epoch, it may lie, so the round continues. The run itself tells
        # this peer when it has to give up the round.
        self.engine = Engine(dht, enter, self._average, Lock(), final=(Rejected,))

    def enter(self) -> None:
        """Begin to join the run, unless this rank is in it."""
        self.engine.start(of_strand(self._tip()))

    def leave(self) -> None:
        """Leave the run."""
        self.engine.shutdown(self._shutdown_timeout)

    def begin(self, weight: float) -> StepControl:
        """Join the next round with this weight."""
        self.engine.wait_until_ready()
        until = get_dht_time() + self._patience
        control = StepControl(until, until + DEFAULT_TIMEOUT, True, weight, encode_gathered(None))
        control.allow_allreduce()
        self.engine.step(control, self._follow)
        return control

    def _follow(self, swarm: Swarm) -> Tip:
        """Move to the tip of the cluster's state, and return its tip in this run."""
        tip = of_strand(self._tip())
        if swarm.tip != tip:
            swarm.move(tip, made=swarm.tip.epoch + 1 == tip.epoch)
        return tip

    async def _average(self, swarm: Swarm, attempt: Attempt) -> Outcome:
        tip = swarm.tip
        if swarm.behind is not None and not await swarm.learn_of_round() and swarm.tip == tip:
            swarm.forget_behind()
        outcome = await attempt.average(swarm, self._vector)
        # A member that hangs stays connected and does not join. So each wait for it is half as long as the last.
        was_long = outcome.matchmaking_seconds > 0.9 * self._patience
        patience = self._patience / 2 if was_long else 2 * self._patience
        self._patience = min(max(patience, LEAST_PATIENCE), self._longest)
        await attempt.take_tensors()
        self._vector.settle(outcome)
        return outcome


def of_strand(tip: Tip) -> Tip:
    """The tip of each strand's run that belongs to `tip` of the run. The epochs of a strand's run count double: 2 k
    before the strand's round of epoch k, and 2 k + 1 after it. That round brings no samples, so the tip of the next
    epoch outranks both."""
    return Tip(min(2 * tip.epoch, LAST_EPOCH - 1), tip.lineage, tip.samples)

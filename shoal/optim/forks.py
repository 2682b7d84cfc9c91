"""Reports forks of the run, and knows the pins of its owner. No state that a peer leaves is thrown away."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

from shoal.membership.pin import Pin
from shoal.optim.reports import Event, ForkReport
from shoal.optim.run import Run
from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.line import Line, leaves
from shoal.swarm.protocol.sides import Sides
from shoal.swarm.protocol.sparing import Sparing
from shoal.swarm.protocol.tip import Tip

log = logging.getLogger(__name__)

TOLD, TOLD_SECONDS = 8, 60.0  # at most so many reports on one member in so many seconds: it may invent states
WHY = "the state with more samples behind it is kept (of equally many: more epochs, then the larger hash)"


class Forks:
    """Reports both sides of a fork, and knows what the owner has pinned.

    The trainer's thread calls all methods.

    Args:
        run: this peer's part in the run.
        tell: called with each event.
    """

    def __init__(self, run: Run, tell: Callable[[Event], None]) -> None:
        self._run, self._tell = run, tell
        self._sides = Sides()
        self._sparing = Sparing(TOLD, TOLD_SECONDS)

    # -- this peer leaves its side

    def leave(
        self,
        mine: Tip,
        tip: Tip,
        line: Collection[bytes],
        made_with: Collection[bytes],
        others: Collection[bytes],
        keep: Callable[[], str],
    ) -> ForkReport | None:
        """Have this peer's own state kept, if the state that it is about to take over does not include all of its
        samples.

        Args:
            mine: the name of this peer's state.
            tip: the name of the state that this peer takes over.
            line: the lineages that lead to `tip`.
            made_with: the keys of the peers that made this peer's state with it.
            others: the keys of the peers that hold the other state.
            keep: keeps the state, and returns where it is, and how to load it, in words.

        Returns:
            The report for `left`, once the other state is here; None if no sample is lost.
        """
        pin = self.pin
        if not leaves(mine, tip, line):
            return None
        is_pinned = pin is not None and tip.pin == pin.number > mine.pin
        self._sides.remember(tip.lineage)
        reason = f"its owner has pinned it (pin {tip.pin})" if is_pinned else WHY
        return self._report(mine, tip, made_with, others, reason, stays=False, kept=keep())

    def _report(
        self,
        mine: Tip,
        tip: Tip,
        made_with: Collection[bytes],
        others: Collection[bytes],
        reason: str,
        *,
        stays: bool,
        kept: str,
    ) -> ForkReport:
        makers = _texts({*made_with, self._run.me})
        return ForkReport(stays, str(mine), mine.samples, makers, str(tip), tip.samples, _texts(others), reason, kept)

    def left(self, report: ForkReport) -> None:
        """Report the fork, once this peer has taken over the other state."""
        mine, other = (tip.split(":")[0] for tip in (report.tip, report.other_tip))
        givers = ", ".join(repr(PeerID.parse(peer)) for peer in report.other_members) or "itself"
        log.warning(
            "this peer has left its state of epoch %s (%g samples) for that of epoch %s (%g samples), which it has "
            "from %s: %s. The run has forked. Tip %s, made with %s, is %s. Now at tip %s",
            mine, report.samples, other, report.other_samples, givers,
            report.reason, report.tip, ", ".join(report.members), report.kept, report.other_tip,
        )  # fmt: skip
        self._tell(report)

    def caught_up(self, mine: Tip, tip: Tip, givers: Collection[bytes]) -> None:
        """Log that this peer, which was apart from the others, has taken over a state that follows from its own."""
        log.warning(
            "this peer has left its state of epoch %d (%g samples) for that of epoch %d (%g samples), which it has "
            "from %s and which leads on from it: nothing is lost",
            mine.epoch, mine.samples, tip.epoch, tip.samples, ", ".join(repr(PeerID(key)) for key in sorted(givers)),
        )  # fmt: skip

    # -- this peer keeps its side

    def look(self, mine: Tip, line: Line, made_with: Collection[bytes]) -> None:
        """Report members whose states do not lead to this peer's state. Report each such state once, and no member more
        than `TOLD` times in `TOLD_SECONDS`."""
        tips = self._run.swarm.peer.tips
        while tips:
            self._sides.hear(*tips.popleft())
        for key, tip in self._sides.find(line, mine):
            if not self._sparing.allows(key, time.monotonic()):
                continue
            reason = f"its owner has pinned it (pin {mine.pin})" if mine.pin > tip.pin else WHY
            log.warning(
                "the run has forked: %r is at tip %s (epoch %d, %g samples), which does not lead to this peer's; this "
                "side, tip %s (%g samples), stays: %s. The other peer keeps what it leaves, and says where",
                PeerID(key), tip, tip.epoch, tip.samples, mine, mine.samples, reason,
            )  # fmt: skip
            self._tell(self._report(mine, tip, made_with, [key], reason, stays=True, kept=""))

    # -- what the owner has pinned

    @property
    def pin(self) -> Pin | None:
        """The owner's newest pin."""
        gate = self._run.swarm.gate
        return None if gate is None else gate.pin

    def due(self, mine: Tip) -> Pin | None:
        """The newest pin, if a peer with the state `mine` does not follow it yet; else None."""
        pin = self.pin
        return pin if pin is not None and mine.pin < pin.number else None

    def follows_from(self, pin: Pin, mine: Tip, line: Line) -> bool:
        """Whether the state `mine` is the pinned one, or follows from it and the pin does not rewind."""
        return mine.lineage == pin.lineage or (not pin.rewind and pin.lineage in line)


def _texts(keys: Collection[bytes]) -> tuple[str, ...]:
    return tuple(str(PeerID(key)) for key in sorted(keys))

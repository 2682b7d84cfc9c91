"""The state handed over: this peer's to newcomers, the others' to this peer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from shoal.averaging.donor import Snapshot
from shoal.averaging.errors import Rejected
from shoal.optim.machine import Machine
from shoal.optim.replica import Replica
from shoal.optim.reports import DownloadReport
from shoal.optim.run import Run
from shoal.optim.settings import Settings
from shoal.optim.update import Background
from shoal.p2p.errors import Refused
from shoal.p2p.identity import PeerID

log = logging.getLogger(__name__)


class Handover:
    """Between one peer's `Replica` and those of the others.

    Args:
        settings: of the optimizer.
        run: has the others.
        replica: is sent, and written.
        background: may be about to bring the replica to the others' state.
        machine: is told of lossy downloads.
    """

    def __init__(
        self, settings: Settings, run: Run, replica: Replica, background: Background, machine: Machine
    ) -> None:
        assert settings.load_state_compression is not None
        self._compression = settings.load_state_compression
        self._run, self._replica, self._background, self._machine = run, replica, background, machine
        self._downloads = 0  # since the last epoch that this peer was in

    @property
    def is_behind(self) -> bool:
        """Whether others hold a state that outranks this peer's."""
        behind = self._run.swarm.behind
        return behind is not None and not self._background.busy and behind.outranks(self._replica.tip)

    async def take_snapshot(self) -> Snapshot:
        """A copy of the newest state for a newcomer; on the reactor. Raises Refused if this peer has none to give."""
        # A commit that is not applied yet is waited for.
        while self._replica.tip != self._run.tip:
            await self._run.state_changed()
        if self.is_behind:
            raise Refused("this peer is behind the others itself")
        try:
            return await asyncio.to_thread(self._replica.snapshot, self._compression)
        except ValueError as error:
            log.warning("a newcomer can't have this peer's state: %s", error)
            raise Refused(str(error)) from error

    def download(self, donors: Sequence[PeerID], timeout: float) -> DownloadReport | None:
        """Set the replica to the state that most of the donors hold, and follow the run from there; None, and nothing
        has changed, if that state has fewer samples behind it than this peer's.

        Raises AveragingError if nobody could bring it within `timeout` seconds, Rejected if it does not fit.
        """
        # What takes longer than an epoch would come too late each time. So the others are asked to wait, but not always
        # where that does not help either: the 2nd, 4th, 8th time.
        self._downloads += 1
        awaited = self._downloads > 1 and self._downloads.bit_count() == 1
        state = self._run.download(donors, timeout, self._replica.max_nbytes, awaited)
        mine, tip = self._replica.tip, state.manifest.tip
        if mine.outranks(tip):
            log.info("the peers' state, of epoch %d, is behind this peer's, of epoch %d", tip.epoch, mine.epoch)
            return None
        try:
            self._replica.load(state)
        except ValueError as error:
            raise Rejected(f"the run's state does not fit this peer: {error}") from error
        self._run.follow(tip)
        if state.lossy:
            self._machine.has_lossy_state(tip.epoch)
        digest = self._replica.digest.hex()
        report = DownloadReport(tip.epoch, state.seconds, state.nbytes, len(state.chunks_from), digest)
        log.info("downloaded the state of epoch %d from %d peers", report.epoch, report.donors)
        return report

    def in_step(self) -> None:
        """This peer was in an epoch's end: it holds what the others hold, and a download to come is the first again."""
        self._downloads = 0

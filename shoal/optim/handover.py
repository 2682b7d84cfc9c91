"""The state handed over: this peer's to newcomers, the others' to this peer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Sequence

from shoal.optim.machine import Machine
from shoal.optim.replica import Replica
from shoal.optim.reports import DownloadReport
from shoal.optim.run import Run
from shoal.optim.settings import Settings
from shoal.optim.update import Background
from shoal.p2p.errors import Refused
from shoal.p2p.identity import PeerID
from shoal.swarm.protocol.errors import Rejected
from shoal.swarm.protocol.tip import Tip
from shoal.transfer.donor import EncodedState, encoded
from shoal.transfer.transfer import NothingWanted

log = logging.getLogger(__name__)

APPLY_SECONDS = 5.0  # that a newcomer waits for a commit that this peer has not applied yet


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
        self._downloads = 0  # since the last epoch that this peer ended together with others
        self._made_with: frozenset[bytes] = frozenset()  # with whom it made its state, or from whom it has it

    @property
    def is_behind(self) -> bool:
        """Whether others hold a state that outranks this peer's."""
        behind = self._run.swarm.behind
        return behind is not None and not self._background.busy and behind.outranks(self._replica.tip)

    def priority(self) -> float:
        """Of this peer's state among those that newcomers are offered: one that is outranked is the last choice."""
        return -1.0 if self.is_behind else 0.0

    async def take_snapshot(self) -> EncodedState:
        """A copy of the state that this peer holds, for newcomers; on the reactor. Raises Refused if it can't be
        given."""
        # A commit that is being applied is waited for, but not for ever: the trainer may have stopped.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(APPLY_SECONDS):
                while self._replica.tip != self._run.tip:
                    await self._run.state_changed()
        try:
            return await asyncio.to_thread(lambda: encoded(self._replica.snapshot(self._compression)))
        except ValueError as error:
            log.warning("a newcomer can't have this peer's state: %s", error)
            raise Refused(str(error)) from error

    def download(self, donors: Sequence[PeerID], timeout: float) -> DownloadReport | None:
        """Set the replica to the state that most of the donors hold, of those that are not behind this peer's, and
        follow the run from there; None, and nothing has changed, if all are behind.

        Raises AveragingError if nobody could bring it, or nothing of it came for `timeout` seconds; Rejected if it does
        not fit.
        """
        # What takes longer than an epoch would come too late each time. So the others are asked to wait, but not always
        # where that does not help either: the 2nd, 4th, 8th time.
        self._downloads += 1
        awaited = self._downloads > 1 and self._downloads.bit_count() == 1
        mine, is_behind = self._replica.tip, self.is_behind

        def wanted(tip: Tip) -> bool:
            return tip.outranks(mine) if is_behind else not mine.outranks(tip)

        try:
            state = self._run.download(donors, timeout, self._replica.max_nbytes, wanted, awaited)
        except NothingWanted as error:
            log.info("%s", error)
            return None
        tip = state.manifest.tip
        try:
            self._replica.load(state)
        except ValueError as error:
            raise Rejected(f"the run's state does not fit this peer: {error}") from error
        self._run.follow(tip)
        self._run.ask_where_they_are(state.chunks_from)  # they have gone on meanwhile, unless they have waited
        if state.lossy:
            self._machine.has_lossy_state(tip.epoch)
        digest = self._replica.digest.hex()
        made_apart = self._made_with.isdisjoint(donor.key for donor in state.chunks_from)
        self._made_with = frozenset(donor.key for donor in state.chunks_from)
        if mine.epoch and tip != mine and made_apart:
            log.warning(
                "this peer has left its state of epoch %d (%g samples) for that of epoch %d (%g samples), which it has "
                "from %s: the state with more samples behind it is kept",
                mine.epoch,
                mine.samples,
                tip.epoch,
                tip.samples,
                ", ".join(map(repr, state.chunks_from)),
            )
        return DownloadReport(tip.epoch, state.seconds, state.nbytes, len(state.chunks_from), digest)

    def ended_epoch(self, members: Collection[bytes]) -> None:
        """This peer has ended an epoch together with these (itself included; none: alone). If it holds what the others
        hold then, a download to come is the first again."""
        self._made_with = frozenset(members) - {self._run.me}
        if self._made_with and not self.is_behind:
            self._downloads = 0

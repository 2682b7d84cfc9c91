"""One peer's reports of its samples to whoever coordinates."""

from __future__ import annotations

import logging

from shoal.p2p.errors import P2PError
from shoal.swarm.following import Following
from shoal.swarm.neighbourhood import Neighbourhood
from shoal.swarm.protocol.errors import AveragingError, Behind
from shoal.swarm.protocol.messages import Count, Elsewhere, Hello, Progress
from shoal.swarm.protocol.tip import Tip

log = logging.getLogger(__name__)


class Reporting:
    """Tells the coordinator of a tip what this peer has, and tells another that takes its place the same.

    Args:
        neighbourhood: this peer among the members of its run.
        following: knows the tip, and hears when its round is called.
        timeout: seconds that the coordinator may take to answer.
    """

    def __init__(self, neighbourhood: Neighbourhood, following: Following, timeout: float) -> None:
        self._channel, self._timeout = neighbourhood.channel, timeout
        self._neighbourhood, self._following = neighbourhood, following
        self._last: Progress | None = None
        self._told: tuple[bytes, Tip] | None = None  # who was told last, and of which tip
        self._asked: list[bytes] = []  # who has not answered yet

    @property
    def waited_for(self) -> list[bytes]:
        """The keys of those who have not answered yet."""
        return list(dict.fromkeys(self._asked))

    async def report(self, report: Progress) -> Count:
        """Tell the coordinator this peer's samples since the tip; returns what all members have. Raises `Behind` if
        the coordinator is at a state that outranks ours, P2PError if it can't be asked, `Rejected` if the run goes by
        other terms."""
        if not self._following.made:
            self._neighbourhood.check_terms()
        self._last = report
        return await self._send(report)

    def members_changed(self) -> None:
        """Members came or went: does somebody else count now?"""
        tip = self._following.tip
        if self._of(tip) is not None and self._told != (self._neighbourhood.coordinator().key, tip):
            self._channel.spawn(self._send_again())

    def _of(self, tip: Tip) -> Progress | None:
        """The last report, if it was of that tip."""
        return self._last if self._last is not None and self._last.tip == tip else None

    async def _send_again(self) -> None:
        report = self._of(self._following.tip)
        if report is None:
            return  # the epoch has ended meanwhile
        try:
            await self._send(report)
        except (P2PError, AveragingError, TimeoutError) as error:
            log.debug("%r could not report: %s", self._channel.node.peer_id, error)

    async def _send(self, report: Progress) -> Count:
        coordinator = self._neighbourhood.coordinator()
        self._told = (coordinator.key, report.tip)
        self._asked.append(coordinator.key)
        try:
            answer = await self._channel.ask(coordinator.key, report, self._timeout)
        finally:
            self._asked.remove(coordinator.key)
        following = self._following
        match answer.body:
            case Count():
                if answer.body.called and answer.body.tip == following.tip and not following.called:
                    following.is_called()
                return answer.body
            case Elsewhere():
                await self._neighbourhood.meet(answer.body.coordinator)
            case Hello():
                if answer.body.tip == report.tip:
                    await self._neighbourhood.meet_peer(coordinator.peer)  # it has lost this peer
                else:
                    self._neighbourhood.told(coordinator.peer, answer.body.tip)
                missed = self._neighbourhood.participant.missed is not None  # then its result comes first
                if answer.body.tip.outranks(following.tip) and not missed:
                    raise Behind(f"the swarm is at epoch {answer.body.tip.epoch}, this peer at {following.tip.epoch}")
        return Count(report.tip, report.samples, report.rate, 1, False)

"""One peer's way into a round: it joins where its tip is coordinated, until a round begins with it or is over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from shoal.p2p.errors import P2PError, Refused, Unavailable
from shoal.p2p.identity import PeerID
from shoal.swarm.contribution import Attempt, Contribution, Outcome
from shoal.swarm.coordination import Coordination
from shoal.swarm.following import Following
from shoal.swarm.neighbourhood import Neighbourhood
from shoal.swarm.protocol.errors import AveragingError, Behind, Rejected, ResultLost
from shoal.swarm.protocol.member import Member
from shoal.swarm.protocol.messages import MAX_GATHER_BYTES, Begin, Elsewhere, Hello, Join, Joined, Unjoin
from shoal.swarm.round import RoundDriver

log = logging.getLogger(__name__)


class Matchmaking:
    """Brings one input after another into a round.

    Args:
        neighbourhood: this peer among the members of its run.
        driver: takes this peer through the round, once it has begun.
        coordination: hears that the coordinator is lost, if it can't be reached.
        following: knows the tip.
        timeout: seconds that the coordinator may take to answer.
    """

    def __init__(
        self,
        neighbourhood: Neighbourhood,
        driver: RoundDriver,
        coordination: Coordination,
        following: Following,
        timeout: float,
    ) -> None:
        self._channel, self._participant = neighbourhood.channel, neighbourhood.participant
        self._neighbourhood, self._round, self._coordination = neighbourhood, driver, coordination
        self._following, self._timeout = following, timeout

    async def average(self, contribution: Contribution, timeout: float) -> Outcome:
        """See `Swarm.average`."""
        if self._round.attempt is not None:
            raise AveragingError("this peer is in a round already")
        if len(contribution.gathered) > MAX_GATHER_BYTES:
            raise ValueError(
                f"gather is {len(contribution.gathered)} bytes long; at most {MAX_GATHER_BYTES} are allowed"
            )
        node, participant = self._channel.node, self._participant
        now = asyncio.get_running_loop().time()
        attempt = self._round.attempt = Attempt(contribution, now, node.bytes_sent, node.bytes_received)
        try:
            async with asyncio.timeout(timeout) as attempt.patience:
                attempt.timeout = timeout
                while attempt.outcome is None:
                    self._go_by(participant.begin, attempt)
                    self._round.changed.clear()
                    if not self._following.made:
                        self._neighbourhood.check_terms()
                    if attempt.error is not None:
                        raise attempt.error
                    if participant.begin is None:
                        await self._between_rounds(attempt)
                    if attempt.outcome is None and attempt.error is None:
                        await self._round.changed.wait()
                return attempt.outcome
        except TimeoutError:
            where = "in a round" if participant.begin is not None else "waiting for one"
            peers = len(self._neighbourhood.connected())
            seconds = asyncio.get_running_loop().time() - now
            raise AveragingError(f"no result within {seconds:.3g} s ({where}; {peers} members are connected)") from None
        finally:
            if attempt.outcome is None and attempt.joined is not None and participant.begin is None:
                self._channel.notify([attempt.joined[0]], Unjoin())
            self._round.finish()

    def _go_by(self, begin: Begin | None, attempt: Attempt) -> None:
        """In a round, its coordinator's time counts; that it has ended may take a while to be heard."""
        if begin is not None and attempt.timeout < begin.timeout + self._timeout:
            attempt.timeout = begin.timeout + self._timeout
            self._round.gets_on()

    async def _between_rounds(self, attempt: Attempt) -> None:
        """Not in a round: fetch the one that was missed, or join the next."""
        following, wanted = self._following, attempt.contribution.tip
        if wanted is not None and wanted != following.tip:
            # A round that this peer was in, but whose result it did not use.
            commit = self._participant.commit
            if commit is None or commit.tip != wanted:
                raise Behind("the swarm has gone on from the state that this input was made from")
            try:
                await self._round.fetch_committed(attempt, commit)
            except ResultLost as error:
                following.move(wanted)  # there this peer's state is still
                self._raise_behind(str(error))
                log.warning("%s: the epoch is made again", error)
            else:
                return
        missed = self._participant.missed
        if missed is not None:
            try:
                await self._round.fetch_committed(attempt, missed)
            except ResultLost as error:
                await self._meet_all(missed.members)  # they may hold a better state meanwhile
                following.give_up_missed()
                self._raise_behind(str(error))
                log.warning("%s: the epoch is made again", error)
            else:
                following.has_missed_result()
                return
        tip, behind = following.tip, following.behind
        if behind is not None and behind.outranks(tip):
            if wanted is not None:
                raise Behind(f"the swarm is at epoch {behind.epoch}, this peer at {tip.epoch}")
            self._following.move(behind)
        coordinator = self._neighbourhood.coordinator()
        here = (coordinator.key, self._following.tip)
        if attempt.joined != here:
            attempt.joined = here
            self._channel.spawn(self._join(attempt, coordinator))

    def _raise_behind(self, why: str) -> None:
        """Raises Behind if a member that can be reached holds a better state."""
        if self._following.behind is not None:
            raise Behind(f"{why}. Others hold a later state")

    async def _meet_all(self, keys: Iterable[bytes]) -> None:
        """Hear at which states these peers are, of those that are connected."""
        peers = [PeerID(key) for key in keys if key != self._participant.me and self._channel.is_connected(key)]
        await asyncio.gather(*(self._neighbourhood.meet_peer(peer) for peer in peers))

    async def _join(self, attempt: Attempt, coordinator: Member) -> None:
        given, tip, membership = attempt.contribution, self._following.tip, self._neighbourhood.membership
        view = membership.fingerprint()
        join = Join(
            tip=tip,
            sender=membership.me,
            terms=self._neighbourhood.terms,
            weight=given.weight,
            machine=given.machine,
            state=given.state,
            attempt=self._participant.attempt,
            patience=given.patience,
            view=b"" if attempt.introduced == (coordinator.key, view) else view,
            options=given.options,
        )
        buffers = [given.gathered] if given.gathered else []
        try:
            answer = await self._channel.ask(coordinator.key, join, self._timeout, buffers)
        except TimeoutError:
            attempt.joined = None  # if it is gone, `Liveness` says so
        except P2PError as error:
            if isinstance(error, Refused) and not isinstance(error, Unavailable):
                self._refused(attempt, coordinator, str(error))
            else:
                log.debug("%r could not join %r: %s", membership.me.peer, coordinator.peer, error)
                self._coordination.lost(coordinator.key)
        else:
            if isinstance(answer.body, Joined):
                return
            attempt.joined = None
            if isinstance(answer.body, Hello) and answer.body.tip == tip:
                # It knows others than this peer does: tell each other, before it begins a round without somebody.
                await self._neighbourhood.meet_peer(coordinator.peer)
                attempt.introduced = (coordinator.key, membership.fingerprint())
            else:
                if isinstance(answer.body, Elsewhere):
                    await self._neighbourhood.meet(answer.body.coordinator)
                elif isinstance(answer.body, Hello):
                    self._neighbourhood.told(coordinator.peer, answer.body.tip)
                # The tips or views differ, and are about to be exchanged; asking at once again would only spin.
                await asyncio.sleep(0.05)
        self._round.changed.set()

    def _refused(self, attempt: Attempt, coordinator: Member, reason: str) -> None:
        """A coordinator does not take this peer. Who trains goes on with others, unless it is a newcomer that nobody
        takes."""
        me = self._participant.me
        if attempt.contribution.tip is not None:
            self._neighbourhood.refused(coordinator.key, reason)
            attempt.joined = None
        alone = self._neighbourhood.coordinator().key in (me, coordinator.key)
        if attempt.contribution.tip is None or coordinator.key == me or (alone and not self._following.made):
            attempt.error = Rejected(f"the run refuses this peer: {reason}")

    def rejoin(self) -> None:
        """What the JOIN said has changed: say it anew. Nothing to do once the round has begun."""
        attempt = self._round.attempt
        if attempt is not None and self._participant.begin is None:
            attempt.joined = None
            self._round.changed.set()

    def waits_in_vain(self, peer: PeerID) -> None:
        """There will be no round of `peer` with this peer in it: if it has joined there, it joins again."""
        attempt = self._round.attempt
        if attempt is not None and attempt.joined is not None and attempt.joined[0] == peer.key:
            self.rejoin()

    async def go_elsewhere(self, peer: PeerID, coordinator: Member) -> None:
        """`peer` says that another coordinates."""
        await self._neighbourhood.meet(coordinator)
        self.waits_in_vain(peer)  # that other one may be out of reach

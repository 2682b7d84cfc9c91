"""Drives a `Coordinator`: its timers, and its messages onto the network."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec

from shoal.p2p.errors import P2PError, Refused
from shoal.p2p.identity import PeerID
from shoal.swarm.gathered import decode_gathered
from shoal.swarm.neighbourhood import Neighbourhood
from shoal.swarm.protocol.book import RuleBroken
from shoal.swarm.protocol.coordinator import Coordinator, Phase, Send
from shoal.swarm.protocol.messages import (
    Begin,
    Broken,
    Count,
    Done,
    Elsewhere,
    Follows,
    Have,
    Hello,
    Join,
    Progress,
    Repair,
    Survey,
    Unjoin,
    Waiting,
)

# Within so long all members notice that one is lost. Whoever is complained of and not lost by then has lost a link
# only.
NOTICE_SECONDS = 0.5
MAX_REFUSED_REPAIRS = 3  # by one member; then it is out


class Lead:
    """One peer's coordination of one tip.

    Args:
        coordinator: decides.
        neighbourhood: this peer among the members of its run.
        survey_timeout: seconds that a member may take to answer a survey.
    """

    def __init__(self, coordinator: Coordinator, neighbourhood: Neighbourhood, survey_timeout: float) -> None:
        self.coordinator = coordinator
        self._channel, self._neighbourhood = neighbourhood.channel, neighbourhood
        self._survey_timeout = survey_timeout
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self._complaints: dict[bytes, dict[bytes, str]] = {}  # of whom each member complains, and why
        self._unrepaired: dict[bytes, int] = {}
        self._signs: dict[bytes, int] = {}  # how often each member has seen the round get on
        self.last_join_at: float | None = None
        self.join_to_begin: float | None = None

    @property
    def over(self) -> bool:
        return self.coordinator.phase in (Phase.COMMITTED, Phase.ABORTED)

    def is_of(self, round_id: bytes) -> bool:
        """Whether this coordinates the round of that name."""
        return self.coordinator.begin is not None and self.coordinator.begin.round == round_id

    @property
    def watched(self) -> list[bytes]:
        """The members on whom this round waits or may wait."""
        coordinator = self.coordinator
        return coordinator.live() if coordinator.begin is not None else list(coordinator.expected)

    def members_changed(self) -> None:
        """Somebody came or went."""
        coordinator = self.coordinator
        if coordinator.begin is None:
            self._act(coordinator.expect(self._neighbourhood.connected(), self._now()))
        else:
            for key in coordinator.live():
                if not self._channel.is_connected(key):
                    self._act(coordinator.put_out(key, "the connection to it was lost", self._now()))

    def progress(self, peer: PeerID, report: Progress) -> Count:
        answer, actions = self.coordinator.progress(peer.key, report, self._now())
        self._act(actions)
        return answer

    def join(self, peer: PeerID, join: Join, gathered: bytes) -> None:
        """A member's input is ready. Raises Refused for what the other members could not use."""
        try:
            decode_gathered(gathered)
            self.coordinator.expected.setdefault(peer.key, join.sender)
            actions = self.coordinator.join(peer.key, join, gathered, self._now())
        except (ValueError, RuleBroken) as error:
            raise Refused(str(error)) from error
        self.last_join_at = self._now()
        self._act(actions)

    def on_notice(self, peer: PeerID, notice: Done | Broken | Unjoin | Waiting | Elsewhere) -> None:
        """A member says how it gets on. Raises Refused for a complaint of a peer that is not in the round."""
        begin = self.coordinator.begin
        match notice:
            case Done() if begin is not None:
                self._act(self.coordinator.finished(peer.key, notice, self._neighbourhood.connected(), self._now()))
            case Broken() if begin is not None and begin.round == notice.round:
                self.broken(peer, notice)
            case Unjoin():
                self._act(self.coordinator.unjoin(peer.key, self._now()))
            case Waiting() if begin is not None and begin.round == notice.round and peer.key in self.coordinator.live():
                self._act(self.coordinator.wait(self._now()))  # its user has not allowed the round yet
            case Elsewhere():
                self.elsewhere(peer)

    def broken(self, peer: PeerID, broken: Broken) -> None:
        """A member can't go on with another. Out goes who broke a rule, who is lost to us too, and who speaks of
        itself. Where we still reach the other, it may be about to be lost to us too: that is waited for first."""
        if peer.key not in self.coordinator.live():
            raise Refused("only a member of the round can complain of another")
        at_fault = broken.fault or broken.peer == peer.key or not self._channel.is_connected(broken.peer)
        if at_fault:
            self._act(self.coordinator.put_out(broken.peer, broken.reason, self._now()))
        elif broken.peer in self.coordinator.live() and broken.peer not in self._complaints.get(peer.key, {}):
            self._complaints.setdefault(peer.key, {})[broken.peer] = broken.reason
            asyncio.get_running_loop().call_later(NOTICE_SECONDS, self._judge, peer.key, broken.peer, False)

    def _judge(self, complainer: bytes, other: bytes, asked: bool) -> None:
        """Two members that we both reach can't reach each other: out goes the one that complains of several, else the
        one complained of. Both are asked first: one may have a commit, or follow another coordinator by now."""
        reasons, live = self._complaints[complainer], self.coordinator.live()
        if self._stopped or self.over or complainer not in live or other not in live:
            return
        if not asked:
            self._act(self.coordinator.start_survey(self._now()))
            asyncio.get_running_loop().call_later(NOTICE_SECONDS, self._judge, complainer, other, True)
        else:
            key = other if len([k for k in reasons if k in live]) == 1 else complainer
            self._act(self.coordinator.put_out(key, reasons[other], self._now()))

    @property
    def signs(self) -> int:
        """How often the members together have seen the round get on."""
        return sum(self._signs.values())

    def saw(self, key: bytes, signs: int) -> None:
        """A member has seen the round get on so often."""
        if self.coordinator.begin is not None and signs > self._signs.get(key, 0):
            self._signs[key] = signs
            self._act(self.coordinator.gets_on(self._now()))

    def elsewhere(self, peer: PeerID) -> None:
        """A member that was called is in a round of another coordinator: going on without it might give this tip two
        results, so this round waits or, if it has begun, ends."""
        if self.coordinator.begin is None:
            self._act(self.coordinator.postpone(self._now()))
        elif not self.over and peer.key in self.coordinator.live():
            self._act(self.coordinator.abort("a member is in a round of another coordinator"))

    def take_over(self) -> None:
        """Begin as the successor of a coordinator that was lost."""
        self._act(self.coordinator.start_survey(self._now()))

    def stop(self) -> None:
        """Nothing more is to be done here, whatever comes."""
        self._stopped = True
        self._cancel_timer()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _act(self, actions: Iterable[Send]) -> None:
        if self._stopped:
            return
        for action in actions:
            if isinstance(action.message, Begin):
                self.join_to_begin = None if self.last_join_at is None else self._now() - self.last_join_at
                self._channel.notify(action.to, action.message, [self._gathered(action.message)])
            elif isinstance(action.message, Survey):
                for key in action.to:
                    self._channel.spawn(self._survey(key, action.message))
            elif isinstance(action.message, Repair):
                for key in action.to:
                    self._channel.spawn(self._repair(key, action.message))
            else:
                self._channel.notify(action.to, action.message)
        self._set_timer()

    def _set_timer(self) -> None:
        self._cancel_timer()
        wake_at = self.coordinator.wake_at()
        if wake_at is not None and not self._stopped:  # what was sent may have come to ourselves, and ended the tip
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(max(wake_at, loop.time()), lambda: self._act(self.coordinator.tick(self._now())))

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _gathered(self, begin: Begin) -> bytes:
        return msgspec.msgpack.encode({m.key: self.coordinator.gathered.get(m.key, b"") for m in begin.members})

    async def _survey(self, key: bytes, survey: Survey) -> None:
        buffers = [self._gathered(survey.begin)] if survey.begin is not None else []
        try:
            reply = await self._channel.ask(key, survey, self._survey_timeout, buffers)
        except (P2PError, TimeoutError) as error:
            if self.coordinator.ballot == survey.ballot:
                self._act(self.coordinator.put_out(key, f"no answer to a survey: {error}", self._now()))
            return
        if self._stopped:
            return
        match reply.body:
            case Have(ballot=ballot) if ballot > survey.ballot:
                reachable = self._channel.is_connected(ballot.coordinator)
                self._act(self.coordinator.outbid(ballot, reachable, self._now()))
            case Have():
                self._act(self.coordinator.surveyed(key, survey.ballot, reply.body, self._now()))
            case Elsewhere():
                self._act(self.coordinator.abort("a member is in the round of another coordinator"))
            case Hello(tip=tip) if tip.outranks(self.coordinator.tip):
                # The round was committed without us, and its members have gone on since.
                self._act(self.coordinator.abort("others are past this round"))
                self._neighbourhood.told(PeerID(key), tip)
            case _:
                self._act(self.coordinator.put_out(key, "it is not at this state", self._now()))

    async def _repair(self, key: bytes, repair: Repair) -> None:
        try:
            await self._channel.call(key, repair, Follows, self._survey_timeout)
        except (P2PError, TimeoutError) as error:
            if self.coordinator.ballot != repair.ballot or self.coordinator.phase is not Phase.RUNNING:
                return
            self._unrepaired[key] = self._unrepaired.get(key, 0) + 1
            if self._unrepaired[key] > MAX_REFUSED_REPAIRS:
                self._act(self.coordinator.put_out(key, f"it does not follow repairs: {error}", self._now()))
            else:  # it may follow a higher ballot, or have a commit: a survey tells
                self._act(self.coordinator.start_survey(self._now()))

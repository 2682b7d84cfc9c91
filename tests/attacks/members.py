"""Attacks of a member, on the rounds of the run."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any

from shoal.p2p.errors import Refused
from shoal.p2p.identity import PeerID
from shoal.swarm.protocol import messages as msg
from shoal.swarm.protocol.view import Role
from tests.attacks import forged
from tests.attacks.attack import MemberAttack, Normal, silence

if TYPE_CHECKING:
    from tests.attacks.attacker import Inside


class OtherTerms(MemberAttack):
    """1: other terms, and a tip that outranks all."""

    async def at_tip(self) -> None:
        await self.again()

    async def again(self) -> None:
        tip = forged.better_tip(self.run.tip)
        self.run.say(self.run.others(), forged.hello(self.run.me, forged.other_terms(self.run.terms), tip))


class BetterTip(MemberAttack):
    """1b: equal terms, and a tip that outranks all, of a state that nobody has."""

    trains = True  # an auxiliary peer's state counts for nothing

    async def again(self) -> None:
        tip = forged.better_tip(self.run.tip)
        self.run.say(self.run.others(), forged.hello(self.run.me, self.run.terms, tip))


class SenselessBegin(MemberAttack):
    """2: a forged COMMIT; who asks for its plan gets a BEGIN that makes no sense."""

    def __init__(self, inside: Inside) -> None:
        super().__init__(inside)
        self._numbers, self._plans = itertools.count(), {}  # type: ignore[var-annotated]

    async def at_tip(self) -> None:
        others = [member for member in self.run.members() if member.key != self.run.me.key]
        choices = forged.senseless_begins(self.run.tip, self.run.me, others)
        begin = choices[next(self._numbers) % len(choices)]
        digests, root = forged.digests_of(begin.starts[-1] if begin.starts and begin.starts[-1] < 9999 else 1)
        self._plans[begin.round] = forged.committed(begin, digests)
        keys = [self.run.me.key, *self.run.others()]
        self.run.say(self.run.others(), forged.commit(self.run.tip, begin.round, root, keys, self.run.members()))

    def hears(self, peer: PeerID, message: Any, normal: Normal) -> Any:
        if isinstance(message, msg.Digests) and message.round in self._plans:
            self.gain("asked for a plan")
            return self._plans[message.round]
        return normal()


class RefusesJoins(MemberAttack):
    """3: as coordinator, refuses every JOIN."""

    def hears(self, peer: PeerID, message: Any, normal: Normal) -> Any:
        if isinstance(message, msg.Join) and peer.key != self.run.me.key:
            raise Refused("not you")
        return normal()


class CommitOfNothing(MemberAttack):
    """4: a COMMIT of a digest that nobody has; who asks for the bytes hears nothing."""

    async def at_tip(self) -> None:
        _, root = forged.digests_of(1)
        keys = [self.run.me.key, *self.run.others()]
        message = forged.commit(self.run.tip, root[:16], root, keys, self.run.members(), samples=256.0)
        self.run.say(self.run.others(), message)

    def hears(self, peer: PeerID, message: Any, normal: Normal) -> Any:
        return silence() if isinstance(message, msg.Digests | msg.Fetch) else normal()


class SilentCoordinator(MemberAttack):
    """7a: as coordinator, answers Ping and never Progress or JOIN."""

    def hears(self, peer: PeerID, message: Any, normal: Normal) -> Any:
        is_other = peer.key != self.run.me.key
        return silence() if isinstance(message, msg.Progress | msg.Join) and is_other else normal()


class NeverCalls(MemberAttack):
    """7b: counts, and never calls."""

    def sends(self, keys: Sequence[bytes], message: Any) -> Any:
        return None if isinstance(message, msg.Call | msg.Begin) else message

    def hears(self, peer: PeerID, message: Any, normal: Normal) -> Any:
        answer = normal()
        return self._never(answer) if isinstance(message, msg.Progress) and isinstance(answer, Awaitable) else answer

    async def _never(self, answer: Awaitable[Any]) -> Any:
        real = await answer
        return forged.never_called(real) if isinstance(real, msg.Count) else real


class NeverBegins(MemberAttack):
    """7c: calls, answers JOIN, and never begins."""

    def sends(self, keys: Sequence[bytes], message: Any) -> Any:
        return None if isinstance(message, msg.Begin) else message


class NeverCommits(MemberAttack):
    """7d: begins, and never commits; it also gives up nothing."""

    def sends(self, keys: Sequence[bytes], message: Any) -> Any:
        return None if isinstance(message, msg.Commit | msg.Abort) else message


class EndsRounds(MemberAttack):
    """7e: begins, and ends each of its rounds at once; all join again."""

    def sends(self, keys: Sequence[bytes], message: Any) -> Any:
        if isinstance(message, msg.Begin):
            asyncio.get_running_loop().call_soon(self.run.end_round)
        return message


class Ghosts(MemberAttack):
    """8: tells of 1,023 clients that do not exist."""

    every, role = 1.0, Role.CLIENT

    def __init__(self, inside: Inside) -> None:
        super().__init__(inside)
        self.ghosts = [forged.ghost(self.role) for _ in range(1023)]

    async def again(self) -> None:
        self.run.say(self.run.others(), forged.hello(self.run.me, self.run.terms, self.run.tip, self.ghosts))


class DeadNodes(Ghosts):
    """8b: tells of 1,023 nodes that nobody reaches."""

    role = Role.NODE


class BadWeights(MemberAttack):
    """9: a weight in each part that no decoder takes."""

    trains = True

    def __init__(self, inside: Inside) -> None:
        super().__init__(inside)
        self._weights = itertools.cycle([1e30, math.nan, -1.0])

    def sends(self, keys: Sequence[bytes], message: Any) -> Any:
        if isinstance(message, msg.Part) and list(keys) != [self.run.me.key]:
            return forged.with_weight(message, next(self._weights))
        return message


class KeepsResults(MemberAttack):
    """9b: as a reducer keeps its results back, and answers each Ping that the round gets on."""

    def __init__(self, inside: Inside) -> None:
        super().__init__(inside)
        self._signs = itertools.count(1000)

    def sends(self, keys: Sequence[bytes], message: Any) -> Any:
        return None if isinstance(message, msg.Result) and list(keys) != [self.run.me.key] else message

    def hears(self, peer: PeerID, message: Any, normal: Normal) -> Any:
        return msg.Pong(True, next(self._signs)) if isinstance(message, msg.Ping) else normal()


class NeverDone(MemberAttack):
    """9c: has all that it needs, never says DONE, and complains of nobody."""

    def sends(self, keys: Sequence[bytes], message: Any) -> Any:
        is_of_it = isinstance(message, msg.Done | msg.Broken) and list(keys) != [self.run.me.key]
        return None if is_of_it else message


class InRounds(MemberAttack):
    """Does something in each round that it is in."""

    every = 0.05

    def __init__(self, inside: Inside) -> None:
        super().__init__(inside)
        self.begin: msg.Begin | None = None
        self._done_at = 0.0

    def hears(self, peer: PeerID, message: Any, normal: Normal) -> Any:
        if isinstance(message, msg.Begin):
            self.begin, self._done_at = message, 0.0
            asyncio.get_running_loop().call_soon(self.in_round, message)
        return normal()

    async def again(self) -> None:
        begin = self.begin
        if begin is not None and begin.tip == self.run.tip and time.monotonic() > self._done_at + 0.5:
            self._done_at = time.monotonic()
            self.in_round(begin)

    def in_round(self, begin: msg.Begin) -> None:
        """At its beginning, and every 0.5 s."""


class Elsewhere(InRounds):
    """10a: ELSEWHERE to everybody, five times a second and whenever a round has begun."""

    every = 0.2

    def in_round(self, begin: msg.Begin) -> None:
        for key in self.run.others():
            others = [member for member in self.run.members() if member.key not in (key, self.run.me.key)]
            other = others[0] if others else forged.ghost(Role.NODE)
            self.run.say([key], forged.elsewhere(other))
            self.run.say([key], forged.elsewhere(other, self.run.tip, self.run.me))

    async def again(self) -> None:
        if self.begin is not None:
            self.in_round(self.begin)


class MembersCall(MemberAttack):
    """10c: CALL at each tip, by a member that does not coordinate."""

    async def at_tip(self) -> None:
        self.run.say(self.run.others(), forged.call(self.run.tip))


class HugeAttempt(InRounds):
    """17a: a JOIN with the highest attempt there is; and the round that follows is ended, so that all have to join
    again."""

    def asks(self, key: bytes, message: Any) -> Any:
        return forged.with_attempt(message, (1 << 52) - 1) if isinstance(message, msg.Join) else message

    def in_round(self, begin: msg.Begin) -> None:
        self.run.say([begin.ballot.coordinator], forged.elsewhere(forged.ghost(Role.NODE)))


class HugeBallot(InRounds):
    """17b: ORPHANED to all, whose coordinator is there; and DONE under the highest ballot there is."""

    def in_round(self, begin: msg.Begin) -> None:
        others = [member.key for member in begin.members if member.key != self.run.me.key]
        self.run.say(others, forged.orphaned(begin))


class Surveys(InRounds):
    """18: takes every round over by SURVEY with a higher ballot, and goes no further."""

    def __init__(self, inside: Inside) -> None:
        super().__init__(inside)
        self._more = itertools.count(1)

    def in_round(self, begin: msg.Begin) -> None:
        survey = forged.survey(begin, begin.ballot.number + 1000 * next(self._more), self.run.me.key)
        for member in begin.members:
            if member.key != self.run.me.key:
                self.run.ask_soon(member.key, survey)


class WholeTarget(MemberAttack):
    """19a: reports the whole target as its own samples, at each tip."""

    every = 0.1

    async def at_tip(self) -> None:
        await self.again()

    async def again(self) -> None:
        for key in self.run.others():
            self.run.ask_soon(key, forged.progress(self.run.tip, samples=self.run.target, rate=1e6))

    def asks(self, key: bytes, message: Any) -> Any:
        return forged.progress(message.tip, samples=self.run.target) if isinstance(message, msg.Progress) else message


class HugeStep(WholeTarget):
    """19b: reports a step of 1e15 samples that is under way."""

    async def again(self) -> None:
        for key in self.run.others():
            self.run.ask_soon(key, forged.progress(self.run.tip, rate=1e9, step=1e15, seconds=1e4))

    def asks(self, key: bytes, message: Any) -> Any:
        if isinstance(message, msg.Progress):
            return forged.progress(message.tip, rate=1e9, step=1e15, seconds=1e4)
        return message

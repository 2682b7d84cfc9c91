"""Whatever order messages come in and whoever dies or loses whom: one tip gets one result, and the living get it."""

from __future__ import annotations

import itertools
import random
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.swarm.protocol.coordinator import Coordinator, Phase
from tests.averaging.brains import Brain, Wire
from tests.averaging.rounds import RULES, TIP, join_of, key, member

MANY = st.lists(st.integers(0, 1 << 16), min_size=1, max_size=25)
ANY = st.integers(0, 1 << 16)


class RoundMachine(RuleBasedStateMachine):
    """Some peers have joined one round; then messages arrive, peers die, and others take over, in any order."""

    @initialize(count=st.integers(2, 5), ahead=st.integers(0, 90), order=st.randoms(use_true_random=False))
    def begin(self, count: int, ahead: int, order: random.Random) -> None:
        """BEGIN is on its way; or the round is that many messages further, so that what follows is not always the
        first moments of a round."""
        self.wire = Wire()
        self.numbers = range(1, count + 1)
        for number in self.numbers:
            self.wire.brains[key(number)] = Brain(key(number), self.wire, TIP)
        lead = Coordinator(key(count), TIP, RULES)
        lead.expect([member(n) for n in self.numbers], 0.0)
        for number in self.numbers:
            self.wire.brains[key(number)].act(lead.join(key(number), join_of(member(number)), b"", 0.0))
        begin = lead.begin
        assert begin is not None
        self.wire.brains[key(count)].lead = lead
        for number in self.numbers:
            self.wire.send(key(count), key(number), begin)
        for _ in range(ahead):
            if ways := self.wire.waiting():
                self.wire.deliver(order.choice(ways))

    @property
    def living(self) -> list[Brain]:
        return [brain for brain in self.wire.brains.values() if brain.alive]

    def unnoticed(self) -> list[tuple[Brain, bytes]]:
        return [
            (brain, other)
            for brain in self.living
            for other in self.wire.brains
            if other not in brain.gone and not self.wire.connected(brain.key, other)
            and not self.wire.ways.get((other, brain.key))  # what it has sent comes before the news of its loss
        ]  # fmt: skip

    @rule(choices=MANY)
    def deliver(self, choices: list[int]) -> None:
        for choice in choices:
            if ways := self.wire.waiting():
                self.wire.deliver(ways[choice % len(ways)])

    @precondition(lambda self: self.wire.waiting())
    @rule(choice=ANY, number=st.integers(1, 12))
    def deliver_of_one(self, choice: int, number: int) -> None:
        """What one peer sends arrives, while the others' messages dawdle."""
        ways = self.wire.waiting()
        source = ways[choice % len(ways)][0]
        for _ in range(number):
            if mine := [way for way in self.wire.waiting() if way[0] == source]:
                self.wire.deliver(mine[0])

    @precondition(lambda self: self.unnoticed())
    @rule(choice=ANY)
    def notice(self, choice: int) -> None:
        unnoticed = self.unnoticed()
        brain, other = unnoticed[choice % len(unnoticed)]
        brain.notice(other)

    @precondition(lambda self: any(brain.may_take_over for brain in self.living))
    @rule(choice=ANY)
    def take_over(self, choice: int) -> None:
        able = [brain for brain in self.living if brain.may_take_over]
        able[choice % len(able)].take_over()

    @invariant()
    def one_result(self) -> None:
        results = {result for brain in self.wire.brains.values() for result in brain.results}
        decided = {b.lead.commit.root for b in self.wire.brains.values() if b.lead is not None and b.lead.commit}
        assert len(results | decided) <= 1, "one tip has two results"

    def teardown(self) -> None:
        """Left to itself, it ends: all that live have the result."""
        for step in itertools.count():
            assert step < 3_000, "they go on for ever"
            if ways := self.wire.waiting():
                self.wire.deliver(ways[step * 7919 % len(ways)])
            elif unnoticed := self.unnoticed():
                unnoticed[0][0].notice(unnoticed[0][1])
            elif able := [brain for brain in self.living if brain.may_take_over]:
                able[0].take_over()
            else:
                break
            self.one_result()
        self.check_end()

    def check_end(self) -> None:
        """To be told apart by what may happen."""


class Kills(RoundMachine):
    """Peers die at any moment, also after a decision that nobody else has heard of."""

    @precondition(lambda self: len(self.living) > 1)
    @rule(choice=ANY, unsent=st.integers(0, 6))
    def kill(self, choice: int, unsent: int) -> None:
        living = self.living
        self.wire.kill(living[choice % len(living)].key, unsent)

    def check_end(self) -> None:
        entered = [b for b in self.living if b.participant.begin is not None]
        assert not entered, "a living peer is still in the round"
        if any(brain.results for brain in self.living):
            told: list[Any] = [brain for brain in self.living if not brain.results]
            assert not told, "a living peer has not heard of the result"


class Partings(RoundMachine):
    """Links break for good, and coordinators put out whom they like; but all keep one peer that they reach, so that
    they do not part into sides that cannot hear of each other."""

    hub = key(1)

    def others(self) -> list[Brain]:
        return [brain for brain in self.living if brain.key != self.hub]

    @precondition(lambda self: len(self.others()) > 1)
    @rule(choice=ANY)
    def cut(self, choice: int) -> None:
        pairs = list(itertools.combinations(self.others(), 2))
        one, other = pairs[choice % len(pairs)]
        self.wire.cut_link(one.key, other.key)

    @precondition(lambda self: self.others())
    @rule(choice=ANY, unsent=st.integers(0, 6))
    def kill(self, choice: int, unsent: int) -> None:
        others = self.others()
        self.wire.kill(others[choice % len(others)].key, unsent)

    @precondition(lambda self: any(brain.lead is not None for brain in self.living))
    @rule(choice=ANY, whom=ANY)
    def put_out(self, choice: int, whom: int) -> None:
        leads = [brain for brain in self.living if brain.lead is not None]
        brain = leads[choice % len(leads)]
        assert brain.lead is not None
        keys = [k for k in brain.lead.live() if k != self.hub]
        if keys and brain.lead.phase in (Phase.RUNNING, Phase.SURVEYING):
            brain.act(brain.lead.put_out(keys[whom % len(keys)], "it is slow", 0.0))


TestKills = Kills.TestCase
TestKills.settings = settings(max_examples=150, stateful_step_count=25)
TestPartings = Partings.TestCase
TestPartings.settings = settings(max_examples=150, stateful_step_count=25)

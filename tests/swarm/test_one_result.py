"""Whatever order messages come in and whoever dies or loses whom: one tip gets one result, and the living get it."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from shoal.swarm.protocol.leading import Leading
from tests.swarm.rounds import RULES, key, member
from tests.swarm.wire import Wire

MANY = st.lists(st.integers(0, 1 << 16), min_size=1, max_size=25)
ANY = st.integers(0, 1 << 16)
PATIENT = replace(RULES, round_timeout=86400.0)  # a round ends by what happens, not by its time


class RoundMachine(RuleBasedStateMachine):
    """Some peers join one round; then messages arrive, peers die, and others take over, in any order."""

    @initialize(count=st.integers(2, 5), ahead=st.integers(0, 90), order=st.randoms(use_true_random=False))
    def begin(self, count: int, ahead: int, order: random.Random) -> None:
        """JOINs are on their way; or the round is that many messages further, so that what follows is not always the
        first moments of a round."""
        self.wire = Wire([member(number) for number in range(1, count + 1)], PATIENT)
        for each in self.wire.peers:
            self.wire.offer(each)
        while not any(peer.participant.begin is not None for peer in self.wire.peers.values()):
            self.wire.deliver(order.choice(self.wire.waiting()))
        for _ in range(ahead):
            if ways := self.wire.waiting():
                self.wire.deliver(order.choice(ways))

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

    @precondition(lambda self: self.wire.unnoticed())
    @rule(choice=ANY)
    def notice(self, choice: int) -> None:
        unnoticed = self.wire.unnoticed()
        self.wire.notice(*unnoticed[choice % len(unnoticed)])

    @rule()
    def pass_time(self) -> None:
        self.wire.pass_time(0.6)

    @invariant()
    def one_result(self) -> None:
        results = {result for results in self.wire.results.values() for result in results}
        assert len(results) <= 1, "one tip has two results"

    def teardown(self) -> None:
        """Left to itself, it ends: all that live have the result."""
        quiet = 0
        for step in itertools.count():
            assert step < 5_000, "they go on for ever"
            if ways := self.wire.waiting():
                self.wire.deliver(ways[step * 7919 % len(ways)])
            elif unnoticed := self.wire.unnoticed():
                self.wire.notice(*unnoticed[0])
            elif quiet < 6:
                quiet += 1
                self.wire.pass_time(0.6)
            else:
                break
            self.one_result()
        self.check_end()

    def check_end(self) -> None:
        """To be told apart by what may happen."""


class Kills(RoundMachine):
    """Peers die at any moment, also after a decision that nobody else has heard of."""

    @precondition(lambda self: len(self.wire.living) > 1)
    @rule(choice=ANY, unsent=st.integers(0, 6))
    def kill(self, choice: int, unsent: int) -> None:
        living = self.wire.living
        self.wire.kill(living[choice % len(living)], unsent)

    def check_end(self) -> None:
        living = self.wire.living
        entered = [key for key in living if self.wire.peers[key].participant.begin is not None]
        assert not entered, "a living peer is still in the round"
        if any(self.wire.results[key] for key in living):
            assert all(self.wire.results[key] for key in living), "a living peer has not heard of the result"


class Partings(RoundMachine):
    """Links break for good, and coordinators put out whom they like; but all keep one peer that they reach, so that
    they do not part into sides that cannot hear of each other."""

    hub = key(1)

    def others(self) -> list[bytes]:
        return [other for other in self.wire.living if other != self.hub]

    @precondition(lambda self: len(self.others()) > 1)
    @rule(choice=ANY)
    def cut(self, choice: int) -> None:
        pairs = list(itertools.combinations(self.others(), 2))
        self.wire.cut_link(*pairs[choice % len(pairs)])

    @precondition(lambda self: self.others())
    @rule(choice=ANY, unsent=st.integers(0, 6))
    def kill(self, choice: int, unsent: int) -> None:
        others = self.others()
        self.wire.kill(others[choice % len(others)], unsent)

    @rule(choice=ANY, whom=ANY)
    def put_out(self, choice: int, whom: int) -> None:
        peers = self.wire.peers
        leads = [key for key in self.wire.living if peers[key].gathering or peers[key].leading]
        if not leads:
            return
        chosen = leads[choice % len(leads)]
        peer = self.wire.peers[chosen]
        lead = peer.lead
        keys = [k for k in lead.live() if k != self.hub] if isinstance(lead, Leading) else []
        if keys and isinstance(lead, Leading):
            peer.out.extend(lead.put_out(keys[whom % len(keys)], "it is slow", self.wire.now))
            self.wire.act(chosen)


@pytest.mark.parametrize("seed", [3953, 7991])
def test_a_successor_takes_a_round_over_once(seed: int) -> None:
    """Its own survey had not reached it yet when it was asked to take over: it did so again, and forgot whom it had put
    out since."""
    parting = Partings()
    parting.begin(4, 61, random.Random(seed))
    parting.wire.kill(key(4), 1)
    for other in (1, 2, 3):
        parting.wire.notice(key(other), key(4))
    parting.put_out(0, 0)
    parting.one_result()
    parting.teardown()


TestKills = Kills.TestCase
TestKills.settings = settings(max_examples=150, stateful_step_count=25)
TestPartings = Partings.TestCase
TestPartings.settings = settings(max_examples=150, stateful_step_count=25)

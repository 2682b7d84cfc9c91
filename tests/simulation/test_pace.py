"""How many samples an epoch has, in whole swarms of trainers of unlike speeds and batches, who come and go: `Pace` as
the coordinators of a run drive it, one after the other, over a network with delays."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
from dataclasses import dataclass, field

import pytest

from shoal.p2p.errors import P2PError
from shoal.simulation.clock import run
from shoal.simulation.world import World
from shoal.swarm.protocol.errors import AveragingError
from shoal.swarm.protocol.messages import Commit, Progress
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.tip import Tip
from tests.simulation.swarms import Board, Peer, seeds, spawn_peer

TARGET = 320.0
BATCHES = (TARGET / 100, TARGET / 10)  # from the smallest to the largest
SECONDS = (0.1, 1.0)  # of a step, from the fastest peer to the slowest
VARIES = 0.05  # by which part of it a peer's steps do
ELEMENTS = 64
RULES = Rules(sizes=(ELEMENTS,), matchmaking_time=15.0, round_timeout=60.0, target_samples=TARGET)
SHORTEST_WAIT = 0.02
OVERHEAD = 0.3  # of messages, in seconds per epoch


@dataclass(eq=False)
class Trainer:
    """A peer that does what `Optimizer` does in its synchronous mode, but for computing.

    Attributes:
        batch: samples of a step.
        seconds: that a step takes, more or less.
        brought: with how many samples it went into the round of each tip.
        began: when it began to accumulate for each tip.
    """

    peer: Peer
    batch: float
    seconds: float
    rng: random.Random
    recent: list[float] = field(default_factory=list)
    brought: dict[Tip, float] = field(default_factory=dict)
    began: dict[Tip, float] = field(default_factory=dict)

    async def train(self) -> None:
        """Until cancelled."""
        swarm = self.peer.swarm
        while True:
            tip, samples = swarm.catch_up(), 0.0
            self.began.setdefault(tip, asyncio.get_running_loop().time())
            await self.tell(tip, samples)
            while self.is_under_way(tip):
                took = self.seconds * self.rng.lognormvariate(0.0, VARIES)
                await asyncio.sleep(took)
                self.recent.append(took)
                samples += self.batch
                await self.tell(tip, samples)
            if swarm.tip == tip:
                self.brought[tip] = samples
                await self.peer.spawn_round(weight=samples, bound=True)

    def is_under_way(self, tip: Tip) -> bool:
        return self.peer.swarm.tip == tip and not self.peer.swarm.called

    async def tell(self, tip: Tip, samples: float) -> None:
        """Report; returns when another step is to be begun, or there is a round."""
        with contextlib.suppress(AveragingError, P2PError, TimeoutError):  # the coordinator is gone, or this peer late
            async with asyncio.timeout(RULES.matchmaking_time):
                while self.is_under_way(tip) and (wait := await self.report(tip, samples)):
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(max(SHORTEST_WAIT, min(wait, self.seconds))):
                            await self.peer.swarm.news()

    async def report(self, tip: Tip, samples: float) -> float:
        """For how long the others can be counted on for the rest."""
        step, seconds = (self.batch, statistics.median(self.recent[-5:])) if self.recent else (0.0, 0.0)
        rate = self.batch / self.seconds
        return (await self.peer.swarm.report(Progress(tip, samples, rate, step, seconds, asks=samples > 0))).wait


@dataclass
class Epoch:
    """An epoch that was committed.

    Attributes:
        members: of its round.
        quiet: whether they were the same in the epoch before, so that it is known of all what they are doing.
    """

    commit: Commit
    members: list[Trainer]
    quiet: bool

    @property
    def seconds(self) -> float:
        """From its begin to that of the next one, where somebody has seen both."""
        tip, after = self.commit.tip, self.commit.next_tip
        return min((m.began[after] - m.began[tip] for m in self.members if {tip, after} <= m.began.keys()), default=0.0)


class Training:
    """A run whose trainers come and go."""

    def __init__(self, world: World) -> None:
        self.world, self.board = world, Board()
        self.trainers: list[Trainer] = []
        self.tasks: dict[Trainer, asyncio.Task[None]] = {}  # of those that are there

    async def come(self) -> None:
        peer = await spawn_peer(self.world, self.board, elements=ELEMENTS, rules=RULES)
        rng = random.Random(f"{self.world.seed}/trainer {len(self.trainers)}")
        (fastest, slowest), batch = SECONDS, rng.uniform(*BATCHES)
        trainer = Trainer(peer, batch, fastest * (slowest / fastest) ** rng.random(), rng)
        self.trainers.append(trainer)
        self.tasks[trainer] = peer.node.spawn(trainer.train())

    def go(self) -> None:
        """Somebody leaves, or dies, in the middle of whatever it does."""
        trainer = self.world.rng.choice(list(self.tasks))
        self.tasks.pop(trainer).cancel()
        if self.world.rng.random() < 0.5:
            trainer.peer.swarm.stop()
        else:
            self.world.kill(trainer.peer.node.peer_id)

    def epochs(self) -> list[Epoch]:
        """What all agree on, in order."""
        commits: dict[Tip, Commit] = {}
        for commit in (commit for trainer in self.trainers for commit in trainer.peer.commits):
            known = commits.setdefault(commit.tip, commit)
            assert (commit.samples, commit.members) == (known.samples, known.members), "peers disagree on an epoch"
        by_key = {trainer.peer.key: trainer for trainer in self.trainers}
        ordered = sorted(commits.values(), key=lambda commit: commit.tip.epoch)
        assert [commit.tip.epoch for commit in ordered] == list(range(len(ordered)))
        members = [[by_key[key] for key in commit.members] for commit in ordered]
        befores: list[list[Trainer] | None] = [None, *members[:-1]]
        return [
            Epoch(commit, here, here == before) for commit, here, before in zip(ordered, members, befores, strict=True)
        ]

    async def last(self, epochs: int) -> None:
        """Go on for so many epochs more."""
        swarm = next(iter(self.tasks)).peer.swarm
        until = swarm.tip.epoch + epochs
        while swarm.tip.epoch < until:
            await swarm.news()


@pytest.mark.parametrize("seed", seeds(6))
def test_samples_are_at_most_1_1_of_the_target_and_what_was_under_way(seed: int) -> None:
    """Where the group stays as it is, less than one batch is too many, and a batch is at most a tenth of the target.
    Where somebody comes, whose speed is not known, or goes, and another counts who knows of no step that is under way:
    at most a batch of each."""

    async def scenario() -> None:
        world = World(seed)
        training = Training(world)
        for _ in range(2 + seed % 7):
            await training.come()
        for _ in range(5 if seed % 2 else 0):
            await asyncio.sleep(world.rng.uniform(1.0, 4.0))
            if len(training.tasks) > 2 and world.rng.random() < 0.5:
                training.go()
            else:
                await training.come()
        await training.last(8)
        epochs = training.epochs()
        for epoch in epochs:
            samples, members = epoch.commit.samples, epoch.members
            batches = [member.batch for member in members]
            assert samples == pytest.approx(sum(member.brought[epoch.commit.tip] for member in members))
            assert samples < TARGET + sum(batches)
            if epoch.quiet:
                assert TARGET <= samples < TARGET + max(batches) <= 1.1 * TARGET
                rate = sum(member.batch / member.seconds for member in members)
                slowest = max(member.seconds for member in members)
                assert epoch.seconds < TARGET / rate + 2.0 * slowest + OVERHEAD, "somebody waited in vain"
        assert sum(epoch.quiet for epoch in epochs) >= 3, "this shows little"
        assert statistics.mean(epoch.commit.samples for epoch in epochs[1:]) <= 1.1 * TARGET

    run(scenario())

"""A newcomer downloads the state while rounds go on, and is in the next round, alike in all bits."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

import pytest
import torch

from shoal.averaging.contribution import Contribution, Fault, Outcome, SendTo
from shoal.averaging.errors import Behind
from shoal.averaging.exchange import Exchange
from shoal.averaging.manifest import CHUNK_ELEMENTS
from shoal.averaging.messages import Begin, Progress
from shoal.averaging.rules import Rules
from shoal.averaging.tip import Tip
from shoal.averaging.transfer import Snapshot, StateDonor, download_state
from shoal.simulation.clock import run
from shoal.simulation.world import World
from tests.codecs import codecs_of
from tests.simulation.swarms import Board, Peer, results_by_tip, spawn_peer, spawn_swarm

ELEMENTS = 2_000
BALLAST = 24 * CHUNK_ELEMENTS  # int8: 24 chunks, together 0.3 s over the ways out of four donors at 5 MB/s
BATCH_SECONDS = 0.04  # that a peer computes for a sample; an epoch of 40 takes four of them 0.4 s
RULES = Rules(sizes=(ELEMENTS,), matchmaking_time=15.0, round_timeout=60.0, target_samples=40.0)
NAME = "state/run"


@dataclass
class Trainer:
    """A peer that adds each round's average to its state."""

    peer: Peer
    tip: Tip = field(default_factory=lambda: Tip.genesis("run"))  # of `state`
    state: torch.Tensor = field(default_factory=lambda: torch.zeros(ELEMENTS))
    ballast: torch.Tensor = field(default_factory=lambda: torch.zeros(BALLAST, dtype=torch.int8))
    outcomes: list[Outcome] = field(default_factory=list)
    downloaded: list[Tip] = field(default_factory=list)
    goal: tuple[int, asyncio.Event] | None = None
    ended: list[float] = field(default_factory=list)  # when each epoch did

    async def reached(self, epoch: int) -> None:
        """Wait until it is there."""
        self.goal = (epoch, asyncio.Event())
        await self.goal[1].wait()

    def donate(self) -> None:
        async def take() -> Snapshot:
            buffers = [self.state.clone(), self.ballast.clone()]
            return Snapshot(self.tip, b"layout", buffers, b"", codecs_of(buffers))

        StateDonor(self.peer.node, NAME, take, lambda: self.tip)

    async def catch_up(self, donors: list[Trainer]) -> None:
        peers = [donor.peer.node.peer_id for donor in donors]
        result = await download_state(self.peer.node, NAME, peers, timeout=60, rng=random.Random(1))
        (self.state, self.ballast), self.tip = result.buffers, result.manifest.tip
        if self.tip.outranks(self.peer.tip):
            self.peer.swarm.move(self.tip)
        self.downloaded.append(result.manifest.tip)

    async def epoch(self) -> None:
        peer, swarm = self.peer, self.peer.swarm
        samples = 0.0
        while swarm.tip == self.tip and not swarm.called:
            await swarm.report(Progress(swarm.tip, samples, 1.0 / BATCH_SECONDS))
            await asyncio.sleep(BATCH_SECONDS)
            samples += 1.0

        def open_exchange(begin: Begin, send: SendTo, fault: Fault) -> Exchange:
            return Exchange.of(peer.key, begin, [peer.vector], [peer.output], codecs_of([peer.vector]), send, fault)

        outcome = await swarm.average(Contribution(samples, open_exchange, tip=self.tip), 30.0)
        self.state += peer.output
        self.ballast += 1
        self.tip = outcome.commit.next_tip
        self.outcomes.append(outcome)
        self.ended.append(asyncio.get_running_loop().time())
        if self.goal is not None and self.goal[0] == self.tip.epoch:
            self.goal[1].set()

    async def train(self, until_epoch: int) -> None:
        while self.tip.epoch < until_epoch:
            await self.epoch()

    async def arrive(self, donors: list[Trainer], until_epoch: int) -> None:
        while self.tip.epoch < until_epoch:
            await self.catch_up(donors)
            try:
                await self.train(until_epoch)
            except Behind:
                continue  # the download was of a state that is two rounds old by now


@pytest.mark.parametrize("seed", range(4))
def test_a_newcomer_is_in_the_round_after_its_download(seed: int) -> None:
    async def scenario() -> None:
        world, board = World(seed, bandwidth=5e6), Board()
        veterans = [Trainer(p) for p in await spawn_swarm(world, 4, board, elements=ELEMENTS, rules=RULES)]
        for trainer in veterans:
            trainer.donate()
        epochs = 14
        tasks = [asyncio.create_task(trainer.train(epochs)) for trainer in veterans]
        await veterans[0].reached(3)
        await asyncio.sleep(world.rng.uniform(0.62, 0.7))  # so that a round ends before its download does
        came = asyncio.get_running_loop().time()
        newcomer = Trainer(await spawn_peer(world, board, elements=ELEMENTS, rules=RULES))
        await asyncio.gather(newcomer.arrive(veterans, epochs), *tasks)

        first = newcomer.outcomes[0]
        assert first.begin.tip == newcomer.downloaded[-1], "it waited for another round than the next"
        assert len(newcomer.downloaded) <= 3
        together = [outcome for outcome in newcomer.outcomes if not outcome.missed]
        # At most the round that was under way is fetched; it is in all that begin after.
        assert not any(outcome.missed for outcome in newcomer.outcomes[1:])
        assert all(len(outcome.begin.members) == 5 for outcome in together)
        assert len(together) >= 5
        # Nobody waited for it, and nobody had to download for it.
        for veteran in veterans:
            assert len(veteran.outcomes) == epochs
            assert not any(outcome.missed for outcome in veteran.outcomes)
            ends = [0.0, *veteran.ended]
            gaps = [after - before for before, after in pairwise(ends)]
            assert max(gaps[1:]) < 2 * median(gaps), gaps
            ended = zip(veteran.ended, veteran.outcomes, strict=True)
            meanwhile = [outcome for end, outcome in ended if end > came and len(outcome.begin.members) == 4]
            assert meanwhile, "no round went on while it came: the scenario tests nothing"
        everybody = [*veterans, newcomer]
        assert len({trainer.tip for trainer in everybody}) == 1
        assert all(torch.equal(trainer.state, newcomer.state) for trainer in everybody)
        assert all(torch.equal(trainer.ballast, newcomer.ballast) for trainer in everybody)
        assert all(len(roots) == 1 for roots in results_by_tip(t.peer for t in everybody).values())

    run(scenario(), until=200.0)

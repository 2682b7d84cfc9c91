"""Simulated peers that keep a state: what `shoal.Optimizer` does between rounds, in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from blake3 import blake3

from shoal.averaging.exchange import Exchange
from shoal.p2p.errors import P2PError
from shoal.swarm.loading import DoesNotFit
from shoal.swarm.protocol.contribution import Contribution, Fault, Outcome, SendTo
from shoal.swarm.protocol.errors import AveragingError, Behind, Rejected
from shoal.swarm.protocol.line import Line, leaves
from shoal.swarm.protocol.messages import Begin, Progress
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.sides import Sides
from shoal.swarm.protocol.tip import Tip
from shoal.transfer.donor import EncodedState, FrozenState, Offer, StateDonor, encoded
from shoal.transfer.manifest import CHUNK_ELEMENTS
from shoal.transfer.transfer import download_state
from tests.averaging.given import given
from tests.codecs import codecs_of
from tests.simulation.history import Batch, History
from tests.simulation.swarms import Peer

ELEMENTS = 2_000
BALLAST = 24 * CHUNK_ELEMENTS  # int8: 24 chunks, together 0.3 s over the ways out of four donors at 5 MB/s
BATCH_SECONDS = 0.04  # that a peer computes for a sample; an epoch of 40 takes four of them 0.4 s
RULES = Rules(sizes=(ELEMENTS,), matchmaking_time=15.0, round_timeout=60.0, target_samples=40.0, wait_for_newcomers=0.1)
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
    committed_at: list[float] = field(default_factory=list)  # when each of `outcomes` was here
    ended: list[float] = field(default_factory=list)  # when each epoch did, those made alone too
    download_seconds: float = 0.0  # that each takes longer: its way in is slow
    patience: float = 30.0  # for a round that stands still; then `train_on` goes on alone
    at_state: Callable[[Trainer], None] = lambda trainer: None  # called whenever it has come to a tip
    batch_seconds: float = BATCH_SECONDS
    history: History | None = None
    process: str = ""  # the name of this start of it, in the history
    batches: int = 0  # that it has begun
    line: Line = field(default_factory=Line)
    sides: Sides = field(default_factory=Sides)
    left: set[tuple[Tip, Tip]] = field(default_factory=set)  # states that it has said to leave, each with the next

    @property
    def batch(self) -> Batch:
        """The samples that it holds or makes, as the history names them."""
        return self.process, self.batches

    async def reached(self, epoch: int) -> None:
        """Wait until it is there."""
        self.goal = (epoch, asyncio.Event())
        await self.goal[1].wait()

    def donate(self) -> None:
        async def take() -> EncodedState:
            buffers = [self.state.clone(), self.ballast.clone()]
            return encoded(FrozenState(self.tip, b"layout", buffers, b"", codecs_of(buffers)))

        def offered() -> Offer:
            return Offer(-1.0 if self.is_behind else 0.0, self.line.to_wire())

        StateDonor(self.peer.node, NAME, take, lambda: self.tip, offered=offered, asked=self.peer.swarm.keep_redo_log)

    @property
    def is_behind(self) -> bool:
        """Whether others hold a state that outranks this one."""
        behind = self.peer.swarm.behind
        return behind is not None and behind.outranks(self.tip)

    async def catch_up(self, donors: list[Trainer], awaited: bool = True) -> None:
        peers = [donor.peer.node.peer_id for donor in donors]
        before = self.tip
        await self.replay()
        if self.tip != before and not self.is_behind:
            return
        mine, is_behind = self.tip, self.is_behind

        def wanted(tip: Tip) -> bool:
            return tip.outranks(mine) if is_behind else not mine.outranks(tip)

        swarm = self.peer.swarm
        swarm.begin_loading()
        assert swarm.loading is not None
        reserve = swarm.loading.reserve if awaited else None
        try:
            with swarm.watching(peer.key for peer in peers):
                downloading = download_state(
                    self.peer.node, NAME, peers, timeout=60, rng=random.Random(1), wanted=wanted, reserve=reserve
                )
                result = await swarm.loading.unless_refused(downloading)
            await asyncio.sleep(self.download_seconds)
            (self.state, self.ballast), self.tip = result.buffers, result.manifest.tip
            if leaves(mine, self.tip, result.line):
                self.left.add((mine, self.tip))
            self.line.take_over(result.line, self.tip)
            if self.tip != self.peer.tip:
                swarm.move(self.tip)
        finally:
            swarm.end_loading()
        await asyncio.gather(*map(self.peer.swarm.contacts.meet_peer, result.chunks_from))
        self.downloaded.append(result.manifest.tip)
        self.at_state(self)

    async def replay(self) -> None:
        """As `Epoch._replay`."""
        swarm = self.peer.swarm
        with contextlib.suppress(Behind):
            while self.is_behind and self.tip.epoch > 0 and swarm.tip == self.tip and await swarm.learn_of_round():
                await self.average(0.0, self.patience)

    async def count(self) -> float:
        """Until the round is called; returns this peer's samples."""
        swarm, samples = self.peer.swarm, 0.0
        self.batches += 1
        self._look_at_forks()
        while swarm.tip == self.tip and not swarm.called:
            with contextlib.suppress(P2PError, TimeoutError):  # the coordinator is out of reach: there will be another
                await swarm.report(Progress(swarm.tip, samples, 1.0 / self.batch_seconds))
            await asyncio.sleep(self.batch_seconds)
            samples += 1.0
            self._look_at_forks()
        return samples

    def _look_at_forks(self) -> None:
        """As `Forks.look`."""
        tips = self.peer.swarm.peer.tips
        while tips:
            self.sides.hear(*tips.popleft())
        for _, tip in self.sides.find(self.line, self.tip):
            if self.history is not None:
                self.history.told(self, tip)

    async def average(self, samples: float, patience: float) -> None:
        peer = self.peer

        def open_exchange(begin: Begin, send: SendTo, fault: Fault) -> Exchange:
            if self.history is not None and not peer.swarm.missed:  # else it only fetches the result of that round
                self.history.contributes(self, begin, samples)
            return Exchange(given(peer.vector, peer.output, codecs_of([peer.vector])), peer.key, begin, send, fault)

        outcome = await peer.swarm.average(Contribution(samples, open_exchange, tip=self.tip), patience)
        self.outcomes.append(outcome)
        self.committed_at.append(asyncio.get_running_loop().time())
        if self.history is not None:
            self.history.committed(outcome)
        self._step(peer.output, outcome.commit.next_tip)

    def _step(self, update: torch.Tensor, tip: Tip) -> None:
        self.state += update
        self.ballast += 1
        self.tip = tip
        self.line.went_to(tip)
        self.at_state(self)
        self.ended.append(asyncio.get_running_loop().time())
        if self.goal is not None and self.goal[0] == self.tip.epoch:
            self.goal[1].set()

    async def epoch(self) -> None:
        await self.average(await self.count(), self.patience)

    async def train(self, until_epoch: int) -> None:
        while self.tip.epoch < until_epoch:
            await self.epoch()

    async def train_on(self, others: list[Trainer], until_epoch: int) -> None:
        """The same, through rounds that fail and states that are missed: as `Epoch` and `Pilot` do it."""
        swarm = self.peer.swarm
        while self.tip.epoch < until_epoch:
            try:
                if swarm.rests(self.tip):
                    await asyncio.sleep(1.0)
                    continue
                if self.is_behind:
                    raise Behind("others are past this state")
                samples = await self.count()
                while not await self._end(samples):
                    pass
            except Behind:
                began = asyncio.get_running_loop().time()
                try:
                    await self.catch_up([other for other in others if other is not self and other.peer.alive])
                except AveragingError as error:
                    if isinstance(error, DoesNotFit):
                        swarm.wait_for_room(min(error.again, 600.0))
                    else:
                        swarm.forget_behind(asyncio.get_running_loop().time() - began)

    async def _end(self, samples: float) -> bool:
        """End the epoch, with others or alone; whether that was done. Raises Behind and Rejected."""
        loop, swarm, before = asyncio.get_running_loop(), self.peer.swarm, self.tip
        until = loop.time() + self.patience
        while True:
            try:
                await self.average(samples, until - loop.time())
            except (Behind, Rejected):
                raise
            except AveragingError:
                until = max(until, swarm.got_on_at + self.patience)
                if loop.time() + 1e-6 < until:  # less than that would not move the virtual clock
                    continue
                if not samples or swarm.tip != before or swarm.peer.participant.at.missed is not None:
                    return False
                name = f"{self.peer.name} alone at {loop.time()}".encode()
                swarm.move(before.after(blake3(name).digest(), samples), made=True)
                if self.history is not None:
                    self.history.made_alone(self, before, swarm.tip, samples)
                self._step(self.peer.vector, swarm.tip)
            return True

    async def arrive(self, donors: list[Trainer], until_epoch: int, *, awaited: bool = False) -> None:
        """Download and train; with `awaited`, the others are asked to wait."""
        while self.tip.epoch < until_epoch:
            await self.catch_up(donors, awaited)
            if self.is_behind:
                continue  # the others have gone on meanwhile
            try:
                await self.train(until_epoch)
            except Behind:
                continue  # the download was of a state that is two rounds old by now

"""Training runs with faults that are drawn from a seed, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from blake3 import blake3

from shoal.p2p.identity import PeerID
from shoal.simulation.world import World
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.protocol.view import Role
from tests.simulation.swarms import Board, spawn_peer
from tests.simulation.trainers import ELEMENTS, RULES, Trainer

BALLAST = 1000
PAUSE = 3.0  # between the end of a process and the beginning of the next in its place
REMEMBERED = 8  # states of each trainer, from which it may be started anew
FOREVER = 1_000_000_000

FAULTS = ("kill", "restart", "restart from a checkpoint", "hold", "cut", "cut one way", "partition", "slow line")


@dataclass
class Faulty:
    """A run of a few trainers, and what was done to it.

    Attributes:
        trainers: that live.
        ended: that were killed.
        states: a digest of the state at each tip that any of them has had.
        schedule: what was done when, for whoever looks into a failure.
    """

    world: World
    rng: random.Random
    trainers: list[Trainer] = field(default_factory=list)
    ended: list[Trainer] = field(default_factory=list)
    states: dict[Tip, bytes] = field(default_factory=dict)
    schedule: list[str] = field(default_factory=list)
    board: Board = field(default_factory=Board)
    tasks: dict[PeerID, asyncio.Task[None]] = field(default_factory=dict)
    _past: dict[PeerID, list[tuple[Tip, torch.Tensor]]] = field(default_factory=dict)
    _slow: dict[PeerID, float] = field(default_factory=dict)  # so many times slower than others

    @classmethod
    async def begin(cls, seed: int) -> Faulty:
        """Three to six trainers on one state; the first is a node, the others are nodes or clients."""
        world = World(seed, bandwidth=20e6)
        run = cls(world, random.Random(f"{seed}/faults"))
        delay = world.network.delay
        world.network.delay = lambda one, other, size: delay(one, other, int(size * run._slow.get(one, 1.0)))
        for number in range(run.rng.randint(3, 6)):
            client = number > 0 and run.rng.random() < 0.3
            await run.spawn(Role.CLIENT if client else Role.NODE)
        return run

    async def spawn(
        self, role: Role, state: tuple[Tip, torch.Tensor] | None = None, again: PeerID | None = None
    ) -> Trainer:
        """Begin to train in a new process, with this state."""
        options: dict[str, Any] = {"elements": ELEMENTS, "rules": RULES, "keeps_state": True}
        peer = await spawn_peer(self.world, self.board, role=role, again=again, **options)
        trainer = Trainer(peer, ballast=torch.zeros(BALLAST, dtype=torch.int8), at_state=self._look_at)
        if state is not None:
            trainer.tip, trainer.state = state[0], state[1].clone()
            peer.swarm.move(trainer.tip)
        trainer.donate()
        self.trainers.append(trainer)
        self.tasks[peer.node.peer_id] = peer.node.spawn(trainer.train_on(self.trainers, FOREVER))
        return trainer

    def _look_at(self, trainer: Trainer) -> None:
        """There are never two states under one name."""
        digest = blake3(trainer.state.numpy().tobytes()).digest()
        known = self.states.setdefault(trainer.tip, digest)
        assert known == digest, f"{trainer.peer.name} has another state of epoch {trainer.tip.epoch}"
        past = self._past.setdefault(trainer.peer.node.peer_id, [])
        past.append((trainer.tip, trainer.state.clone()))
        del past[:-REMEMBERED]

    # -- faults

    async def suffer(self, count: int, seconds: float) -> None:
        """So many faults, within so many seconds; when this returns all of them are over but for the deaths."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        over = begun
        for at in sorted(self.rng.uniform(0.0, seconds) for _ in range(count)):
            await asyncio.sleep(max(0.0, begun + at - loop.time()))
            over = max(over, await self._fault(self.rng.choice(FAULTS)))
        await asyncio.sleep(max(0.0, over - loop.time()))
        self.world.heal()
        self._log("all is well")

    async def _fault(self, kind: str) -> float:
        """Do it, and return when it is over."""
        rng, loop = self.rng, asyncio.get_running_loop()
        seconds = rng.uniform(1.0, 30.0)
        one, other = (trainer.peer for trainer in rng.sample(self.trainers, 2))
        a, b = one.node.peer_id, other.node.peer_id
        match kind:
            case "kill":
                nodes = [trainer for trainer in self.trainers if trainer.peer.swarm.me.role is Role.NODE]
                victim = next(trainer for trainer in self.trainers if trainer.peer is one)
                if len(self.trainers) > 2 and nodes != [victim]:
                    self._kill(victim)
            case "restart" | "restart from a checkpoint":
                victim = next(trainer for trainer in self.trainers if trainer.peer is one)
                past = self._past.get(a)
                state = rng.choice(past) if kind != "restart" and past else None
                again = a if rng.random() < 0.5 else None
                self._kill(victim)
                await asyncio.sleep(PAUSE)
                self._log(f"{one.name} is back, {'the same' if again else 'another'}, at {state and state[0].epoch}")
                await self.spawn(one.swarm.me.role, state, again)
            case "hold":
                self._log(f"hold {one.name} for {seconds:.1f} s")
                self.world.hold(a, seconds)
                return loop.time() + seconds
            case "cut" | "cut one way":
                self._log(f"{kind} {one.name} {other.name} for {seconds:.1f} s")
                self.world.cut(a, b, one_way=kind == "cut one way")
                self._heal_later(seconds)
                return loop.time() + seconds
            case "partition":
                peers = [trainer.peer.node.peer_id for trainer in self.trainers]
                rng.shuffle(peers)
                middle = rng.randrange(1, len(peers))
                groups = [peers[:middle], peers[middle:]]
                names = [[self.world.name(peer) for peer in group] for group in groups]
                self._log(f"partition {names} for {seconds:.1f} s")
                self.world.partition(groups)
                self._heal_later(seconds)
                return loop.time() + seconds
            case "slow line":
                factor = rng.choice([10.0, 100.0, 1000.0])
                self._log(f"{one.name} {factor:g} times slower for {seconds:.1f} s")
                self._slow[a] = factor
                loop.call_later(seconds, self._slow.pop, a, None)
                return loop.time() + seconds
        return loop.time()

    def _heal_later(self, seconds: float) -> None:
        def heal() -> None:
            self._log("heal")
            self.world.heal()

        asyncio.get_running_loop().call_later(seconds, heal)

    def _kill(self, trainer: Trainer) -> None:
        self._log(f"kill {trainer.peer.name}")
        self.trainers.remove(trainer)
        self.ended.append(trainer)
        self.world.kill(trainer.peer.node.peer_id)

    def _log(self, text: str) -> None:
        now = asyncio.get_running_loop().time()
        roles = " ".join(
            f"{trainer.peer.name}{'c' if trainer.peer.swarm.me.role is Role.CLIENT else ''}@{trainer.tip.epoch}"
            for trainer in self.trainers
        )
        self.schedule.append(f"{now:7.2f} {text}  [{roles}]")

    # -- what must hold

    def check(self) -> None:
        """No trainer has ended by itself, and none has followed two results of one tip. (The two sides of a partition
        may, even of one round: then their states have two names.)"""
        for trainer in self.trainers:
            task = self.tasks[trainer.peer.node.peer_id]
            assert not task.done(), f"{trainer.peer.name} trains no more: {task!r}"
        for trainer in (*self.trainers, *self.ended):
            tips = [commit.tip for commit in trainer.peer.commits]
            assert len(set(tips)) == len(tips), f"{trainer.peer.name} has followed two results of one tip"

    def are_together(self, since: float) -> bool:
        """Whether all who live have made an epoch together that has ended since then."""
        keys = {trainer.peer.key for trainer in self.trainers}
        rounds = [
            {
                outcome.commit.round
                for outcome, ended in zip(trainer.outcomes[-5:], trainer.ended[-5:], strict=True)
                if ended > since and {member.key for member in outcome.begin.members} == keys
            }
            for trainer in self.trainers
        ]
        return bool(set.intersection(*rounds))

    async def until_together(self, seconds: float) -> float:
        """Wait until they are; returns how long that took."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        while not self.are_together(since):
            await asyncio.sleep(0.1)
            self.check()
            assert loop.time() - since < seconds, f"not together {seconds:g} s after the last fault: {self.standing()}"
        return loop.time() - since

    def standing(self) -> Sequence[str]:
        """Where each trainer is."""
        return [
            f"{trainer.peer.name} at {trainer.tip.epoch} ({trainer.tip.samples:g} samples, "
            f"{trainer.tip.lineage.hex()[:6]}), swarm at {trainer.peer.tip.epoch} {trainer.peer.tip.lineage.hex()[:6]}"
            for trainer in self.trainers
        ]

"""Training runs with faults that are drawn from a seed, in virtual time."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from shoal.p2p.identity import PeerID
from shoal.simulation.world import World
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.protocol.view import Reach, Role
from shoal.swarm.swarm import DEFAULT_CHUNK_TIMEOUT
from tests.simulation.history import History
from tests.simulation.swarms import Board, spawn_peer
from tests.simulation.trainers import BATCH_SECONDS, RULES, Trainer

PAUSE = 3.0  # between the end of a process and the beginning of the next in its place
REMEMBERED = 8  # states of each trainer, from which one of them may be started anew
FOREVER = 1_000_000_000

FAULTS = ("kill", "restart", "restart from a checkpoint", "hold", "cut", "cut one way", "partition", "slow line")


@dataclass(frozen=True, slots=True)
class Setting:
    """The conditions of a run.

    Attributes:
        least, most: how many trainers there are.
        rules: see `Rules`.
        faults: which may happen.
        batch_seconds: that a trainer computes for a sample.
        ballast: elements of a state that only have to be downloaded.
        chunk_timeout: `next_chunk_timeout`.
        latency: seconds of a link.
        out, into: bytes per second of the ways out and in.
        spread: rates differ by up to this factor between trainers, latencies between links.
        payload_scale: see `MemoryNetwork`.
        at_once: all trainers begin at the same time.
        remembered: states of each trainer, from which one of them may be started anew.
        relayed: how likely a node is reached through a relay only, when it begins.
    """

    least: int = 3
    most: int = 6
    rules: Rules = RULES
    faults: tuple[str, ...] = FAULTS
    batch_seconds: float = BATCH_SECONDS
    ballast: int = 1000
    chunk_timeout: float | None = None
    latency: float = 0.01
    out: float = 20e6
    into: float = math.inf
    spread: float = 1.0
    payload_scale: int = 1
    at_once: bool = False
    remembered: int = REMEMBERED
    relayed: float = 0.0

    @property
    def deadline(self) -> float:
        """The longest, in seconds, that a member may have to wait for something that does not come: for the CALL to
        lead to BEGIN, for a round to get on, and for a chunk."""
        chunk = DEFAULT_CHUNK_TIMEOUT if self.chunk_timeout is None else self.chunk_timeout
        return self.rules.matchmaking_time + self.rules.round_timeout + chunk


@dataclass
class Faulty:
    """A run of a few trainers, and what was done to it.

    Attributes:
        trainers: that live.
        ended: that were killed.
        liars: that live and are not to be believed.
        lied: all that have ever been.
        donors: the trainers and the liars.
        history: all states.
        faults: how many were done.
        schedule: what was done when, for whoever looks into a failure.
    """

    world: World
    rng: random.Random
    setting: Setting = field(default_factory=Setting)
    trainers: list[Trainer] = field(default_factory=list)
    ended: list[Trainer] = field(default_factory=list)
    liars: list[Trainer] = field(default_factory=list)
    lied: set[PeerID] = field(default_factory=set)
    donors: list[Trainer] = field(default_factory=list)
    history: History = field(default_factory=lambda: History(Tip.genesis("run")))
    schedule: list[str] = field(default_factory=list)
    board: Board = field(default_factory=Board)
    tasks: dict[PeerID, asyncio.Task[None]] = field(default_factory=dict)
    _past: dict[PeerID, list[Tip]] = field(default_factory=dict)
    _rates: dict[PeerID, tuple[float, float]] = field(default_factory=dict)  # of each trainer when all is well
    _latencies: dict[tuple[PeerID, PeerID], float] = field(default_factory=dict)  # where links have their own
    faults: int = 0  # that were done
    _begun: int = 0

    @classmethod
    async def begin(cls, seed: int, setting: Setting | None = None) -> Faulty:
        """Some trainers on one state; the first is a node, the others are nodes or clients."""
        setting = setting or Setting()
        world = World(seed, latency=setting.latency, bandwidth=setting.out, bandwidth_in=setting.into)
        world.network.payload_scale = setting.payload_scale
        run = cls(world, random.Random(f"{seed}/faults"), setting)
        count = run.rng.randint(setting.least, setting.most)
        clients = [number > 0 and run.rng.random() < 0.3 for number in range(count)]
        begin = [run.spawn(Role.CLIENT if client else Role.NODE) for client in clients]
        if setting.at_once:
            await asyncio.gather(*begin)
        else:
            for one in begin:
                await one
        return run

    async def spawn(
        self, role: Role, state: Tip | None = None, again: PeerID | None = None, *, lies: bool = False
    ) -> Trainer:
        """Begin to train in a new process, with this state. One that `lies` is not one of those for whom all must hold;
        its states are as good as theirs."""
        setting = self.setting
        options: dict[str, Any] = {"elements": setting.rules.sizes[0], "rules": setting.rules, "keeps_state": True}
        if setting.relayed and role is Role.NODE:
            options["relayed"] = self.rng.random() < setting.relayed
        peer = await spawn_peer(
            self.world, self.board, role=role, again=again, chunk_timeout=setting.chunk_timeout, start=False, **options
        )
        self._begun += 1
        trainer = Trainer(
            peer,
            state=torch.zeros(setting.rules.sizes[0]),
            ballast=torch.zeros(setting.ballast, dtype=torch.int8),
            at_state=self._look_at,
            batch_seconds=setting.batch_seconds,
            history=self.history,
            process=f"{peer.name}/{self._begun}",
        )
        self._line_up(peer.node.peer_id)
        await peer.swarm.start()
        if state is not None:
            trainer.tip, trainer.state = state, self.history.states[state].clone()
            trainer.line.take_over([tip.lineage for tip in self.history.line(state)][::-1], state)
            peer.swarm.move(trainer.tip)
        if lies:
            self.history.unbelieved.add(trainer.process)
        self._look_at(trainer)
        trainer.donate()
        (self.liars if lies else self.trainers).append(trainer)
        self.donors.append(trainer)
        self.tasks[peer.node.peer_id] = peer.node.spawn(trainer.train_on(self.donors, FOREVER))
        return trainer

    def _line_up(self, peer: PeerID) -> None:
        """Give the trainer's lines rates of their own, and its links latencies."""
        setting, rng = self.setting, self.rng
        if setting.spread == 1.0:
            self._rates[peer] = (setting.out, setting.into)
            return
        if peer not in self._rates:
            low = math.log(setting.spread)
            self._rates[peer] = (
                setting.out / math.exp(rng.uniform(0.0, low)),
                setting.into / math.exp(rng.uniform(0.0, low)),
            )
            for other in self._rates:
                latency = setting.latency / math.exp(rng.uniform(0.0, low))
                self.world.set_link(peer, other, latency=latency)
                self._latencies[peer, other] = self._latencies[other, peer] = latency
        self.world.set_rates(peer, out=self._rates[peer][0], into=self._rates[peer][1])

    def _look_at(self, trainer: Trainer) -> None:
        self.history.is_at(trainer, asyncio.get_running_loop().time())
        past = self._past.setdefault(trainer.peer.node.peer_id, [])
        past.append(trainer.tip)
        del past[: -self.setting.remembered]

    # -- faults

    async def suffer(self, count: int, seconds: float) -> None:
        """So many faults, within so many seconds; when this returns all of them are over but for the deaths."""
        loop = asyncio.get_running_loop()
        begun = loop.time()
        over = begun
        for at in sorted(self.rng.uniform(0.0, seconds) for _ in range(count)):
            await asyncio.sleep(max(0.0, begun + at - loop.time()))
            over = max(over, await self._fault(self.rng.choice(self.setting.faults)))
        await asyncio.sleep(max(0.0, over - loop.time()))
        self.world.heal()
        self.log("all is well")

    async def _fault(self, kind: str) -> float:
        """Do it, and return when it is over."""
        rng, loop = self.rng, asyncio.get_running_loop()
        seconds = rng.uniform(1.0, 30.0)
        self.faults += 1
        if kind == "all restart":
            await self._restart(list(self.trainers), kind, older=True)
            return loop.time()
        if len(self.trainers) < 2:
            kind = "newcomer"
        one, other = rng.sample(self.trainers, 2) if len(self.trainers) > 1 else (self.trainers * 2)
        a, b = one.peer.node.peer_id, other.peer.node.peer_id
        match kind:
            case "kill":
                self._kill_some([one])
            case "kill half":
                self._kill_some(rng.sample(self.trainers, len(self.trainers) // 2))
            case "newcomer":
                newcomer = await self.spawn(Role.CLIENT if rng.random() < 0.3 else Role.NODE)
                self.log(f"{newcomer.peer.name} is new")
            case "restart" | "restart from a checkpoint":
                await self._restart([one], kind, older=kind != "restart")
            case "other reach":
                swarm = one.peer.swarm
                self.log(f"{kind} of {one.peer.name}, which was {swarm.me.reach.value}")
                swarm.is_reached(Reach.DIRECT if swarm.me.is_relayed else Reach.RELAYED)
            case "hold":
                self.log(f"hold {one.peer.name} for {seconds:.1f} s")
                self.world.hold(a, seconds)
                return loop.time() + seconds
            case "cut" | "cut one way":
                self.log(f"{kind} {one.peer.name} {other.peer.name} for {seconds:.1f} s")
                self.world.cut(a, b, one_way=kind == "cut one way")
                self._heal_later(seconds)
                return loop.time() + seconds
            case "partition":
                peers = [trainer.peer.node.peer_id for trainer in self.trainers]
                rng.shuffle(peers)
                middle = rng.randrange(1, len(peers))
                groups = [peers[:middle], peers[middle:]]
                names = [[self.world.name(peer) for peer in group] for group in groups]
                self.log(f"partition {names} for {seconds:.1f} s")
                self.world.partition(groups)
                self._heal_later(seconds)
                return loop.time() + seconds
            case "slow line" | "slow way in":
                factor = self._factor()
                self.log(f"{kind} of {one.peer.name}, {factor:g} times slower for {seconds:.1f} s")
                out, into = self._rates[a]
                if kind == "slow line":
                    self.world.set_rates(a, out=out / factor, into=into)
                else:
                    self.world.set_rates(a, out=out, into=min(into, self.setting.out) / factor)
                loop.call_later(seconds, partial(self.world.set_rates, a, out=out, into=into))
                return loop.time() + seconds
            case "slow link" | "slow one way":
                factor, latency = self._factor(), rng.choice([0.1, 0.5, 2.0])
                self.log(f"{kind} {one.peer.name} {other.peer.name}, {factor:g} times, for {seconds:.1f} s")
                self.world.set_link(
                    a, b, latency=latency, bandwidth=self.setting.out / factor, one_way=kind == "slow one way"
                )
                loop.call_later(seconds, self._as_before, a, b)
                return loop.time() + seconds
        return loop.time()

    def _factor(self) -> float:
        """How many times slower a line becomes. What is under way then keeps its pace, so large vectors are not sent
        over a line that would take an hour for them."""
        return self.rng.choice(
            [factor for factor in (10.0, 100.0, 1000.0) if factor * self.setting.payload_scale <= 2000]
        )

    def _as_before(self, one: PeerID, other: PeerID) -> None:
        latency = self._latencies.get((one, other))
        if latency is None:
            self.world.unset_link(one, other)
        else:
            self.world.set_link(one, other, latency=latency)

    def _kill_some(self, victims: list[Trainer]) -> None:
        """Kill these, as long as two live then, one of them a node."""
        for victim in victims:
            nodes = [trainer for trainer in self.trainers if trainer.peer.swarm.me.role is Role.NODE]
            if len(self.trainers) > 2 and nodes != [victim]:
                self._kill(victim)

    async def _restart(self, victims: list[Trainer], kind: str, *, older: bool) -> None:
        """Kill these, and start others in their place: the same or others, each with an earlier state if `older`."""
        rng, back = self.rng, []
        for victim in victims:
            peer = victim.peer.node.peer_id
            past = self._past.get(peer)
            state = rng.choice(past) if older and past else None
            back.append((victim, state, peer if rng.random() < 0.5 else None))
            self._kill(victim)
        await asyncio.sleep(PAUSE)
        for victim, state, again in back:
            epoch = state and state.epoch
            self.log(f"{kind}: {victim.peer.name} is back, {'the same' if again else 'another'}, at {epoch}")
            await self.spawn(victim.peer.swarm.me.role, state, again)

    def _heal_later(self, seconds: float) -> None:
        def heal() -> None:
            self.log("heal")
            self.world.heal()

        asyncio.get_running_loop().call_later(seconds, heal)

    def _kill(self, trainer: Trainer) -> None:
        self.log(f"kill {trainer.peer.name}")
        self.trainers.remove(trainer)
        self.donors.remove(trainer)
        self.ended.append(trainer)
        self.world.kill(trainer.peer.node.peer_id)

    def log(self, text: str) -> None:
        """Add to the schedule what was done."""
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
        assert not self.history.violations, "\n".join(self.history.violations)

    def check_history(self) -> None:
        """No sample counts twice, and each state has the samples that were brought to it."""
        found = self.history.check()
        assert not found, "\n".join(found)

    def are_together(self, since: float) -> bool:
        """Whether all who live have made an epoch together that has ended since then."""
        keys, liars = {trainer.peer.key for trainer in self.trainers}, {liar.peer.key for liar in self.liars}
        rounds = [
            {
                outcome.commit.round
                for outcome, at in zip(trainer.outcomes[-5:], trainer.committed_at[-5:], strict=True)
                if at > since and {member.key for member in outcome.begin.members} - liars == keys
            }
            for trainer in self.trainers
        ]
        return bool(set.intersection(*rounds))

    async def until_together(self, seconds: float) -> float:
        """Wait until they are; returns how long that took."""
        loop = asyncio.get_running_loop()
        since = loop.time()
        while not self.are_together(since):
            await asyncio.sleep(0.5)
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

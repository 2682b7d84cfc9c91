"""What a member that stops to answer costs the others, at whatever moment, and what it costs the member itself."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import math
import random
from dataclasses import dataclass, field

import pytest

from shoal.p2p.errors import P2PError
from shoal.p2p.identity import PeerID
from shoal.simulation.clock import run
from shoal.simulation.world import World
from shoal.swarm.protocol.errors import AveragingError, Behind
from shoal.swarm.protocol.messages import Progress
from tests.simulation.swarms import Board, seeds, spawn_swarm
from tests.simulation.test_replay import OPTIONS, assert_alike
from tests.simulation.trainers import RULES, Trainer

BATCH_SECONDS, PART = 0.1, 8.0  # an epoch of five takes 0.8 s
REFRESH_SECONDS = 0.5
EPOCHS = 30
PAUSE = 2.5 + 1.0  # a member that is silent in a round is out of it in 2.5 s; then comes an epoch without its samples
COORDINATOR_PAUSE = 5.0 + 1.0
MOST_SILENT = 15.0 / 3  # beyond this, three times as long is more than any member is given


@dataclass
class Computing(Trainer):
    """It computes on while a report is on its way, as the progress tracker does, and repeats reports like that one. It
    rests when it has its part."""

    part: float = math.inf
    reported: tuple[float, bytes] = (-1.0, b"")  # how many samples, and to whom
    reported_at: float = -math.inf

    async def count(self) -> float:
        swarm, samples, self.reported = self.peer.swarm, 0.0, (-1.0, b"")
        reporting: asyncio.Task[None] | None = None
        while swarm.tip == self.tip and not swarm.called:
            if self.is_behind:
                raise Behind("others are past this state")
            is_new = self.reported != (samples, self._coordinator()) or now() - self.reported_at > REFRESH_SECONDS
            if (reporting is None or reporting.done()) and is_new:
                reporting = self.peer.node.spawn(self._report(samples))
            await asyncio.sleep(self.batch_seconds)
            samples = min(self.part, samples + 1.0)
        return samples

    async def _report(self, samples: float) -> None:
        with contextlib.suppress(P2PError, TimeoutError, AveragingError):
            await self.peer.swarm.report(Progress(self.peer.swarm.tip, samples, 1.0 / self.batch_seconds))
            self.reported, self.reported_at = (samples, self._coordinator()), now()

    def _coordinator(self) -> bytes:
        return self.peer.swarm.peer.participant.coordinator().key


@dataclass
class Silences:
    """Which members were put out because they were silent: when, by whom, who."""

    seen: list[tuple[float, Trainer, PeerID]] = field(default_factory=list)

    def watch(self, trainer: Trainer) -> None:
        node = trainer.peer.node
        disconnect = node.disconnect

        def noted(peer: PeerID, reason: str) -> None:
            if "no sign of life" in reason:
                self.seen.append((asyncio.get_running_loop().time(), trainer, peer))
            disconnect(peer, reason)

        node.disconnect = noted  # type: ignore[method-assign]

    def of(self, trainer: Trainer, since: float = 0.0) -> int:
        """How many others have put it out."""
        who = trainer.peer.node.peer_id
        return len({id(by) for at, by, peer in self.seen if peer == who and at >= since})

    def by(self, trainer: Trainer) -> int:
        return sum(by is trainer for _, by, _ in self.seen)


async def spawn_trainers(
    world: World, silences: Silences, count: int = 5, *, have_parts: bool = False
) -> list[Trainer]:
    rules = dataclasses.replace(OPTIONS["rules"], target_samples=PART, target_is_each=True) if have_parts else None
    options = OPTIONS | ({"rules": rules} if rules else {})
    part = PART if have_parts else math.inf
    trainers: list[Trainer] = [
        Computing(peer, part=part) for peer in await spawn_swarm(world, count, Board(), **options)
    ]
    for trainer in trainers:
        trainer.donate()
        trainer.batch_seconds = BATCH_SECONDS
        silences.watch(trainer)
    return trainers


def begin(trainers: list[Trainer], epochs: int) -> list[asyncio.Task[None]]:
    return [asyncio.create_task(trainer.train_on(trainers, epochs)) for trainer in trainers]


def longest_pause(trainers: list[Trainer]) -> float:
    """The longest time in which none of them ended an epoch."""
    ends = sorted(end for trainer in trainers for end in trainer.ended)
    return max(after - before for before, after in itertools.pairwise(ends))


def now() -> float:
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("seconds", [1.0, 3.0, 10.0, 30.0, 60.0])
@pytest.mark.parametrize("have_parts", [False, True])
@pytest.mark.parametrize("seed", seeds(4))
def test_a_member_that_is_stopped_holds_up_nobody_for_long(seed: int, seconds: float, have_parts: bool) -> None:
    async def scenario() -> None:
        world, silences = World(seed), Silences()
        stopped, *others = trainers = await spawn_trainers(world, silences, have_parts=have_parts)
        tasks = begin(trainers, EPOCHS)
        await others[0].reached(8)
        await asyncio.sleep(world.rng.uniform(0.0, 4.0))
        leads = others[0].peer.swarm.peer.participant.coordinator().key == stopped.peer.key
        world.hold(stopped.peer.node.peer_id, seconds)
        await asyncio.gather(*tasks)
        assert longest_pause(others) < (COORDINATOR_PAUSE if leads else PAUSE)
        assert silences.by(stopped) == 0, "all others were silent at once: it was this one that slept"
        assert_alike(trainers)

    run(scenario(), until=300.0)


@pytest.mark.parametrize("seconds", [2.0, 5.0, 20.0])
@pytest.mark.parametrize("seed", seeds(2))
def test_a_trainer_that_keeps_its_interpreter_busy_is_left_out_once(seed: int, seconds: float) -> None:
    async def scenario() -> None:
        world, silences = World(seed), Silences()
        busy, *others = trainers = await spawn_trainers(world, silences)
        tasks = begin(trainers, 100)
        for number in range(3):  # it compiles, and saves
            await others[0].reached(others[0].tip.epoch + 8)
            await asyncio.sleep(world.rng.uniform(0.0, 1.0))
            began = now()
            world.hold(busy.peer.node.peer_id, seconds)
            await asyncio.sleep(seconds)
            busy.peer.swarm.contacts.was_held(seconds)
            await asyncio.sleep(1.0)
            if number and seconds <= MOST_SILENT:
                assert silences.of(busy, began) == 0
        await asyncio.gather(*tasks)
        assert silences.by(busy) == 0
        assert_alike(trainers)

    run(scenario(), until=900.0)


@pytest.mark.parametrize("seed", seeds(2))
def test_nobody_is_left_out_on_a_core_that_ten_share(seed: int) -> None:
    async def scenario() -> None:
        world, silences = World(seed), Silences()
        trainers = await spawn_trainers(world, silences)

        async def share(trainer: Trainer) -> None:
            draw = random.Random(f"{seed} {trainer.peer.name}")
            while True:
                seconds = draw.uniform(0.02, 0.3)
                world.hold(trainer.peer.node.peer_id, seconds)
                await asyncio.sleep(seconds)
                trainer.peer.swarm.contacts.was_held(seconds)
                await asyncio.sleep(draw.uniform(0.005, 0.05))

        sharing = [asyncio.create_task(share(trainer)) for trainer in trainers]
        await asyncio.gather(*begin(trainers, 40))
        for task in sharing:
            task.cancel()
        assert not silences.seen
        assert_alike(trainers)

    run(scenario(), until=900.0)


@pytest.mark.parametrize("seed", seeds(2))
def test_nobody_is_left_out_on_lines_that_lose_packets(seed: int) -> None:
    """A packet that is sent again comes 0.2 to 0.8 s late, and all behind it."""

    async def scenario() -> None:
        world, silences = World(seed), Silences()
        trainers = await spawn_trainers(world, silences)
        nodes = [trainer.peer.node.peer_id for trainer in trainers]

        async def lose() -> None:
            while True:
                for one, other in itertools.combinations(nodes, 2):
                    late = world.rng.choice((0.2, 0.4, 0.8)) if world.rng.random() < 0.05 else 0.0
                    world.set_link(one, other, latency=0.05 + late)
                await asyncio.sleep(0.1)

        losing = asyncio.create_task(lose())
        await asyncio.gather(*begin(trainers, 40))
        losing.cancel()
        assert not silences.seen
        assert_alike(trainers)

    run(scenario(), until=900.0)


@pytest.mark.parametrize("have_parts", [False, True])
@pytest.mark.parametrize("seed", seeds(2))
def test_lines_that_are_cut_one_after_another_hold_up_nobody_for_long(seed: int, have_parts: bool) -> None:
    """Who comes back may have trained alone meanwhile."""

    async def scenario() -> None:
        world, silences = World(seed), Silences()
        first, *cut, last = trainers = await spawn_trainers(world, silences, have_parts=have_parts)
        tasks = begin(trainers, 2 * EPOCHS)
        await first.reached(4)
        for parted in cut:
            for other in trainers:
                if other is not parted:
                    world.cut(parted.peer.node.peer_id, other.peer.node.peer_id)
            await asyncio.sleep(world.rng.choice((10.0, 24.0)))
            world.heal()
            await asyncio.sleep(world.rng.uniform(0.0, 3.0))
        await asyncio.gather(*tasks)
        assert longest_pause([first, last]) < COORDINATOR_PAUSE
        assert_alike(trainers)

    run(scenario(), until=900.0)


def test_a_silent_coordinator_that_others_name_does_not_hold_up_a_report() -> None:
    async def scenario() -> None:
        world, silences = World(1), Silences()
        trainers = await spawn_trainers(world, silences, 3)
        await asyncio.gather(*(trainer.train_on(trainers, 2) for trainer in trainers))
        coordinator = trainers[0].peer.swarm.peer.participant.coordinator().key
        others = [trainer for trainer in trainers if trainer.peer.key != coordinator]
        world.hold(PeerID(coordinator), 30.0)
        others[0].peer.node.disconnect(PeerID(coordinator), "it is silent")
        began, swarm = now(), others[0].peer.swarm
        assert swarm.peer.participant.coordinator().key == others[1].peer.key, "which still takes the silent one for it"
        await swarm.report(Progress(swarm.tip, 1.0, 1.0))
        assert now() - began < 1.5

    run(scenario(), until=60.0)


@pytest.mark.parametrize("seed", seeds(2))
def test_a_member_that_answers_to_some_only_holds_up_nobody_for_long(seed: int) -> None:
    async def scenario() -> None:
        world, silences = World(seed), Silences()
        parted, *others = trainers = await spawn_trainers(world, silences)
        tasks = begin(trainers, EPOCHS)
        await others[0].reached(8)
        await asyncio.sleep(world.rng.uniform(0.0, 2.0))
        for other in others[:2]:
            world.cut(parted.peer.node.peer_id, other.peer.node.peer_id, one_way=True)
        await asyncio.sleep(10.0)
        world.heal()
        await asyncio.gather(*tasks)
        assert longest_pause(others) < COORDINATOR_PAUSE
        assert_alike(trainers)

    run(scenario(), until=900.0)


@pytest.mark.parametrize("seed", seeds(2))
def test_a_trainer_that_is_dead_while_its_reactor_answers_holds_up_one_round(seed: int) -> None:
    async def scenario() -> None:
        world, silences = World(seed), Silences()
        trainers = await spawn_trainers(world, silences)
        others, tasks = trainers[1:], begin(trainers, EPOCHS)
        await others[0].reached(8)
        tasks[0].cancel()
        await asyncio.gather(*tasks[1:])
        assert not silences.seen, "it answers"
        assert longest_pause(others) < COORDINATOR_PAUSE + RULES.matchmaking_time + 1.0, "it may coordinate"
        assert others[0].ended[-1] - others[0].ended[8] < 2 * RULES.matchmaking_time + EPOCHS * 2.0
        assert_alike(others)

    run(scenario(), until=900.0)

"""Peers that train in this process without a network: each rank has the real `Epoch` and `Pilot`, and a `Board` in
memory stands in for the swarm. Ranks are threads. Where a seed is given, each is slow at random places."""

from __future__ import annotations

import asyncio
import inspect
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn

import shoal
from shoal.averaging.exchange import Vector
from shoal.cluster.shards import Unsharded
from shoal.cluster.team import Alone, Team
from shoal.compression import NoCompression
from shoal.optim.accumulator import EpochGradients
from shoal.optim.choice import background_of, make_rounds, make_state, make_torch
from shoal.optim.division import Undivided
from shoal.optim.epoch import Epoch
from shoal.optim.gradients import Gradients
from shoal.optim.kept import Keeper
from shoal.optim.lending import Lending
from shoal.optim.machine import Machine
from shoal.optim.pieces import Own
from shoal.optim.pilot import Pilot
from shoal.optim.ranks import Ranks
from shoal.optim.rounds import Rounds, Strand, StrandRounds
from shoal.optim.settings import Settings
from shoal.optim.state import State
from shoal.optim.work import Batch
from shoal.swarm.protocol.contribution import Contribution, Outcome
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.tip import Tip
from tests.cluster.threads import at_ranks
from tests.optim import piloted
from tests.optim.piloted import KEYS, outcome_of

HANGS_AFTER = 60.0  # seconds; everything here takes milliseconds
MOST_SECONDS = 0.001  # of a delay


class Pace:
    """How slow one rank is at each place.

    Args:
        seed: None: not at all.
    """

    def __init__(self, seed: object) -> None:
        self._chance = None if seed is None else random.Random(str(seed))

    def delay(self) -> None:
        if self._chance is not None and self._chance.random() < 0.5:
            time.sleep(self._chance.random() * MOST_SECONDS)


class Board:
    """Averages the vectors of so many peers, round after round, each when all of them have come."""

    def __init__(self, peers: int) -> None:
        self._peers = peers
        self._changed = threading.Condition()
        self._rounds: dict[object, dict[int, tuple[float, Any, list[Tensor], Sequence[Vector], Future[Any]]]] = {}

    def join(self, name: object, peer: int, weight: float, told: Any, vectors: Sequence[Vector]) -> Future[Any]:
        """Join the round of that name. Returns a future of what all members have told, and their weights."""
        given = [flat.clone() for vector in vectors for flat in vector.inputs.flat]
        done: Future[Any] = Future()
        with self._changed:
            members = self._rounds.setdefault(name, {})
            members[peer] = weight, told, given, vectors, done
            if len(members) == self._peers:
                self._average(members)
        return done

    def _average(self, members: dict[int, Any]) -> None:
        of_all = [members[peer] for peer in sorted(members)]
        weights = [weight for weight, *_ in of_all]
        total = sum(weights) or 1.0
        means = [
            torch.stack([weight * each for weight, each in zip(weights, flats, strict=True)]).sum(0).div(total)
            for flats in zip(*(given for _, _, given, *_ in of_all), strict=True)
        ]
        digest = blake3(b"".join(mean.numpy().tobytes() for mean in means)).hexdigest()
        for _, _, _, vectors, done in of_all:
            outputs = [flat for vector in vectors for flat in vector.outputs.flat]
            for output, mean in zip(outputs, means, strict=True):
                output.copy_(mean)
            if not done.done():
                done.set_result((digest, weights, [told for _, told, *_ in of_all]))


class StrandAverager:
    """Averages one strand on a board."""

    def __init__(self, board: Board, peer: int, strand: int, vector: Vector, pace: Pace) -> None:
        self._board, self._peer, self._strand, self._vector, self._pace = board, peer, strand, vector, pace
        self.engine = self
        node = SimpleNamespace(bytes_sent=0, bytes_received=0)
        self.dht = SimpleNamespace(node=node, peer_id=SimpleNamespace(key=KEYS[peer]))
        self.got_on_at, self.runs, self.rounds = 0.0, False, 0
        self.last_round: Any = None
        self.under_way: list[Future[Any]] = []
        self.hears_nothing = False  # of the end of its round

    def is_alive(self) -> bool:
        return self.runs

    def enter(self) -> None:
        self.runs = True

    def wait_until_ready(self) -> None:
        self._pace.delay()

    def leave(self) -> None:
        self.runs = False
        for each in self.under_way:
            each.cancel()

    def begin(self, weight: float) -> Future[Any]:
        self._pace.delay()
        self.rounds += 1
        control: Future[Any] = Future()
        self.under_way = [control]
        if self.hears_nothing:
            return control
        joined = self._board.join((self._strand, self.rounds), self._peer, weight, None, [self._vector])

        def end(done: Future[Any]) -> None:
            self.last_round = SimpleNamespace(digest=done.result()[0])
            control.set_result({})

        joined.add_done_callback(end)
        return control


class Run(piloted.Run):
    """A peer's part in a run that is a board."""

    def __init__(self, world: World, peer: int, run_id: str, rules: Any, pace: Pace) -> None:
        super().__init__(piloted.Swarm(), rules, KEYS[peer])
        self.run_id, self._world, self._peer, self._pace = run_id, world, peer, pace
        self.swarm.tip = Tip.genesis(run_id)
        self.vectors: Callable[[int], Sequence[Vector]] = lambda epoch: []
        self.ended: list[Future[None]] = []
        self.dht = SimpleNamespace(submit=world.submit, reactor=SimpleNamespace(loop=world.loop))
        swarm: Any = self.swarm
        swarm.news = lambda: asyncio.sleep(MOST_SECONDS / 2)

    def average(self, contribution: Contribution, timeout: float) -> Outcome:
        self._pace.delay()
        self.contributions.append(contribution)
        if self.outcomes:
            found = self.outcomes.pop(0)
            if isinstance(found, Exception):
                raise found
        tip = self.swarm.tip
        assert contribution.tip == tip, "the swarm is elsewhere"
        told = contribution.machine, contribution.state, contribution.average
        board = self._world.board(self.run_id)
        _, weights, said = board.join(tip, self._peer, contribution.weight, told, self.vectors(tip.epoch)).result(
            HANGS_AFTER
        )
        machines, states, averages = zip(*said, strict=True)
        outcome = outcome_of(tip, weights, machines=machines, states=states, averages=averages, me=self.me, options=b"")
        self._pace.delay()
        self.swarm.called = False
        self.swarm.tip = outcome.commit.next_tip
        return outcome

    def past(self, tip: Tip) -> Future[None]:
        self.ended.append(Future())
        return self.ended[-1]


class Tracker(piloted.Tracker):
    """Calls the round of an epoch when this peer has its share, or, of runs that are lent, when all peers have."""

    def __init__(self, world: World, peer: int, run: Run, share: float, last: int, pace: Pace) -> None:
        super().__init__()
        self._world, self._peer, self._run, self._share, self._last, self._pace = world, peer, run, share, last, pace

    def report(self, progress: float, *, behind: float = 0.0, rests: bool = False) -> None:
        self._pace.delay()
        tip = self._run.swarm.tip
        has_share = progress >= self._share and tip.epoch < self._last
        self.ready_to_update_epoch = has_share and self._world.calls(self._run.run_id, tip, self._peer)

    def start_epoch(self, tip: Tip) -> None:
        super().start_epoch(tip)
        self.ready_to_update_epoch = False


class CalledTogether(Tracker):
    @property
    def ready_to_update_epoch(self) -> bool:  # type: ignore[override]
        return self._run.swarm.called

    @ready_to_update_epoch.setter
    def ready_to_update_epoch(self, now: bool) -> None:
        pass


class World:
    """All peers of a few runs.

    Args:
        peers: their number.
        seed: of the delays; None: there are none.
        together: whether a round is called when all peers have their share.
    """

    def __init__(self, peers: int, seed: int | None, *, together: bool = False) -> None:
        self.peers, self.seed, self.together = peers, seed, together
        self._boards: dict[object, Board] = {}
        self._lock = threading.Lock()
        self._shares: dict[tuple[str, Tip], set[int]] = {}
        self.runs: list[Run] = []
        self.loop = asyncio.new_event_loop()
        self._reactor: threading.Thread | None = None

    def board(self, name: object) -> Board:
        with self._lock:
            return self._boards.setdefault(name, Board(self.peers))

    def calls(self, run_id: str, tip: Tip, peer: int) -> bool:
        """That peer has its share of the epoch."""
        if not self.together:
            return True
        with self._lock:
            have = self._shares.setdefault((run_id, tip), set())
            have.add(peer)
            if len(have) == self.peers:
                for run in self.runs:
                    if run.run_id == run_id and run.swarm.tip == tip:
                        run.swarm.called = True
        return False

    def pace(self, *of: int) -> Pace:
        return Pace(None if self.seed is None else (self.seed, *of))

    # -- the reactor, of runs that are lent

    def start(self) -> None:
        self._reactor = threading.Thread(target=self.loop.run_forever)
        self._reactor.start()

    def submit(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self) -> None:
        if self._reactor is not None:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self._reactor.join(HANGS_AFTER)
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()


class Parted(Undivided):
    """The state has one part for each rank."""

    always_sends_frozen = True

    def __init__(self, model: Sequence[Tensor], rank: int, size: int) -> None:
        super().__init__(model)
        self.mine, self.carriers = (rank,), tuple(range(size))  # type: ignore[assignment]


class SlowSGD(torch.optim.SGD):
    """Takes its time."""

    pace = Pace(None)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.pace.delay()
        super().step(closure)


def settings_of(**given: Any) -> Settings:
    defaults = {name: each.default for name, each in inspect.signature(shoal.Optimizer).parameters.items()}
    return Settings.of({**defaults, "run_id": "in memory", "target_batch_size": 64, "client_mode": False, **given})


class Rank:
    """A rank of a peer, as `shoal.Optimizer` makes it.

    Args:
        world: all peers.
        peer: the number of this one.
        team: its ranks.
        share: the samples (or inner steps) of this peer after which it ends an epoch.
        last: the number of epochs after which no round is called any more.
        given: arguments of `shoal.Optimizer`.
    """

    def __init__(
        self, world: World, peer: int, team: Team | None = None, *, share: float = 8.0, last: int = 1000, **given: Any
    ) -> None:
        self.world, self.peer, self.team = world, peer, team or Alone()
        rank, self.size = self.team.rank, self.team.size
        self.pace = world.pace(peer, rank)
        is_cluster = self.size > 1
        self.settings = settings = settings_of(**given)
        self.model = [nn.Parameter(torch.full((3,), 1.0 + rank)), nn.Parameter(torch.full((2, 2), 0.5))]
        dht: Any = SimpleNamespace(peer_id=SimpleNamespace(key=KEYS[peer]))

        def make(params: Any) -> torch.optim.Optimizer:
            made = SlowSGD(params, lr=0.125, momentum=0.5, foreach=False)
            made.pace = self.pace
            return made

        shards = Unsharded(self.model)
        self.ranks = Ranks(self.team, shards, [])
        self.made = made = make_torch(settings, make, None, shards, is_cluster=False)
        self.averagers: list[StrandAverager] = []
        self.rounds: Rounds
        if is_cluster:
            keeper = Keeper(None, dht.peer_id.key)
            division = Parted(self.model, rank, self.size)
            self.state = State(made.stepped, made.users, [], settings, division, Own, keeper)
            self.rounds = self._of_strands(rank)
        else:
            self.state = make_state(made, [], settings, shards, dht)
            self.rounds = make_rounds(made.users.optimizer, settings, self.state, made, shards, dht)
        self.background = background_of(settings, is_cluster=is_cluster)
        self.events: list[Any] = []
        pilot = self.team.at_first(lambda: self._make_pilot(share, last))
        self.epoch = Epoch(settings, self.team, self.state, self.rounds, pilot, self._no_transfers(), self.background)
        self.trainer = threading.RLock()
        self.lending: Lending | None = None

    def _no_transfers(self) -> Any:
        return None

    def _of_strands(self, rank: int) -> StrandRounds:
        total = EpochGradients(self.state.trained, NoCompression())
        pieces, targets, wrapped = self.state.pieces, [self.state.stepped], self.state.wrapped
        work = Gradients(wrapped, pieces, [total], targets, wrapped, is_exact=True)
        averager = StrandAverager(self.world.board(f"strand {rank}"), self.peer, rank, total, self.pace)
        self.averagers = [averager]
        strand: Any = Strand(total, averager)  # type: ignore[arg-type]
        return StrandRounds(work, [[strand]], list(range(self.size)))

    def _make_pilot(self, share: float, last: int) -> Pilot:
        rules = Rules((4,), self.settings.matchmaking_time, HANGS_AFTER, min_group=self.settings.min_group)
        self.run = Run(self.world, self.peer, self.settings.run_id, rules, self.pace)
        self.run.vectors = self.rounds.vectors
        self.world.runs.append(self.run)
        kind = CalledTogether if self.world.together else Tracker
        self.tracker = kind(self.world, self.peer, self.run, share, last, self.pace)
        given: Any = (self.settings, self.run, self.tracker, Machine(KEYS[self.peer], "cpu"), "SGD", self.events.append)
        return Pilot(*given)

    def lend(self) -> None:
        """It is one of several optimizers of the calling thread."""
        run: Any = self.run
        self.lending = Lending(self.epoch, run, self.trainer, because="", counts_steps=False)
        self.lending.belongs_here()

    # -- in the trainer's thread

    def begin(self) -> None:
        with torch.no_grad(), self.team.call("begin"):
            self.epoch.begin()

    def step(self, gradients: Callable[[Tensor], Tensor], samples: float) -> None:
        """A step with these gradients, given each parameter."""
        with self.trainer, torch.no_grad():
            self.pace.delay()
            for parameter in self.model:
                parameter.grad = gradients(parameter)
            with self.team.call("step"):
                step = self.ranks.bring(int(samples), None, self.state.tip)
                self.epoch.take_result(wait=False)
                self.epoch.advance(Batch.of_ranks(step.samples / self.size, None))

    def end(self) -> None:
        with self.trainer, torch.no_grad(), self.team.call("end"):
            self.epoch.end()

    def close(self) -> None:
        if self.lending is not None:
            self.lending.close()
        self.epoch.close(HANGS_AFTER)

    @property
    def values(self) -> list[list[float]]:
        return [parameter.detach().flatten().tolist() for parameter in self.model]

    @property
    def outcome(self) -> tuple[Any, ...]:
        """What must be equal with and without delays."""
        return self.epoch.applied, self.state.tip, self.epoch.digest, self.values


def in_threads(*does: Callable[[], Any]) -> list[Any]:
    """Do these things at once. Returns what each has returned, or raises the first error."""
    ended = at_ranks(does, lambda do: do())  # type: ignore[arg-type]
    for each in ended:
        if isinstance(each, BaseException):
            raise each
    return ended

"""Whole swarms in one process, on a virtual clock: what the tests of the protocols are made of."""

from __future__ import annotations

import asyncio
import os
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec
import torch

from shoal.averaging.exchange import Exchange
from shoal.averaging.residual import Residual
from shoal.compression import CodecPlan
from shoal.dht.node import DHTNode
from shoal.p2p.identity import PeerID
from shoal.p2p.node import Node
from shoal.simulation.world import World
from shoal.swarm.directory import RECORD_SECONDS, DHTDirectory, Directory
from shoal.swarm.protocol.contribution import Contribution, Fault, Outcome, SendTo
from shoal.swarm.protocol.errors import AveragingError
from shoal.swarm.protocol.messages import PROTOCOL, Begin, Commit, Terms
from shoal.swarm.protocol.rules import Rules
from shoal.swarm.protocol.tip import Tip
from shoal.swarm.protocol.view import Member, Reach, Role
from shoal.swarm.swarm import Place, Swarm
from tests.averaging.given import given
from tests.codecs import codecs_of

SCHEMA = bytes(32)
TERMS = Terms({"protocol": PROTOCOL}, SCHEMA)


def circuit_to(node: Node) -> str:
    """An address of a relay that leads to that peer; in the simulation, at once."""
    return f"{node.addresses[0].with_peer(None)}/p2p/{PeerID(bytes(32))}/p2p-circuit/p2p/{node.peer_id}"


def seeds(count: int) -> range:
    """The seeds of a sweep: `count` of them, or as many times more as SHOAL_SOAK says, for a soak run."""
    return range(count * int(os.environ.get("SHOAL_SOAK", "1")))


class Board:
    """Where the peers of a run are listed, in the place of a DHT: free, and never wrong."""

    def __init__(self) -> None:
        self.listed: dict[bytes, tuple[float, Member]] = {}

    def place(self) -> Directory:
        """One peer's access to it."""
        return _Place(self)


class _Place(Directory):
    def __init__(self, board: Board) -> None:
        self._board = board
        self._gone: dict[bytes, float] = {}

    async def publish(self, member: Member) -> None:
        self._board.listed[member.key] = (asyncio.get_running_loop().time() + RECORD_SECONDS, member)

    async def read(self) -> list[Member]:
        now = asyncio.get_running_loop().time()
        return [m for until, m in self._board.listed.values() if until > max(now, self._gone.get(m.key, 0.0))]

    def gone(self, key: bytes) -> None:
        self._gone[key] = asyncio.get_running_loop().time() + RECORD_SECONDS


@dataclass(eq=False)
class Peer:
    """A simulated peer with a vector of its own."""

    world: World
    node: Node
    swarm: Swarm
    vector: torch.Tensor
    output: torch.Tensor
    dht: DHTNode | None = None
    codecs: CodecPlan | None = None
    residual: Residual | None = None
    exchange: Exchange | None = None  # of the last round
    commits: list[Commit] = field(default_factory=list)

    @property
    def key(self) -> bytes:
        return self.node.peer_id.key

    @property
    def name(self) -> str:
        return self.world.name(self.node.peer_id)

    @property
    def alive(self) -> bool:
        return not self.node.closed

    @property
    def tip(self) -> Tip:
        return self.swarm.tip

    async def round(
        self, timeout: float = 60.0, weight: float | None = None, bound: bool = False, patience: float = 15.0
    ) -> Outcome:
        """Take part in one round; `bound` to its state, as a training peer is. The weight is 1 unless given (0 of an
        auxiliary)."""

        def open_exchange(begin: Begin, send: SendTo, fault: Fault) -> Exchange:
            codecs = self.codecs or codecs_of([self.vector])
            vectors = given(self.vector, self.output, codecs, [self.residual])
            self.exchange = Exchange(vectors, self.key, begin, send, fault)
            return self.exchange

        if weight is None:
            weight = 1.0 if self.swarm.me.contributes else 0.0
        tip = self.swarm.tip if bound else None
        return await self.swarm.average(Contribution(weight, open_exchange, patience=patience, tip=tip), timeout)

    def spawn_round(
        self, timeout: float = 60.0, weight: float | None = None, bound: bool = False, patience: float = 15.0
    ) -> asyncio.Task[Outcome | AveragingError]:
        """A round as a task of the peer, which ends when the peer is killed."""
        return self.node.spawn(self._logged_round(timeout, weight, bound, patience))

    async def _logged_round(
        self, timeout: float, weight: float | None, bound: bool, patience: float
    ) -> Outcome | AveragingError:
        try:
            outcome = await self.round(timeout, weight, bound, patience)
        except AveragingError as error:
            self.world.log(f"{self.name} failed: {error}")
            return error
        self.world.log(f"{self.name} committed {outcome.commit.root.hex()[:12]} with {len(outcome.begin.members)}")
        return outcome


async def spawn_peer(
    world: World,
    board: Board | Peer | None = None,
    *,
    elements: int = 40_000,
    run_id: str = "run",
    role: Role = Role.NODE,
    rules: Rules | None = None,
    bandwidth: float | None = 1.0,
    relayed: bool = False,
    terms: Terms = TERMS,
    chunk_timeout: float | None = None,
    keeps_state: bool = False,
    redo_bytes: int = 0,
    start: bool = True,
    again: PeerID | None = None,
) -> Peer:
    """A new peer of the run. It is listed on `board`; or in a DHT, which it joins through that peer (None: it begins a
    DHT). It has the identity of `again`, if given, which was killed. It may be `relayed`: all reach it through a
    relay that is not simulated."""
    node = await world.spawn_node(again)
    dht: DHTNode | None = None
    if isinstance(board, Board):
        directory = board.place()
    else:
        rng = random.Random(world.rng.random())
        dht = DHTNode(node, clock=world.wall_clock, rng=rng, client_mode=role is Role.CLIENT)
        directory = DHTDirectory(dht, run_id, world.wall_clock)
        if board is not None:
            await dht.bootstrap(board.node.addresses)
    rules = rules or Rules(sizes=(elements,), matchmaking_time=15.0, round_timeout=60.0)
    generator = torch.Generator().manual_seed(world.rng.randrange(1 << 30))
    vector = torch.randn(elements, generator=generator)
    commits: list[Commit] = []
    place = Place(
        role=role, bandwidth=bandwidth, chunk_timeout=chunk_timeout, keeps_state=keeps_state, redo_bytes=redo_bytes
    )
    swarm = Swarm(node, node.addresses, directory, run_id, terms, rules, place)
    if relayed:
        swarm.peer.view.say(msgspec.structs.replace(swarm.me, addresses=(circuit_to(node),), reach=Reach.RELAYED))
        node.transport.is_direct = lambda peer: False  # type: ignore[method-assign]
    participant = swarm.peer.participant
    advance = participant.advance

    def recorded(commit: Commit) -> None:
        commits.append(commit)
        advance(commit)

    participant.advance = recorded  # type: ignore[method-assign]
    if start:
        await swarm.start()
    return Peer(world, node, swarm, vector, torch.zeros(elements), dht, commits=commits)


async def spawn_swarm(world: World, count: int, board: Board | None = None, **options: object) -> list[Peer]:
    """`count` peers of one run that have met."""
    board = board or Board()
    return list(await asyncio.gather(*(spawn_peer(world, board, **options) for _ in range(count))))  # type: ignore[arg-type]


def mean(peers: Iterable[Peer]) -> torch.Tensor:
    """The mean of the peers' vectors, in float64."""
    return torch.stack([peer.vector for peer in peers]).double().mean(0)


def results_by_tip(peers: Iterable[Peer]) -> dict[Tip, set[bytes]]:
    """What was committed at each tip, over all peers."""
    results: dict[Tip, set[bytes]] = defaultdict(set)
    for peer in peers:
        for commit in peer.commits:
            results[commit.tip].add(commit.root)
    return results

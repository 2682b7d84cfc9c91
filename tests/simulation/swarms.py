"""Whole swarms in one process, on a virtual clock: what the tests of the protocols are made of."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

import torch

from shoal.averaging.book import root_of
from shoal.averaging.contribution import Contribution, Outcome
from shoal.averaging.coordinator import Rules
from shoal.averaging.directory import DHTDirectory
from shoal.averaging.errors import AveragingError
from shoal.averaging.exchange import Exchange
from shoal.averaging.member import Member, Role
from shoal.averaging.messages import Begin, Commit, Terms
from shoal.averaging.swarm import Swarm
from shoal.compression import NoCompression
from shoal.dht.node import DHTNode
from shoal.p2p.node import Node
from shoal.simulation.world import World

SCHEMA = bytes(32)


@dataclass
class Peer:
    """A simulated peer with a vector of its own."""

    world: World
    node: Node
    dht: DHTNode
    swarm: Swarm
    vector: torch.Tensor
    output: torch.Tensor
    commits: list[Commit] = field(default_factory=list)

    @property
    def key(self) -> bytes:
        return self.node.peer_id.key

    async def round(self, timeout: float = 60.0, weight: float = 1.0, bound: bool = False) -> Outcome:
        """Take part in one round; `bound` to its state, as a training peer is."""

        def open_exchange(begin: Begin, send: object, fault: object) -> Exchange:
            return Exchange.of(self.key, begin, [self.vector], [self.output], NoCompression(), send, fault)  # type: ignore[arg-type]

        contribution = Contribution(weight=weight, open=open_exchange, tip=self.swarm.tip if bound else None)
        return await self.swarm.average(contribution, timeout)

    def spawn_round(self, timeout: float = 60.0, weight: float = 1.0, bound: bool = False) -> asyncio.Task[Outcome]:
        """A round as a task of the peer, which ends when the peer is killed."""
        return self.node.spawn(self._logged_round(timeout, weight, bound))

    async def _logged_round(self, timeout: float, weight: float, bound: bool) -> Outcome | AveragingError:
        try:
            outcome = await self.round(timeout, weight, bound)
        except AveragingError as error:
            self.world.log(f"{self.world.name(self.node.peer_id)} failed: {error}")
            return error
        name = self.world.name(self.node.peer_id)
        self.world.log(f"{name} committed {outcome.commit.root.hex()[:12]} with {len(outcome.begin.members)} members")
        return outcome


async def spawn_peer(
    world: World,
    *,
    elements: int = 40_000,
    run_id: str = "run",
    role: Role = Role.NODE,
    first: Peer | None = None,
    rules: Rules | None = None,
    bandwidth: float = 1.0,
    start: bool = True,
) -> Peer:
    """A new peer that joins the DHT through `first`, and the run."""
    node = await world.spawn_node()
    dht = DHTNode(node, clock=world.wall_clock, rng=random.Random(world.rng.random()), client_mode=role is Role.CLIENT)
    if first is not None:
        await dht.bootstrap(first.node.addresses)
    addresses = () if role is Role.CLIENT else tuple(map(str, node.addresses))
    me = Member(node.peer_id.key, addresses, role, bandwidth)
    rules = rules or Rules(sizes=(elements,), matchmaking_time=15.0, round_timeout=60.0)
    peer = Peer(world, node, dht, None, torch.zeros(0), torch.zeros(elements))  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(world.rng.randrange(1 << 30))
    peer.vector = torch.randn(elements, generator=generator)
    directory = DHTDirectory(dht, run_id, world.wall_clock)
    peer.swarm = Swarm(node, directory, run_id, me, Terms({}, SCHEMA), rules, on_commit=peer.commits.append)
    if start:
        await peer.swarm.start()
    return peer


async def spawn_swarm(world: World, count: int, **options: object) -> list[Peer]:
    """`count` peers of one run that have met."""
    first = await spawn_peer(world, **options)  # type: ignore[arg-type]
    others = await asyncio.gather(*(spawn_peer(world, first=first, **options) for _ in range(count - 1)))  # type: ignore[arg-type]
    return [first, *others]


def mean(peers: list[Peer]) -> torch.Tensor:
    """The mean of the peers' vectors, in float64."""
    return torch.stack([peer.vector for peer in peers]).double().mean(0)


__all__ = ["Peer", "mean", "root_of", "spawn_peer", "spawn_swarm"]

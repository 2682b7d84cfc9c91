"""A network of peers in one process. Everything random in it is drawn from one seed."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import combinations, product
from typing import Any

from blake3 import blake3

from shoal.p2p.identity import Identity, PeerID
from shoal.p2p.memory_transport import MemoryNetwork, MemoryTransport
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.node import Node
from shoal.p2p.transport import LostHandler, MessageHandler
from shoal.simulation.clock import Task, VirtualLoop, owner
from shoal.simulation.lines import Lines, OneWayLink, way

EPOCH = 1_700_000_000.0  # the time of the wall clock at virtual time 0, in seconds since 1970


class World:
    """A network and its peers. It is created in a running `VirtualLoop`, and uses the time of that loop.

    The time of a message is the sum of: waiting until its sender's earlier messages are sent; its size divided by
    `bandwidth`; `latency`; a random part of `jitter`; and with `bandwidth_in`, the time to pass the receiver's download
    after earlier messages. Messages from one peer to another never overtake each other.

    Args:
        seed: the seed of everything random.
        latency: the latency between two peers, in seconds; 10 ms by default.
        jitter: the maximum of the additional random latency, in seconds; 5 ms by default.
        bandwidth: the rate of each peer's upload, in bytes per second; 100 MB/s by default.
        bandwidth_in: the rate of each peer's download, in bytes per second; unlimited by default.
        lost_after: a connection over a cut link counts as lost after this many seconds; 10 by default.

    Attributes:
        seed: as given.
        lines: the rates, which may be changed at any time.
        rng: random numbers for the scenario's own choices. They do not influence the delays.
        network: the `MemoryNetwork`.
        nodes: the nodes of the living peers, in the order in which they were created.
        trace: what has happened, as (virtual time, text).

    Raises:
        RuntimeError: if the running loop is no `VirtualLoop`.
    """

    def __init__(
        self,
        seed: int,
        *,
        latency: float = 0.01,
        jitter: float = 0.005,
        bandwidth: float = 100e6,
        bandwidth_in: float = math.inf,
        lost_after: float = 10.0,
    ) -> None:
        loop = asyncio.get_running_loop()
        if not isinstance(loop, VirtualLoop):
            raise RuntimeError("a World needs virtual time: make it in a coroutine that simulation.clock.run runs")
        self._loop = loop
        self.seed = seed
        self.rng = random.Random(f"{seed}/scenario")
        self.lines = Lines(random.Random(f"{seed}/delays"), latency, jitter, bandwidth, bandwidth_in)
        self.network = MemoryNetwork(self._delay, lost_after, self._enter)
        self.nodes: dict[PeerID, Node] = {}
        self.trace: list[tuple[float, str]] = []
        self._names: dict[PeerID, int] = {}
        self._cut: dict[tuple[PeerID, PeerID], None] = {}

    # -- time and record

    def wall_clock(self) -> float:
        """The virtual time of day, in seconds since 1970, for code that takes a clock."""
        return EPOCH + self._loop.time()

    def log(self, text: str) -> None:
        """Add an event of the scenario to the trace."""
        self.trace.append((self._loop.time(), text))

    def heard(self, source: PeerID, target: PeerID, header: bytes, buffers: Sequence[memoryview]) -> None:
        """Add a message to the trace: a hash of its header, and the sizes of its buffers."""
        sizes = ",".join(str(len(buffer)) for buffer in buffers)
        names = f"{self.name(source)} to {self.name(target)}"
        self.trace.append((self._loop.time(), f"{names}: {blake3(header).hexdigest(8)} {len(header)},{sizes} bytes"))

    def digest(self) -> str:
        """A hash of the trace: the same for the same seed, whichever process ran it."""
        hasher = blake3()
        for time, text in self.trace:
            hasher.update(f"{time.hex()} {text}\n".encode())
        return hasher.hexdigest()

    def name(self, peer: PeerID) -> str:
        """The name of a peer in the trace: the number of peers that were created before it."""
        return f"#{self._names[peer]}"

    # -- peers

    async def spawn_node(self, again: PeerID | None = None) -> Node:
        """Create a peer: a node that listens. Its identity follows from the seed and its number. With `again`, it is a
        killed peer that starts anew with its old identity."""
        number = len(self._names) if again is None else self._names[again]
        identity = Identity(blake3(f"{self.seed}/peer {number}".encode()).digest())
        self._names[identity.peer_id] = number
        transport = _Transport(self.network, identity.peer_id, self)
        node = self.nodes[identity.peer_id] = _Node(identity, transport)
        await node.listen(Multiaddr(f"/ip4/10.{number >> 16}.{number >> 8 & 255}.{number & 255}/tcp/0"))
        return node

    def introduce(self, nodes: Iterable[Node] | None = None) -> None:
        """Tell all of `nodes` each other's addresses; None: the nodes of all living peers."""
        everyone = list(self.nodes.values() if nodes is None else nodes)
        for one, other in product(everyone, everyone):
            one.learn(other.peer_id, other.addresses)

    def kill(self, peer: PeerID) -> None:
        """Simulate the death of the peer's process: its tasks end where they are. Messages that it has sent still
        arrive.

        Its tasks are those that its node has spawned, that its handlers have started, and all that these have started.
        A coroutine of the peer that the scenario awaits directly, and not through `node.spawn`, belongs to the
        scenario. It continues, but nobody hears of it.
        """
        self.log(f"kill {self.name(peer)}")
        self.network.kill(peer)
        self._loop.go_on(peer)
        node = self.nodes.pop(peer)
        node.closed = True
        for task in sorted(asyncio.all_tasks(self._loop), key=hash):
            if isinstance(task, Task) and task.owner == peer:
                task.cancel()

    def hold(self, peer: PeerID, seconds: float) -> None:
        """Simulate that the peer's process is stopped for so many seconds. Its connections stay, and arriving messages
        and timers wait."""
        self.log(f"hold {self.name(peer)} for {seconds:g} s")
        self._loop.hold(peer)
        self._loop.call_later(seconds, self._loop.go_on, peer)

    # -- links

    def cut(self, one: PeerID, other: PeerID, *, one_way: bool = False) -> None:
        """Cut the link between two peers; with `one_way`, only from `one` to `other`. After `lost_after` seconds, each
        of the two sees the other as lost."""
        self.log(f"cut {self.name(one)} {'to' if one_way else 'and'} {self.name(other)}")
        self._cut[one, other] = None
        self.network.cut(one, other, one_way=one_way)

    def partition(self, groups: Sequence[Iterable[PeerID]]) -> None:
        """Cut every link between peers of different groups. Peers in no group keep all their links."""
        for one, other in combinations([list(group) for group in groups], 2):
            for pair in product(one, other):
                self.cut(*pair)

    def heal(self) -> None:
        """Repair all links. Messages over cut links may be missing, so the connections over them count as lost, as a
        transport promises. Peers that need them dial again."""
        self.log("heal")
        for one, other in self._cut:
            for near, far in ((one, other), (other, one)):
                if near in self.network.transports:
                    self.network.transports[near].lost(far, "no heartbeat")
        self._cut.clear()
        self.network.heal()

    def set_rates(self, peer: PeerID, *, out: float | None = None, into: float | None = None) -> None:
        """Set the rates of a peer's upload and download, in bytes per second. None: those of the other peers."""
        self.log(f"{self.name(peer)} sends {out} B/s, takes {into} B/s")
        self.lines.set_rates(peer, out, into)

    def set_link(
        self, one: PeerID, other: PeerID, *, latency: float, bandwidth: float = math.inf, one_way: bool = False
    ) -> None:
        """Set the latency of the link between two peers, in seconds, and its rate in each direction, in bytes per
        second. With `one_way`, set only those from `one` to `other`."""
        ways = [(one, other)] if one_way else [(one, other), (other, one)]
        for source, target in ways:
            self.log(f"{self.name(source)} to {self.name(target)}: {latency:g} s, {bandwidth:g} B/s")
            self.lines.links[way(source, target)] = OneWayLink(latency, bandwidth)

    def unset_link(self, one: PeerID, other: PeerID) -> None:
        """Reset the link between two peers to the values of other links."""
        for source, target in ((one, other), (other, one)):
            if self.lines.links.pop(way(source, target), None) is not None:
                self.log(f"{self.name(source)} to {self.name(target)} as others")

    def _delay(self, source: PeerID, target: PeerID, size: int) -> float:
        return self.lines.travel(source, target, size, self._loop.time())

    def _enter(self, source: PeerID, target: PeerID, size: int) -> float:
        return self.lines.enter(source, target, size, self._loop.time())


@contextmanager
def _acting(peer: PeerID) -> Iterator[None]:
    """A context in which created tasks belong to `peer`."""
    token = owner.set(peer)
    try:
        yield
    finally:
        owner.reset(token)


class _Node(Node):
    """A node whose tasks belong to its peer, whichever task spawns them."""

    def spawn(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        with _acting(self.peer_id):
            return super().spawn(coroutine)


class _Transport(MemoryTransport):
    """A transport that records arriving messages. The work that they cause belongs to the peer at which they arrive,
    and waits while that peer is held."""

    def __init__(self, network: MemoryNetwork, peer_id: PeerID, world: World) -> None:
        super().__init__(network, peer_id)
        self._world = world

    def start(self, on_message: MessageHandler, on_lost: LostHandler) -> None:
        def call(handler: Callable[..., None], *args: Any) -> None:
            with _acting(self.peer_id):
                self._world._loop.unless_held(self.peer_id, handler, *args)

        super().start(partial(call, on_message), partial(call, on_lost))

    async def dial(self, address: Multiaddr) -> None:
        while self._world._loop.is_held(address.peer_id):  # noqa: ASYNC110  # in virtual time
            await asyncio.sleep(0.1)  # the other peer answers as soon as it continues
        await super().dial(address)

    def received(self, source: PeerID, header: bytes, buffers: Sequence[memoryview]) -> None:
        self._world.heard(source, self.peer_id, header, buffers)
        super().received(source, header, buffers)

    def lost(self, peer: PeerID, reason: str) -> None:
        self._world.log(f"{self._world.name(self.peer_id)} lost {self._world.name(peer)}: {reason}")
        super().lost(peer, reason)

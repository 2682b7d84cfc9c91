"""A transport within one process, over a network whose delays and partitions are given: for tests and simulation."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextvars import Context

from shoal.p2p.errors import HandshakeFailed, PeerUnreachable
from shoal.p2p.identity import PeerID
from shoal.p2p.leases import Leases
from shoal.p2p.movement import LARGE_BYTES
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.transport import Buffer, Transport, check_size

Delay = Callable[[PeerID, PeerID, int], float]


class MemoryNetwork:
    """Joins `MemoryTransport`s. Time is the running loop's, so it may be virtual.

    Args:
        delay: seconds that a message of so many bytes takes from one peer to another; zero when not given.
        lost_after: seconds until a connection over a cut link counts as lost (the heartbeat's time-out).
    """

    def __init__(self, delay: Delay | None = None, lost_after: float = 10.0) -> None:
        self.delay: Delay = delay or (lambda _source, _target, _size: 0.0)
        self.lost_after = lost_after
        self.transports: dict[PeerID, MemoryTransport] = {}
        self._listening: dict[tuple[str, int], PeerID] = {}
        self._ports = 1024
        self._last_arrival: dict[tuple[PeerID, PeerID], float] = {}
        self._cut: set[tuple[PeerID, PeerID]] = set()  # from the first nothing comes to the second
        self._connections = itertools.count()
        self.moved: dict[frozenset[PeerID], int] = {}  # bytes of large messages that arrived, of each pair

    def cut(self, one: PeerID, other: PeerID, *, one_way: bool = False) -> None:
        """Nothing passes between the two from now on, or nothing from `one` to `other` if `one_way`; both see the other
        lost after `lost_after` seconds."""
        self._cut |= {(one, other)} if one_way else {(one, other), (other, one)}
        for near, far in ((one, other), (other, one)):
            if near in self.transports:
                asyncio.get_running_loop().call_later(self.lost_after, self._heartbeat_missed, near, far)

    def heal(self) -> None:
        """All links work again. Connections that were lost meanwhile stay lost until somebody dials."""
        self._cut.clear()

    def kill(self, peer: PeerID) -> None:
        """The peer's process dies: what it sent still arrives, it sends and receives nothing more, all see it lost."""
        transport = self.transports.pop(peer)
        self._listening = {address: owner for address, owner in self._listening.items() if owner != peer}
        for other, number in sorted(transport.connections.items()):
            self._close(peer, other, number, "its process ended")
        transport.dead = True

    def is_cut(self, one: PeerID, other: PeerID) -> bool:
        """Whether nothing comes from `one` to `other`."""
        return (one, other) in self._cut

    def _heartbeat_missed(self, near: PeerID, far: PeerID) -> None:
        if (self.is_cut(near, far) or self.is_cut(far, near)) and near in self.transports:
            self.transports[near].lost(far, "no heartbeat")

    def _arrive(self, source: PeerID, target: PeerID, size: int, event: Callable[[], None]) -> None:
        """Call `event` after the link's delay, never before what was sent earlier over the same link."""
        loop = asyncio.get_running_loop()
        link = (source, target)
        when = max(loop.time() + self.delay(source, target, size), self._last_arrival.get(link, 0.0))
        self._last_arrival[link] = when
        loop.call_at(when, event, context=Context())  # what is under way belongs to neither peer

    def _deliver(self, source: PeerID, target: PeerID, header: bytes, buffers: Sequence[bytes], name: bytes) -> None:
        number = self.transports[source].connections[target]

        def event() -> None:
            transport = self.transports.get(target)
            if transport is None or self.is_cut(source, target):
                return
            if transport.connections.get(source) == number:
                pair = frozenset((source, target))
                self.moved[pair] = self.moved.get(pair, 0) + (size if size >= LARGE_BYTES else 0)
                transport.received(source, header, transport.placed(source, buffers, name))

        size = len(header) + sum(map(len, buffers))
        self._arrive(source, target, size, event)

    def _close(self, source: PeerID, target: PeerID, number: int, reason: str) -> None:
        """`source` ends the connection of that number to `target`, which sees it after what `source` had sent."""

        def event() -> None:
            transport = self.transports.get(target)
            if transport is None or self.is_cut(source, target):
                return
            if transport.connections.get(source) == number:
                transport.lost(source, reason)

        self._arrive(source, target, 0, event)


class MemoryTransport(Transport):
    """One peer's end of a `MemoryNetwork`. Messages are copied when sent, as a real transport does."""

    def __init__(self, network: MemoryNetwork, peer_id: PeerID) -> None:
        self.network = network
        self.peer_id = peer_id
        self.leases = Leases()
        self.connections: dict[PeerID, int] = {}  # by their numbers, of which both ends have the same
        self.dead = False
        network.transports[peer_id] = self

    async def listen(self, address: Multiaddr) -> Multiaddr:
        if not address.port:
            self.network._ports += 1
            address = address.with_port(self.network._ports)
        if self.network._listening.setdefault((address.host, address.port), self.peer_id) != self.peer_id:
            raise OSError(f"{address} is in use")
        return address.with_peer(self.peer_id)

    async def dial(self, address: Multiaddr) -> None:
        if address.peer_id is None:
            raise ValueError(f"{address} does not say whom to expect: it must end in /p2p/<peer id>")
        if address.peer_id == self.peer_id:
            raise PeerUnreachable(f"{address} is this peer itself")
        if address.peer_id in self.connections:
            return
        found = self.network._listening.get((address.host, address.port))
        there_and_back = self.network.delay(self.peer_id, address.peer_id, 0) + self.network.delay(
            address.peer_id, self.peer_id, 0
        )
        await asyncio.sleep(there_and_back)
        network = self.network
        if (
            found is None
            or found not in network.transports
            or network.is_cut(self.peer_id, found)
            or network.is_cut(found, self.peer_id)
        ):
            raise PeerUnreachable(f"nobody answers at {address}")
        if found != address.peer_id:
            raise HandshakeFailed(f"{address}: another peer answers there")
        if not self.dead and found not in self.connections:
            other = network.transports[found]
            other.lost(self.peer_id, "it has connected anew")  # if the end of the connection before is still to come
            self.connections[found] = other.connections[self.peer_id] = next(network._connections)

    def is_connected(self, peer: PeerID) -> bool:
        return peer in self.connections

    def moved(self, peer: PeerID) -> int:
        return self.network.moved.get(frozenset((self.peer_id, peer)), 0) if peer in self.connections else 0

    def send(self, peers: Sequence[PeerID], header: Buffer, buffers: Sequence[Buffer] = (), name: bytes = b"") -> None:
        check_size(header, buffers)
        if self.dead:
            return
        message, payload = bytes(header), [bytes(buffer) for buffer in buffers]
        for peer in peers:
            if peer in self.connections:
                self.network._deliver(self.peer_id, peer, message, payload, name)

    def disconnect(self, peer: PeerID) -> None:
        if peer in self.connections and not self.dead:
            self.network._close(self.peer_id, peer, self.connections.pop(peer), "the peer disconnected")

    async def close(self) -> None:
        for peer in sorted(self.connections):
            self.disconnect(peer)
        self.network.transports.pop(self.peer_id, None)
        self.network._listening = {a: p for a, p in self.network._listening.items() if p != self.peer_id}

    def cancel(self, prefix: bytes) -> None:
        pass  # everything was copied when it was sent

    def placed(self, source: PeerID, buffers: Sequence[bytes], name: bytes) -> list[memoryview]:
        """The buffers where they belong."""
        views = [memoryview(buffer) for buffer in buffers]
        if name and (target := self.leases.lease(name, source, len(views[0]))) is not None:
            target.memory[:] = views[0]
            self.leases.give_back(target, filled=True)
            views[0] = target.memory
        return views

    def received(self, source: PeerID, header: bytes, buffers: Sequence[memoryview]) -> None:
        self._on_message(source, memoryview(header), buffers)

    def lost(self, peer: PeerID, reason: str) -> None:
        if self.connections.pop(peer, None) is not None:
            self._on_lost(peer, reason)

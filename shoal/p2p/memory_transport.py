"""A transport within one process, over a network with given delays and partitions: for tests and simulation."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextvars import Context
from dataclasses import dataclass, field

from shoal.p2p.errors import HandshakeFailed, PeerUnreachable
from shoal.p2p.identity import PeerID
from shoal.p2p.leases import Leases
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.transport import LARGE_BYTES, Buffer, Observation, Transport, check_size, named

Delay = Callable[[PeerID, PeerID, int], float]


@dataclass(eq=False, slots=True)
class _Connection:
    """A connection. Both ends share one object."""

    moved: int = 0  # bytes of large messages that arrived
    flows: dict[PeerID, _Flow] = field(default_factory=dict)  # one for each end


@dataclass(slots=True)
class _Flow:
    """What one end has sent over a connection.

    Attributes:
        nbytes: bytes that have arrived or are under way.
        seconds: for how long, in total, bytes were or will be under way.
        until: when the last byte arrives.
    """

    nbytes: int = 0
    seconds: float = 0.0
    until: float = 0.0

    def sent(self, nbytes: int, now: float, until: float) -> None:
        """Record that `nbytes` more bytes are sent now and arrive at `until`."""
        self.nbytes += nbytes
        self.seconds += max(0.0, until - max(now, self.until))
        self.until = max(self.until, until)


class MemoryNetwork:
    """Connects `MemoryTransport`s. It uses the running loop's time, which may be virtual.

    Attributes:
        payload_scale: each byte of a message's buffers takes the time of this many bytes, so that small tensors can
            stand for larger ones.

    Args:
        delay: seconds that a message of a size in bytes takes from one peer to another. Default: zero.
        enter: called when a message reaches the receiver: seconds that it takes from then on, because other messages
            come in as well. A later message from the same peer must take longer. Default: zero.
        lost_after: seconds until a connection over a cut link counts as lost (the timeout of the heartbeat).
    """

    def __init__(
        self,
        delay: Delay = lambda _source, _target, _size: 0.0,
        lost_after: float = 10.0,
        enter: Delay = lambda _source, _target, _size: 0.0,
    ) -> None:
        self.delay, self.enter, self.lost_after, self.payload_scale = delay, enter, lost_after, 1
        self.transports: dict[PeerID, MemoryTransport] = {}
        self._listening: dict[tuple[str, int], MemoryTransport] = {}
        self._ports = itertools.count(1025)
        self._cut: set[tuple[PeerID, PeerID]] = set()  # nothing passes from the first to the second

    def cut(self, one: PeerID, other: PeerID, *, one_way: bool = False) -> None:
        """Let nothing pass between the two from now on, or nothing from `one` to `other` if `one_way`. Both lose each
        other after `lost_after` seconds.
        """
        self._cut |= {(one, other)} if one_way else {(one, other), (other, one)}
        for near, far in ((one, other), (other, one)):
            if near in self.transports:
                asyncio.get_running_loop().call_later(self.lost_after, self._heartbeat_missed, near, far)

    def heal(self) -> None:
        """Let all links work again. Connections that were lost meanwhile stay lost until a peer dials."""
        self._cut.clear()

    def kill(self, peer: PeerID) -> None:
        """End the peer's process: its earlier messages still arrive, it sends and receives no more, and all others lose
        it.
        """
        self.transports[peer]._leave("its process ended")

    def _is_cut(self, one: PeerID, other: PeerID) -> bool:
        """Whether the link between the two is cut in at least one direction."""
        return not self._cut.isdisjoint({(one, other), (other, one)})

    def _heartbeat_missed(self, near: PeerID, far: PeerID) -> None:
        if self._is_cut(near, far) and near in self.transports:
            self.transports[near].lost(far, "no heartbeat")


class MemoryTransport(Transport):
    """One peer's end of a `MemoryNetwork`. It copies messages when they are sent, as a real transport does."""

    def __init__(self, network: MemoryNetwork, peer_id: PeerID) -> None:
        self.network = network
        self.peer_id = peer_id
        self.leases = Leases()
        self._connections: dict[PeerID, _Connection] = {}
        self._last_arrival: dict[PeerID, float] = {}
        network.transports[peer_id] = self

    async def listen(self, address: Multiaddr) -> Multiaddr:
        if not address.port:
            address = address.with_port(next(self.network._ports))
        if self.network._listening.setdefault((address.host, address.port), self) is not self:
            raise OSError(f"{address} is in use")
        return address.with_peer(self.peer_id)

    async def dial(self, address: Multiaddr) -> None:
        network, me, peer = self.network, self.peer_id, named(address)
        if peer == me:
            raise PeerUnreachable(f"{address} is this peer itself")
        if peer in self._connections:
            return
        await asyncio.sleep(network.delay(me, peer, 0) + network.delay(peer, me, 0))
        other = network._listening.get((address.host, address.port))
        if other is None or network._is_cut(me, other.peer_id):
            raise PeerUnreachable(f"nobody answers at {address}")
        if other.peer_id != peer:
            self.tell_of_another(peer, other.peer_id)
            raise HandshakeFailed(f"{address}: another peer answers there")
        if network.transports.get(me) is self and peer not in self._connections:
            other.lost(me, "it has connected anew")  # if it has not noticed the end of the earlier connection yet
            self._connections[peer] = other._connections[me] = _Connection()

    async def observe(self, address: Multiaddr, source_port: int = 0) -> Observation:
        network, peer = self.network, address.peer_id
        other = network._listening.get((address.host, address.port))
        if peer is None or other is None or network._is_cut(self.peer_id, other.peer_id):
            raise PeerUnreachable(f"nobody answers at {address}")
        await asyncio.sleep(network.delay(self.peer_id, peer, 0) + network.delay(peer, self.peer_id, 0))
        if other.peer_id != peer:
            raise HandshakeFailed(f"{address}: another peer answers there")
        return Observation("127.0.0.1", source_port, source_port)

    def source(self, peer: PeerID) -> str:
        return "127.0.0.1" if peer in self._connections else ""

    def is_connected(self, peer: PeerID) -> bool:
        return peer in self._connections

    def moved(self, peer: PeerID) -> int:
        return self._connections[peer].moved if peer in self._connections else 0

    def delivered(self, peer: PeerID) -> tuple[int, float]:
        connection = self._connections.get(peer)
        flow = None if connection is None else connection.flows.get(self.peer_id)
        return (0, 0.0) if flow is None else (flow.nbytes, flow.seconds)

    def send(self, peers: Sequence[PeerID], header: Buffer, buffers: Sequence[Buffer] = (), name: bytes = b"") -> None:
        check_size(header, buffers)
        message, payload = bytes(header), [bytes(buffer) for buffer in buffers]
        size = len(message) + self.network.payload_scale * sum(map(len, payload))
        for peer in peers:
            self._tell(peer, size, lambda other: other._arrived(self.peer_id, size, message, payload, name))

    def disconnect(self, peer: PeerID) -> None:
        self._end(peer, "the peer disconnected")

    async def close(self) -> None:
        self._leave("the peer disconnected")

    def cancel(self, prefix: bytes) -> None:
        pass  # all buffers were copied when they were sent

    def _tell(self, peer: PeerID, size: int, event: Callable[[MemoryTransport], None]) -> None:
        """Call `event` with the other end after the link's delay, and never before earlier messages. If there is no
        connection, or if it is cut or gone by then, `event` is not called.
        """
        connection, network, loop = self._connections.get(peer), self.network, asyncio.get_running_loop()
        if connection is None:
            return

        def come() -> None:
            wait = network.enter(self.peer_id, peer, size)
            if wait > 0.0:
                flow.sent(0, loop.time(), loop.time() + wait)
                loop.call_later(wait, arrive, context=Context())
            else:
                arrive()

        def arrive() -> None:
            other, cut = network.transports.get(peer), (self.peer_id, peer) in network._cut
            if other is not None and not cut and other._connections.get(self.peer_id) is connection:
                event(other)

        when = max(loop.time() + network.delay(self.peer_id, peer, size), self._last_arrival.get(peer, 0.0))
        self._last_arrival[peer] = when
        flow = connection.flows.setdefault(self.peer_id, _Flow())
        flow.sent(size, loop.time(), when)
        loop.call_at(when, come, context=Context())  # the context of neither peer applies to a message under way

    def _end(self, peer: PeerID, reason: str) -> None:
        self._tell(peer, 0, lambda other: other.lost(self.peer_id, reason))
        self._connections.pop(peer, None)

    def _leave(self, reason: str) -> None:
        for peer in sorted(self._connections):
            self._end(peer, reason)
        self.network.transports.pop(self.peer_id, None)
        self.network._listening = {a: t for a, t in self.network._listening.items() if t is not self}

    def _arrived(self, source: PeerID, size: int, header: bytes, buffers: Sequence[bytes], name: bytes) -> None:
        self._connections[source].moved += size if size >= LARGE_BYTES else 0
        views = [memoryview(buffer) for buffer in buffers]
        if name and (target := self.leases.lease(name, source, len(views[0]))) is not None:
            target.memory[:] = views[0]
            self.leases.give_back(target, filled=True)
            views[0] = target.memory
        self.received(source, header, views)

    def received(self, source: PeerID, header: bytes, buffers: Sequence[memoryview]) -> None:
        self._on_message(source, memoryview(header), buffers)

    def lost(self, peer: PeerID, reason: str) -> None:
        if self._connections.pop(peer, None) is not None:
            self._on_lost(peer, reason)

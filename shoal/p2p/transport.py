"""The interface of everything that carries messages between peers."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shoal.p2p.errors import MessageTooLarge
from shoal.p2p.identity import PeerID
from shoal.p2p.leases import Leases
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.twins import Twins

Buffer = bytes | bytearray | memoryview

MAX_HEADER_BYTES = 1 << 20
MAX_BUFFER_BYTES = 4 << 20
MAX_BUFFERS = 4
LARGE_BYTES = 16 << 10
"""Messages of so many bytes are large: on a slow line others wait behind them."""

MessageHandler = Callable[[PeerID, memoryview, Sequence[memoryview]], None]
LostHandler = Callable[[PeerID, str], None]


@dataclass(frozen=True, slots=True)
class Observation:
    """From where a connection was seen to come.

    Attributes:
        host: the address of this machine, or of a router before it, as the other side sees it.
        port: of TCP, as the other side sees it.
        source_port: as this side has it; another one than `port` where a router has changed it.
    """

    host: str
    port: int
    source_port: int


class Transport(ABC):
    """Carries messages between this peer and others. One message is a header and up to MAX_BUFFERS buffers.

    All methods are called on the loop's thread, and both handlers are called there. What a caller may rely on:

    - messages of one peer arrive whole, in the order sent, or not at all and then the peer is reported lost; one with a
      `name` may be overtaken by others, or overtake them;
    - `on_message` names the authenticated sender; the views that it is given stay valid as long as they are referenced;
    - a connected peer is not replaced by another process with its identity, for as long as it lives: that other one is
      refused, and all three are told (`twins`);
    - `on_lost(peer, reason)` is called once when a peer is not connected any more, whoever dialled, after the last
      message that had arrived from it; a peer to which this side disconnected is not reported.

    Attributes:
        peer_id: who this peer is.
        leases: where the memory is registered that named buffers belong to. One that came into it is that memory in
            `on_message`, and its target is `filled`.
        limit: bytes per second that this peer may send and receive: the less of the two; infinity for no limit.
    """

    peer_id: PeerID
    leases: Leases
    limit: float = math.inf

    def start(self, on_message: MessageHandler, on_lost: LostHandler) -> None:
        """Name the handlers; called once, before anything else."""
        self._on_message = on_message
        self._on_lost = on_lost
        self.twins = Twins(self.peer_id)

    @abstractmethod
    async def listen(self, address: Multiaddr) -> Multiaddr:
        """Accept connections there; returns the address with the port in use and this peer's id. OSError if taken."""

    @abstractmethod
    async def dial(self, address: Multiaddr) -> None:
        """Connect to the peer that `address` names, or return at once if connected to it already.

        Raises PeerUnreachable if nobody answers, HandshakeFailed if somebody else does. The caller sets the deadline.
        """

    @abstractmethod
    async def observe(self, address: Multiaddr, source_port: int = 0) -> Observation:
        """Make a connection of its own to the peer that `address` names, whether or not there is another; the peer
        proves who it is, says from where the connection comes, and the connection ends.

        Args:
            address: who, and where.
            source_port: of TCP, from which to connect; 0 for any free one.

        Raises:
            PeerUnreachable: as `dial` does. The caller sets the deadline.
        """

    @abstractmethod
    def source(self, peer: PeerID) -> str:
        """The numeric address (IPv4 or IPv6) at the other end of the connection to `peer`; "" if there is none, or a
        relay is at that end."""

    @abstractmethod
    def is_connected(self, peer: PeerID) -> bool:
        """Whether messages can be sent to that peer now."""

    @abstractmethod
    def moved(self, peer: PeerID) -> int:
        """Bytes of large messages (`LARGE_BYTES`) that have passed between this peer and that one so far, both
        ways, those that are under way included, about; 0 if it is not connected. While it grows, what has not come is
        late and not lost."""

    @abstractmethod
    def delivered(self, peer: PeerID) -> tuple[int, float]:
        """Bytes of chunks that have come to that peer so far, about, and for how many seconds some were under way while
        it had room for more: their quotient is what the path carries. Zeros if it is not connected."""

    def is_direct(self, peer: PeerID) -> bool:
        """Whether the connection to that peer passes no relay."""
        return True

    @abstractmethod
    def send(self, peers: Sequence[PeerID], header: Buffer, buffers: Sequence[Buffer] = (), name: bytes = b"") -> None:
        """Queue one message to each of `peers`, copying it once; never waits.

        With a `name` (NAME_BYTES), one buffer comes along that the receiver may be waiting for under that name
        (`leases`). It may be sent without a copy: it must not be written before it has arrived, or `cancel` was called.

        A peer that is not connected, or whose queue is full (which ends its connection), gets nothing: `on_lost` tells.
        Raises MessageTooLarge before anything is queued.
        """

    @abstractmethod
    def cancel(self, prefix: bytes) -> None:
        """Nobody reads the buffers any more that were sent under names that begin so; those that have not left do not
        arrive. May wait for milliseconds."""

    @abstractmethod
    def disconnect(self, peer: PeerID) -> None:
        """End all connections to that peer; what is queued to it is dropped."""

    @abstractmethod
    async def close(self) -> None:
        """Stop listening and end all connections, after a short time for what is queued to leave."""


class Movement:
    """Looks at how many bytes have passed between two peers, now and then.

    Args:
        moved: `Transport.moved` at the beginning.
    """

    def __init__(self, moved: int) -> None:
        self._moved = moved

    def goes_on(self, moved: int) -> bool:
        """Whether at least LARGE_BYTES of them have passed since the beginning, or since this last said so."""
        if moved < self._moved:  # another connection, which counts from its own beginning
            self._moved = 0
        if moved - self._moved < LARGE_BYTES:
            return False
        self._moved = moved
        return True


def check_size(header: Buffer, buffers: Sequence[Buffer]) -> None:
    """Raise MessageTooLarge if a message exceeds the bounds that every transport enforces on receipt as well."""
    if memoryview(header).nbytes > MAX_HEADER_BYTES:
        raise MessageTooLarge(f"a header of {memoryview(header).nbytes} bytes exceeds {MAX_HEADER_BYTES}")
    if len(buffers) > MAX_BUFFERS:
        raise MessageTooLarge(f"{len(buffers)} buffers in one message exceed {MAX_BUFFERS}")
    for buffer in buffers:
        if memoryview(buffer).nbytes > MAX_BUFFER_BYTES:
            raise MessageTooLarge(f"a buffer of {memoryview(buffer).nbytes} bytes exceeds {MAX_BUFFER_BYTES}")

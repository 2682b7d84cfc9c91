"""The interface of transports, which carry messages between peers."""

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
"""Messages of at least this many bytes are large: on a slow line others wait behind them."""

MessageHandler = Callable[[PeerID, memoryview, Sequence[memoryview]], None]
LostHandler = Callable[[PeerID, str], None]
AnotherHandler = Callable[[PeerID, PeerID], None]


@dataclass(frozen=True, slots=True)
class Observation:
    """The address from which a connection was seen to come.

    Attributes:
        host: the address of this machine, or of a router in front of it, as the other side sees it.
        port: the TCP port, as the other side sees it.
        source_port: the TCP port on this side. It differs from `port` if a router has changed it.
    """

    host: str
    port: int
    source_port: int


class Transport(ABC):
    """Carries messages between this peer and others. A message is a header and up to MAX_BUFFERS buffers.

    Call all methods on the loop's thread; both handlers are called there. A caller may rely on this:

    - The messages of one peer arrive whole and in the order in which they were sent. If one does not arrive, none after
      it does, and the peer is reported lost. A message with a `name` may overtake others, or be overtaken.
    - `on_message` gets the authenticated sender. The views that it gets stay valid as long as they are referenced.
    - As long as a connected peer is alive, no other process with its identity replaces it. Such a process is refused,
      and all three sides log a warning (`twins`).
    - `on_lost(peer, reason)` is called once when a peer is no longer connected, whichever side dialled, after the last
      message that has arrived from it. A peer that this side has disconnected is not reported.

    Attributes:
        peer_id: this peer's id.
        leases: the registry of memory for named buffers. A buffer that was received into registered memory is that
            memory in `on_message`, and its target is `filled`.
        limit: bytes per second that this peer may send and receive: the lesser of the two; infinity for no limit.
    """

    peer_id: PeerID
    leases: Leases
    limit: float = math.inf

    def start(self, on_message: MessageHandler, on_lost: LostHandler) -> None:
        """Set the handlers. Called once, before all other methods."""
        self._on_message = on_message
        self._on_lost = on_lost
        self.twins = Twins(self.peer_id)
        self.another_handlers: list[AnotherHandler] = []

    def tell_of_another(self, dialled: PeerID, found: PeerID) -> None:
        """The peer `found` has proven to be at an address that was dialled as that of the peer `dialled`."""
        for handler in list(self.another_handlers):
            handler(dialled, found)

    @abstractmethod
    async def listen(self, address: Multiaddr) -> Multiaddr:
        """Accept connections at `address`. Returns it with the port in use and this peer's id. Raises OSError if it is
        taken.
        """

    @abstractmethod
    async def dial(self, address: Multiaddr) -> None:
        """Connect to the peer that `address` names, or return at once if it is connected already. The caller sets the
        deadline.

        Raises:
            PeerUnreachable: if nobody answers. HandshakeFailed if another peer answers.
            ValueError: if `address` has no peer id.
        """

    @abstractmethod
    async def observe(self, address: Multiaddr, source_port: int = 0) -> Observation:
        """Make a separate connection to the peer that `address` names, and ask from which address the connection comes.

        The peer proves its identity and answers; then the connection ends. Other connections to the peer don't matter.
        The caller sets the deadline.

        Args:
            address: the peer's address, with its id.
            source_port: the TCP port from which to connect; 0 for any free one.

        Raises:
            PeerUnreachable: as `dial`.
        """

    @abstractmethod
    def source(self, peer: PeerID) -> str:
        """The numeric address (IPv4 or IPv6) at the other end of the connection to `peer`; "" if there is no
        connection, or if a relay is at that end.
        """

    @abstractmethod
    def is_connected(self, peer: PeerID) -> bool:
        """Whether messages to that peer can be sent now."""

    @abstractmethod
    def moved(self, peer: PeerID) -> int:
        """The approximate number of bytes of large messages (`LARGE_BYTES`) that have passed between this peer and that
        one so far, in both directions, including messages under way. 0 if it is not connected.

        While the number grows, a message that has not come is late and not lost.
        """

    @abstractmethod
    def delivered(self, peer: PeerID) -> tuple[int, float]:
        """The approximate number of bytes of chunks that have reached that peer so far, and the seconds in which bytes
        were under way while the peer had room for more. Their quotient is the rate of the path. Zeros if it is not
        connected.
        """

    def is_direct(self, peer: PeerID) -> bool:
        """Whether the connection to that peer does not lead through a relay."""
        return True

    @abstractmethod
    def send(self, peers: Sequence[PeerID], header: Buffer, buffers: Sequence[Buffer] = (), name: bytes = b"") -> None:
        """Queue one message to each of `peers`, copied once; never waits.

        With a `name` (NAME_BYTES), the message has one buffer, for which the receiver may have registered memory under
        that name (`leases`). It may be sent without a copy, so the caller must not write to it until it has arrived or
        `cancel` has returned.

        A peer that is not connected gets nothing. A peer whose queue is full is disconnected; `on_lost` reports it.

        Raises:
            MessageTooLarge: if the message exceeds a bound. Nothing has been queued then.
        """

    @abstractmethod
    def cancel(self, prefix: bytes) -> None:
        """Stop reading the buffers that were sent under names with this prefix. Those that have not left do not arrive.
        May wait for milliseconds.
        """

    @abstractmethod
    def disconnect(self, peer: PeerID) -> None:
        """End all connections to that peer. Queued messages to it are dropped."""

    @abstractmethod
    async def close(self) -> None:
        """Stop listening and end all connections. Queued messages have a short time to leave."""


class Movement:
    """Watches how many bytes pass between two peers.

    Args:
        moved: the value of `Transport.moved` at the beginning.
    """

    def __init__(self, moved: int) -> None:
        self._moved = moved

    def goes_on(self, moved: int) -> bool:
        """Whether at least LARGE_BYTES have passed since the beginning, or since the last call that returned True.

        Args:
            moved: the present value of `Transport.moved`.
        """
        if moved < self._moved:  # another connection, which counts from zero
            self._moved = 0
        if moved - self._moved < LARGE_BYTES:
            return False
        self._moved = moved
        return True


def named(address: Multiaddr) -> PeerID:
    """The peer whom an address to dial names. Raises ValueError if it names none."""
    if address.peer_id is None:
        raise ValueError(f"{address} does not say whom to expect: it must end in /p2p/<peer id>")
    return address.peer_id


def check_size(header: Buffer, buffers: Sequence[Buffer]) -> None:
    """Raises MessageTooLarge if a message exceeds the bounds. Every transport enforces them on received messages as
    well.
    """
    if memoryview(header).nbytes > MAX_HEADER_BYTES:
        raise MessageTooLarge(f"a header of {memoryview(header).nbytes} bytes exceeds {MAX_HEADER_BYTES}")
    if len(buffers) > MAX_BUFFERS:
        raise MessageTooLarge(f"{len(buffers)} buffers in one message exceed {MAX_BUFFERS}")
    for buffer in buffers:
        if memoryview(buffer).nbytes > MAX_BUFFER_BYTES:
            raise MessageTooLarge(f"a buffer of {memoryview(buffer).nbytes} bytes exceeds {MAX_BUFFER_BYTES}")

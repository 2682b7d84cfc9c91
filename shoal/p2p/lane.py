"""Lanes: sealed TCP connections beside a link, for chunks of tensors.

A lane has one thread per connection that reads, and shares those that write with all others. They run sockets and
ciphers only, each call for a whole chunk: Python takes the GIL a few times per chunk, however large it is.
"""

from __future__ import annotations

import atexit
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple
from weakref import WeakSet

from shoal.p2p import congestion, forks, tcp
from shoal.p2p.buffers import Buffers, NoMemory
from shoal.p2p.errors import MessageTooLarge, P2PError, PeerLost, PeerUnreachable
from shoal.p2p.identity import PeerID
from shoal.p2p.leases import Leases, Target
from shoal.p2p.limit import Limit
from shoal.p2p.sealing import (
    MAX_MESSAGE_BYTES,
    MAX_PAYLOAD_BYTES,
    NAME_BYTES,
    SEALED_HEADER_BYTES,
    TAG_BYTES,
    BrokenFrame,
    Header,
    Keys,
    Opener,
    Sealer,
    sealed_bytes,
)
from shoal.p2p.tokens import Tokens
from shoal.p2p.writers import Writers

MAX_CONNECTIONS: Final = 4
WINDOW_BYTES: Final = 8 << 20  # that wait to be sealed, of one lane
SCRATCH_BYTES: Final = 2 * WINDOW_BYTES  # of one lane, that came without a target and are not released
LEAST_SHARE: Final = 64 << 10  # of that, for each chunk
FORGOTTEN_SECONDS: Final = 0.1  # between two looks whether some was forgotten instead of released
MEMORY_BYTES: Final = 4 << 30  # of all lanes: chunks under way, and scratch
OPENING_SECONDS: Final = 10.0
TURN_SECONDS: Final = 0.1
_HELLO: Final = Header(0, bytes(NAME_BYTES), b"shoal lane 1")
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))

Address = tuple[str, int] | tuple[str, int, int, int]


class Arrival:
    """A chunk that has come.

    Attributes:
        peer: who sent it.
        message: what it said about the chunk.
        memory: the chunk: the target's memory, or scratch.
        target: which it was opened into; None if it is in scratch.
    """

    __slots__ = ("_lane", "memory", "message", "peer", "target")

    def __init__(self, lane: Lane, message: bytes, memory: memoryview, target: Target | None) -> None:
        self.peer, self.message, self.memory, self.target = lane.peer, message, memory, target
        self._lane: Lane | None = lane if target is None else None

    def release(self) -> None:
        """The chunk was used: `memory` may be another chunk's from now on. Does nothing for a target."""
        lane, self._lane = self._lane, None
        if lane is not None:
            memory, self.memory = self.memory, memoryview(b"")
            lane.put_scratch(memory)

    def __del__(self) -> None:
        if self._lane is not None:  # no lock may be taken here: this thread may hold any
            self._lane.forgotten.append(self.memory)


class _Frame(NamedTuple):
    header: Header
    memory: memoryview
    when_free: Callable[[], None]


class Lanes:
    """The lanes of one peer.

    Both callbacks are called in the threads of the lanes and must return quickly, without waiting.

    Args:
        on_arrival: called with each chunk.
        on_lost: called with the peer and a reason when a lane is over, whoever ended it, once: after everything that
            had arrived.
        upload, download: what this peer may send and receive.

    Attributes:
        leases: which memory chunks belong to.
    """

    def __init__(
        self,
        on_arrival: Callable[[Arrival], None],
        on_lost: Callable[[PeerID, str], None],
        upload: Limit | None = None,
        download: Limit | None = None,
    ) -> None:
        self.on_arrival, self.on_lost = on_arrival, on_lost
        self.upload, self.download = upload or Limit(None), download or Limit(None)
        self.leases, self.buffers, self.writers = Leases(), Buffers(MEMORY_BYTES), Writers()
        self._tokens: Tokens[tuple[Lane, Keys]] = Tokens(os.urandom)
        self._lanes: set[Lane] = set()
        self._readers: list[threading.Thread] = []
        self._closed, self._process = False, os.getpid()
        _all.add(self)

    def lane(self, peer: PeerID) -> Lane:
        """A new lane to that peer, without connections. What is sent waits for the first of them."""
        if self._closed:
            raise PeerUnreachable("this peer's lanes were closed")
        lane = Lane(self, peer)
        self._lanes.add(lane)
        return lane

    def invite(self, lane: Lane, keys: Keys) -> bytes:
        """A token with which the other side may add a connection to this lane, within TOKEN_SECONDS."""
        return self._tokens.issue((lane, keys), time.monotonic())

    def admit(self, accepted: socket.socket, token: bytes) -> bool:
        """Add a connection to the lane that its first bytes, `token`, are good for; else close it. Belongs to the same
        thread as `invite`."""
        grant = self._tokens.redeem(token, time.monotonic())
        if grant is None:
            accepted.close()
            return False
        lane, keys = grant
        lane.accept(accepted, keys)
        return True

    def close(self) -> None:
        """End all lanes and threads. What had arrived is delivered before this returns."""
        if self._closed or os.getpid() != self._process:
            return  # in a forked child there are no threads to end, and its sockets are closed
        self._closed = True
        for lane in list(self._lanes):
            lane.end()
        for reader in self._readers:
            reader.join()
        self.writers.close()

    def start(self, reader: threading.Thread) -> None:
        """Start a reader's thread, which is joined when these lanes are closed."""
        self._readers = [reader for reader in self._readers if reader.is_alive()]
        reader.start()
        self._readers.append(reader)

    def gone(self, lane: Lane, reason: str) -> None:
        """This lane is over, and all that came over it was delivered."""
        self._lanes.discard(lane)
        self.on_lost(lane.peer, reason)


class Lane:
    """1 to 4 connections to one peer, over which chunks pass both ways; of several, in any order. If one ends, all do.

    `send`, `cancel` and `end` may be called from any thread, all else from the one that made the `Lanes`.

    Attributes:
        peer: who is at the other end.
        over: set when the lane has ended, or is about to.
        queued: bytes that wait to be sealed.
    """

    def __init__(self, lanes: Lanes, peer: PeerID) -> None:
        self.peer, self.lanes = peer, lanes
        self.over = threading.Event()
        self._changed = threading.Condition()  # and the lock of what follows; taken after that of a connection
        self._reason, self._told = "", False
        self._connections: list[_Connection] = []
        self._idle: list[_Connection] = []  # those that have nothing to send
        self._frames: deque[_Frame] = deque()
        self.queued = self._scratch = 0  # bytes
        self.forgotten: deque[memoryview] = deque()  # scratch that is garbage

    # -- connections

    def dial(self, address: Address, token: bytes, keys: Keys) -> None:
        """Add a connection to that address, where `token` is known."""
        family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self._add(_Connection(self, socket.socket(family, socket.SOCK_STREAM), keys, (address, token)))

    def accept(self, accepted: socket.socket, keys: Keys) -> None:
        """Add a connection that came with a token for this lane, which was read."""
        self._add(_Connection(self, accepted, keys, None))

    def _add(self, connection: _Connection) -> None:
        with self._changed:
            if self.over.is_set() or len(self._connections) == MAX_CONNECTIONS:
                connection.close()
                return
            self.lanes.start(connection)
            self._connections.append(connection)

    def confirmed(self, connection: _Connection) -> None:
        """The other side has the keys."""
        with self._changed:
            if not self.over.is_set():
                self.lanes.writers.add(connection.fd, connection.turn)
                self._idle.append(connection)
                self._wake()

    def ended(self, connection: _Connection, reason: str) -> None:
        """This connection has ended, and what came over it was delivered."""
        self._stop(reason)
        with connection.sending, self._changed:
            connection.close()
            self._connections.remove(connection)
        self._tell()

    def end(self) -> None:
        """End the lane. What had arrived is still delivered, in the reader's thread."""
        self._stop("this side ended it")
        self._tell()

    def _stop(self, reason: str) -> None:
        with self._changed:
            if self.over.is_set():
                return
            self.over.set()
            self._reason = reason
            for connection in self._connections:
                connection.shut()
            dropped, self.queued = list(self._frames), 0
            self._frames.clear()
            self._changed.notify_all()
        for frame in dropped:
            frame.when_free()

    def _tell(self) -> None:
        with self._changed:
            if self._connections or self._told:
                return
            self._told = True
        self.lanes.gone(self, self._reason)

    @property
    def moved(self) -> int:
        """Bytes that have passed, both ways: also while one chunk takes long."""
        with self._changed:
            return sum(sum(tcp.counts(connection.fd)) for connection in self._connections)

    # -- sending

    def send(self, name: bytes, message: bytes, memory: memoryview, when_free: Callable[[], None]) -> bool:
        """Queue a chunk; never waits. Returns False, and does nothing, if WINDOW_BYTES are queued already.

        Where it is opened to, the other side says by `name`: no two chunks of one peer have the same.
        `memory` must not be written before `when_free` is called: in any thread, once, when the chunk was sealed or
        will not be sent. It must not wait.

        Raises MessageTooLarge for more than 4 MiB, nothing, or a longer message than MAX_MESSAGE_BYTES.
        """
        memory = memory.cast("B")
        if not 0 < len(memory) <= MAX_PAYLOAD_BYTES or len(message) > MAX_MESSAGE_BYTES or len(name) != NAME_BYTES:
            raise MessageTooLarge(f"a chunk of {len(memory)} bytes, a message of {len(message)} breaks the bounds")
        with self._changed:
            if self.queued and self.queued + len(memory) > WINDOW_BYTES:
                return False
            if not self.over.is_set():
                self.queued += len(memory)
                self._frames.append(_Frame(Header(len(memory), name, message), memory, when_free))
                self._wake()
                return True
        when_free()
        return True

    def cancel(self, prefix: bytes) -> None:
        """Do not send the queued chunks whose names begin so. Those that are being sealed are still sent."""
        with self._changed:
            dropped = [frame for frame in self._frames if frame.header.name.startswith(prefix)]
            self._frames = deque(frame for frame in self._frames if not frame.header.name.startswith(prefix))
            self.queued -= sum(len(frame.memory) for frame in dropped)
        for frame in dropped:
            frame.when_free()

    def _wake(self) -> None:
        if self._frames and self._idle:
            self.lanes.writers.ask(self._idle.pop().fd)

    def next_frame(self) -> _Frame | None:
        """What is sent now."""
        with self._changed:
            if not self._frames:
                return None
            frame = self._frames.popleft()
            self.queued -= len(frame.memory)
            return frame

    def has_more(self, connection: _Connection) -> bool:
        """Whether there is something for this connection to send. Else it gets its turn when there is."""
        with self._changed:
            if not self._frames and connection not in self._idle:
                self._idle.append(connection)
            return bool(self._frames)

    # -- receiving

    def take_scratch(self, size: int) -> memoryview:
        """Memory for a chunk without a target. Waits while the peer's share is used up: a peer that keeps to its
        window never comes so far. Raises PeerLost if the lane is over before there is some."""
        with self._changed:
            while not self._has_room(size):
                if self.over.is_set():
                    raise PeerLost("this side ended it")
                self._changed.wait(FORGOTTEN_SECONDS)
            self._scratch += max(size, LEAST_SHARE)
        return self.lanes.buffers.take(size)

    def _has_room(self, size: int) -> bool:
        while self.forgotten:
            self.put_scratch(self.forgotten.popleft(), reuse=False)
        return self._scratch + max(size, LEAST_SHARE) <= SCRATCH_BYTES

    def put_scratch(self, memory: memoryview, *, reuse: bool = True) -> None:
        """It is not used any more; without `reuse`, somebody may still look at it."""
        self.lanes.buffers.put(memory, reuse=reuse)
        with self._changed:
            self._scratch -= max(len(memory), LEAST_SHARE)
            self._changed.notify_all()


class _Connection(threading.Thread):
    """One connection of a lane, and the thread that reads it.

    Args:
        dialled: address and token, if this side dials.
    """

    def __init__(
        self, lane: Lane, connection: socket.socket, keys: Keys, dialled: tuple[Address, bytes] | None
    ) -> None:
        super().__init__(name="shoal-lane", daemon=True)
        self._lane, self._lanes, self._socket, self._dialled = lane, lane.lanes, connection, dialled
        forks.close_in_children(connection)
        self.fd = connection.fileno()
        self._sealer, self._opener = Sealer(keys.suite, keys.sealing), Opener(keys.suite, keys.opening)
        self.sending = threading.Lock()
        self._sealed = self._unsent = memoryview(b"")  # the frame that is being sent, and what of it is left

    # -- the reader's thread

    def run(self) -> None:
        reason = "its reader failed"
        try:
            self._open()
            self._lane.confirmed(self)
            self._read()
        except BlockingIOError:  # what the kernel says after the time that it was given
            reason = "the other side did not answer in time"
        except (OSError, P2PError) as error:
            reason = str(error)
        finally:
            self._lane.ended(self, reason)

    def _open(self) -> None:
        """Show both sides that the other has the keys."""
        self._set_up()
        self._set_times(OPENING_SECONDS, OPENING_SECONDS)
        if self._dialled is not None:
            address, token = self._dialled
            self._socket.connect(address)
            if self._lane.over.is_set():  # since before there was anything to shut down
                raise PeerLost("this side ended it")
            self._greet(token)
        sealed = memoryview(bytearray(SEALED_HEADER_BYTES))
        self._receive(sealed, time.monotonic() + OPENING_SECONDS)
        if self._opener.header(sealed) != _HELLO:
            raise BrokenFrame("the first frame is no hello")
        if self._dialled is None:
            self._greet(b"")
        congestion.suit(self._socket)
        self._set_times(0, TURN_SECONDS)

    def _greet(self, token: bytes) -> None:
        sealed = memoryview(bytearray(sealed_bytes(0)))
        self._sealer.seal(_HELLO, memoryview(b""), sealed)
        self._socket.sendall(token + sealed)

    def _set_up(self) -> None:
        self._socket.setblocking(True)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # No TCP_USER_TIMEOUT: a process whose GIL is held for long takes no bytes, and is not lost. The link knows of a
        # machine that is gone. This keeps routers from forgetting the connection.
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            self._socket.setsockopt(socket.IPPROTO_TCP, option, value)
        if self._lanes.download.rate is not None:  # what the kernel takes ahead of us is beyond the limit
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * self._lanes.download.piece)

    def _set_times(self, receive: float, send: float) -> None:
        """For how long the kernel waits in one call; 0 for ever. (A time-out of Python's would mean more calls.)"""
        for option, seconds in ((socket.SO_RCVTIMEO, receive), (socket.SO_SNDTIMEO, send)):
            self._socket.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(seconds), int(seconds % 1 * 1e6)))

    def _receive(self, memory: memoryview, deadline: float = float("inf")) -> None:
        limit = self._lanes.download
        while memory:
            got = self._socket.recv_into(memory[: limit.piece], 0, socket.MSG_WAITALL)
            if not got:
                raise PeerLost("the other side ended it")
            if got < len(memory) and time.monotonic() > deadline:
                raise PeerLost("the other side took too long")
            memory = memory[got:]
            if wait := limit.charge(got):
                self._lane.over.wait(wait)

    def _read(self) -> None:
        sealed_header = memoryview(bytearray(SEALED_HEADER_BYTES))
        while True:
            self._receive(sealed_header)
            header = self._opener.header(sealed_header)
            if not header.size:
                raise BrokenFrame("a chunk without bytes")
            sealed = self._lanes.buffers.take(header.size + TAG_BYTES)
            try:
                self._receive(sealed)
                arrival = self._placed(header, sealed)
            finally:
                self._lanes.buffers.put(sealed)
            self._lanes.on_arrival(arrival)
            del arrival

    def _placed(self, header: Header, sealed: memoryview) -> Arrival:
        """Open a payload where it belongs."""
        target = self._lanes.leases.lease(header.name, self._lane.peer, header.size)
        if target is None:
            arrival = Arrival(self._lane, header.message, self._lane.take_scratch(header.size), None)
            self._opener.payload(sealed, arrival.memory)
            return arrival
        filled = False
        try:
            self._opener.payload(sealed, target.memory)
            filled = True
        finally:
            self._lanes.leases.give_back(target, filled)
        return Arrival(self._lane, header.message, target.memory, target)

    # -- a writer's thread

    def turn(self) -> bool:
        """Send some of the next frame, for TURN_SECONDS at most; returns whether there is more to send."""
        limit, sent = self._lanes.upload, 0
        with self.sending:
            try:
                if not self._unsent:
                    self._seal()
                if self._unsent:
                    sent = self._socket.send(self._unsent[: limit.piece])
            except BlockingIOError:
                pass
            except (OSError, NoMemory):
                self.shut()
                return False
            self._unsent = self._unsent[sent:]
            more = bool(self._unsent)
            if sent and not more:
                self._lanes.buffers.put(self._sealed)
        if sent and (wait := limit.charge(sent)):
            self._lane.over.wait(wait)
        return more or self._lane.has_more(self)

    def _seal(self) -> None:
        frame = self._lane.next_frame()
        if frame is None:
            return
        try:
            sealed = self._lanes.buffers.take(sealed_bytes(frame.header.size))
            self._sealer.seal(frame.header, frame.memory, sealed)
            self._sealed = self._unsent = sealed
        finally:
            frame.when_free()

    # -- the end

    def shut(self) -> None:
        """Let both threads know that it is over; what has arrived can still be read."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Nobody uses it any more."""
        self._lanes.writers.remove(self.fd)
        if self._unsent:
            self._lanes.buffers.put(self._sealed)
        self._socket.close()


_all: WeakSet[Lanes] = WeakSet()


def _close_all() -> None:
    for lanes in list(_all):
        lanes.close()


atexit.register(_close_all)

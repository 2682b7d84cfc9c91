"""Lanes: sealed TCP connections beside a link, for chunks of tensors.

Each connection has a thread that reads and one that writes. They run sockets and ciphers only, each call for a whole
chunk: Python takes the GIL a few times per chunk, however large it is.
"""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Final, NamedTuple

from shoal.p2p import congestion, forks, tcp
from shoal.p2p.buffers import ASK_AGAIN, Buffers
from shoal.p2p.errors import MessageTooLarge, P2PError, PeerLost
from shoal.p2p.identity import PeerID
from shoal.p2p.leases import Leases
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

MAX_CONNECTIONS: Final = 4
QUEUE_BYTES: Final = 128 << 20  # that wait to be sealed; more than a peer that keeps the rules can be owed
SCRATCH_BYTES: Final = 6 * MAX_PAYLOAD_BYTES  # of one lane, that came without a target and are still referred to
LEAST_SHARE: Final = 64 << 10  # of that, for each chunk
MEMORY_BYTES: Final = 4 << 30  # of all lanes: chunks under way, and scratch
OPENING_SECONDS: Final = 60.0  # a process may stand still for longer than it takes to open one
PATIENCE: Final = 10.0  # seconds in which, of a chunk under way,
LEAST_BYTES: Final = 64 << 10  # so many must pass while others wait for memory
_HELLO: Final = Header(0, bytes(NAME_BYTES), b"shoal lane 1")
_GOODBYE: Final = Header(0, bytes(NAME_BYTES), b"shoal lane over")
_PATIENCE = struct.Struct("ll")  # struct timeval

Address = tuple[str, int] | tuple[str, int, int, int]


@dataclass
class Shared:
    """What all lanes of a peer share: the memory that waits for chunks, the memory of those under way, and what may
    pass per second."""

    leases: Leases
    upload: Limit
    download: Limit
    buffers: Buffers = field(default_factory=lambda: Buffers(MEMORY_BYTES))


class _Chunk(NamedTuple):
    header: Header
    memory: memoryview


class Lane:
    """1 to 4 connections to one peer, over which chunks pass both ways; of several, in any order. If one ends, all do.

    Any thread may call any method. The callbacks are called in the lane's threads and must not wait.

    Args:
        peer: who is at the other end.
        shared: see there.
        on_chunk: called with a chunk's message, and its memory: that of a target (the same memoryview), or scratch,
            which is this chunk's as long as it is referred to.
        on_over: called with a reason when the lane is over, whoever ended it, once: after everything that had come.
        on_opened: called with "" when a connection has opened, or with the reason when it has ended before that: then
            the lane goes on without it.

    Attributes:
        over: set when the lane has ended, or is about to.
        leaving: whether another lane takes its place.
        passed: whether a chunk has passed, either way.
    """

    def __init__(
        self,
        peer: PeerID,
        shared: Shared,
        on_chunk: Callable[[bytes, memoryview], None],
        on_over: Callable[[str], None],
        on_opened: Callable[[str], None],
    ) -> None:
        self.peer, self.shared, self.on_chunk, self.on_opened = peer, shared, on_chunk, on_opened
        self.over, self.passed = threading.Event(), False
        self._finishing = self.leaving = False
        self._on_over = on_over
        self._changed = threading.Condition()  # and the lock of what follows
        self._reason, self._told = "", False
        self._connections: list[_Connection] = []
        self._readers: list[threading.Thread] = []
        self._queue: deque[_Chunk] = deque()
        self._queued = 0  # bytes
        self._sealing: list[_Chunk] = []
        self._taking = threading.Lock()
        self._scratch = SCRATCH_BYTES  # that is left; what comes back does so in any thread, in the middle of anything
        self._back: queue.SimpleQueue[int] = queue.SimpleQueue()

    # -- connections

    def dial(self, where: Address | socket.socket, token: bytes, keys: Keys) -> None:
        """Add a connection to that address, where `token` is known; or one that leads there already."""
        if isinstance(where, socket.socket):
            return self._add(_Connection(self, where, keys, (None, token)))
        family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
        self._add(_Connection(self, socket.socket(family, socket.SOCK_STREAM), keys, (where, token)))

    def accept(self, accepted: socket.socket, keys: Keys) -> None:
        """Add a connection that came with a token for this lane, which was read."""
        self._add(_Connection(self, accepted, keys, None))

    def _add(self, connection: _Connection) -> None:
        with self._changed:
            if self.over.is_set() or len(self._connections) == MAX_CONNECTIONS:
                return connection.socket.close()
            try:
                connection.reader.start()
            except RuntimeError as error:  # there are as many threads as there may be
                connection.socket.close()
                return self.end(str(error))
            self._connections.append(connection)
            self._readers.append(connection.reader)

    def end(self, reason: str = "this side ended it") -> None:
        """End the lane. What had come is still delivered, in the threads that read."""
        with self._changed:
            if not self.over.is_set():
                self.over.set()
                self._reason = reason
                for connection in self._connections:
                    connection.shut()
                self._queue.clear()
                self._back.put(0)  # who waits for scratch looks up
                self._changed.notify_all()
        self._tell()

    def finish(self) -> None:
        """End the lane when what is queued has left."""
        with self._changed:
            self._finishing = True
            self._changed.notify_all()
            nothing = not self._connections
        if nothing:
            self.end("" if self.leaving else "this side ended it")

    def leave(self) -> list[_Chunk]:
        """Another lane takes the place of this one: returns what is queued, and sends nothing more. What the other side
        has sent still comes."""
        with self._changed:
            self.leaving = True
            left = list(self._queue)
            self._queue.clear()
            self._queued = 0
            return left

    def part(self) -> None:
        """The other side has left this lane as well: say goodbye over each connection. When the other side has, too,
        all has come, and the lane is over, with "" for a reason."""
        self.finish()

    def ended(self, connection: _Connection, why_not: str) -> None:
        """This connection has ended, and what came over it was delivered, or it has never opened."""
        with self._changed:
            self._connections.remove(connection)
            connection.socket.close()
            if self.leaving and self._finishing and not self._connections and not self.over.is_set():
                self.over.set()
        if why_not:
            self.on_opened(why_not)
        self._tell()

    def _tell(self) -> None:
        with self._changed:
            if self._connections or self._told or not self.over.is_set():
                return
            self._told = True
        self._on_over(self._reason)

    def join(self) -> None:
        """Wait for the threads of a lane that was ended."""
        for reader in self._readers:
            reader.join()

    @property
    def connections(self) -> int:
        """How many there are."""
        return len(self._connections)

    @property
    def moved(self) -> int:
        """Bytes that have passed, both ways: also while one chunk takes long."""
        with self._changed:
            return sum(sum(tcp.counts(connection.socket)) for connection in self._connections)

    @property
    def delivered(self) -> tuple[int, float]:
        """See `Transport.delivered`. All connections are in use at the same time."""
        with self._changed:
            flows = [tcp.delivered(connection.socket) for connection in self._connections]
        return sum(nbytes for nbytes, _ in flows), max((seconds for _, seconds in flows), default=0.0)

    # -- sending

    def send(self, name: bytes, message: bytes, memory: memoryview) -> bool:
        """Queue a chunk; never waits. Where it is opened to, the other side says by `name`. Returns False, and does
        nothing, if QUEUE_BYTES are queued. Nothing happens if the lane is over.

        `memory` must not be written before the chunk was sent or `cancel` has returned.

        Raises MessageTooLarge for more than 4 MiB, nothing, or a longer message than MAX_MESSAGE_BYTES.
        """
        memory = memory.cast("B")
        if not 0 < len(memory) <= MAX_PAYLOAD_BYTES or len(message) > MAX_MESSAGE_BYTES or len(name) != NAME_BYTES:
            raise MessageTooLarge(f"a chunk of {len(memory)} bytes, a message of {len(message)} breaks the bounds")
        with self._changed:
            if self.over.is_set():
                return True
            if self._queued + len(memory) > QUEUE_BYTES:
                return False
            self._queue.append(_Chunk(Header(len(memory), name, message), memory))
            self._queued += len(memory)
            self._changed.notify_all()
        return True

    def cancel(self, prefix: bytes) -> None:
        """Do not send the queued chunks whose names begin so. Waits for those that are being sealed (milliseconds):
        afterwards nobody reads their memory."""
        with self._changed:
            self._queue = deque(chunk for chunk in self._queue if not chunk.header.name.startswith(prefix))
            self._queued = sum(len(chunk.memory) for chunk in self._queue)
            self._changed.wait_for(lambda: not any(c.header.name.startswith(prefix) for c in self._sealing))

    def next_chunk(self) -> tuple[_Chunk, memoryview] | None:
        """What is sealed now, until it was `sealed`, and memory for that. Waits; None if there will be nothing more."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._queue or self._finishing or self.over.is_set())
                if self.over.is_set() or not self._queue:
                    return None
                memory = self.shared.buffers.take(sealed_bytes(self._queue[0].header.size))
                if memory is not None:
                    break
                self._changed.wait(ASK_AGAIN)
            chunk = self._queue.popleft()
            self._queued -= len(chunk.memory)
            self._sealing.append(chunk)
            return chunk, memory

    def sealed(self, chunk: _Chunk) -> None:
        """Its memory is not needed any more."""
        with self._changed:
            self._sealing = [other for other in self._sealing if other is not chunk]
            self._changed.notify_all()

    # -- receiving

    def memory(self, size: int) -> memoryview:
        """Memory for a chunk under way. Waits for it; raises PeerLost if the lane is over before there is some."""
        while (memory := self.shared.buffers.take(size)) is None:
            if self.over.wait(ASK_AGAIN):
                raise PeerLost("this side ended it")
        return memory

    def keep(self, memory: memoryview) -> None:
        """Count it as scratch until nobody refers to it. Waits while the peer's share is used up: a peer that keeps to
        its window never comes so far. Raises PeerLost if the lane is over before that."""
        share = max(len(memory), LEAST_SHARE)
        with self._taking:
            while self._scratch < share and not self.over.is_set():
                self._scratch += self._back.get()
            if self.over.is_set():
                self._back.put(0)  # for the next one
                raise PeerLost("this side ended it")
            self._scratch -= share
        weakref.finalize(memory.obj, self._back.put, share).atexit = False


class _Connection:
    """One connection of a lane, and its two threads.

    Args:
        dialled: if this side dials: the address, None where it is connected already, and the token.
    """

    def __init__(
        self, lane: Lane, connection: socket.socket, keys: Keys, dialled: tuple[Address | None, bytes] | None
    ) -> None:
        self.socket = connection
        self.reader = threading.Thread(target=self._run, name="shoal-lane-in", daemon=True)
        self._lane, self._shared, self._dialled = lane, lane.shared, dialled
        self._sealer, self._opener = Sealer(keys.suite, keys.sealing), Opener(keys.suite, keys.opening)
        forks.close_in_children(connection)

    def shut(self, how: int = socket.SHUT_RDWR) -> None:
        """Let both threads know that it is over; what has come can still be read."""
        with suppress(OSError):
            self.socket.shutdown(how)

    # -- the reader's thread

    def _run(self) -> None:
        writer = threading.Thread(target=self._write, name="shoal-lane-out", daemon=True)
        opened, parted, reason = False, False, "its thread failed"
        try:
            self._open()
            opened = True
            self._lane.on_opened("")
            writer.start()
            self._read()
            parted = True
        except BlockingIOError:  # what the kernel says after the time that it was given
            reason = "the other side did not answer in time"
        except (OSError, P2PError, RuntimeError) as error:  # the last one if the writer can't be started
            reason = str(error) or reason
        finally:
            if opened and not parted:
                self._lane.end(reason)
            if writer.ident is not None:
                writer.join()
            self._lane.ended(self, "" if opened else reason)

    def _open(self) -> None:
        """Show both sides that the other has the keys."""
        self.socket.setblocking(True)
        tcp.prepare(self.socket, keepalive=30)  # the link knows of a machine that is gone
        if self._shared.download.rate is not None:  # what the kernel takes ahead of us is beyond the limit
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * self._shared.download.piece)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # (A time-out of Python's would mean more calls.)
            self.socket.setsockopt(socket.SOL_SOCKET, option, _PATIENCE.pack(int(PATIENCE), int(PATIENCE % 1 * 1e6)))
        if self._dialled is not None:
            address, token = self._dialled
            connect = [partial(self.socket.connect, address)] if address is not None else []
            for step in (*connect, partial(self._say_hello, token)):
                if self._lane.over.is_set():  # since before there was anything to shut down
                    raise PeerLost("this side ended it")
                step()
        sealed = memoryview(bytearray(SEALED_HEADER_BYTES))
        self._receive(sealed, time.monotonic() + OPENING_SECONDS)
        if self._opener.header(sealed) != _HELLO:
            raise BrokenFrame("the first frame is no hello")
        if self._dialled is None:
            self._say_hello()
        congestion.suit(self.socket)

    def _sealed(self, what: Header) -> memoryview:
        sealed = memoryview(bytearray(sealed_bytes(0)))
        self._sealer.seal(what, memoryview(b""), sealed)
        return sealed

    def _say_hello(self, token: bytes = b"") -> None:
        self.socket.sendall(token + self._sealed(_HELLO))

    def _receive(self, memory: memoryview, deadline: float = float("inf"), *, borrowed: bool = False) -> None:
        while memory:
            piece = memory[: self._shared.download.piece]
            got = 0
            with suppress(BlockingIOError):  # in PATIENCE nothing has come
                got = self.socket.recv_into(piece, 0, socket.MSG_WAITALL)
                if not got:
                    raise PeerLost("the other side ended it")
            if got < len(piece) and time.monotonic() > deadline:
                raise PeerLost("the other side took too long")
            memory = memory[got:]
            self._passed(self._shared.download, got, piece, borrowed)

    def _read(self) -> None:
        sealed_header = memoryview(bytearray(SEALED_HEADER_BYTES))
        while True:
            self._receive(sealed_header)
            header = self._opener.header(sealed_header)
            if header == _GOODBYE and self._lane.leaving:
                return
            if not header.size:
                raise BrokenFrame("a chunk without bytes")
            sealed = self._lane.memory(header.size + TAG_BYTES)
            self._receive(sealed, borrowed=True)
            memory = self._opened(header, sealed)
            self._lane.passed = True
            self._lane.on_chunk(header.message, memory)
            del sealed, memory

    def _opened(self, header: Header, sealed: memoryview) -> memoryview:
        """Open a payload where it belongs."""
        target = self._shared.leases.lease(header.name, self._lane.peer, header.size)
        if target is None:
            memory = sealed[: header.size]
            self._lane.keep(memory)
            self._opener.payload(sealed, memory)  # in place
            return memory
        filled = False
        try:
            self._opener.payload(sealed, target.memory)
            filled = True
        finally:
            self._shared.leases.give_back(target, filled)
        return target.memory

    # -- the writer's thread

    def _write(self) -> None:
        try:
            while (following := self._lane.next_chunk()) is not None:
                chunk, sealed = following
                try:
                    self._sealer.seal(chunk.header, chunk.memory, sealed)
                finally:
                    self._lane.sealed(chunk)
                del chunk, following
                self._send(sealed, borrowed=True)
                self._lane.passed = True
                del sealed
            if self._lane.leaving and not self._lane.over.is_set():
                self._send(self._sealed(_GOODBYE))
        except P2PError as error:
            self._lane.end(str(error))
        except OSError:  # the reader says why
            pass
        finally:
            # Who has said goodbye still hears.
            self.shut(socket.SHUT_WR if self._lane.leaving and not self._lane.over.is_set() else socket.SHUT_RDWR)

    def _send(self, sealed: memoryview, *, borrowed: bool = False) -> None:
        while sealed:
            piece = sealed[: self._shared.upload.piece]
            sent = 0
            with suppress(BlockingIOError):  # in PATIENCE nothing has left
                sent = self.socket.send(piece)
            sealed = sealed[sent:]
            self._passed(self._shared.upload, sent, piece, borrowed)

    def _passed(self, limit: Limit, nbytes: int, piece: memoryview, borrowed: bool) -> None:
        """So much of a piece has passed; less than all of it in PATIENCE."""
        if borrowed and nbytes < min(len(piece), LEAST_BYTES) and self._shared.buffers.is_missed:
            raise PeerLost("it moved too slowly while others waited for memory")
        if wait := limit.charge(nbytes):
            self._lane.over.wait(wait)

"""Lanes: sealed TCP connections beside a link, for chunks of tensors.

Each connection has one thread that reads and one that writes. They run only sockets and ciphers, with one call for a
whole chunk. So Python takes the GIL a few times per chunk, however large the chunk is.
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
from functools import partial
from typing import Final, NamedTuple

from shoal.p2p import congestion, forks, sealing, tcp
from shoal.p2p.buffers import ASK_AGAIN
from shoal.p2p.errors import MessageTooLarge, P2PError, PeerLost
from shoal.p2p.identity import PeerID
from shoal.p2p.limit import Limit
from shoal.p2p.sealing import BrokenFrame, Header, LaneKeys, Opener, Sealer
from shoal.p2p.shared import Shared

MAX_CONNECTIONS: Final = 4
# bytes that wait to be sealed; more than this peer ever owes to one that follows the protocol
QUEUE_BYTES: Final = 128 << 20
# of one lane: bytes that came without a target and are still referred to
SCRATCH_BYTES: Final = 6 * sealing.MAX_PAYLOAD_BYTES
LEAST_SHARE: Final = 64 << 10  # of these bytes, the least that each chunk counts
OPENING_SECONDS: Final = 60.0  # generous, because a process may be stopped for a while
PATIENCE: Final = 10.0  # while others wait for memory, a chunk under way must move in this many seconds
LEAST_BYTES: Final = 64 << 10  # at least this many bytes
_HELLO: Final = Header(0, bytes(sealing.NAME_BYTES), b"shoal lane 1")
_GOODBYE: Final = Header(0, bytes(sealing.NAME_BYTES), b"shoal lane over")
_PATIENCE = struct.Struct("ll")  # struct timeval

Address = tuple[str, int] | tuple[str, int, int, int]


class _Chunk(NamedTuple):
    header: Header
    memory: memoryview


class Lane:
    """1 to 4 connections to one peer. Chunks pass over them in both directions; over several connections, in any order.
    If one connection ends, all end.

    Any thread may call any method. The callbacks are called on the lane's threads and must not wait.

    Args:
        peer: the peer at the other end.
        shared: the resources that all lanes share.
        on_chunk: called with a chunk's message and its memory. The memory is that of a target (the same memoryview), or
            scratch, which belongs to this chunk as long as somebody refers to it.
        on_over: called once with the reason when the lane is over, whichever side ended it, after all chunks that had
            come.
        on_opened: called with "" when a connection has opened, or with the reason if it ended before that. Then the
            lane goes on without it.

    Attributes:
        over: set when the lane has ended, or is about to end.
        leaving: whether another lane replaces this one.
        passed: whether a chunk has passed, in either direction.
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
        self._changed = threading.Condition()  # also the lock of the next attributes
        self._reason, self._told = "", False
        self._connections: list[_Connection] = []
        self._readers: list[threading.Thread] = []
        self._queue: deque[_Chunk] = deque()
        self._queued = 0  # bytes
        self._sealing: list[_Chunk] = []
        self._taking = threading.Lock()
        # the bytes left; returned bytes go to `_back`, because they return on any thread at any moment
        self._scratch = SCRATCH_BYTES
        self._back: queue.SimpleQueue[int] = queue.SimpleQueue()

    # -- connections

    def dial(self, where: Address | socket.socket, token: bytes, keys: LaneKeys) -> None:
        """Add a connection to that address, where `token` is known. `where` may also be a connection that leads there
        already.
        """
        if isinstance(where, socket.socket):
            return self._add(_Connection(self, where, keys, (None, token)))
        family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
        self._add(_Connection(self, socket.socket(family, socket.SOCK_STREAM), keys, (where, token)))

    def accept(self, accepted: socket.socket, keys: LaneKeys) -> None:
        """Add a connection that began with a token for this lane. The token has been read already."""
        self._add(_Connection(self, accepted, keys, None))

    def _add(self, connection: _Connection) -> None:
        with self._changed:
            if self.over.is_set() or len(self._connections) == MAX_CONNECTIONS:
                return connection.socket.close()
            try:
                connection.reader.start()
            except RuntimeError as error:  # no more threads can be started
                connection.socket.close()
                return self.end(str(error))
            self._connections.append(connection)
            self._readers.append(connection.reader)

    def end(self, reason: str = "this side ended it") -> None:
        """End the lane. Chunks that had come are still delivered, on the threads that read."""
        with self._changed:
            if not self.over.is_set():
                self.over.set()
                self._reason = reason
                for connection in self._connections:
                    connection.shut()
                self._queue.clear()
                self._back.put(0)  # wakes a thread that waits for scratch
                self._changed.notify_all()
        self._tell()

    def finish(self) -> None:
        """End the lane when all queued chunks have been sent.

        If both sides have left the lane, send a goodbye over each connection. When the other side has done so too, all
        chunks have come. Then the lane is over, with the reason "".
        """
        with self._changed:
            self._finishing = True
            self._changed.notify_all()
            nothing = not self._connections
        if nothing:
            self.end("" if self.leaving else "this side ended it")

    def leave(self) -> list[_Chunk]:
        """Another lane replaces this one. Returns the queued chunks, and sends no more. Chunks of the other side still
        come.
        """
        with self._changed:
            self.leaving = True
            left = list(self._queue)
            self._queue.clear()
            self._queued = 0
            return left

    def ended(self, connection: _Connection, why_not: str) -> None:
        """This connection has ended, after its chunks were delivered; or it has never opened."""
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
        """Wait for the threads of a lane that has been ended."""
        for reader in self._readers:
            reader.join()

    @property
    def connections(self) -> int:
        """The number of connections."""
        return len(self._connections)

    @property
    def moved(self) -> int:
        """The bytes that have passed, in both directions. The number also grows while one large chunk is under way."""
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
        """Queue a chunk; never waits. By `name`, the other side knows into which memory to open it.

        Returns False, and does nothing, if QUEUE_BYTES are queued. If the lane is over, the chunk is dropped. `memory`
        must not be written until the chunk was sent or `cancel` has returned.

        Raises:
            MessageTooLarge: if the chunk is empty or larger than 4 MiB, or if the message is longer than
                MAX_MESSAGE_BYTES.
        """
        memory = memory.cast("B")
        if (
            not 0 < len(memory) <= sealing.MAX_PAYLOAD_BYTES
            or len(message) > sealing.MAX_MESSAGE_BYTES
            or len(name) != sealing.NAME_BYTES
        ):
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
        """Drop the queued chunks whose names begin with `prefix`. Waits for chunks that are being sealed
        (milliseconds). Afterwards nobody reads their memory.
        """
        with self._changed:
            self._queue = deque(chunk for chunk in self._queue if not chunk.header.name.startswith(prefix))
            self._queued = sum(len(chunk.memory) for chunk in self._queue)
            self._changed.wait_for(lambda: not any(c.header.name.startswith(prefix) for c in self._sealing))

    def next_chunk(self) -> tuple[_Chunk, memoryview] | None:
        """The next chunk to seal, and memory for its frame. Call `sealed` afterwards. Waits; returns None if no more
        chunks will come.
        """
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._queue or self._finishing or self.over.is_set())
                if self.over.is_set() or not self._queue:
                    return None
                memory = self.shared.buffers.take(sealing.sealed_bytes(self._queue[0].header.size))
                if memory is not None:
                    break
                self._changed.wait(ASK_AGAIN)
            chunk = self._queue.popleft()
            self._queued -= len(chunk.memory)
            self._sealing.append(chunk)
            return chunk, memory

    def sealed(self, chunk: _Chunk) -> None:
        """The chunk is sealed, so its memory is no longer needed."""
        with self._changed:
            self._sealing = [other for other in self._sealing if other is not chunk]
            self._changed.notify_all()

    # -- receiving

    def memory(self, size: int) -> memoryview:
        """Memory for a chunk under way. Waits for it; raises PeerLost if the lane is over first."""
        while (memory := self.shared.buffers.take(size)) is None:
            if self.over.wait(ASK_AGAIN):
                raise PeerLost("this side ended it")
        return memory

    def keep(self, memory: memoryview) -> None:
        """Count this memory as scratch until nobody refers to it.

        Waits while the peer's share is used up, which never happens to a peer that keeps to its window. Raises PeerLost
        if the lane is over first.
        """
        share = max(len(memory), LEAST_SHARE)
        with self._taking:
            while self._scratch < share and not self.over.is_set():
                self._scratch += self._back.get()
            if self.over.is_set():
                self._back.put(0)  # for the next waiting thread
                raise PeerLost("this side ended it")
            self._scratch -= share
        weakref.finalize(memory.obj, self._back.put, share).atexit = False


class _Connection:
    """One connection of a lane, and its two threads.

    Args:
        dialled: if this side dials: the address (None if the socket is connected already), and the token.
    """

    def __init__(
        self, lane: Lane, connection: socket.socket, keys: LaneKeys, dialled: tuple[Address | None, bytes] | None
    ) -> None:
        self.socket = connection
        self.reader = threading.Thread(target=self._run, name="shoal-lane-in", daemon=True)
        self._lane, self._shared, self._dialled = lane, lane.shared, dialled
        self._sealer, self._opener = Sealer(keys.suite, keys.sealing), Opener(keys.suite, keys.opening)
        forks.close_in_children(connection)

    def shut(self, how: int = socket.SHUT_RDWR) -> None:
        """Tell both threads that the connection is over. Bytes that have come can still be read."""
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
        except BlockingIOError:  # the kernel raises this when its timeout is over
            reason = "the other side did not answer in time"
        except (OSError, P2PError, RuntimeError) as error:  # RuntimeError if the writer can't be started
            reason = str(error) or reason
        finally:
            if opened and not parted:
                self._lane.end(reason)
            if writer.ident is not None:
                writer.join()
            self._lane.ended(self, "" if opened else reason)

    def _open(self) -> None:
        """Prove to both sides that the other one has the keys."""
        self.socket.setblocking(True)
        tcp.prepare(self.socket, keepalive=30)  # the link notices a machine that is gone
        if self._shared.download.rate is not None:  # bytes that the kernel takes in advance are not limited
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * self._shared.download.piece)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # (A timeout in Python would need more system calls.)
            self.socket.setsockopt(socket.SOL_SOCKET, option, _PATIENCE.pack(int(PATIENCE), int(PATIENCE % 1 * 1e6)))
        if self._dialled is not None:
            address, token = self._dialled
            connect = [partial(self.socket.connect, address)] if address is not None else []
            for step in (*connect, partial(self._say_hello, token)):
                if self._lane.over.is_set():  # the lane ended before there was a connection to shut down
                    raise PeerLost("this side ended it")
                step()
        sealed = memoryview(bytearray(sealing.SEALED_HEADER_BYTES))
        self._receive(sealed, time.monotonic() + OPENING_SECONDS)
        if self._opener.header(sealed) != _HELLO:
            raise BrokenFrame("the first frame is no hello")
        if self._dialled is None:
            self._say_hello()
        congestion.suit(self.socket)

    def _sealed(self, what: Header) -> memoryview:
        sealed = memoryview(bytearray(sealing.sealed_bytes(0)))
        self._sealer.seal(what, memoryview(b""), sealed)
        return sealed

    def _say_hello(self, token: bytes = b"") -> None:
        self.socket.sendall(token + self._sealed(_HELLO))

    def _receive(self, memory: memoryview, deadline: float = float("inf"), *, borrowed: bool = False) -> None:
        while memory:
            piece = memory[: self._shared.download.piece]
            got = 0
            with suppress(BlockingIOError):  # nothing has come within PATIENCE
                got = self.socket.recv_into(piece, 0, socket.MSG_WAITALL)
                if not got:
                    raise PeerLost("the other side ended it")
            if got < len(piece) and time.monotonic() > deadline:
                raise PeerLost("the other side took too long")
            memory = memory[got:]
            self._passed(self._shared.download, got, piece, borrowed)

    def _read(self) -> None:
        sealed_header = memoryview(bytearray(sealing.SEALED_HEADER_BYTES))
        while True:
            self._receive(sealed_header)
            header = self._opener.header(sealed_header)
            if header == _GOODBYE and self._lane.leaving:
                return
            if not header.size:
                raise BrokenFrame("a chunk without bytes")
            sealed = self._lane.memory(header.size + sealing.TAG_BYTES)
            self._receive(sealed, borrowed=True)
            memory = self._opened(header, sealed)
            self._lane.passed = True
            self._lane.on_chunk(header.message, memory)
            del sealed, memory

    def _opened(self, header: Header, sealed: memoryview) -> memoryview:
        """Open a payload into the memory to which it belongs."""
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
        except OSError:  # the reader reports the reason
            pass
        finally:
            # After its goodbye, this side still reads.
            self.shut(socket.SHUT_WR if self._lane.leaving and not self._lane.over.is_set() else socket.SHUT_RDWR)

    def _send(self, sealed: memoryview, *, borrowed: bool = False) -> None:
        while sealed:
            piece = sealed[: self._shared.upload.piece]
            sent = 0
            with suppress(BlockingIOError):  # nothing has left within PATIENCE
                sent = self.socket.send(piece)
            sealed = sealed[sent:]
            self._passed(self._shared.upload, sent, piece, borrowed)

    def _passed(self, limit: Limit, nbytes: int, piece: memoryview, borrowed: bool) -> None:
        """This many bytes of a piece have passed. If they are less than the piece, that took PATIENCE."""
        if borrowed and nbytes < min(len(piece), LEAST_BYTES) and self._shared.buffers.is_missed:
            raise PeerLost("it moved too slowly while others waited for memory")
        if wait := limit.charge(nbytes):
            self._lane.over.wait(wait)

"""The bytes of a link on their way to the kernel."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from shoal.p2p import tcp
from shoal.p2p.limit import Limit

QUEUE_BYTES = 128 << 20  # bytes that wait for one peer; more than this peer ever owes to one that follows the protocol


class Outgoing:
    """Gives the kernel what TLS has encrypted, as fast as the kernel and the limit allow.

    Args:
        connection: the socket.
        limit: the limit of upload.
        on_full: called with the reason when QUEUE_BYTES wait.

    Attributes:
        sealed: TLS writes here. Call `flush` afterwards.
        deaf: whether sending has failed: the other side receives no more.
    """

    def __init__(self, connection: socket.socket, limit: Limit, on_full: Callable[[str], None]) -> None:
        self.sealed, self.deaf = ssl.MemoryBIO(), False
        self._socket, self._limit, self._on_full = connection, limit, on_full
        self._loop = asyncio.get_running_loop()
        self._queued = 0  # bytes, since the beginning
        self._unsent = bytearray()  # sealed bytes that the kernel has not taken
        self._sent_at = self._loop.time()  # when the kernel last took bytes
        self._paying = False  # whether it waits because of the limit
        self._finishing = False

    def flush(self) -> None:
        """Gives the kernel as many bytes as it has room for."""
        watched, sealed = bool(self._unsent), self.sealed.read()
        self._queued += len(sealed)
        self._unsent += sealed
        if len(self._unsent) > QUEUE_BYTES:
            return self._on_full("its queue is full")
        try:
            if self._unsent and not self._paying:
                # Both views are released here, even if a profiler in another thread holds on to them.
                with memoryview(self._unsent) as unsent, unsent[: self._limit.piece] as piece:
                    number = self._socket.send(piece)
                del self._unsent[:number]
                self._sent_at = self._loop.time()
                if wait := self._limit.charge(number, urgent=True):
                    self._paying = True
                    self._loop.call_later(wait, self._paid)
        except BlockingIOError:
            pass
        except OSError:
            # Bytes that arrived before must still be read, and then the end of the connection.
            self.deaf = True
            self._unsent.clear()
        if self._unsent and not self._paying:
            return self._loop.add_writer(self._socket, self.flush)
        if watched:
            self._loop.remove_writer(self._socket)
        if self._finishing and not self._unsent:
            with suppress(OSError):  # it has ended; the next read finds that
                self._socket.shutdown(socket.SHUT_WR)

    def _paid(self) -> None:
        self._paying = False
        self.flush()

    def finish(self) -> None:
        """Says goodbye when all bytes are sent."""
        self._finishing = True
        self.flush()

    def drop(self) -> None:
        """Drops all bytes. The socket is about to be closed."""
        self._loop.remove_writer(self._socket)
        self._unsent.clear()
        del self._on_full  # a reference back

    def queued(self, seconds: float = 0.0) -> int:
        """The number of queued bytes, if the kernel has taken none of them for `seconds`; else 0."""
        return len(self._unsent) if self._loop.time() - self._sent_at >= seconds else 0

    def under_way(self) -> int:
        """The number of bytes that were queued and that the other side has not acknowledged."""
        return max(0, self._queued - tcp.counts(self._socket)[0])

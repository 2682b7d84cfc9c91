"""The ZeroMQ context that all transports on one loop share, and the handler that tells them who dialled."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import ClassVar
from weakref import WeakKeyDictionary

import zmq

from shoal.p2p.allocator import keep_freed_buffers

log = logging.getLogger(__name__)

IO_THREADS = 2
MAX_SOCKETS = 8192
ZAP_DOMAIN = b"shoal"
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # fixed by ZeroMQ RFC 27
_ZAP_VERSION = b"1.0"
_BATCH = 64  # requests answered in one go, before the loop may do something else


class SharedContext:
    """Sockets, I/O threads and the ZAP handler (ZeroMQ RFC 27) for every transport on one loop.

    The handler vouches for keys, not for rights: it accepts whoever proved to own a CURVE key and notes that key, in
    hexadecimal, as the `User-Id` of all that comes over the connection. Other mechanisms are refused.

    Use `SharedContext.acquire()` and `release()`: the last user ends the threads.
    """

    _of_loop: ClassVar[WeakKeyDictionary[asyncio.AbstractEventLoop, SharedContext]] = WeakKeyDictionary()

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        keep_freed_buffers()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=IO_THREADS)
        self.context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self._users = 0
        self._zap = self.context.socket(zmq.REP)
        self._zap.linger = 0
        self._zap.bind(_ZAP_ENDPOINT)
        loop.add_reader(self._zap.fileno(), self._answer)

    @classmethod
    def acquire(cls) -> SharedContext:
        """The running loop's context, made if there is none. Each caller must `release()` it once."""
        loop = asyncio.get_running_loop()
        shared = cls._of_loop.get(loop)
        if shared is None:
            shared = cls._of_loop[loop] = cls(loop)
        shared._users += 1
        return shared

    async def release(self) -> None:
        """Say that this user has closed its sockets. After the last one, returns when threads and sockets are gone,
        which takes as long as sockets linger."""
        self._users -= 1
        if self._users:
            return
        if SharedContext._of_loop.get(self.loop) is self:
            del SharedContext._of_loop[self.loop]
        self.loop.remove_reader(self._zap.fileno())
        self._zap.close()
        ended = self.loop.create_future()

        def end() -> None:
            self.context.term()
            self.loop.call_soon_threadsafe(lambda: None if ended.done() else ended.set_result(None))

        # It blocks, so a thread of its own: the loop's default executor would keep one for good.
        thread = threading.Thread(target=end, name="shoal-zeromq-end")
        thread.start()
        await ended
        thread.join()

    def _answer(self) -> None:
        """Answer what has been asked. The socket's descriptor tells of changes only, so ask until there is no more."""
        if self._zap.closed:
            return
        for _ in range(_BATCH):
            try:
                request = self._zap.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # version, request id, domain, address, routing id, mechanism, credentials…
            number = request[1] if len(request) > 1 else b""
            known = (
                len(request) == 7 and request[0] == _ZAP_VERSION and request[5] == b"CURVE" and len(request[6]) == 32
            )
            if known:
                answer = [b"200", b"OK", request[6].hex().encode(), b""]
            else:
                log.info("refused a connection that does not use CURVE")
                answer = [b"400", b"only CURVE is accepted", b"", b""]
            self._zap.send_multipart([_ZAP_VERSION, number, *answer], zmq.NOBLOCK)
        self.loop.call_soon(self._answer)

"""A thread that passes bytes between pairs of TCP connections. The kernel moves the bytes, and this process never sees
them.

`os.splice` moves the bytes from one socket into a pipe, and from the pipe into the other socket. Nothing is copied into
this process, and the GIL is released meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import heapq
import logging
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from shoal.p2p import forks, tcp
from shoal.p2p.limit import Limit

log = logging.getLogger(__name__)

PIPE_BYTES: Final = 1 << 20  # the largest size that the kernel allows every user
TURN_BYTES: Final = 4 << 20  # that one direction passes in its turn
LOOK_INTERVAL: Final = 2.0  # seconds between two checks for machines that are gone
_EVENTS = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
_FLAGS = os.SPLICE_F_NONBLOCK | os.SPLICE_F_MOVE


class _Direction:
    """The bytes that come from `source` and go to `sink`.

    Attributes:
        readable, writable: whether the source may have bytes, and the sink may have room, as far as is known.
        pipe: holds the bytes that have left the source and not reached the sink; None if there are none.
        inside: the number of these bytes.
        ended: whether the source sends no more. The sink is told when the pipe is empty.
        over: whether this direction has ended.
        queued: whether it is waiting for its turn.
    """

    __slots__ = ("circuit", "ended", "inside", "over", "pipe", "queued", "readable", "sink", "source", "writable")

    def __init__(self, circuit: Splice, source: socket.socket, sink: socket.socket) -> None:
        self.circuit, self.source, self.sink = circuit, source, sink
        self.readable = self.writable = True
        self.pipe: tuple[int, int] | None = None
        self.inside = 0
        self.ended = self.over = self.queued = False


class Splice:
    """Two connections that are joined.

    Attributes:
        ends: the connections.
        passed: the number of bytes passed, in both directions together.
        passed_at: when the last byte passed, on the clock of `time.monotonic`.
    """

    def __init__(self, one: socket.socket, other: socket.socket) -> None:
        self.ends = one, other
        self.directions = _Direction(self, one, other), _Direction(self, other, one)
        self.passed = 0
        self.passed_at = time.monotonic()


class Splicer:
    """Passes bytes between the ends of circuits. Methods may be called from any thread, and none waits for bytes.

    If one end closes its sending side, the splicer closes that of the other connection, so each direction ends by
    itself. A circuit is over when both directions have ended, when an end is lost, or when its machine gives no sign of
    life (`tcp.is_silent`).

    Args:
        rate: bytes per second of all circuits together; None for no limit. Circuits take turns, so each gets an equal
            share.
        on_over: called on the thread with each circuit that is over and whose connections are closed.

    Attributes:
        passed: the number of bytes passed over all circuits.
    """

    def __init__(self, rate: float | None, on_over: Callable[[Splice], None]) -> None:
        self.passed = 0
        self._limit = Limit(rate)
        self._on_over = on_over
        self._turn = min(TURN_BYTES, self._limit.piece)
        self._epoll = select.epoll()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._epoll.register(self._wake_in.fileno(), select.EPOLLIN)
        self._commands: deque[tuple[bool, Splice]] = deque()  # (whether to add it or to end it, the circuit)
        self._circuits: set[Splice] = set()
        # the directions of which it is the source, and the sink
        self._by_descriptor: dict[int, tuple[_Direction, _Direction]] = {}
        self._pipes: list[tuple[int, int]] = []  # empty pipes, for later use
        self._full = False  # there were no file descriptors left for the last pipe
        self._ready: deque[_Direction] = deque()
        self._paused: list[tuple[float, int, _Direction]] = []  # (until when, tie-breaker, direction)
        self._closed = False
        for descriptor in (self._wake_in, self._wake_out):
            forks.close_in_children(descriptor)
        self._thread = threading.Thread(target=self._run, name="shoal-splice", daemon=True)
        self._thread.start()

    def join(self, one: socket.socket, other: socket.socket) -> Splice:
        """Pass bytes between these two non-blocking connections. The splicer owns them from now on."""
        circuit = Splice(one, other)
        if not self._thread.is_alive():  # it has failed and logged the error
            for end in circuit.ends:
                end.close()
            self._on_over(circuit)
            return circuit
        for end in circuit.ends:
            forks.close_in_children(end)
            with contextlib.suppress(OSError):  # it has ended already; the next read finds that
                tcp.prepare(end)
        self._tell((True, circuit))
        return circuit

    def end(self, circuit: Splice) -> None:
        """End a circuit."""
        self._tell((False, circuit))

    def close(self) -> None:
        """End all circuits and the thread. Call it once."""
        self._closed = True
        self._wake()
        self._thread.join()
        self._wake_in.close()
        self._wake_out.close()

    def _tell(self, command: tuple[bool, Splice]) -> None:
        self._commands.append(command)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a wake-up is pending
            self._wake_out.send(b"\0")

    # -- the thread

    def _run(self) -> None:
        look_at = time.monotonic() + LOOK_INTERVAL
        try:
            while not self._closed:
                for descriptor, events in self._epoll.poll(self._patience(look_at)):
                    self._on_events(descriptor, events)
                self._obey()
                now = time.monotonic()
                while self._paused and self._paused[0][0] <= now:
                    self._ready.append(heapq.heappop(self._paused)[2])
                for _ in range(len(self._ready)):
                    direction = self._ready.popleft()
                    direction.queued = False
                    if not direction.over:
                        self._pass(direction)
                if now >= look_at:
                    look_at = now + LOOK_INTERVAL
                    for circuit in [c for c in self._circuits if any(map(tcp.is_silent, c.ends))]:
                        self._end(circuit)
        except Exception:  # a bug: log the traceback; the relay's node goes on without circuits
            log.exception("the relay's thread failed")
        finally:
            self._obey()
            for circuit in list(self._circuits):
                self._end(circuit)
            for pipe in self._pipes:
                _close(pipe)
            self._epoll.close()

    def _patience(self, look_at: float) -> float:
        if self._ready or self._commands:
            return 0.0
        until = min(look_at, self._paused[0][0]) if self._paused else look_at
        return max(0.0, until - time.monotonic())

    def _on_events(self, descriptor: int, events: int) -> None:
        if descriptor == self._wake_in.fileno():
            with contextlib.suppress(BlockingIOError):
                self._wake_in.recv(4096)
        elif descriptor in self._by_descriptor:  # otherwise it has just ended
            outgoing, incoming = self._by_descriptor[descriptor]
            if events & ~select.EPOLLOUT:
                outgoing.readable = True
                self._take_turn(outgoing)
            if events & ~(select.EPOLLIN | select.EPOLLRDHUP):
                incoming.writable = True
                self._take_turn(incoming)

    def _obey(self) -> None:
        while self._commands:
            add, circuit = self._commands.popleft()
            if add:
                self._circuits.add(circuit)
                for number, end in enumerate(circuit.ends):
                    away, back = circuit.directions if number == 0 else circuit.directions[::-1]
                    self._by_descriptor[end.fileno()] = away, back
                    self._epoll.register(end.fileno(), _EVENTS)
                for direction in circuit.directions:
                    self._take_turn(direction)
            elif circuit in self._circuits:
                self._end(circuit)

    def _take_turn(self, direction: _Direction) -> None:
        if not (direction.queued or direction.over):
            direction.queued = True
            self._ready.append(direction)

    def _pass(self, direction: _Direction) -> None:
        """Pass the bytes that are there, up to one turn's bytes."""
        left = self._turn
        while left > 0 and not direction.over:
            if direction.inside:
                if not direction.writable:
                    return
                moved = self._empty(direction)
                left -= moved
                if wait := self._passed(direction, moved):
                    return self._pause(direction, wait)
            elif direction.ended:
                self._finish(direction)
            elif not direction.readable or not self._fill(direction, left):
                return
        self._take_turn(direction)

    def _fill(self, direction: _Direction, most: int) -> bool:
        """Read from the source into the pipe. Returns whether anything has changed."""
        pipe = direction.pipe
        try:
            if pipe is None:
                pipe = direction.pipe = self._pipes.pop() if self._pipes else _pipe()
                self._full = False
            direction.inside = os.splice(direction.source.fileno(), pipe[1], most, flags=_FLAGS)
        except BlockingIOError:
            direction.readable = False
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                if not self._full:
                    log.warning("circuits end: there are no descriptors left for their pipes")
                self._full = True
            direction.ended = True
        else:
            direction.ended = not direction.inside
        if not direction.inside:
            self._give_back(direction)
        return bool(direction.inside) or direction.ended

    def _empty(self, direction: _Direction) -> int:
        """Write the contents of the pipe to the sink. Returns the number of bytes passed."""
        assert direction.pipe is not None
        moved = 0
        try:
            moved = os.splice(direction.pipe[0], direction.sink.fileno(), direction.inside, flags=_FLAGS)
        except BlockingIOError:
            direction.writable = False
        except OSError:
            # The sink is gone. Bytes that came from it earlier must still be passed on in the other direction.
            _close(direction.pipe)
            direction.pipe, direction.inside = None, 0
            self._over(direction)
        else:
            direction.inside -= moved
            if not direction.inside:
                self._give_back(direction)
        return moved

    def _give_back(self, direction: _Direction) -> None:
        if direction.pipe is not None:
            self._pipes.append(direction.pipe)
            direction.pipe = None

    def _passed(self, direction: _Direction, moved: int) -> float:
        self.passed += moved
        direction.circuit.passed += moved
        direction.circuit.passed_at = time.monotonic()
        return self._limit.charge(moved) if moved else 0.0

    def _pause(self, direction: _Direction, wait: float) -> None:
        if not direction.over:
            direction.queued = True
            heapq.heappush(self._paused, (time.monotonic() + wait, id(direction), direction))

    def _finish(self, direction: _Direction) -> None:
        with contextlib.suppress(OSError):  # it is gone
            direction.sink.shutdown(socket.SHUT_WR)
        self._over(direction)

    def _over(self, direction: _Direction) -> None:
        direction.over = True
        if all(each.over for each in direction.circuit.directions):
            self._end(direction.circuit)

    def _end(self, circuit: Splice) -> None:
        self._circuits.discard(circuit)
        for end in circuit.ends:
            self._by_descriptor.pop(end.fileno(), None)
            end.close()  # which removes it from the epoll as well
        for direction in circuit.directions:
            direction.over = True
            if direction.inside:
                assert direction.pipe is not None
                _close(direction.pipe)
                direction.pipe, direction.inside = None, 0
            self._give_back(direction)
        self._on_over(circuit)


def _pipe() -> tuple[int, int]:
    pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    with contextlib.suppress(OSError):  # a user may have only so many large pipes: a smaller one will do
        fcntl.fcntl(pipe[1], fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    return pipe


def _close(pipe: tuple[int, int]) -> None:
    for descriptor in pipe:
        os.close(descriptor)

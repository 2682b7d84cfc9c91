"""Messages as bytes of a link, and back. No I/O.

A frame is a head of fixed length, then a message's header and its buffers. What the head announces is bounded before
memory is taken, and every part is received straight into memory of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from shoal.p2p.movement import LARGE_BYTES
from shoal.p2p.transport import MAX_BUFFER_BYTES, MAX_BUFFERS, MAX_HEADER_BYTES, Buffer

MAX_CONTROL_BYTES = 4096
_HEAD = struct.Struct(f"!BBxx{1 + MAX_BUFFERS}I")  # kind, number of buffers, bytes of the header and of each buffer


class Kind(IntEnum):
    """Who a frame is for."""

    CONTROL = 0  # the other transport: a header only (`greeting`)
    MESSAGE = 1  # the node


@dataclass(frozen=True, slots=True)
class Frame:
    """What came: views that stay valid as long as they are referenced."""

    kind: Kind
    header: memoryview
    buffers: list[memoryview]


def encode(kind: Kind, header: Buffer, buffers: Sequence[Buffer] = ()) -> bytes:
    """The bytes of a frame: the one copy that sending makes."""
    sizes = [memoryview(buffer).nbytes for buffer in buffers]
    head = _HEAD.pack(kind, len(sizes), memoryview(header).nbytes, *sizes, *[0] * (MAX_BUFFERS - len(sizes)))
    return b"".join((head, header, *buffers))


class Reader:
    """Takes what comes over one link apart.

    Bytes go to `target`, then `filled` is told how many. `target` is None when a head has announced a large message:
    `allocate` takes the memory for it.

    Attributes:
        opened: whether messages may come; before that, the two transports talk.
        target: where the next bytes belong.
        size: bytes of the frame under way, without its head; 0 between two.
        large: bytes of large messages that have come so far, of the one under way, too.
    """

    def __init__(self) -> None:
        self.opened = False
        self.large = 0
        self._begin()

    def _begin(self) -> None:
        self.size = 0
        self._kind = Kind.CONTROL
        self._parts: list[memoryview] = []
        self._unfilled: list[memoryview] = []
        self._head = bytearray(_HEAD.size)
        self.target: memoryview | None = memoryview(self._head)

    def filled(self, number: int) -> Frame | None:
        """`number` bytes have come; the frame that they complete. Raises ValueError if the head breaks a bound."""
        assert self.target is not None
        self.target = self.target[number:]
        if self._parts and self.size >= LARGE_BYTES:
            self.large += number
        if self.target:
            return None
        if self._parts:
            return self._next()
        self._announce()
        if self.size >= LARGE_BYTES:
            self.target = None
            return None
        return self.allocate()

    def allocate(self) -> Frame | None:
        """Take the memory for the frame that the head announced; the frame, if it is an empty one."""
        self._parts = [memoryview(bytearray(size)) for size in self._sizes]
        self._unfilled = [part for part in reversed(self._parts) if part]
        return self._next()

    def _announce(self) -> None:
        kind, buffers, header, *sizes = _HEAD.unpack(self._head)
        if kind not in (Kind.CONTROL, Kind.MESSAGE):
            raise ValueError(f"a frame of the unknown kind {kind}")
        if kind == Kind.MESSAGE and not self.opened:
            raise ValueError("a message came before the hello was answered")
        most, most_buffers = (MAX_CONTROL_BYTES, 0) if kind == Kind.CONTROL else (MAX_HEADER_BYTES, MAX_BUFFERS)
        if header > most:
            raise ValueError(f"a header of {header} bytes exceeds {most}")
        if buffers > most_buffers:
            raise ValueError(f"{buffers} buffers in one message exceed {most_buffers}")
        if max(sizes) > MAX_BUFFER_BYTES:
            raise ValueError(f"a buffer of {max(sizes)} bytes exceeds {MAX_BUFFER_BYTES}")
        self._kind = Kind(kind)
        self._sizes = [header, *sizes[:buffers]]
        self.size = sum(self._sizes)

    def _next(self) -> Frame | None:
        if self._unfilled:
            self.target = self._unfilled.pop()
            return None
        frame = Frame(self._kind, self._parts[0], self._parts[1:])
        self._begin()
        return frame

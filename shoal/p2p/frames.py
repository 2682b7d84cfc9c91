"""Messages as the bytes of a link, and back. No I/O.

A frame is a head of fixed length, followed by a message's header and its buffers. The sizes in the head are checked
against bounds before memory is allocated.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import IntEnum

from shoal.p2p.transport import MAX_BUFFER_BYTES, MAX_BUFFERS, MAX_HEADER_BYTES, Buffer

MAX_CONTROL_BYTES = 4096
_HEAD = struct.Struct(f"!BBxx{1 + MAX_BUFFERS}I")  # kind, number of buffers, bytes of the header and of each buffer
HEAD_BYTES = _HEAD.size


class FrameKind(IntEnum):
    """The receiver of a frame."""

    CONTROL = 0  # the transport: a header only (`greeting`)
    MESSAGE = 1  # the node


def encode(kind: FrameKind, header: Buffer, buffers: Sequence[Buffer] = ()) -> bytes:
    """The bytes of a frame."""
    sizes = [memoryview(buffer).nbytes for buffer in buffers]
    head = _HEAD.pack(kind, len(sizes), memoryview(header).nbytes, *sizes, *[0] * (MAX_BUFFERS - len(sizes)))
    return b"".join((head, header, *buffers))


def announced(head: Buffer, *, opened: bool) -> tuple[FrameKind, list[int]]:
    """The kind of a frame and the sizes of its header and buffers, from its head.

    Args:
        head: the HEAD_BYTES bytes of the head.
        opened: whether messages may pass over the link already.

    Raises:
        ValueError: if a size breaks a bound, or if a message comes too early.
    """
    number, buffers, header, *sizes = _HEAD.unpack(head)
    if number not in (FrameKind.CONTROL, FrameKind.MESSAGE):
        raise ValueError(f"a frame of the unknown kind {number}")
    if number == FrameKind.MESSAGE and not opened:
        raise ValueError("a message came before the hello was answered")
    most, most_buffers = (MAX_CONTROL_BYTES, 0) if number == FrameKind.CONTROL else (MAX_HEADER_BYTES, MAX_BUFFERS)
    if header > most:
        raise ValueError(f"a header of {header} bytes exceeds {most}")
    if buffers > most_buffers:
        raise ValueError(f"{buffers} buffers in one message exceed {most_buffers}")
    if max(sizes) > MAX_BUFFER_BYTES:
        raise ValueError(f"a buffer of {max(sizes)} bytes exceeds {MAX_BUFFER_BYTES}")
    return FrameKind(number), [header, *sizes[:buffers]]

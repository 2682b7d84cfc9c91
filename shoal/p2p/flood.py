"""Finds connections that fill memory with a message that never ends.

ZeroMQ bounds the size of a frame and the number of messages that wait, but not the number of frames of a message, and
hands over nothing before the last one. So this compares what the kernel received over a connection with what came out.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.p2p.transport import MAX_BUFFER_BYTES, MAX_BUFFERS, MAX_HEADER_BYTES

MAX_MESSAGE_BYTES = 2 * (MAX_HEADER_BYTES + MAX_BUFFERS * MAX_BUFFER_BYTES)  # with room for framing, encryption, acks
INTERVAL = 0.5  # seconds between two looks


@dataclass(slots=True)
class FloodGauge:
    """What one connection received and handed over: call `is_flooding` every INTERVAL seconds."""

    _messages: int = -1
    _received: int = 0
    _suspected: bool = False

    def is_flooding(self, received: int, messages: int) -> bool:
        """Whether more than MAX_MESSAGE_BYTES came without a message, seen twice in a row.

        Args:
            received: bytes that came over the connection so far.
            messages: messages that were handed over so far.

        The first time may mean that the loop was held up and the messages still wait. By the second look it has run.
        """
        if messages != self._messages:
            self._messages, self._received, self._suspected = messages, received, False
            return False
        suspected, self._suspected = self._suspected, received - self._received > MAX_MESSAGE_BYTES
        return suspected and self._suspected

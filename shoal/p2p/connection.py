"""What is known of one TCP connection."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shoal.p2p import tcp
from shoal.p2p.flood import FloodGauge
from shoal.p2p.identity import PeerID

if TYPE_CHECKING:
    from shoal.p2p.router import Router


@dataclass(eq=False, slots=True)
class Connection:
    """One TCP connection of a router.

    Attributes:
        router: whose connection it is.
        endpoint: where it was dialled, "tcp://address:port"; "" if it was accepted.
        routing_id: by which the router knows it; b"" until the first message of an accepted connection.
        fd: its descriptor, -1 while it isn't made.
        peer: who is at the other end, None until that is proven and both sides have said hello.
        instance: which start of that peer.
        reason: why this side ended it, "" if it didn't.
        muted: nothing that arrives over it is wanted any more.
        retry: milliseconds until ZeroMQ would dial again. No two are equal, so the event that tells of a failure, by
            endpoint and interval, is known for this dial's and not an earlier one's.
        failure: why its handshake failed.
        proven: of a dialled connection: done when the other side has proven to own the key that was dialled.
        greeted: of a dialled connection: done when the other side has said hello, or in error.
        messages: how many came over it.
        large_in, large_out: bytes of the large messages that came over it, and that were queued to it.
        sent: bytes that were queued to it, at least.
        acked: bytes that the other side had acknowledged when that was last looked at.
        gauge: watches for a message that never ends.
        timer: ends an accepted connection that does not say hello.
    """

    router: Router
    endpoint: str = ""
    routing_id: bytes = b""
    fd: int = -1
    peer: PeerID | None = None
    instance: bytes = b""
    reason: str = ""
    muted: bool = False
    retry: int = 0
    failure: str = ""
    proven: asyncio.Future[None] | None = None
    greeted: asyncio.Future[None] | None = None
    messages: int = 0
    large_in: int = 0
    large_out: int = 0
    sent: int = 0
    acked: int = 0
    looked: tuple[int, int] = (-1, 0)  # messages and bytes that had come when `moved` was last asked
    under_way: int = 0  # bytes that came while no message was complete, over all times that it was asked
    gauge: FloodGauge = field(default_factory=FloodGauge)
    timer: asyncio.TimerHandle | None = field(default=None, repr=False)

    def moved(self) -> int:
        """See `Transport.moved`."""
        acknowledged, received = tcp.counts(self.fd)
        messages, before = self.looked
        if messages == self.messages:
            self.under_way += max(0, received - before)
        self.looked = (self.messages, received)
        self.sent = max(self.sent, acknowledged)  # which has ZeroMQ's own bytes in it
        return self.large_in + self.under_way + max(0, self.large_out - (self.sent - acknowledged))

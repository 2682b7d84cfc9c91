"""What can go wrong between two peers."""

from __future__ import annotations


class P2PError(Exception):
    """Base of all errors of talking to another peer."""


class PeerUnreachable(P2PError):
    """No connection could be made: no known address, nobody listens there, or the dial timed out."""


class HandshakeFailed(PeerUnreachable):
    """Somebody answered at the address, but could not prove to be the peer that was dialled."""


class PeerLost(P2PError):
    """The connection to a peer ended while something was expected from it."""


class Refused(P2PError):
    """The other peer understood the message and declined it; the text is the reason that it gave.

    A handler raises it to decline a message: the reason goes back to the sender, and the connection stays.
    """


class Unavailable(Refused):
    """The other peer did not judge the message: it does not serve this, has too much to do, or failed at it."""


class Unanswered(Refused):
    """A handler raises it to decline a message in silence: the sender has had its refusals."""


class MessageTooLarge(P2PError, ValueError):
    """A message to be sent exceeds the transport's bound; it was not sent."""

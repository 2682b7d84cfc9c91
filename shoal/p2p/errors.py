"""The errors of communication between two peers."""

from __future__ import annotations


class P2PError(Exception):
    """Base class of all errors of communication with another peer."""


class PeerUnreachable(P2PError):
    """No connection could be made: no known address, nobody listens there, or the dial timed out."""


class HandshakeFailed(PeerUnreachable):
    """A process answered at the address, but did not prove to be the dialled peer, or refused the link."""


class PeerLost(P2PError):
    """The connection to a peer ended while this peer was waiting for it."""


class Refused(P2PError):
    """The other peer understood the message and declined it. The text is the reason that it gave.

    A handler raises this error to decline a message: the reason goes back to the sender, and the connection stays.
    """


class Unavailable(Refused):
    """The other peer did not judge the message: it does not serve this service, is too busy, or failed to handle it."""


class Outrun(Refused):
    """The message has crossed another one, or came after what it was about had ended. So it may be nobody's fault."""


class Unanswered(Refused):
    """A handler raises this error to decline a message without an answer, because the sender has had enough
    refusals.
    """


class MessageTooLarge(P2PError, ValueError):
    """A message exceeds the transport's bound, and was not sent."""

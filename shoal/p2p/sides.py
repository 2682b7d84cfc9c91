"""The two sides of a link: what the one that has dialled does, and what the one that has accepted does."""

from __future__ import annotations

import errno
import logging
import os
import socket

from shoal.p2p import greeting
from shoal.p2p.errors import HandshakeFailed
from shoal.p2p.identity import PeerID
from shoal.p2p.lane import Address
from shoal.p2p.link import Greeting, Link, Succession, Wait
from shoal.p2p.release import RELEASE
from shoal.p2p.route import PeerRoute
from shoal.p2p.transport import Observation

log = logging.getLogger(__name__)

REFUSAL_TIME = 1.0  # seconds that a refused peer has to read the reason


class DialledLink(Link):
    """A link that this side has dialled. Its life begins with `dial`."""

    dialled = True

    def dial(self, peer: PeerID, to: Address | PeerRoute, *, asks: bool = False, succeeds: bool = False) -> None:
        """Connects to that peer.

        Args:
            peer: the peer.
            to: its address; or the route by which the socket is connected to it already.
            asks: whether only to ask from which address the link comes.
            succeeds: whether to replace another link.
        """
        self.peer = peer
        if isinstance(to, PeerRoute):
            self.route, self.relayed = to, to.relayed
        self.greeting = Greeting.ASKED if asks else Greeting.BEGUN
        self.succession = Succession.SUCCEEDING if succeeds else Succession.NONE
        self._start(self._connect(to))

    @property
    def certificate(self) -> bytes:
        """The other side's certificate, as DER."""
        return self._tls.getpeercert(binary_form=True) or b""

    def challenged(self, said: greeting.Challenge) -> None:
        """The other side has sent its challenge."""
        self.nonce = said.nonce
        if self.greeting is Greeting.ASKED:  # Without an instance, it is not one of the links of which one stays.
            return self.say(greeting.Observe())
        self.instance = said.instance
        self._go_to(Greeting.CHALLENGED)

    def answered(self, observed: Observation) -> None:
        """The other side has said from which address the link comes."""
        self.observed = observed
        self._go_to(Greeting.KEPT)

    def say_hello(self, instance: bytes, me: PeerID, signature: bytes) -> None:
        """Answers the challenge. `instance` identifies this start of this peer."""
        succeeds = self.succession is Succession.SUCCEEDING
        self.say(greeting.Hello(greeting.MAGIC, greeting.VERSION, instance, me.key, signature, succeeds, RELEASE))
        self._go_to(Greeting.SAID_HELLO)

    def refuse(self, reason: str, answer: greeting.Said | None = None) -> None:
        self.end(reason, HandshakeFailed)

    def _connect(self, to: Address | PeerRoute) -> Wait[bool]:
        number = 0 if isinstance(to, PeerRoute) else self.socket.connect_ex(to)
        if number == errno.EINPROGRESS:
            self._loop.add_writer(self.socket, self._go_on)
            yield
            self._loop.remove_writer(self.socket)
            number = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self.end("nobody listens there" if number == errno.ECONNREFUSED else os.strerror(number))
            return False
        self._prepare()
        return True


class AcceptedLink(Link):
    """A link that the other side has dialled. Its life begins with `take`."""

    dialled = False

    def take(self, *, relayed: bool) -> None:
        """Begins to listen."""
        self.relayed = relayed
        self._start(self._look_at_token())

    def challenge(self, instance: bytes) -> None:
        """Asks the other side who it is. `instance` identifies this start of this peer."""
        self.nonce = os.urandom(greeting.NONCE_BYTES)
        self.say(greeting.Challenge(greeting.MAGIC, greeting.VERSION, instance, self.nonce, RELEASE))
        self._go_to(Greeting.CHALLENGED)

    def proven(self, peer: PeerID, instance: bytes) -> None:
        """The other side has said hello, and has proven who it is."""
        self.peer, self.instance = peer, instance
        self._go_to(Greeting.SAID_HELLO)

    def dismiss(self, said: greeting.Said, reason: str) -> None:
        """Says that as the last thing."""
        self.say(said)
        self.finish(REFUSAL_TIME, reason)

    def refuse(self, reason: str, answer: greeting.Said | None = None) -> None:
        log.info("refused a connection: %s", reason)
        self.dismiss(answer or greeting.Refusal(reason[: greeting.MAX_REASON]), reason)

    def _look_at_token(self) -> Wait[bool]:
        self._prepare()
        first = yield from self._bytes(greeting.TOKEN_BYTES)
        if first[:1] not in (greeting.LANE_BYTE, greeting.CIRCUIT_BYTE):
            self._incoming.write(first)
            return True
        while len(first) < greeting.TOKEN_BYTES:
            first += yield from self._bytes(greeting.TOKEN_BYTES - len(first))
        self._events.token_came(self, first)
        return False

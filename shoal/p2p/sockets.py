"""The transport over TCP: one link between two peers, encrypted by TLS 1.3, with both sides authenticated."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import os
import socket
import ssl
from collections.abc import Callable, Sequence
from functools import partial
from weakref import WeakValueDictionary

from shoal.p2p import frames, greeting, sealing, tcp, tls
from shoal.p2p.errors import PeerUnreachable
from shoal.p2p.frames import FrameKind
from shoal.p2p.identity import Identity, PeerID
from shoal.p2p.lane import Address
from shoal.p2p.lanes import Lanes
from shoal.p2p.leases import Leases
from shoal.p2p.limit import Limit
from shoal.p2p.link import Greeting, Link, Stage, Succession
from shoal.p2p.listener import Admission, Listener, most_connections, plain
from shoal.p2p.multiaddr import FAMILIES, Multiaddr
from shoal.p2p.race import first_to_succeed
from shoal.p2p.route import PeerRoute, Router
from shoal.p2p.shared import Shared
from shoal.p2p.transport import Buffer, Observation, Transport, check_size, named

log = logging.getLogger(__name__)

MOVE_LINGER = 60.0  # seconds that the queue of a link has to drain when another link has replaced it
# seconds that a connected peer has to prove that it is alive, when another process claims to be the same peer
ALIVE_TIMEOUT = 3.0
LINGER = 0.5  # seconds that queues have to drain when the transport is closed
LINKS_PER_PEER = 4  # accepted links, including refused ones that have not ended yet
QUEUES_BYTES = 1 << 30  # that wait for all peers; beyond this, the peer with the longest stuck queue is disconnected
STUCK_SECONDS = 10.0  # a queue is stuck if its peer has taken nothing for this long
LOOK_INTERVAL = 0.5  # seconds
LANE_BYTES = 64 << 10  # named buffers from this size on go over the lane
LANE_LINGER = 1.0  # seconds after its link's end in which a lane still delivers

_TAKEN = "another process with the same identity is connected already"
_NONE_TO_SUCCEED = "there is no link that it could succeed"

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address


class SocketTransport(Transport):
    """Links over TCP.

    The dialled peer is proven by its certificate, whose key must be the dialled peer id. The dialling peer is proven by
    a signature inside TLS (`greeting.signed`). Nothing else passes before the listener has kept the link.

    Two peers that dial each other at the same time end up with one link. The peer with the smaller id decides which
    one, by being the first to keep it or to use it. The other peer keeps a link, but does not use it while it has a
    hello of its own under way. So the link that is dropped has carried nothing. A dial that gets no answer refuses
    nobody.

    Of two processes with one identity, the first stays connected. When another start of a connected peer says hello,
    the connected process is asked whether it is alive (`greeting.Taken`), and the new one waits. If the connected
    process answers within 3 s, two processes use one identity at the same time, and the new one is refused. If its link
    ends or it is silent, the peer was restarted: the old process is lost, and the new one takes its place. The same
    question decides whether a peer that this side has dialled, and that dials now, has lost the first link.

    The kernel probes the other side (`tcp`), so a machine or a network that is gone is noticed, however long a large
    message takes on a slow line. A process that hangs is not noticed, because its kernel still answers.

    A link may replace another one while messages pass (`succeed`), as a direct link replaces one through a relay. Each
    side announces over the old link that it sends over the new one from now on (`greeting.Moved`), and reads nothing
    from the new link before it has received that announcement. So all messages arrive, once and in order. The old lane
    ends when all chunks under way over it have come. If the old link ends before that, the peer is lost.

    Large named buffers pass over a lane beside the link (`lanes`), which lives as long as the link.

    Args:
        identity: this peer's identity.
        upload_limit, download_limit: bytes per second that this peer may send and receive; None for no limit.
    """

    def __init__(
        self, identity: Identity, *, upload_limit: float | None = None, download_limit: float | None = None
    ) -> None:
        self.identity = identity
        self.peer_id = identity.peer_id
        self.leases = Leases()
        self.shared = Shared(self.leases, Limit(upload_limit), Limit(download_limit))
        self.limit = min((limit for limit in (upload_limit, download_limit) if limit is not None), default=math.inf)
        self._lanes = Lanes(self.shared, self._on_chunk, self._lane_over)
        # lost peers whose lanes are still being read
        self._leaving: dict[PeerID, tuple[Link, str]] = {}
        self._instance = os.urandom(greeting.INSTANCE_BYTES)
        self._peers: dict[PeerID, Link] = {}
        self._links: set[Link] = set()  # all links that have not ended
        self._moves: dict[PeerID, Link] = {}  # the link that is being replaced, while there is one
        # a proven link of a peer that has another link, while that one is asked whether it is alive
        self._rivals: dict[PeerID, Link] = {}
        self._greeting: WeakValueDictionary[PeerID, asyncio.Lock] = WeakValueDictionary()
        self._listeners: list[Listener] = []
        self._listening: ssl.SSLContext | None = None
        self._certificate = b""
        self._dialling: ssl.SSLContext | None = None
        self._admission = Admission(0)
        self._next_look: asyncio.TimerHandle | None = None
        self.router: Router | None = None  # finds the routes through relays
        # on a relay: called with each end of a circuit
        self.on_circuit: Callable[[socket.socket, bytes], None] | None = None
        self._closed = False
        self._emptied: asyncio.Event = asyncio.Event()

    # -- connections

    async def listen(self, address: Multiaddr) -> Multiaddr:
        ip = (await self.resolve(address))[0]
        if self._closed:
            raise RuntimeError("this transport is closed")
        try:
            listener = Listener(ip, address.port, self._accepted)
        except OSError as error:
            raise OSError(error.errno, f"can't listen at {address}: {os.strerror(error.errno or 0)}") from error
        self._listeners.append(listener)
        self._be_ready_to_accept()
        return address.with_port(listener.port).with_peer(self.peer_id)

    def _be_ready_to_accept(self) -> None:
        if self._listening is None:
            self._listening, self._certificate = tls.listening(self.identity)
            self._admission = Admission(most_connections())

    def accept(self, connection: socket.socket, where: str, *, relayed: bool = False) -> None:
        """Treat a non-blocking connection as an accepted one: the other end believes that it has dialled this peer.

        Args:
            connection: the connection.
            where: the host from which it comes; the relay's if it is `relayed`.
            relayed: whether it leads through a relay.
        """
        if self._closed:
            return connection.close()
        self._be_ready_to_accept()
        self._accepted(connection, where, relayed=relayed)

    def _accepted(self, connection: socket.socket, where: str, *, relayed: bool = False) -> None:
        reason = self._admission.refusal(where, self._lanes.connections, expected=self._lanes.expects(where))
        if reason:
            log.info("refused a connection from %s: %s", where, reason)
            return connection.close()
        assert self._listening is not None
        link = Link(self, connection, self._listening, self.shared, dialled=False)
        self._enter(link)
        self._admission.enter(link, where)
        link.take(relayed=relayed)

    def _enter(self, link: Link) -> None:
        self._links.add(link)
        if self._next_look is None:
            self._look()

    async def dial(self, address: Multiaddr) -> None:
        if address.relay is not None:
            return await self._dial_by(address)
        peer, found = await self._find(address)
        if self.is_connected(peer):
            return
        await first_to_succeed([partial(self._dial, peer, ip, address.port) for ip in found])

    async def _find(self, address: Multiaddr) -> tuple[PeerID, list[IPAddress]]:
        try:
            return named(address), await self.resolve(address)
        except OSError as error:
            raise PeerUnreachable(f"{address}: {error}") from error

    async def _dial_by(self, address: Multiaddr) -> None:
        """Dial through a relay."""
        peer = named(address)
        if self.is_connected(peer):
            return
        if self.router is None:
            raise PeerUnreachable(f"{address}: this peer dials through no relay")
        route = self.router(address)
        connection = await route.connect()
        if self._closed or self.is_connected(peer):
            return connection.close()
        link = self._dialled(connection, peer, route)
        try:
            await self._greet(link, peer)
        except PeerUnreachable as error:
            raise type(error)(f"{address}: {error}") from error
        if self._peers.get(peer) is link:
            route.opened()

    def _dialled(self, connection: socket.socket, peer: PeerID, to: Address | PeerRoute, **purpose: bool) -> Link:
        self._dialling = self._dialling or tls.dialling()
        link = Link(self, connection, self._dialling, self.shared, dialled=True)
        self._enter(link)
        link.dial(peer, to, **purpose)
        return link

    async def _dial(self, peer: PeerID, ip: IPAddress, port: int) -> None:
        try:
            await self._greet(self._dialled(self._socket(ip), peer, (str(ip), port)), peer)
        except PeerUnreachable as error:
            raise type(error)(f"{ip}:{port}: {error}") from error

    async def _greet(self, link: Link, peer: PeerID) -> None:
        """Return when a link that this side dials, or another link to that peer, is open."""
        try:
            await link.until(Greeting.CHALLENGED)
            # A peer that is dialled at several addresses gets one hello at a time.
            async with self._greeting.setdefault(peer, asyncio.Lock()):
                if link.succession is Succession.NONE and self.is_connected(peer):
                    return link.end("another link was quicker")
                if link.succession is Succession.SUCCEEDING and not self._may_succeed(link, peer):
                    link.end(_NONE_TO_SUCCEED)
                self._say_hello(link, peer)
                await link.until(Greeting.KEPT)
        except BaseException:
            # If the link opens at the very moment in which the caller gives up, it stays.
            if self._peers.get(peer) is not link:
                link.end("this side gave up")
            raise

    async def succeed(self, peer: PeerID, connection: socket.socket, route: PeerRoute) -> None:
        """Replace the link to that peer by a link over this non-blocking connection, which the other side accepts
        (`accept`).

        From then on, lanes are dialled by `route`. Raises PeerUnreachable if this fails; the old link stays then.
        """
        if self._closed or peer not in self._peers:
            connection.close()
            raise PeerUnreachable(_NONE_TO_SUCCEED)
        await self._greet(self._dialled(connection, peer, route, succeeds=True), peer)

    def _socket(self, ip: IPAddress, source_port: int | None = None) -> socket.socket:
        if self._closed:
            raise PeerUnreachable("this transport is closed")
        try:
            connection = socket.socket(socket.AF_INET6 if ip.version == 6 else socket.AF_INET)
        except OSError as error:
            raise PeerUnreachable(f"{ip} can't be dialled: {error.strerror}") from error
        if source_port is not None:
            # Other connections come from this port, too. On Linux, all of them must set this option to share it.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                connection.bind(("", source_port))
            except OSError as error:
                connection.close()
                raise PeerUnreachable(f"{ip} can't be dialled from port {source_port}: {error.strerror}") from error
        connection.setblocking(False)
        return connection

    async def observe(self, address: Multiaddr, source_port: int = 0) -> Observation:
        peer, [ip, *_] = await self._find(address)
        link = self._dialled(self._socket(ip, source_port), peer, (str(ip), address.port), asks=True)
        try:
            await link.until(Greeting.KEPT)
        finally:
            link.end("it was dialled to ask")
        assert link.observed is not None
        return link.observed

    def source(self, peer: PeerID) -> str:
        link = self._peers.get(peer)
        try:
            return plain(link.address[0]) if link is not None and not link.relayed else ""
        except OSError:  # it has just ended, which is reported elsewhere
            return ""

    def is_direct(self, peer: PeerID) -> bool:
        return peer in self._peers and not self._peers[peer].relayed

    def is_connected(self, peer: PeerID) -> bool:
        return peer in self._peers

    def disconnect(self, peer: PeerID) -> None:
        link = self._peers.pop(peer, None)
        self._end_move(peer, "this side disconnected")
        if peer in self._leaving:
            link, _ = self._leaving.pop(peer)
        if link is not None:
            link.end("this side disconnected")
            if (lane := self._lanes.beside.get(link)) is not None:
                lane.end()
        if peer in self._rivals and not self._closed:
            # Only after the caller has dealt with the loss.
            asyncio.get_running_loop().call_soon(self._admit, peer)

    async def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        for listener in self._listeners:
            listener.close()
        self._rivals.clear()
        connected = set(self._peers.values())
        self._peers.clear()
        self._moves.clear()
        for link in list(self._links):
            if link in connected:
                link.finish(LINGER, "this transport was closed")
            else:
                link.end("this transport was closed")
        await self._lanes.close(LINGER)
        if self._links:
            await self._emptied.wait()
        if self._next_look is not None:
            self._next_look.cancel()

    # -- messages

    def moved(self, peer: PeerID) -> int:
        links, beside = (self._peers.get(peer), self._moves.get(peer)), self._lanes.beside
        return sum(link.moved() + (beside[link].moved if link in beside else 0) for link in links if link)

    def delivered(self, peer: PeerID) -> tuple[int, float]:
        """Counts only what passes over lanes: small messages tell nothing about the path."""
        link = self._peers.get(peer)
        return self._lanes.beside[link].delivered if link in self._lanes.beside else (0, 0.0)

    def send(self, peers: Sequence[PeerID], header: Buffer, buffers: Sequence[Buffer] = (), name: bytes = b"") -> None:
        check_size(header, buffers)
        links = [link for peer in peers if (link := self._peers.get(peer)) and link.stage is Stage.OPEN]
        if not links:
            return
        if name and memoryview(buffers[0]).nbytes >= LANE_BYTES and len(header) <= sealing.MAX_MESSAGE_BYTES:
            for link in links:
                if not self._lanes.of(link).send(name, bytes(header), memoryview(buffers[0])):
                    link.end("its queue is full")
            return
        frame = frames.encode(FrameKind.MESSAGE, header, buffers)  # the one copy, shared by all receivers
        for link in links:
            link.send(frame)

    def received(self, link: Link, header: memoryview, buffers: Sequence[memoryview]) -> None:
        """A message has come over an open link."""
        if link.peer is not None and self._is_of(link, link.peer):
            self._deliver(link.peer, header, buffers)

    def _on_chunk(self, link: Link, message: bytes, memory: memoryview) -> None:
        """A chunk has come over the lane beside a link. The link may have ended since."""
        assert link.peer is not None
        if self._is_of(link, link.peer) or self._leaving.get(link.peer, (None,))[0] is link:
            self._deliver(link.peer, memoryview(message), [memory])

    def _deliver(self, peer: PeerID, header: memoryview, buffers: Sequence[memoryview]) -> None:
        try:
            self._on_message(peer, header, buffers)
        except Exception:  # a bug: log the traceback; the loop, which serves all other links, goes on
            log.exception("handling what a connection brought failed")

    def cancel(self, prefix: bytes) -> None:
        self._lanes.cancel(prefix)

    def token_came(self, link: Link, token: bytes) -> None:
        """The accepted connection is no link, but one end of a circuit, or of a lane if the token is valid."""
        if token.startswith(greeting.LANE_BYTE):
            self._lanes.admit(link.socket, token)
        elif self.on_circuit is not None:
            self.on_circuit(link.socket.dup(), token)
        link.end("it is no link")

    # -- greetings

    def secured(self, link: Link) -> None:
        """The TLS handshake is complete: the listener begins the greeting."""
        if not link.dialled:
            link.challenge(self._instance)
        elif (found := tls.peer_of(link.certificate)) != link.peer:
            reason = "somebody answers there who cannot prove to be that peer"
            if link.peer is not None and found is not None:
                reason += f": it is peer {found}"
                self.tell_of_another(link.peer, found)
            link.refuse(reason)

    def heard(self, link: Link, payload: memoryview) -> None:
        """Handle a control message of the other transport. Raises ValueError if the message may not come now."""
        said, peer = greeting.decode(payload), link.peer
        if peer is not None and self._is_of(link, peer):
            return self._heard_from(peer, link, said)
        match link, said:
            case Link(dialled=True, nonce=b""), greeting.Challenge():
                link.challenged(said)
            case Link(dialled=True, greeting=Greeting.ASKED), greeting.Observed():
                link.answered(Observation(plain(said.host), said.port, link.socket.getsockname()[1]))
            case Link(dialled=True), greeting.Refusal():
                link.refuse(f"it refused: {said.reason}")
            case Link(dialled=True), greeting.Taken():
                self.twins.found(self.peer_id)
                link.refuse(f"it refused: {_TAKEN}")
            case Link(dialled=False, greeting=Greeting.CHALLENGED), greeting.Observe():
                host, port = link.address[:2]
                link.dismiss(greeting.Observed(plain(host), port), "it came to ask from where it comes")
            case Link(dialled=False, greeting=Greeting.CHALLENGED), greeting.LinkHello():
                self._on_hello(link, said)
            case Link(greeting=Greeting.SAID_HELLO), greeting.LinkKept() if peer is not None:
                self._on_kept(link, peer)
            case _:
                raise greeting.unexpected(said)

    def _heard_from(self, peer: PeerID, link: Link, said: greeting.Said) -> None:
        """Handle a control message of a connected peer."""
        is_old = self._peers.get(peer) is not link
        match said:
            case greeting.LinkKept():
                pass
            case greeting.Taken():
                if said.instance != self._instance:
                    self.twins.found(self.peer_id)
                link.say(greeting.Alive())
            case greeting.Alive():
                self._lives(peer)
            case greeting.Wanted() | greeting.Key() | greeting.Token():
                if not is_old:  # otherwise the other side did not know yet
                    self._lanes.heard(link, said)
            case greeting.Moved() if link.succession is not Succession.EMPTIED and (is_old or peer not in self._moves):
                self._on_moved(link, peer)
            case _:
                raise greeting.unexpected(said)

    def _say_hello(self, link: Link, peer: PeerID) -> None:
        if link.stage is not Stage.GREETING:
            return  # it has ended meanwhile
        signed = greeting.signed(self.peer_id, peer, self._instance, link.nonce, link.certificate)
        link.say_hello(self._instance, self.peer_id, self.identity.sign(signed))

    def _on_hello(self, link: Link, hello: greeting.LinkHello) -> None:
        peer = PeerID(hello.peer)
        signed = greeting.signed(peer, self.peer_id, hello.instance, link.nonce, self._certificate)
        if not peer.verify(signed, hello.signature):
            return link.refuse(f"it has not proven to be {peer}")
        if peer == self.peer_id:
            if hello.instance == self._instance:
                return link.refuse(f"{peer} is this peer itself")
            self.twins.found(peer)
            return link.refuse(_TAKEN, greeting.Taken(self._instance))
        if sum(other.peer == peer and not other.dialled for other in self._links) >= LINKS_PER_PEER:
            return link.end("too many links of one peer")
        self._admission.proven(link)
        link.proven(peer, hello.instance)
        self._left(peer)
        earlier = self._peers.get(peer)
        if hello.succeeds:
            if not self._may_succeed(link, peer):
                return link.refuse(_NONE_TO_SUCCEED)
            link.say(greeting.LinkKept())
            self._succeed(link, peer)
        elif earlier is None:
            self._welcome(link, peer)
        elif earlier.instance != hello.instance or earlier.dialled:
            self._hold(link, peer)
        else:
            self._lives(peer)
            self._lose(peer, "it connected anew")
            self._left(peer)
            self._welcome(link, peer)

    def _on_kept(self, link: Link, peer: PeerID) -> None:
        """The other side has kept a link that this side dialled, or uses one that this side has kept."""
        self._left(peer)
        if link.succession is Succession.SUCCEEDING:
            if not self._may_succeed(link, peer):
                return link.end("the link that it was to succeed is no more")
            self._succeed(link, peer)
        elif peer in self._peers:
            self._hold(link, peer)
        elif link.dialled:
            self._welcome(link, peer)
        else:
            self._open(link, peer)

    def _welcome(self, link: Link, peer: PeerID) -> None:
        """The other end is `peer`, and no other link to it is open."""
        if not link.dialled:
            link.say(greeting.LinkKept())
            if self.peer_id > peer and any(other.peer == peer and _says_hello(other) for other in self._links):
                return  # the other side may have kept that one: it decides
        elif self.peer_id < peer:
            link.say(greeting.LinkKept())
        self._open(link, peer)

    def _open(self, link: Link, peer: PeerID) -> None:
        if link.stage is not Stage.GREETING:
            return  # it has ended meanwhile
        self._peers[peer] = link
        link.open()
        for other in list(self._links):
            if other is not link and (other.peer, other.instance) == (peer, link.instance):
                other.give_way()

    # -- two links of one peer, or two processes with one identity

    def _hold(self, link: Link, peer: PeerID) -> None:
        """There is another link of that peer: ask over it whether it is alive."""
        if peer in self._rivals:
            return link.refuse("another process claims to be that peer, too: try again")
        self._rivals[peer] = link
        self._peers[peer].say(greeting.Taken(link.instance))
        asyncio.get_running_loop().call_later(ALIVE_TIMEOUT, self._take_place, link, peer)

    def _take_place(self, link: Link, peer: PeerID) -> None:
        """The other link has had the time to prove that it is alive."""
        if self._rivals.get(peer) is link:
            self._lose(peer, "it was started anew")

    def _lives(self, peer: PeerID) -> None:
        """The open link of `peer` has proven that it is alive: the rival that waits for its end is rejected."""
        rival = self._rivals.pop(peer, None)
        if rival is not None:
            instance = self._peers[peer].instance
            if rival.instance == instance:
                return rival.refuse("it is connected already")
            self.twins.found(peer)
            rival.refuse(_TAKEN, greeting.Taken(instance))

    def _admit(self, peer: PeerID) -> None:
        """The open link of `peer` is lost: the rival takes its place, unless a third link has."""
        rival = self._rivals.pop(peer, None)
        if rival is not None and peer in self._peers:
            rival.refuse("another process claims to be that peer, too: try again")
        elif rival is not None:
            self._welcome(rival, peer)

    # -- a link that takes the place of another one

    def _is_of(self, link: Link, peer: PeerID) -> bool:
        """Whether messages of that peer may come over that link."""
        return self._peers.get(peer) is link or self._moves.get(peer) is link

    def _may_succeed(self, link: Link, peer: PeerID) -> bool:
        old = self._peers.get(peer)
        busy = peer in self._moves or peer in self._rivals
        # if each side dials a link, that of the smaller id replaces the old one
        if not link.dialled and self.peer_id < peer:
            busy |= any(map(_says_hello, self._successors(peer)))
        return old is not None and old.stage is Stage.OPEN and old.instance == link.instance and not busy

    def _successors(self, peer: PeerID) -> list[Link]:
        """The links that this side dials to replace the one to that peer."""
        links = [link for link in self._links if link.peer == peer and link.greeting is not Greeting.KEPT]
        return [link for link in links if link.succession is Succession.SUCCEEDING]

    def _succeed(self, link: Link, peer: PeerID) -> None:
        """Send over that link from now on. The accepting side does so first."""
        old = self._peers[peer]
        self._moves[peer], self._peers[peer] = old, link
        link.succeed(old)
        self._lanes.succeed(old, link)
        old.say(greeting.Moved())
        if old.succession is Succession.EMPTIED:
            self._on_moved(old, peer)

    def _on_moved(self, old: Link, peer: PeerID) -> None:
        """The other side sends over another link, and has left the lane beside the old one."""
        old.empty()
        if self._moves.get(peer) is old:  # otherwise this side, which has dialled, does not know yet that it was kept
            self._peers[peer].release()
            if (lane := self._lanes.beside.get(old)) is not None:
                lane.finish()
            self._finish_move(peer)

    def _finish_move(self, peer: PeerID) -> None:
        """End the old link, if all that was sent over it has come."""
        old = self._moves[peer]
        if self._peers[peer].succession is Succession.NONE and old not in self._lanes.beside:
            del self._moves[peer]
            old.finish(MOVE_LINGER, "another link has taken its place")

    def _end_move(self, peer: PeerID, reason: str) -> None:
        """That peer is no longer connected."""
        for link in self._successors(peer):
            link.end(_NONE_TO_SUCCEED)
        old = self._moves.pop(peer, None)
        if old is not None:
            old.end(reason)
            if (lane := self._lanes.beside.get(old)) is not None:
                lane.end(reason)

    # -- ends

    def ended(self, link: Link, reason: str) -> None:
        """A link has ended."""
        self._links.discard(link)
        self._admission.leave(link)
        self.shared.unfinished.give(link)
        if link.peer is not None:
            if self._rivals.get(link.peer) is link:
                del self._rivals[link.peer]
            if self._moves.get(link.peer) is link and link.succession is Succession.EMPTIED:
                self._finish_move(link.peer)  # the other side is done with it
            elif self._is_of(link, link.peer):
                self._lose(link.peer, reason)
        if self._closed and not self._links:
            self._emptied.set()

    def _lose(self, peer: PeerID, reason: str) -> None:
        link = self._peers.pop(peer, None)
        self._end_move(peer, reason)
        if link is not None:
            link.end(reason)
            self._leaving[peer] = link, reason
            if link in self._lanes.beside:
                asyncio.get_running_loop().call_later(LANE_LINGER, self._lane_read, link, peer)
            else:
                self._left(peer)

    def _left(self, peer: PeerID) -> None:
        """If that peer was lost: its last chunks were read, or need not be awaited. Report the loss."""
        if peer in self._leaving:
            link, reason = self._leaving.pop(peer)
            if (lane := self._lanes.beside.get(link)) is not None:
                lane.end()
            self._on_lost(peer, reason)
            self._admit(peer)

    def _lane_read(self, link: Link, peer: PeerID) -> None:
        """The last chunks beside a link were read, or need not be awaited."""
        if self._leaving.get(peer, (None,))[0] is link:
            self._left(peer)

    def _lane_over(self, link: Link, reason: str) -> None:
        assert link.peer is not None
        self._lane_read(link, link.peer)
        if self._moves.get(link.peer) is not link:
            link.end(f"its lane was lost: {reason}")
        elif reason:  # the old link may have ended normally, and nobody would notice the missing chunks
            self._lose(link.peer, f"its lane was lost: {reason}")
        else:
            self._finish_move(link.peer)

    def _look(self) -> None:
        for link in list(self._links):
            if link.stage not in (Stage.CONNECTING, Stage.ENDED) and tcp.is_silent(link.socket):
                link.end("its machine does not answer")
        if (late := self.shared.unfinished.overdue()) is not None:
            late.end("its message took too long")
        if sum(link.outgoing.queued() for link in self._links) > QUEUES_BYTES:
            most = max(self._links, key=lambda link: link.outgoing.queued(STUCK_SECONDS))
            if most.outgoing.queued(STUCK_SECONDS):
                most.end("it took nothing while too much waited for all")
        self._next_look = asyncio.get_running_loop().call_later(LOOK_INTERVAL, self._look)

    async def resolve(self, address: Multiaddr) -> list[IPAddress]:
        """The numeric addresses of a host. Raises OSError if it has none."""
        if address.protocol in ("ip4", "ip6"):
            return [ipaddress.ip_address(address.host)]
        found = await asyncio.get_running_loop().getaddrinfo(
            address.host, address.port, family=FAMILIES[address.protocol], type=socket.SOCK_STREAM
        )
        return list(dict.fromkeys(ipaddress.ip_address(where[0]) for *_, where in found))


def _says_hello(link: Link) -> bool:
    return link.dialled and link.greeting >= Greeting.SAID_HELLO

"""A public node that connects others to peers that nobody can dial."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import msgspec

from shoal.p2p.errors import Refused
from shoal.p2p.greeting import CIRCUIT_BYTE, TOKEN_BYTES
from shoal.p2p.identity import PeerID
from shoal.p2p.node import Node
from shoal.p2p.sockets import SocketTransport
from shoal.reach.finding import host_of
from shoal.reach.ledger import TOKEN_SECONDS, Ledger
from shoal.reach.messages import CIRCUIT, RELAY, Circuit, Incoming, Opened, Reserve, Reserved
from shoal.reach.splice import Splice as Spliced
from shoal.reach.splice import Splicer

log = logging.getLogger(__name__)


class Relay:
    """Serves as a relay: keeps reservations, tells peers who asks for them, and joins the two ends of circuits.

    It knows who communicates with whom, and how much, but not what. Every peer with a link to it may use it. The cost
    is bounded by `ledger` and by `bandwidth`.

    Args:
        node: this peer.
        transport: the transport of `node`.
        bandwidth: bytes per second that pass over all circuits at most; None for no limit.
    """

    def __init__(self, node: Node, transport: SocketTransport, bandwidth: float | None = None) -> None:
        self._node, self._transport = node, transport
        self._loop = asyncio.get_running_loop()
        self.splicer = Splicer(bandwidth, self._over)
        self._ledger: Ledger[socket.socket, Spliced] = Ledger(lambda circuit: circuit.passed_at)
        self._closed = False
        self._timers: dict[bytes, asyncio.TimerHandle] = {}
        self._stop_listening = node.on_lost(lambda peer, _reason: self._ledger.lose(peer))
        transport.on_circuit = self._came
        node.serve(RELAY, self._handle)

    def close(self) -> None:
        """Stop serving, and end all circuits."""
        if self._closed:
            return
        self._closed = True
        self._node.stop_serving(RELAY)
        self._stop_listening()
        self._transport.on_circuit = None
        for token in list(self._timers):
            self._late(token)
        self.splicer.close()

    @property
    def numbers(self) -> tuple[int, int, int]:
        """The numbers of reservations, of circuits that wait for an end, and of running circuits."""
        return self._ledger.numbers

    def _handle(self, peer: PeerID, message: msgspec.Struct, _buffers: Sequence[memoryview]) -> msgspec.Struct:
        source = self._transport.source(peer)
        if not source:
            raise Refused("its connection has ended, or leads through another relay")
        network = host_of(source)
        match message:
            case Reserve():
                return Reserved(self._ledger.reserve(peer, network, time.monotonic()))
            case Circuit():
                return self._open(peer, network, PeerID(message.to))
        raise Refused(f"{type(message).__name__} is a reply, not a request")

    def _open(self, asker: PeerID, network: str, to: PeerID) -> Opened:
        token = CIRCUIT_BYTE + os.urandom(TOKEN_BYTES - 1)
        idle = self._ledger.ask(token, asker, network, to, time.monotonic())
        if idle is not None:
            self._ledger.over(idle)
            self.splicer.end(idle)
        self._timers[token] = self._loop.call_later(TOKEN_SECONDS, self._late, token)
        self._node.notify([to], CIRCUIT, Incoming(token, asker.key))
        return Opened(token)

    def _came(self, connection: socket.socket, token: bytes) -> None:
        circuit = self._ledger.arrive(token, connection)
        if circuit is None:
            log.info("a connection came with an unknown or expired token of a circuit")
            connection.close()
        elif circuit.first is not None:
            self._timers.pop(token).cancel()
            self._ledger.joined(circuit, self.splicer.join(circuit.first, connection))

    def _late(self, token: bytes) -> None:
        timer = self._timers.pop(token)
        timer.cancel()
        first = self._ledger.late(token)
        if first is not None:
            first.close()

    def _over(self, circuit: Spliced) -> None:
        with suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(partial(self._ledger.over, circuit))

"""Attacks of a peer that is no member: on the DHT, on sockets, on services of the run."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from typing import TYPE_CHECKING

from shoal.dht.records import DHTRecord, encode_key, encode_value, get_dht_time
from shoal.p2p.errors import P2PError
from shoal.p2p.identity import PeerID
from shoal.swarm.protocol import messages as msg
from shoal.transfer.donor import Chunk, GetChunk, GetManifest, Offer, transfer_service
from shoal.transfer.manifest import Manifest
from tests.attacks import forged
from tests.attacks.attack import StrangerAttack

if TYPE_CHECKING:
    from tests.attacks.attacker import Outside


class StrangersCall(StrangerAttack):
    """10b: CALL by a peer that is no member, as soon as there is a new tip."""

    every = 0.1

    async def again(self) -> None:
        for peer in self.net.peers:
            hello = await self.net.hello(peer)
            if hello is not None:
                self.net.say(peer, forged.call(hello.tip))


class UnsignedRecords(StrangerAttack):
    """11: records under the run's key that nobody has signed, with and without subkey, and for a whole day."""

    every = 0.5

    async def again(self) -> None:
        key, until = encode_key(f"{self.net.run_id}/members"), get_dht_time() + 86390
        places = [b"", *(encode_key(f"!{number}") for number in range(200))]
        for peer in self.net.peers:
            for place in places[:1], places[1:]:
                records = [DHTRecord(key, subkey, encode_value(b"nobody is here"), until) for subkey in place]
                kept = await self.net.store(peer, records)
                self.gain("records kept", sum(kept))


class Stores(StrangerAttack):
    """12: 34 KB of STORE a second to each peer, of subkeys of one key."""

    every, rate = 0.1, 34_000

    def __init__(self, outside: Outside) -> None:
        super().__init__(outside)
        self._numbers = itertools.count()

    async def again(self) -> None:
        key, until = encode_key("full"), get_dht_time() + 80000
        number = max(1, round(self.rate * self.every / 60))
        for peer in self.net.peers:
            records = [
                DHTRecord(key, encode_key(f"{next(self._numbers)}"), encode_value(b"x" * 20), until + n)
                for n in range(number)
            ]
            for start in range(0, number, 256):
                self.net.store_soon(peer, records[start : start + 256])


class ManyStores(Stores):
    """12b: the same with 500 KB a second."""

    rate = 500_000


class IdleConnections(StrangerAttack):
    """13: 1,100 TCP connections to each peer that say nothing; those that end are made anew."""

    every = 1.0

    def __init__(self, outside: Outside) -> None:
        super().__init__(outside)
        self._open: dict[PeerID, list[socket.socket]] = {}

    async def again(self) -> None:
        for peer in self.net.peers:
            kept = self._open.setdefault(peer, [])
            for connection in list(kept):
                with contextlib.suppress(BlockingIOError, InterruptedError):
                    try:
                        ended = connection.recv(65536) == b""
                    except ConnectionError:
                        ended = True
                    if ended:
                        connection.close()
                        kept.remove(connection)
            for _ in range(1100 - len(kept)):
                connection = socket.socket()
                connection.setblocking(False)
                connection.connect_ex(self.net.where(peer))
                kept.append(connection)
                self.gain("connections made")


class TakesState(StrangerAttack):
    """14: without Hello, the state of each peer, and what it holds of a round."""

    every = 1.0

    async def again(self) -> None:
        service = transfer_service(forged.STATE_SERVICE.format(run_id=self.net.run_id))
        for peer in self.net.peers:
            with contextlib.suppress(P2PError, TimeoutError):
                reply = await self.net.node.call_for_buffers(peer, service, GetManifest(), timeout=5)
                if not (isinstance(reply.body, Offer) and reply.buffers):
                    continue
                manifest = Manifest.decode(bytes(reply.buffers[0]))
                self.gain("manifests")
                for number in range(len(manifest.digests) // 32):
                    request = GetChunk(manifest.id, number)
                    chunk = await self.net.node.call_for_buffers(peer, service, request, timeout=5)
                    if isinstance(chunk.body, Chunk):
                        self.gain("bytes of states", sum(len(buffer) for buffer in chunk.buffers))
                await asyncio.sleep(0.5)
                for name in forged.round_names():
                    await self._fetch(peer, name)

    async def _fetch(self, peer: PeerID, round_id: bytes) -> None:
        with contextlib.suppress(P2PError, TimeoutError):
            reply = await self.net.ask(peer, msg.Digests(round_id))
            if isinstance(reply.body, msg.Committed):
                self.gain("plans")
            reply = await self.net.ask(peer, msg.Fetch(round_id, 0))
            self.gain("bytes of averages", sum(len(buffer) for buffer in reply.buffers))

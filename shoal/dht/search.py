"""Drives a `Lookup` over the network."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from shoal.dht.lookup import Lookup
from shoal.dht.messages import Find, Found
from shoal.dht.protocol import Protocol
from shoal.dht.records import ID_BITS, DHTRecord
from shoal.p2p.identity import PeerID

log = logging.getLogger(__name__)

TIMEOUT = 20.0

Heed = Callable[[PeerID, list[DHTRecord]], bool]


async def search(protocol: Protocol, target: int, width: int, parallel: int, heed: Heed | None = None) -> Lookup:
    """Search for the `width` nodes nearest to `target`, asking `parallel` of them at a time; 20 s at most.

    With `heed`, nodes are also asked for the records of the key `target`. `heed(peer, records)` is called with what
    each says, and ends the search by returning true.
    """
    lookup = Lookup(target, width, protocol.node.peer_id)
    nearest = protocol.table.nearest(target, protocol.table.bucket_size)
    lookup.add((contact.peer, contact.addresses) for contact in nearest)
    request = Find(protocol.sender(), target.to_bytes(ID_BITS // 8, "big"), heed is not None)
    answers: asyncio.Queue[tuple[PeerID, Found | None]] = asyncio.Queue()

    async def ask(peer: PeerID, addresses: tuple[str, ...]) -> None:
        reply = None
        try:
            reply = await protocol.ask(peer, addresses, request, Found)
        finally:
            answers.put_nowait((peer, reply))

    tasks: list[asyncio.Task[None]] = []
    heard = 0
    try:
        async with asyncio.timeout(TIMEOUT):
            while True:
                while len(tasks) - heard < parallel and (peer := lookup.next_peer()) is not None:
                    if protocol.is_blocked(peer):
                        lookup.failed(peer)
                    else:
                        tasks.append(protocol.node.spawn(ask(peer, lookup.addresses[peer])))
                if len(tasks) == heard:
                    break
                peer, reply = await answers.get()
                heard += 1
                if reply is None:
                    lookup.failed(peer)
                    continue
                lookup.answered(peer)
                lookup.add((PeerID(known.key), known.addresses) for known in reply.peers)
                if heed is not None and heed(peer, reply.records):
                    break
    except TimeoutError:
        log.info("a search of the DHT was ended after %g s", TIMEOUT)
    finally:
        for task in tasks:
            task.cancel()
    return lookup

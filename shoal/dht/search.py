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
PATIENCE = 0.5  # seconds after which another node is asked instead of one that has not answered
LAST = 0.5  # seconds that slow nodes have when all others have answered; they may be stopped

Heed = Callable[[PeerID, list[DHTRecord]], bool]


async def search(protocol: Protocol, target: int, width: int, parallel: int, heed: Heed | None = None) -> Lookup:
    """Search for the `width` nodes nearest to `target`, asking `parallel` of them at a time, for at most 20 s.

    With `heed`, the search also asks nodes for the records of the key with the id `target`. It calls `heed(peer,
    records)` with each answer, and ends when `heed` returns true.
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

    loop = asyncio.get_running_loop()
    tasks: list[asyncio.Task[None]] = []
    expected: dict[PeerID, float] = {}  # the peers being asked, and when each counts as slow
    slow: set[PeerID] = set()
    heard = 0
    until: float | None = None
    try:
        async with asyncio.timeout(TIMEOUT):
            while True:
                while len(expected) < parallel and (asked := lookup.next_peer()) is not None:
                    if protocol.is_blocked(asked):
                        lookup.failed(asked)
                    else:
                        expected[asked] = loop.time() + PATIENCE
                        tasks.append(protocol.node.spawn(ask(asked, lookup.addresses[asked])))
                if len(tasks) == heard:
                    break
                first = next(iter(expected), None)
                if first is None and until is None and lookup.nearest():
                    until = loop.time() + LAST
                try:
                    async with asyncio.timeout_at(expected[first] if first else until):
                        peer, reply = await answers.get()
                except TimeoutError:
                    if first is None:
                        for silent in slow:
                            protocol.block(silent)
                        break
                    del expected[first]
                    slow.add(first)
                    lookup.slow(first)
                    continue
                heard, until = heard + 1, None
                expected.pop(peer, None)
                slow.discard(peer)
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

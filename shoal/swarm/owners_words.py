"""Keeps the owner's revocations and pin of a closed run (its *words*) in the DHT, for members that nobody has told
yet."""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from shoal.dht.closed_runs import OWNER
from shoal.dht.node import DHTNode
from shoal.dht.validation import owner_marker
from shoal.membership.run import ClosedRun
from shoal.p2p.identity import PeerID
from shoal.swarm.gate import Document, Gate, LongDocument

log = logging.getLogger(__name__)

READ_SECONDS = 15.0
KEEP_SECONDS = 3600.0  # lifetime of a member's copy
OWNER_SECONDS = 80000.0  # lifetime of the owner's own record: a little less than the day that a DHT allows
COPIES = 3  # copies of the newest words that members keep in the DHT, beside the owner's own record
MAX_RECORDS = 64  # records that are read

Words = tuple[LongDocument, Document]


def words_key(run: ClosedRun) -> str:
    """The key in the DHT of the words of the run's owner. The owner and members each write a subkey of their own."""
    return f"{run.run_id}{OWNER}"


async def publish_words(dht: DHTNode, run: ClosedRun, words: Words, peer: PeerID, expiration: float) -> bool:
    """Write the owner's words to the DHT, in a record that this node signs as `peer`. Returns whether a node of the DHT
    keeps the record."""
    return await dht.store(words_key(run), msgspec.msgpack.encode(words), expiration, subkey=owner_marker(peer))


class OwnersWords:
    """Reads the owner's words from the DHT, and keeps a few copies of the newest ones there, so that the owner need not
    be online.

    Args:
        dht: this peer's DHT node.
        gate: the gate that receives the words.
        clock: the clock of the DHT, in seconds.
    """

    def __init__(self, dht: DHTNode, gate: Gate, clock: Callable[[], float]) -> None:
        self._dht, self._gate, self._clock = dht, gate, clock

    async def refresh(self) -> None:
        """Read the words and renew the copies, unless a service of this node has done so in the last READ_SECONDS."""
        now, gate = self._clock(), self._gate
        if now < gate.words_read_at + READ_SECONDS:
            return
        gate.words_read_at = now
        found = await self._dht.get(words_key(gate.run), latest=True)
        records = found.value if found is not None and isinstance(found.value, dict) else {}
        owner = owner_marker(gate.run.owner)
        kept: list[tuple[float, Words]] = []
        # The owner's own record comes first, so a peer that fills the key with other records does not displace it.
        for subkey, record in sorted(records.items(), key=lambda item: item[0] != owner)[:MAX_RECORDS]:
            try:
                words = _decoder.decode(record.value)
            except (msgspec.MsgspecError, TypeError, UnicodeDecodeError):
                continue
            gate.hear(*words)
            if subkey != owner:
                kept.append((record.expiration_time, words))
        newest = (gate.texts[0], gate.texts[1])
        copies = sum(words == newest and expiration > now + KEEP_SECONDS / 2 for expiration, words in kept)
        if any(newest) and copies < COPIES:
            await publish_words(self._dht, gate.run, newest, self._dht.peer_id, now + KEEP_SECONDS)


_decoder = msgspec.msgpack.Decoder(Words)

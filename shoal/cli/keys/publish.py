"""Publishes an owner's revocations and pin (its *words*) in the DHT of the run, where members read them every 15 s."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

from shoal.dht.created import CreatedNode
from shoal.dht.records import get_dht_time
from shoal.membership import ClosedRun, OwnerKey
from shoal.membership.pin import PIN
from shoal.membership.revocations import REVOCATIONS
from shoal.membership.signed import StatementKind
from shoal.swarm.owners_words import OWNER_SECONDS, Words, publish_words, words_key


def publish(key: OwnerKey, initial_peers: list[str], words: Words) -> bool:
    """Publish the owner's words in the DHT of the initial peers. If the DHT has newer ones, those are kept.

    Args:
        key: the owner's key, which signs the record.
        initial_peers: addresses of peers of the DHT.
        words: (revocations, pin) as text; "" for none.

    Returns:
        Whether a node of the DHT keeps the record.

    Raises:
        PeerUnreachable: if no initial peer answers.
        ValueError: if an address is invalid.
    """
    return asyncio.run(_publish(key, initial_peers, words))


async def _publish(key: OwnerKey, initial_peers: list[str], words: Words) -> bool:
    dht = await CreatedNode.create(initial_peers, identity=key.identity, client_mode=True)
    try:
        found = await dht.get(words_key(key.run), latest=True)
        for record in found.value.values() if found is not None and isinstance(found.value, dict) else ():
            with contextlib.suppress(msgspec.MsgspecError, TypeError, UnicodeDecodeError):
                there = _decoder.decode(record.value)
                words = _newest(REVOCATIONS, key.run, words[0], there[0]), _newest(PIN, key.run, words[1], there[1])
        now = get_dht_time()
        return await publish_words(dht, key.run, words, key.identity.peer_id, now + OWNER_SECONDS)
    finally:
        await dht.shutdown()


def _newest(kind: StatementKind, run: ClosedRun, mine: str, there: str) -> str:  # type: ignore[type-arg]
    """The newer of two statements. The second may be invalid, since anybody may have written it."""
    try:
        number = kind.read(there, run).number
    except ValueError:
        return mine
    return mine if mine and kind.read(mine, run).number >= number else there


_decoder = msgspec.msgpack.Decoder(Words)

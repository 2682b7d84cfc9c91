"""Writes and reads health records of a run, as signed records in the DHT."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from shoal.dht.node import DHTNode
from shoal.dht.records import get_dht_time
from shoal.dht.run_keys import MAX_HEALTH_RECORDS, MAX_HEALTH_SECONDS, health_key
from shoal.dht.validation import owner_marker
from shoal.health.record import LIFE_SECONDS, Health, decode_health, encode_health
from shoal.membership.membership import Part
from shoal.p2p.identity import PeerID
from shoal.swarm.duties import parts_of
from shoal.swarm.gate import Document
from shoal.swarm.gates import gate_of

log = logging.getLogger(__name__)

SHARDED_FROM = MAX_HEALTH_RECORDS  # with more members than this, the records are divided among 16 keys
_MARKER = "[owner:"


@dataclass(frozen=True, slots=True)
class Posted:
    """A record that was read.

    Attributes:
        peer: the peer that has signed it.
        health: its content.
        at: when it was published, by the clock of that peer.
    """

    peer: PeerID
    health: Health
    at: float


class HealthBoard:
    """The health records of one run. Each peer has one subkey, which only it can write.

    Args:
        dht: this peer's DHT node.
        run_id: the name of the run. In a closed run, each record carries the membership of its peer, and records
            without a valid one are ignored.
        clock: the clock of the DHT, in seconds.

    Raises:
        ValueError: if the run is closed, and `admit_to` was not called.
    """

    def __init__(self, dht: DHTNode, run_id: str, clock: Callable[[], float] = get_dht_time) -> None:
        self._dht, self._run_id, self._clock = dht, run_id, clock
        self._gate = gate_of(dht.node, run_id)

    async def publish(self, health: Health, members: int) -> bool:
        """Publish this peer's record, which replaces the one before. Returns whether a node of the DHT keeps it.

        Args:
            health: the content of the record.
            members: the number of members of the run, as far as this peer knows.
        """
        peer, said = self._dht.peer_id, encode_health(health)
        record = bytes(said) if self._gate is None else msgspec.msgpack.encode((said, self._gate.holder.text))
        shard = f"{peer.key[0] >> 4:x}" if members > SHARDED_FROM else ""
        return await self._dht.store(
            health_key(self._run_id, shard), record, self._clock() + LIFE_SECONDS, subkey=owner_marker(peer)
        )

    async def read(self, members: int) -> list[Posted]:
        """Read the present records. Records that break a rule are left out.

        Args:
            members: the number of members of the run, as far as the reader knows.
        """
        shards = [""] if members <= SHARDED_FROM // 2 else ["", *(f"{digit:x}" for digit in range(16))]
        found = await self._dht.get_many([health_key(self._run_id, shard) for shard in shards], latest=True)
        newest: dict[PeerID, Posted] = {}
        for records in found.values():
            if records is None or not isinstance(records.value, dict):
                continue
            for subkey, record in records.value.items():
                posted = self._posted(subkey, record.value, record.expiration_time)
                if posted is not None:
                    before = newest.get(posted.peer)
                    if before is None or posted.health.order > before.health.order:
                        newest[posted.peer] = posted
        return list(newest.values())

    def _posted(self, subkey: object, record: Any, expiration: float) -> Posted | None:
        """Decode and check one record; None if it is invalid."""
        latest = self._clock() + MAX_HEALTH_SECONDS
        if not (isinstance(subkey, str) and isinstance(record, bytes) and expiration <= latest):
            return None
        try:
            peer = PeerID.parse(subkey.removeprefix(_MARKER).removesuffix("]"))
            if subkey != owner_marker(peer):
                return None  # another peer may have written it
            membership = ""
            if self._gate is not None:
                said, membership = _admitted.decode(record)
                record = bytes(said)
            health = decode_health(record)
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            log.debug("a health record is ignored: %s", error)
            return None
        if self._gate is not None and peer != self._dht.peer_id:
            parts: tuple[Part, ...] = parts_of(health.role)
            if not self._gate.learn(membership, peer.key, *parts):
                return None
        return Posted(peer, health, expiration - LIFE_SECONDS)


_admitted = msgspec.msgpack.Decoder(tuple[msgspec.Raw, Document])  # in a closed run

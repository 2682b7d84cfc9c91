"""Lets the peers of a run find each other by signed records under the run's key in the DHT."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from shoal.dht.node import DHTNode
from shoal.dht.records import get_dht_time
from shoal.dht.run_keys import members_key
from shoal.dht.validation import owner_marker
from shoal.membership.membership import Part
from shoal.p2p.multiaddr import Multiaddr
from shoal.swarm.duties import parts_of
from shoal.swarm.gate import Document
from shoal.swarm.gates import gate_of
from shoal.swarm.owners_words import OwnersWords
from shoal.swarm.protocol.view import MAX_MEMBERS, Member, Role

log = logging.getLogger(__name__)

RECORD_SECONDS = 60.0  # how long a record lives in the DHT; a dead peer is listed no longer than this
REFRESH_SECONDS = 15.0
# In seconds. A larger difference is warned of. From RECORD_SECONDS on, the peers do not find each other.
MAX_CLOCK_DIFFERENCE = 15.0


class Directory:
    """Lists the peers of one run. This base class lists nobody; it is for a run whose members know each other."""

    async def publish(self, member: Member) -> None:
        """List this peer for the next RECORD_SECONDS."""

    async def read(self) -> list[Member]:
        """The peers that are listed now."""
        return []

    def gone(self, key: bytes) -> None:
        """That peer has left or was lost. It is listed again only if it publishes a newer record."""

    def on_moved(self, handler: Callable[[Sequence[Multiaddr]], None]) -> Callable[[], None]:
        """Call `handler` with the addresses at which this peer is reached, whenever they may have changed. Returns a
        function that ends this."""
        return lambda: None

    def others(self) -> int:
        """How many other peers of any run use the same DHT, as far as this peer knows."""
        return 0


class DHTDirectory(Directory):
    """A directory in the DHT. Each peer writes its own subkey, which only it can sign.

    It warns when this peer can't be listed; once when this peer's clock is behind another's, since others then see its
    record expire early; and once when another process writes this peer's record.

    Args:
        dht: this peer's DHT node.
        run_id: the name of the run. In a closed run, each record carries the membership of its peer, and records
            without a valid one are ignored.
        clock: the clock of the DHT, in seconds.
    """

    def __init__(self, dht: DHTNode, run_id: str, clock: Callable[[], float] = get_dht_time) -> None:
        self._dht, self._clock = dht, clock
        self._gate = gate_of(dht.node, run_id)
        self._words = None if self._gate is None else OwnersWords(dht, self._gate, clock)
        self._key = members_key(run_id)
        self._unlisted = self._behind = False  # whether the log has said so
        self._gone: dict[bytes, float] = {}  # by peer: its record counts only if it expires later than this
        self._written = 0.0  # the latest expiration time of this peer's records
        self._foreign = 0.0  # the expiration time of the last record of this peer that another process wrote

    async def publish(self, member: Member) -> None:
        expiration = self._clock() + RECORD_SECONDS
        self._written = max(self._written, expiration)
        listed = await self._store(member, self._encoded(member), expiration)
        if not (listed or self._unlisted or self._dht.peer_id in self._dht.node.twins):
            until = datetime.fromtimestamp(expiration, UTC).isoformat(timespec="seconds")
            why = "either none can be reached, or this machine's clock is behind, or another process uses this identity"
            log.warning("no node of the DHT keeps this peer's record (%r, until %s): %s", self._key, until, why)
        self._unlisted = not listed

    def _encoded(self, member: Member) -> bytes:
        return msgspec.msgpack.encode(member if self._gate is None else (member, self._gate.holder.text))

    def _decoded(self, subkey: object, record: Any) -> Member | None:
        """The member that a record lists; None for an invalid record."""
        try:
            if self._gate is None:
                member = _decoder.decode(record)
            else:
                member, membership = _admitted.decode(record)
        except (msgspec.MsgspecError, TypeError, UnicodeDecodeError):
            return None  # only its owner suffers from a record that can't be read
        if subkey != owner_marker(member.peer):
            return None  # another peer may have written it
        if self._gate is not None and member.peer != self._dht.peer_id:
            parts = (Part.WATCH,) if member.role is Role.CLIENT else parts_of(member.role)
            if not self._gate.learn(membership, member.key, *parts):
                return None
        return member

    async def withdraw(self, member: Member) -> None:
        """List this peer no longer."""
        record = b"" if self._gate is None else msgspec.msgpack.encode((None, self._gate.holder.text))
        await self._store(member, record, self._clock() + RECORD_SECONDS)

    async def _store(self, member: Member, record: bytes, expiration: float) -> bool:
        return await self._dht.store(self._key, record, expiration, subkey=owner_marker(member.peer))

    async def read(self) -> list[Member]:
        found = await self._dht.get(self._key, latest=True)
        records = found.value if found is not None and isinstance(found.value, dict) else {}
        members, latest = [], 0.0
        for subkey, record in records.items():
            member = self._decoded(subkey, record.value)
            if member is None:
                continue
            latest = max(latest, record.expiration_time)
            if member.peer == self._dht.peer_id:
                self._look_for_twin(record.expiration_time)
            if record.expiration_time > self._gone.get(member.key, 0.0):
                members.append(member)
        self._compare_clocks(latest)
        if self._words is not None:
            await self._words.refresh()
        return members[:MAX_MEMBERS]

    def gone(self, key: bytes) -> None:
        self._gone.pop(key, None)
        self._gone[key] = self._clock() + RECORD_SECONDS
        if len(self._gone) > MAX_MEMBERS:
            del self._gone[next(iter(self._gone))]

    def on_moved(self, handler: Callable[[Sequence[Multiaddr]], None]) -> Callable[[], None]:
        return self._dht.on_moved(lambda: handler(self._dht.visible_addresses()))

    def others(self) -> int:
        return len({peer.peer for peer in self._dht.table.alive()} - self._dht.node.mates)

    def _look_for_twin(self, expiration: float) -> None:
        """Find another process with this peer's identity: it has written a record that expires later than all records
        of this process. One such record may come from an earlier start, if the clock was set back since then; a second
        one comes from a process that runs."""
        if expiration > self._written and expiration != self._foreign:
            if self._foreign:
                self._dht.node.twins.found(self._dht.peer_id)
            self._foreign = expiration

    def _compare_clocks(self, latest: float) -> None:
        """Each peer's record expires RECORD_SECONDS ahead by its own clock. So if a record expires later than that, its
        writer's clock is ahead of this one."""
        behind = latest - self._clock() - RECORD_SECONDS
        if behind > MAX_CLOCK_DIFFERENCE and not self._behind:
            clock = f"this machine's clock is at least {behind:.0f} s behind that of another peer of the run"
            limit = f"With a difference of {RECORD_SECONDS:.0f} s they do not find each other"
            log.warning("%s. %s: set the clock that is wrong", clock, limit)
            self._behind = True


_decoder = msgspec.msgpack.Decoder(Member)
_admitted = msgspec.msgpack.Decoder(tuple[Member, Document])  # in a closed run

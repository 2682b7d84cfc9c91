"""Where the peers of a run find each other: signed records under the run's key in the DHT."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec

from shoal.averaging.member import MAX_MEMBERS, Member
from shoal.dht.node import DHTNode
from shoal.dht.records import get_dht_time
from shoal.dht.validation import owner_marker

RECORD_SECONDS = 60.0  # how long a record lives in the DHT; a dead peer is listed no longer than this
REFRESH_SECONDS = 15.0


class Directory(ABC):
    """Lists the peers of one run."""

    @abstractmethod
    async def publish(self, member: Member) -> None:
        """List this peer for the next RECORD_SECONDS."""

    @abstractmethod
    async def read(self) -> list[Member]:
        """The peers that are listed now."""


class DHTDirectory(Directory):
    """A directory in the DHT. Each peer writes its own subkey, which only it can sign.

    Args:
        dht: this peer's DHT node.
        run_id: names the run.
        clock: seconds, as the DHT's.
    """

    def __init__(self, dht: DHTNode, run_id: str, clock: Callable[[], float] = get_dht_time) -> None:
        self._dht, self._clock = dht, clock
        self._key = f"{run_id}/members"

    async def publish(self, member: Member) -> None:
        expiration = self._clock() + RECORD_SECONDS
        await self._dht.store(self._key, msgspec.msgpack.encode(member), expiration, subkey=owner_marker(member.peer))

    async def read(self) -> list[Member]:
        found = await self._dht.get(self._key, latest=True)
        records = found.value if found is not None and isinstance(found.value, dict) else {}
        members = []
        for subkey, record in list(records.items())[:MAX_MEMBERS]:
            try:
                member = _decoder.decode(record.value)
            except (msgspec.MsgspecError, TypeError, UnicodeDecodeError):
                continue  # a record of its own making hurts nobody but its owner
            if subkey == owner_marker(member.peer):
                members.append(member)
        return members


_decoder = msgspec.msgpack.Decoder(Member)

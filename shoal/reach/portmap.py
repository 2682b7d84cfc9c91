"""Keeps a port of this peer mapped at its home router, as long as the peer lives."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from shoal.p2p.multiaddr import Multiaddr
from shoal.reach.mapper import Mapped, Mapper, MappingFailed

log = logging.getLogger(__name__)

LEASE = 3600  # seconds; the mapping of a killed peer lasts up to this long
SHORTEST = 60.0  # seconds between two renewals, whatever the router grants
TIMEOUT = 2.5  # seconds for each mapper
REMOVAL = 1.0  # seconds


class PortMapping:
    """One mapping, by the first of several protocols that works.

    Args:
        mappers: the protocols, the preferred one first.
        port: the TCP port at which this peer listens.

    Attributes:
        address: the address at which, by the router's word, this peer can be reached; None without a mapping. Only
            other peers can tell whether that is true.
    """

    def __init__(self, mappers: Sequence[Mapper], port: int) -> None:
        self._mappers, self._port = mappers, port
        self._used: Mapper | None = None
        self._mapped: Mapped | None = None
        self._has_failed = False  # since the last mapping, if there was one
        self.address: Multiaddr | None = None

    async def begin(self) -> None:
        """Ask for the mapping. If there is none, a warning gives the reason; it is logged once until a mapping
        works.
        """
        reasons = []
        for mapper in self._mappers:
            try:
                async with asyncio.timeout(TIMEOUT):
                    return self._take(mapper, await mapper.map(self._port, self._port, LEASE))
            except (MappingFailed, TimeoutError) as error:
                reasons.append(f"{mapper.name}: {str(error) or f'no answer within {TIMEOUT:g} s'}")
        self._used = self._mapped = self.address = None
        level, self._has_failed = logging.DEBUG if self._has_failed else logging.WARNING, True
        log.log(
            level,
            "the router maps no port to this peer (%s). Forward TCP port %d by hand, or use a relay",
            "; ".join(reasons),
            self._port,
        )

    def _take(self, mapper: Mapper, mapped: Mapped) -> None:
        self._used, self._mapped, self._has_failed = mapper, mapped, False
        self.address = Multiaddr(f"/ip4/{mapped.host}/tcp/{mapped.port}")
        log.info("the router maps %s to TCP port %d, by %s", self.address, self._port, mapper.name)

    async def keep_up(self) -> None:
        """Renew the mapping when half its time is over, and try again if there is none."""
        while True:
            await asyncio.sleep(max((self._mapped.lifetime if self._mapped else LEASE) / 2, SHORTEST))
            if self._used is not None and self._mapped is not None:
                try:
                    async with asyncio.timeout(TIMEOUT):
                        self._take(self._used, await self._used.map(self._port, self._mapped.port, LEASE))
                    continue
                except (MappingFailed, TimeoutError) as error:
                    log.debug("a mapping was not renewed: %s", error)
            await self.begin()

    async def end(self) -> None:
        """Remove the mapping. (If that fails, the mapping ends with its lease.)"""
        if self._used is not None and self._mapped is not None:
            try:
                async with asyncio.timeout(REMOVAL):
                    await self._used.unmap(self._port, self._mapped.port)
            except (MappingFailed, TimeoutError) as error:
                log.debug("a mapping was not removed: %s", error)
            self._used = self._mapped = self.address = None

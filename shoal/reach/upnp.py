"""UPnP IGD, by miniupnpc (the extra `shoal[nat]`): for routers without NAT-PMP."""

from __future__ import annotations

import asyncio
import ipaddress
import random
from typing import Any

from shoal.reach.mapper import Mapped, Mapper, MappingFailed

DISCOVERY = 1000  # milliseconds to wait for routers' answers
OTHER_PORTS = 3  # ports to try if another machine has the wanted one


class Upnp(Mapper):
    """Maps ports by UPnP. miniupnpc may block for seconds, so it runs in a thread."""

    name = "UPnP"

    def __init__(self) -> None:
        self._router: Any = None  # miniupnpc has no types

    async def external_address(self) -> str:
        return (await asyncio.to_thread(_find))[1]

    async def map(self, port: int, external: int, lifetime: int) -> Mapped:
        return await asyncio.to_thread(self._map, port, external, lifetime)

    async def unmap(self, port: int, external: int) -> None:
        await asyncio.to_thread(self._unmap, external)

    def _map(self, port: int, external: int, lifetime: int) -> Mapped:
        router, host = _find()
        others = random.sample(range(32768, 61000), OTHER_PORTS)
        reason = ""
        for wanted in (external, *others):
            # Some routers support only mappings without an end.
            for seconds in (lifetime, 0):
                try:
                    if router.addportmapping(wanted, "TCP", router.lanaddr, port, "shoal", "", seconds):
                        self._router = router
                        return Mapped(host, wanted, lifetime)
                except Exception as error:  # noqa: BLE001 (as above)
                    reason = str(error)
        raise MappingFailed(f"the router {host} refuses: {reason or 'it gives no reason'}")

    def _unmap(self, external: int) -> None:
        try:
            self._router.deleteportmapping(external, "TCP")
        except Exception as error:
            raise MappingFailed(f"the router did not end the mapping: {error}") from error


def _find() -> tuple[Any, str]:
    """The router, and its external address."""
    try:
        import miniupnpc
    except ImportError:
        raise MappingFailed("miniupnpc is not installed: pip install 'shoal[nat]'") from None
    try:
        router = miniupnpc.UPnP()
        router.discoverdelay = DISCOVERY
        if router.discover():
            router.selectigd()
            return router, str(ipaddress.IPv4Address(router.externalipaddress()))
    except Exception as error:  # miniupnpc raises plain Exception, with the router's error text
        raise MappingFailed(f"no router answers as it should: {error}") from error
    raise MappingFailed("no router answers")

"""UPnP IGD, by miniupnpc (the extra `shoal[nat]`): for routers that speak no NAT-PMP."""

from __future__ import annotations

import asyncio
import ipaddress
import random
from typing import Any

from shoal.reach.mapper import Mapped, Mapper, MappingFailed

DISCOVERY = 1000  # milliseconds that routers have to answer
OTHER_PORTS = 3  # that are tried if the wanted one is another machine's


class Upnp(Mapper):
    """Maps by UPnP. What miniupnpc does takes up to seconds, so it runs in a thread."""

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
            # Some routers know mappings without an end only.
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
    """The router, and its own address."""
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
    except Exception as error:  # it raises Exception itself, with the router's words
        raise MappingFailed(f"no router answers as it should: {error}") from error
    raise MappingFailed("no router answers")

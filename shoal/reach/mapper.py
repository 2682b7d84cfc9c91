"""The interface for protocols that ask a router to forward a port to this machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


class MappingFailed(Exception):
    """The router maps no port. The text gives the reason."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """A mapping, as the router describes it.

    Attributes:
        host: the router's external address.
        port: the TCP port at that address.
        lifetime: seconds for which the mapping is valid.
    """

    host: str
    port: int
    lifetime: int


class Mapper(ABC):
    """One protocol for asking routers. The methods don't block the loop; the caller sets the deadline.

    Attributes:
        name: the protocol's name.
    """

    name: str

    @abstractmethod
    async def external_address(self) -> str:
        """The router's external address, as the router gives it. Changes nothing there. Raises MappingFailed."""

    @abstractmethod
    async def map(self, port: int, external: int, lifetime: int) -> Mapped:
        """Ask the router to forward its port `external`, or another port, to `port` of this machine for `lifetime`
        seconds, or to renew that. Raises MappingFailed.
        """

    @abstractmethod
    async def unmap(self, port: int, external: int) -> None:
        """End the mapping. Raises MappingFailed."""

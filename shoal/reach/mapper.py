"""The interface of what asks a router to send a port to this machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


class MappingFailed(Exception):
    """The router maps no port; the text says why."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """What the router says.

    Attributes:
        host: its external address.
        port: of TCP, at that address.
        lifetime: seconds for which it holds.
    """

    host: str
    port: int
    lifetime: int


class Mapper(ABC):
    """One protocol by which routers are asked. The methods don't block the loop; the caller sets the deadline.

    Attributes:
        name: of the protocol.
    """

    name: str

    @abstractmethod
    async def external_address(self) -> str:
        """The router's own address, as it says itself; changes nothing there. Raises MappingFailed."""

    @abstractmethod
    async def map(self, port: int, external: int, lifetime: int) -> Mapped:
        """Have the router's port `external`, or another one, sent to `port` of this machine for `lifetime` seconds; or
        go on with that. Raises MappingFailed."""

    @abstractmethod
    async def unmap(self, port: int, external: int) -> None:
        """End that. Raises MappingFailed."""

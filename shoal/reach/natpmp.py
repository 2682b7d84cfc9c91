"""NAT-PMP (RFC 6886): asks the router, by a datagram, to forward a TCP port of its public address to this machine."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from shoal.reach.mapper import Mapped, Mapper, MappingFailed

PORT = 5351
TRIES = (0.25, 0.5, 0.5)  # seconds to wait for an answer to each datagram
MAX_DATAGRAMS = 16  # datagrams read after each request: a router that floods must not block the loop
_VERSION, _ADDRESS, _MAP_TCP, _ANSWER = 0, 0, 2, 128
_REQUEST = struct.Struct("!BBHHHI")  # version, opcode, reserved, internal port, external port, lifetime
_HEAD = struct.Struct("!BBH")  # the head of each answer: version, opcode, result
_ADDRESS_ANSWER = struct.Struct("!BBHI4s")  # the head, the router's epoch, its external address
_MAP_ANSWER = struct.Struct("!BBHIHHI")  # the head, the epoch, internal port, external port, lifetime
_RESULTS = {
    1: "it speaks another version",
    2: "it is not allowed to: switch on NAT-PMP or UPnP at the router",
    3: "the router has no connection itself",
    4: "the router has no port left",
    5: "it can't do that",
}

T = TypeVar("T")


def default_gateway(routes: str) -> str:
    """The router of this machine, from the text of /proc/net/route. Raises MappingFailed if there is none."""
    found: list[tuple[int, str]] = []
    for line in routes.splitlines()[1:]:
        fields = line.split()
        if len(fields) >= 8 and fields[1] == "00000000" and int(fields[3], 16) & 2:
            found.append((int(fields[6]), str(ipaddress.IPv4Address(struct.pack("<I", int(fields[2], 16))))))
    if not found:
        raise MappingFailed("this machine has no router (no default route)")
    return min(found)[1]


def address_request() -> bytes:
    """A request for the router's external address."""
    return bytes([_VERSION, _ADDRESS])


def map_request(port: int, external: int, lifetime: int) -> bytes:
    """A request to map `external`, if it is free, to this machine's `port`, for `lifetime` seconds; 0 ends the
    mapping.
    """
    return _REQUEST.pack(_VERSION, _MAP_TCP, 0, port, external, lifetime)


def address_of(answer: bytes) -> str | None:
    """The external address in an answer; None if it is no answer to `address_request`. Raises MappingFailed."""
    if not _is_answer(answer, _ADDRESS, _ADDRESS_ANSWER.size):
        return None
    return str(ipaddress.IPv4Address(_ADDRESS_ANSWER.unpack(answer)[-1]))


def mapping_of(answer: bytes, port: int) -> tuple[int, int] | None:
    """The external port and the lifetime in seconds; None if it is no answer to a `map_request` of `port`. Raises
    MappingFailed.
    """
    if not _is_answer(answer, _MAP_TCP, _MAP_ANSWER.size):
        return None
    *_, internal, external, lifetime = _MAP_ANSWER.unpack(answer)
    return (external, lifetime) if internal == port else None


def _is_answer(answer: bytes, opcode: int, size: int) -> bool:
    if len(answer) < _HEAD.size:
        return False
    version, answered, result = _HEAD.unpack_from(answer)
    if answered != _ANSWER + opcode and not (result == 1 and answered >= _ANSWER):
        return False
    if result:
        raise MappingFailed(_RESULTS.get(result, f"it answers with the unknown error {result}"))
    return version == _VERSION and len(answer) == size


def _routes() -> str:
    try:
        return Path("/proc/net/route").read_text()
    except OSError as error:
        raise MappingFailed(f"it is not known which router this machine has: {error}") from error


class NatPmp(Mapper):
    """Maps ports by NAT-PMP."""

    name = "NAT-PMP"

    async def external_address(self) -> str:
        return await _ask(default_gateway(_routes()), address_request(), address_of)

    async def map(self, port: int, external: int, lifetime: int) -> Mapped:
        host = await self.external_address()
        gateway = default_gateway(_routes())
        external, granted = await _ask(gateway, map_request(port, external, lifetime), lambda a: mapping_of(a, port))
        if not external or not granted:
            raise MappingFailed(f"the router {gateway} says that it has mapped no port")
        return Mapped(host, external, min(granted, lifetime))

    async def unmap(self, port: int, external: int) -> None:
        gateway = default_gateway(_routes())
        await _ask(gateway, map_request(port, 0, 0), lambda answer: mapping_of(answer, port))


async def _ask(gateway: str, request: bytes, parse: Callable[[bytes], T | None]) -> T:
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.setblocking(False)
        try:
            asking.connect((gateway, PORT))  # the kernel drops datagrams from all others
            for wait in TRIES:
                asking.send(request)
                try:
                    async with asyncio.timeout(wait):
                        for _ in range(MAX_DATAGRAMS):
                            if (answer := parse(await loop.sock_recv(asking, 64))) is not None:
                                return answer
                except TimeoutError:
                    continue
        except OSError as error:
            raise MappingFailed(f"the router {gateway} does not speak it ({error.strerror})") from error
    raise MappingFailed(f"the router {gateway} does not answer")

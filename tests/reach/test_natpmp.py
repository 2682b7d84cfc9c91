"""NAT-PMP: what is asked, and what is made of the answers of routers that keep the rules, and that don't."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import pytest

from shoal.p2p.multiaddr import Multiaddr
from shoal.reach import natpmp
from shoal.reach.mapper import Mapped, Mapper, MappingFailed
from shoal.reach.portmap import PortMapping

ROUTES = """Iface	Destination	Gateway 	Flags	RefCnt	Use	Metric	Mask		MTU	Window	IRTT
wlan0	00000000	0100A8C0	0003	0	0	600	00000000	0	0	0
eth0	00000000	01004D0A	0003	0	0	100	00000000	0	0	0
eth0	00004D0A	00000000	0001	0	0	100	00FFFFFF	0	0	0
"""
RIGHT = {
    natpmp.address_request(): struct.pack("!BBHI4s", 0, 128, 0, 9, socket.inet_aton("52.1.2.3")),
    natpmp.map_request(7, 7, 3600): struct.pack("!BBHIHHI", 0, 130, 0, 9, 7, 8, 1800),
    natpmp.map_request(7, 0, 0): struct.pack("!BBHIHHI", 0, 130, 0, 9, 7, 0, 0),
}


def test_what_is_sent_is_as_the_rfc_has_it():
    assert natpmp.address_request().hex() == "0000"
    assert natpmp.map_request(31337, 31337, 3600).hex() == "000200007a697a6900000e10"
    assert natpmp.map_request(31337, 0, 0).hex() == "000200007a69000000000000"


def test_the_router_is_that_of_the_default_route_with_the_smallest_metric():
    assert natpmp.default_gateway(ROUTES) == "10.77.0.1"
    with pytest.raises(MappingFailed, match="no default route"):
        natpmp.default_gateway("\n".join(ROUTES.splitlines()[::3]))


def test_what_answers_say():
    assert natpmp.address_of(RIGHT[natpmp.address_request()]) == "52.1.2.3"
    assert natpmp.mapping_of(RIGHT[natpmp.map_request(7, 7, 3600)], 7) == (8, 1800)
    for result in (1, 2, 3, 4, 5, 77):
        with pytest.raises(MappingFailed):
            natpmp.mapping_of(struct.pack("!BBHIHHI", 0, 130, result, 9, 7, 8, 1800), 7)
    with pytest.raises(MappingFailed, match="another version"):
        natpmp.address_of(bytes([2, 128, 0, 1]))


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\0",
        bytes(16),
        RIGHT[natpmp.map_request(7, 7, 3600)][:-1],
        RIGHT[natpmp.map_request(7, 7, 3600)] + b"x",
        RIGHT[natpmp.address_request()],
        struct.pack("!BBHIHHI", 0, 129, 0, 9, 7, 8, 1800),  # of UDP
        struct.pack("!BBHIHHI", 2, 130, 0, 9, 7, 8, 1800),
        struct.pack("!BBHIHHI", 0, 130, 0, 9, 9, 8, 1800),  # of another port
    ],
)
def test_what_is_no_answer_is_passed_over(answer):
    assert natpmp.mapping_of(answer, 7) is None


@contextmanager
def router(monkeypatch: pytest.MonkeyPatch, answers: dict[bytes, list[bytes]]) -> Iterator[list[bytes]]:
    """A router on loopback; what it was asked."""
    asked: list[bytes] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as serving:
        serving.bind(("127.0.0.1", 0))
        monkeypatch.setattr(natpmp, "PORT", serving.getsockname()[1])
        monkeypatch.setattr(natpmp, "default_gateway", lambda _routes: "127.0.0.1")

        def serve() -> None:
            while (came := serving.recvfrom(64))[0] != b"end":
                asked.append(came[0])
                for answer in answers.get(came[0], []):
                    serving.sendto(answer, came[1])

        thread = Thread(target=serve)
        thread.start()
        try:
            yield asked
        finally:
            serving.sendto(b"end", serving.getsockname())
            thread.join()


def test_a_mapping_is_made_announced_and_removed(monkeypatch):
    async def main() -> None:
        mapping = PortMapping([natpmp.NatPmp()], 7)
        await mapping.begin()
        assert mapping.address == Multiaddr("/ip4/52.1.2.3/tcp/8")
        await mapping.end()
        assert mapping.address is None

    with router(monkeypatch, {request: [answer] for request, answer in RIGHT.items()}) as asked:
        asyncio.run(main())
    assert asked == list(RIGHT)


def test_a_router_that_says_nonsense_without_end_is_left_in_bounded_time(monkeypatch, caplog):
    monkeypatch.setattr(natpmp, "TRIES", (0.05, 0.05))

    async def main() -> None:
        mapping = PortMapping([natpmp.NatPmp()], 7)
        await asyncio.wait_for(mapping.begin(), 30)
        assert mapping.address is None

    with router(monkeypatch, {natpmp.address_request(): [b"nonsense"] * 100}):
        asyncio.run(main())
    [warning] = caplog.records
    assert "NAT-PMP: the router 127.0.0.1 does not answer" in warning.getMessage()


class Granting(Mapper):
    """Grants what it is asked, or what it is told to."""

    name = "Granting"

    def __init__(self, *lifetimes: int) -> None:
        self.lifetimes, self.asked = list(lifetimes), 0

    async def external_address(self) -> str:
        return "52.1.2.3"

    async def map(self, port: int, external: int, lifetime: int) -> Mapped:
        self.asked += 1
        if not self.lifetimes:
            raise MappingFailed("no more")
        return Mapped("52.1.2.3", external, self.lifetimes.pop(0))

    async def unmap(self, port: int, external: int) -> None:
        raise MappingFailed("it does not")


def test_it_is_renewed_at_half_its_time_and_another_way_is_tried_when_that_fails(monkeypatch, caplog):
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) > 4:
            raise asyncio.CancelledError

    monkeypatch.setattr(asyncio, "sleep", sleep)
    first, second = Granting(3600, 1), Granting(600)

    async def main() -> None:
        mapping = PortMapping([first, second], 7)
        await mapping.begin()
        with pytest.raises(asyncio.CancelledError):
            await mapping.keep_up()
        assert mapping.address is None
        await mapping.end()

    asyncio.run(main())
    assert slept == [1800, 60, 300, 1800, 1800]
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("the router maps no port to this peer"), "once, though it was looked for twice"

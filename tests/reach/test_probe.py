"""A peer that is asked dials back to the asker, and to nobody else."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shoal.p2p.errors import P2PError, Refused, Unavailable
from shoal.p2p.identity import Identity, PeerID
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.node import Node
from shoal.p2p.quota import Rate
from shoal.p2p.sockets import SocketTransport
from shoal.reach import probe as module
from shoal.reach.probe import SERVICE, DialBack, Probe, Probed, probe
from tests.p2p.recorder import LOOPBACK

ANY6 = Multiaddr("/ip6/::1/tcp/0")


@asynccontextmanager
async def asker_and_asked(listen: Multiaddr = LOOPBACK) -> AsyncIterator[tuple[Node, Node]]:
    """Two nodes, of which the first has dialled the second and listens, too."""
    nodes = [Node(identity, SocketTransport(identity)) for identity in (Identity(), Identity())]
    asker, asked = nodes
    try:
        await asker.listen(listen)
        DialBack(asked)
        asker.learn(asked.peer_id, [await asked.listen(listen)])
        await asker.connect(asked.peer_id)
        yield asker, asked
    finally:
        for node in nodes:
            await node.close()


def at(port: int, peer: PeerID, host: str = "ip4/127.0.0.1") -> Multiaddr:
    return Multiaddr(f"/{host}/tcp/{port}").with_peer(peer)


def test_the_answer_says_which_addresses_work():
    async def main() -> None:
        async with asker_and_asked() as (asker, asked):
            [own] = asker.addresses
            with socket.socket() as nobody:
                nobody.bind(("127.0.0.1", 0))
                refused = at(nobody.getsockname()[1], asker.peer_id)
                answer = await probe(asker, asked.peer_id, [own, refused], 60)
                assert (answer.seen, {*answer.reached}, {*answer.failed}) == ("127.0.0.1", {own}, {refused})

    asyncio.run(main())


def test_only_the_asker_s_own_host_is_dialled(monkeypatch):
    dialled = []

    async def main() -> None:
        async with asker_and_asked() as (asker, asked):
            observe = asked.transport.observe

            async def record(address: Multiaddr, source_port: int = 0):
                dialled.append(address)
                return await observe(address, source_port)

            monkeypatch.setattr(asked.transport, "observe", record)
            [own] = asker.addresses
            elsewhere = [
                at(own.port, asker.peer_id, host) for host in ("ip4/8.8.8.8", "ip6/2001:db8::1", "dns/a.invalid")
            ]
            answer = await probe(asker, asked.peer_id, elsewhere, 60)
            assert dialled == [own], "its port there, once"
            assert answer.reached == {own}
            answer = await probe(asker, asked.peer_id, [at(own.port, asker.peer_id, "dns4/localhost")], 60)
            assert answer.reached == {at(own.port, asker.peer_id, "dns4/localhost")}
            assert dialled == [own, own]

    asyncio.run(main())


def test_who_answers_has_to_be_the_asker():
    async def main() -> None:
        async with asker_and_asked() as (asker, asked):
            [of_asked] = asked.addresses
            mine = of_asked.with_peer(asker.peer_id)
            answer = await probe(asker, asked.peer_id, [mine], 60)
            assert ({*answer.reached}, {*answer.failed}) == (set(), {mine})
            with pytest.raises(Refused, match="is no address of"):
                await probe(asker, asked.peer_id, [of_asked.with_peer(None).with_port(0)], 60)
            third = Probe((str(of_asked),))
            with pytest.raises(Refused, match="is no address of"):
                await asker.call(asked.peer_id, SERVICE, third, Probed, timeout=60)
            many = Probe(tuple(f"/ip4/127.0.0.1/tcp/{port}" for port in range(1, 6)))
            with pytest.raises(Refused):
                await asker.call(asked.peer_id, SERVICE, many, Probed, timeout=60)

    asyncio.run(main())


def test_a_peer_that_asks_without_end_is_told_to_ask_less(monkeypatch):
    monkeypatch.setattr(module, "PROBES", Rate(1e-9, 5))

    async def main() -> None:
        async with asker_and_asked() as (asker, asked):
            for _ in range(5):
                await probe(asker, asked.peer_id, asker.addresses, 60)
            with pytest.raises(Unavailable, match="ask less"):
                await probe(asker, asked.peer_id, asker.addresses, 60)

    asyncio.run(main())


@pytest.mark.parametrize(
    "said",
    [
        Probed("6.6.6.6", ("/ip4/6.6.6.7/tcp/7",), ()),
        Probed("localhost", ("/ip4/127.0.0.1/tcp/7",), ()),
        Probed("6.6.6.6", ("/ip4/6.6.6.6/tcp/8",), ()),
        Probed("6.6.6.6", ("what",), ()),
        Probed("6.6.6.6", (), ()),
    ],
)
def test_an_answer_that_is_none_is_not_believed(said):
    async def main() -> None:
        async with asker_and_asked() as (asker, asked):
            asked.stop_serving(SERVICE)
            asked.serve(SERVICE, lambda *_: said)
            with pytest.raises(P2PError):
                await probe(asker, asked.peer_id, [at(7, asker.peer_id)], 60)

    asyncio.run(main())


def test_ipv6():
    try:
        with socket.socket(socket.AF_INET6) as six:
            six.bind(("::1", 0))
    except OSError:
        pytest.skip("no IPv6 on this machine")

    async def main() -> None:
        async with asker_and_asked(ANY6) as (asker, asked):
            answer = await probe(asker, asked.peer_id, asker.addresses, 60)
            assert (answer.seen, {*answer.reached}) == ("::1", {*asker.addresses})

    asyncio.run(main())

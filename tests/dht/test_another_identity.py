"""An initial peer that was restarted with another identity is not found at its address: one warning says so."""

from __future__ import annotations

import contextlib
import socket
import time

import pytest

from shoal.dht import DHT
from shoal.dht import node as dht_node
from shoal.p2p import redial
from shoal.p2p.errors import PeerUnreachable
from shoal.p2p.identity import Identity


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    """The other initial peer answers, so nothing else says that something is wrong."""
    before = Identity().peer_id
    with DHT(start=True) as restarted, DHT(start=True) as other:
        [address] = restarted.get_visible_maddrs()
        old = address.with_peer(before)
        with DHT([old, *other.get_visible_maddrs()], start=True) as dht:
            [line] = warned(caplog)
            assert line.startswith(
                f"at {old} answers peer {restarted.peer_id}, and initial_peers names {before} there. "
            )
            assert "DHT(identity_path=…)" in line
            assert "initial_peers" in line
            with contextlib.suppress(PeerUnreachable):
                dht.run_coroutine(lambda _, node: node.node.connect(before))
            assert len(warned(caplog)) == 1, "once is enough"


def test_later(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redial, "SHORTEST", 0.05)
    monkeypatch.setattr(dht_node, "SHORTEST", 1.0)
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(DHT(start=True))
        [address] = first.get_visible_maddrs()
        stack.enter_context(DHT([address], start=True))
        first.shutdown()
        host = f"/ip4/{address.host}/tcp/{address.port}"
        again = stack.enter_context(DHT(host_maddrs=[host], start=True))
        deadline = time.monotonic() + 60
        while not warned(caplog):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        [line] = warned(caplog)
        assert str(address) in line
        assert str(again.peer_id) in line


def test_addresses_of_others_are_nobodys_business(caplog: pytest.LogCaptureFixture) -> None:
    """In a large swarm peers restart all the time."""
    with DHT(start=True) as other, DHT(other.get_visible_maddrs(), start=True) as dht:
        gone = Identity().peer_id
        [address] = other.get_visible_maddrs()

        async def dial(_: DHT, node: dht_node.DHTNode) -> str:
            node.node.learn(gone, [address.with_peer(gone)])
            try:
                await node.node.connect(gone)
            except PeerUnreachable as error:
                return str(error)
            return ""

        assert f"it is peer {other.peer_id}" in dht.run_coroutine(dial)
        assert warned(caplog) == []


def test_of_this_very_peer(caplog: pytest.LogCaptureFixture) -> None:
    """All peers have one list of initial peers, and this one has lost its identity."""
    before = Identity().peer_id
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host = f"/ip4/127.0.0.1/tcp/{free.getsockname()[1]}"
    old = f"{host}/p2p/{before}"
    with DHT(start=True) as other, DHT([old, *other.get_visible_maddrs()], host_maddrs=[host], start=True) as dht:
        [line] = warned(caplog)
        assert line.startswith("this peer's own address stands in initial_peers with an earlier identity: " + old)
        assert f"this peer is now {dht.peer_id}. Remove it there, or keep the identity with DHT(identity_" in line
        assert dht.run_coroutine(_initial_peers) == {other.peer_id}, "nobody is missing there"
    with pytest.raises(PeerUnreachable, match=f"{old}: it is this peer's own address, with an earlier identity"):
        DHT([old], host_maddrs=[host], start=True)


async def _initial_peers(_: DHT, node: dht_node.DHTNode) -> set[object]:
    return set(node._initial_peers)

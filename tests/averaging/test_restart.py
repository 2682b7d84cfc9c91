"""A node that is killed and comes back at its address, with its identity: its clients find it again by themselves."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from tests.peers import Worker, ask_all
from tests.workers.averager import Averager

pytestmark = pytest.mark.processes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_clients_of_a_node_that_was_restarted_are_its_members_again(tmp_path: Path) -> None:
    """They can be dialled by nobody, and the node was all that they knew of the DHT and of the run."""
    listening = [f"/ip4/127.0.0.1/tcp/{free_port()}"]
    node_dht = {"host_maddrs": listening, "identity_path": str(tmp_path / "identity")}
    peers = [Worker(Averager) for _ in range(3)]
    try:
        node, *clients = peers
        node.begin(Averager, [], 100, {}, node_dht)
        node.started()
        for client in clients:
            client.begin(Averager, node.addresses, 100, {}, {"client_mode": True})
        for client in clients:
            client.started()
            members, _ = client.ask(Averager.members, 2, seconds=100)
            assert members == sorted({node.peer, client.peer})
        node.kill()
        killed = time.monotonic()
        for client in clients:
            assert client.ask(Averager.members, 1, seconds=100)[0] == [client.peer]
        again = Worker(Averager)
        peers.append(again)
        again.begin(Averager, [], 100, {}, node_dht)
        again.started()
        away = time.monotonic() - killed
        assert (again.addresses, again.peer) == (node.addresses, node.peer)
        found = ask_all(clients, Averager.members, 2, seconds=100)
        for client, (members, seconds) in zip(clients, found, strict=True):
            assert members == sorted({node.peer, client.peer})
            assert seconds < 5 + away / 4 + 20, "not after 5 s, nor a fourth of the time for which it was away"
        assert again.ask(Averager.members, 3, seconds=100)[0] == sorted(peer.peer for peer in peers[:3])
    finally:
        for peer in peers:
            peer.end()

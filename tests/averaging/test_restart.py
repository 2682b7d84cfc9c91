"""A node that is killed and comes back at its address, with its identity: its clients find it again by themselves."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest

from tests.averaging.processes import WORKER
from tests.peers import PeerProcess

pytestmark = pytest.mark.processes


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_clients_of_a_node_that_was_restarted_are_its_members_again(tmp_path: Path) -> None:
    """They can be dialled by nobody, and the node was all that they knew of the DHT and of the run."""
    averager = {"prefix": "test"}
    node_options: dict[str, Any] = {
        "elements": 100,
        "averager": averager,
        "dht": {
            "host_maddrs": [f"/ip4/127.0.0.1/tcp/{free_port()}"],
            "identity_path": str(tmp_path / "identity"),
        },
    }
    peers = [PeerProcess(WORKER, node_options)]
    try:
        peers[0].started()
        addresses, names = peers[0].addresses, [peers[0].peer]
        client_options = {
            "elements": 100,
            "averager": averager,
            "initial_peers": addresses,
            "dht": {"client_mode": True},
        }
        clients = [PeerProcess(WORKER, client_options) for _ in range(2)]
        peers += clients
        for client in clients:
            client.started()
            names.append(client.peer)
        for client in clients:
            assert client.ask(do="members", members=2, seconds=100)["members"] == sorted({names[0], client.peer})
        peers[0].kill()
        killed = time.monotonic()
        for client in clients:
            assert client.ask(do="members", members=1, seconds=100)["members"] == [client.peer]
        again = PeerProcess(WORKER, node_options)
        peers.append(again)
        again.started()
        away = time.monotonic() - killed
        assert (again.addresses, again.peer) == (addresses, names[0])
        for client in clients:
            client.tell(do="members", members=2, seconds=100)
        for client in clients:
            answer = client.hear()
            assert answer is not None
            assert answer["members"] == sorted({names[0], client.peer})
            assert answer["seconds"] < 5 + away / 4 + 20, (
                "not after 5 s, nor a fourth of the time for which it was away"
            )
        assert again.ask(do="members", members=3, seconds=100)["members"] == sorted(names)
    finally:
        for peer in peers:
            peer.end()

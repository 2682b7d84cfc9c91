"""One node and two clients: the node is killed and comes back at its address. A client gives its state over the
connection that it made, so all are one again."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from tests.optim.processes import Peer, Pool, Training, begin, events, training
from tests.soaked import only_in_soak
from tests.waiting import wait_until

pytestmark = pytest.mark.long

TOGETHER_SECONDS = 90.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def one_lineage(peers: list[Peer], since: float) -> bool:
    """Whether all have made three epochs together since then, with the same states."""
    shared: list[set[tuple[int, str]]] = []
    for peer in peers:
        found = [e for e in events(peer) if e["kind"] == "epoch" and e["peers"] == len(peers) and e["time"] > since]
        shared.append({(event["epoch"], event["digest"]) for event in found})
    return len(set.intersection(*shared)) >= 3


@pytest.mark.parametrize("checkpoint", ["with its checkpoint", "without one"])
def test_a_node_that_comes_back_and_its_clients_are_one_again(pool: Pool, tmp_path: Path, checkpoint: str) -> None:
    port, identity, saved = free_port(), str(tmp_path / "identity"), str(tmp_path / "checkpoint")
    with training(pool, 0, optimizer="adamw", target=64, averaging_timeout=20.0) as peers:
        (node,) = peers.add(1, port=port, identity=identity)
        address = peers.addresses
        clients = peers.add(2, dht_client=True)
        for peer, batch in zip(peers.all, (16, 16, 8), strict=True):
            peer.ask(Training.train, batch=batch, pause=0.05)
        wait_until(lambda: one_lineage(peers.all, 0.0))
        node.ask(Training.stop)
        node.ask(Training.save, saved)
        node.kill()
        killed = time.monotonic()
        wait_until(lambda: all(any(e["time"] > killed + 1 for e in events(client)) for client in clients))
        peers.all.remove(node)
        node.end()
        [again] = pool.take(1)
        peers.all.append(again)
        run = {"optimizer": "adamw", "target": 64, "averaging_timeout": 20.0, "port": port, "identity": identity}
        begin(again, [], run)
        again.started()
        assert again.addresses == address
        if checkpoint == "with its checkpoint":
            again.ask(Training.load, saved)
        back = time.monotonic()
        again.ask(Training.train, batch=16, pause=0.05)
        wait_until(lambda: one_lineage(peers.all, back), TOGETHER_SECONDS)
        print(f"one again after {time.monotonic() - back:.1f} s")


@only_in_soak
def test_a_fast_client_that_was_away_gives_its_state_once(pool: Pool) -> None:
    """Alone it makes many epochs; the nodes take its state over, and then train with it."""
    with training(pool, 0, optimizer="adamw", target=256) as peers:
        nodes = peers.add(2)
        (client,) = peers.add(1, dht_client=True)
        for peer, batch, pause in zip(peers.all, (16, 16, 8), (0.05, 0.05, 0.002), strict=True):
            peer.ask(Training.train, batch=batch, pause=pause)
        wait_until(lambda: one_lineage(peers.all, 0.0))
        for node in nodes:
            node.hang()
        wait_until(lambda: sum(e.get("peers") == 1 for e in events(client)) > 5)
        for node in nodes:
            node.go_on()
        back = time.monotonic()
        wait_until(lambda: one_lineage(peers.all, back), TOGETHER_SECONDS)
        for node in nodes:
            downloads = [event for event in events(node) if event["kind"] == "download" and event["time"] > back]
            assert len(downloads) <= 4, "each download came too late"
        together = [e for e in events(client) if e.get("peers") == 3 and e["time"] > back]
        assert min(event["samples"] for event in together) >= 256

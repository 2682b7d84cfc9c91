"""``shoal node``: prints addresses that work, keeps its identity, ends at a signal, and refuses what cannot be."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import shoal
from shoal.dht.created import CreatedNode as DHTNode
from shoal.p2p.identity import PeerID
from shoal.p2p.multiaddr import Multiaddr

pytestmark = pytest.mark.processes

LOOPBACK = ("--host-maddrs", "/ip4/127.0.0.1/tcp/0")


@contextmanager
def node(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A node process and its address."""
    command = [sys.executable, "-m", "shoal.cli", "node", *LOOPBACK, *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = next(line.split()[1] for line in process.stdout if line.startswith("--initial-peers"))
        yield process, address
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_others_find_each_other_by_it_until_it_is_ended(ending: signal.Signals) -> None:
    with node() as (process, address):
        with shoal.DHT([address], start=True) as writer, shoal.DHT([address], start=True) as reader:
            assert writer.store("key", "value", expiration_time=shoal.get_dht_time() + 60)
            found = reader.get("key")
            assert found is not None
            assert found.value == "value"
        process.send_signal(ending)
        assert process.wait(timeout=100) == 0


def test_an_identity_file_keeps_the_peer_id(tmp_path: Path) -> None:
    identity = ("--identity", str(tmp_path / "key"))
    with node(*identity) as (_, address):
        first = address.rpartition("/p2p/")[2]
    with node(*identity) as (_, address):
        assert address.rpartition("/p2p/")[2] == first


def test_a_node_that_relays_leads_to_peers_that_nobody_can_dial() -> None:
    async def reserve(_dht: shoal.DHT, node: DHTNode) -> list[Multiaddr]:
        return await node.circuits.reserve()

    with (
        node("--relay", "--relay-bandwidth", "12.5e6") as (_, address),
        shoal.DHT([address], client_mode=True, start=True) as one,
        shoal.DHT([address], start=True) as other,
    ):
        [circuit] = one.run_coroutine(reserve)
        assert str(circuit) == f"{address}/p2p-circuit/p2p/{one.peer_id}"
        other.run_coroutine(lambda _, node: node.node.transport.dial(circuit))
        assert other.run_coroutine(is_connected(one.peer_id))
    with node() as (_, address), shoal.DHT([address], client_mode=True, start=True) as one:
        assert one.run_coroutine(reserve) == []


def is_connected(peer: PeerID) -> Callable[[shoal.DHT, DHTNode], Awaitable[bool]]:
    async def ask(_dht: shoal.DHT, node: DHTNode) -> bool:
        return node.node.is_connected(peer)

    return ask


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (("--relay-bandwidth", "1e6"), 2, "add relay=True"),
        (("--relay", "--relay-bandwidth", "1"), 2, "at least 10000 bytes per second"),
        (("--host-maddrs", "localhost:80"), 2, "localhost:80"),
        (("--initial-peers", "/ip4/127.0.0.1/tcp/9"), 2, "must end in /p2p/"),
        (("--host-maddrs", "/ip4/203.0.113.1/tcp/9"), 1, "could not start"),
    ],
)
def test_what_cannot_be_is_one_clear_error(arguments: tuple[str, ...], code: int, says: str) -> None:
    command = [sys.executable, "-m", "shoal.cli", "node", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == code
    assert says in " ".join(done.stderr.replace("│", "").split())
    assert "Traceback" not in done.stderr

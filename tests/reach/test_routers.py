"""Peers at home, behind routers that let nobody in, reach each other: through a relay, or a hole in their routers."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from shoal.swarm.swarm import DEFAULT_CHUNK_TIMEOUT
from tests.homes import Host, Router, homes

ELEMENTS = 1 << 20
BYTES = 4 * ELEMENTS
DIRECT_SECONDS = 5.0  # after which two peers whose routers allow it are connected directly

RELAY = """
import json, socket, sys, threading, shoal
seen = bytearray()
def capture():
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3)) as tap:
        while True:
            seen.extend(tap.recv(1 << 16))
if "capture" in sys.argv:
    threading.Thread(target=capture, daemon=True).start()
dht = shoal.DHT(start=True, host_maddrs=["/ip4/0.0.0.0/tcp/31337"], relay=True)
print(json.dumps([str(address) for address in dht.get_visible_maddrs() if not address.is_loopback]), flush=True)
for line in sys.stdin:
    windows = [bytes.fromhex(text) for text in json.loads(line)]
    relay = dht.dht_node.relay
    answer = [relay.splicer.passed, len(seen), sum(window in seen for window in windows), relay.numbers[2]]
    print(json.dumps(answer), flush=True)
dht.shutdown()
"""
PEER = """
import hashlib, json, sys, time, torch, shoal
rank, elements = int(sys.argv[1]), int(sys.argv[2])
options = json.loads(sys.argv[3])
dht = shoal.DHT(start=True, host_maddrs=["/ip4/0.0.0.0/tcp/31337"], **options)
print(json.dumps([dht.client_mode, [str(address) for address in dht.get_visible_maddrs()]]), flush=True)
vector = torch.rand(elements, generator=torch.Generator().manual_seed(rank))
averager = shoal.DecentralizedAverager([vector], dht, prefix="run", min_matchmaking_time=10.0, start=True)
for line in sys.stdin:
    match json.loads(line):
        case "some":
            data = vector.numpy().tobytes()
            answer = [data[at : at + 16].hex() for at in range(0, len(data), len(data) // 10)]
        case "ways":
            transport = dht.node.transport
            answer = {str(p): type(link.route).__name__ for p, link in transport._peers.items()}
        case ["round", change]:
            vector.add_(torch.rand(elements, generator=torch.Generator().manual_seed(change + rank)))
            averager.step(timeout=60)
            digest = hashlib.sha256(vector.numpy().tobytes()).hexdigest()
            answer = [len(averager.last_round.members), digest]
    print(json.dumps(answer), flush=True)
averager.shutdown()
dht.shutdown()
"""


class Program:
    """A program in a host that answers lines."""

    def __init__(self, host: Host, text: str, *arguments: str) -> None:
        self.process = host.python(text, *arguments, stderr=None)

    def send(self, command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "it has ended"
        return json.loads(line)

    def ask(self, command: Any) -> Any:
        self.send(command)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with self.process.stdout, self.process.stdin:
            self.process.stdin.close()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.kill()


class Run:
    """Relays, and peers that average."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.relays: list[Program] = []
        self.addresses: list[str] = []
        self.peers: list[Program] = []
        self._rounds = 0

    def relay(self, host: Host, *arguments: str) -> Program:
        relay = Program(host, RELAY, *arguments)
        self._stack.callback(relay.close)
        self.relays.append(relay)
        self.addresses += relay.answer()
        return relay

    def join(self, *hosts: Host, elements: int = ELEMENTS, **options: Any) -> list[list[str]]:
        """Start a peer in each; returns their addresses."""
        options["initial_peers"] = self.addresses
        new = [
            Program(host, PEER, str(len(self.peers) + number), str(elements), json.dumps(options))
            for number, host in enumerate(hosts)
        ]
        for peer in new:
            self._stack.callback(peer.close)
        self.peers += new
        answers = [peer.answer() for peer in new]
        assert not any(is_client for is_client, _ in answers)
        return [visible for _, visible in answers]

    def begin_round(self) -> None:
        self._rounds += 1
        for peer in self.peers:
            peer.send(["round", 100 * self._rounds])

    def end_round(self) -> None:
        answers = [peer.answer() for peer in self.peers]
        assert [members for members, _ in answers] == [len(self.peers)] * len(self.peers)
        assert len({digest for _, digest in answers}) == 1

    def round(self) -> int:
        """Average once; returns the bytes that the relays have passed meanwhile."""
        before = self.passed()
        self.begin_round()
        self.end_round()
        return self.passed() - before

    def passed(self) -> int:
        return sum(relay.ask([])[0] for relay in self.relays if relay.process.poll() is None)


@contextmanager
def run() -> Iterator[Run]:
    with ExitStack() as stack:
        yield Run(stack)


@pytest.mark.long
def test_behind_symmetric_routers_all_goes_through_the_relay_and_nothing_can_be_read_there():
    with homes(Router.SYMMETRIC, Router.SYMMETRIC, publics=1) as bed, run() as at:
        relay = at.relay(bed.publics[0], "capture")
        for visible in at.join(*bed.homes):
            assert visible
            assert all("/p2p-circuit/" in address for address in visible)
        secrets = [window for peer in at.peers for window in peer.ask("some")]
        for number in range(10):
            assert at.round() > BYTES
            if number in (0, 5):
                secrets += [window for peer in at.peers for window in peer.ask("some")]
        passed, seen, read, _ = relay.ask(secrets)
        assert seen > passed / 4  # it was captured, most of it
        assert read == 0


@pytest.mark.long
def test_where_routers_keep_ports_a_direct_connection_takes_over_and_outlives_the_relay():
    with homes(Router.REFUSING, Router.CONE, publics=2) as bed, run() as at:
        relay = at.relay(bed.publics[0])
        at.join(*bed.homes)
        met = time.monotonic()
        at.round()
        while at.round() >= BYTES / 100:
            assert time.monotonic() - met < DIRECT_SECONDS
        assert at.round() < BYTES / 100
        relay.kill()
        for _ in range(3):
            at.round()


@pytest.mark.long
def test_a_public_peer_is_dialled_back_by_one_behind_any_router():
    with homes(Router.SYMMETRIC, publics=2) as bed, run() as at:
        at.relay(bed.publics[0])
        at.join(bed.homes[0], bed.publics[1])
        met = time.monotonic()
        at.round()
        while at.round() >= BYTES / 100:
            assert time.monotonic() - met < DIRECT_SECONDS


@pytest.mark.long
def test_a_relay_that_dies_in_a_round_costs_what_a_lost_link_costs():
    with homes(Router.SYMMETRIC, Router.SYMMETRIC, publics=3) as bed, run() as at:
        for host in bed.publics[:2]:
            at.relay(host)
        visible = at.join(*bed.homes, bed.publics[2], upload_limit=4e6)
        assert all(len({address.split("/p2p/")[1] for address in each}) == 2 for each in visible[:2])
        at.round()
        [used] = [relay for relay in at.relays if relay.ask([])[3]]
        at.begin_round()
        time.sleep(0.8)
        used.kill()
        killed = time.monotonic()
        at.end_round()
        assert time.monotonic() - killed < 3 + DEFAULT_CHUNK_TIMEOUT
        # Nothing else connects the two, and there is another relay.
        while "Through" not in [way for peer in at.peers[:2] for way in peer.ask("ways").values()]:
            assert time.monotonic() - killed < 3 + DEFAULT_CHUNK_TIMEOUT + 5
            time.sleep(0.1)
        at.round()

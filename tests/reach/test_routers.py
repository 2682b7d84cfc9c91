"""Peers at home, behind routers that let nobody in, reach each other by a public node that relays."""

from __future__ import annotations

import json
import subprocess
from contextlib import ExitStack
from typing import Any

import pytest

from tests.homes import Host, Router, homes

RELAY = """
import sys, json, shoal
dht = shoal.DHT(start=True, host_maddrs=["/ip4/0.0.0.0/tcp/31337"], relay=True)
print(json.dumps([str(a) for a in dht.get_visible_maddrs() if not a.is_loopback]), flush=True)
for line in sys.stdin:
    print(json.dumps(dht.dht_node.relay.splicer.passed), flush=True)
dht.shutdown()
"""
PEER = """
import sys, json, hashlib, logging, torch, shoal
rank, rounds = int(sys.argv[2]), int(sys.argv[3])
dht = shoal.DHT(json.loads(sys.argv[1]), start=True, host_maddrs=["/ip4/0.0.0.0/tcp/31337"])
print(json.dumps([dht.client_mode, [str(a) for a in dht.get_visible_maddrs()]]), flush=True)
vector = torch.full((1 << 20,), float(rank))
averager = shoal.DecentralizedAverager([vector], dht, prefix="run", min_matchmaking_time=10.0, start=True)
for line in sys.stdin:
    vector.add_(torch.arange(1 << 20) * (rank + 1))
    averager.step(timeout=30)
    node = dht.node
    others = [peer for peer in node.transport._peers]
    ways = sorted(type(node.transport.route_to(peer)).__name__ for peer in others)
    digest = hashlib.sha256(vector.numpy().tobytes()).hexdigest()
    print(json.dumps([len(averager.last_round.members), digest, ways]), flush=True)
averager.shutdown()
dht.shutdown()
"""


class Program:
    """A program in a host that answers lines."""

    def __init__(self, host: Host, text: str, *arguments: str) -> None:
        self.process = host.python(text, *arguments, stderr=None)

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "it has ended"
        return json.loads(line)

    def ask(self) -> Program:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


@pytest.mark.long
@pytest.mark.parametrize("routers", [(Router.SYMMETRIC, Router.SYMMETRIC), (Router.CONE, Router.REFUSING)])
def test_peers_behind_routers_average_through_a_relay(routers):
    with homes(*routers, publics=1) as bed, ExitStack() as stack:
        relay = Program(bed.publics[0], RELAY)
        stack.callback(relay.close)
        addresses = relay.answer()
        peers = [Program(host, PEER, json.dumps(addresses), str(rank), "10") for rank, host in enumerate(bed.homes)]
        for peer in peers:
            stack.callback(peer.close)
        for peer in peers:
            is_client, visible = peer.answer()
            assert not is_client
            assert all("/p2p-circuit/" in address for address in visible)
            assert len(visible) >= 1
        for _ in range(10):
            before = relay.ask().answer()
            for peer in peers:
                peer.ask()
            answers = [peer.answer() for peer in peers]
            passed = relay.ask().answer() - before
            print(answers, passed)
            assert [members for members, *_ in answers] == [2, 2]
            assert len({digest for _, digest, _ in answers}) == 1

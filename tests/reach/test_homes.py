"""Peers behind real home routers (in namespaces) find out how they are reached."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.homes import Bed, Host, Router, homes

PORT = 31337

NODE = """
import sys, shoal
with shoal.DHT(sys.argv[2:], start=True, client_mode=False, host_maddrs=[sys.argv[1]]) as dht:
    print(dht.get_visible_maddrs()[0], flush=True)
    sys.stdin.read()
"""

# Answers what is asked of it, whatever is true; argv[1]: "yes" or "no".
LIAR = """
import sys, shoal
from shoal.p2p.node import Node
from shoal.reach import probe
async def lie(self, peer, message, _buffers):
    lies = tuple(f"/ip4/6.6.6.6/tcp/{shoal.p2p.Multiaddr(address).port}" for address in message.addresses)
    where = tuple(str(shoal.p2p.Multiaddr(address)) for address in message.addresses)
    return probe.Probed("6.6.6.6", lies, ()) if sys.argv[1] == "yes" else probe.Probed("6.6.6.6", (), lies)
probe.DialBack._handle = lie
""" + NODE.replace("sys.argv[1]", "sys.argv[2]").replace("sys.argv[2:]", "sys.argv[3:]")

RELAY = NODE.replace("client_mode=False", "relay=True")

DOCTOR = "from shoal.cli import app; app()"

PEER = """
import json, logging, sys, time
import shoal
said = []
class Said(logging.Handler):
    def emit(self, record):
        if record.name.startswith("shoal") and record.levelno >= logging.WARNING:
            said.append(record.getMessage())
logging.getLogger("shoal").addHandler(Said())
options = json.loads(sys.argv[1])
began = time.perf_counter()
with shoal.DHT(sys.argv[2:], start=True, **options) as dht:
    print(json.dumps({
        "seconds": time.perf_counter() - began,
        "client": dht.client_mode,
        "addresses": [str(address.with_peer(None)) for address in dht.get_visible_maddrs() if not address.is_loopback],
        "peer": str(dht.peer_id),
        "said": said,
    }), flush=True)
    sys.stdin.read()
"""


@contextmanager
def running(host: Host, program: str, *arguments: str) -> Iterator[str]:
    """The first line that the program prints in this host, which then runs to the end of the block."""
    with host.python(program, *arguments) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                pytest.fail(f"{process.communicate(timeout=10)}")
            yield line.strip()
        finally:
            process.kill()


@contextmanager
def nodes(bed: Bed, number: int, liar: str = "") -> Iterator[list[str]]:
    """So many nodes with public addresses, of one DHT; the last one lies, if `liar` says what."""
    with ExitStack() as stack:
        addresses: list[str] = []
        for host in bed.publics[:number]:
            lies = [liar] if liar and host is bed.publics[number - 1] else []
            program = LIAR if lies else NODE
            listen = f"/ip4/{host.address}/tcp/{PORT}"
            addresses.append(stack.enter_context(running(host, program, *lies, listen, *addresses[:1])))
        yield addresses


def found_by(host: Host, initial: list[str], **options: Any) -> dict[str, Any]:
    """What a peer in that host finds out at its start."""
    [found] = found_by_all([host], initial, **options)
    return found


def found_by_all(hosts: Sequence[Host], initial: list[str], **options: Any) -> list[dict[str, Any]]:
    """What a peer in each host finds out at its start, all at once."""
    options = {"host_maddrs": [f"/ip4/0.0.0.0/tcp/{PORT}"]} | options
    processes = [host.python(PEER, json.dumps(options), *initial) for host in hosts]
    said = [process.communicate(timeout=60) for process in processes]
    for line, errors in said:
        assert line, errors
    return [dict(json.loads(line)) for line, _ in said]


@pytest.mark.parametrize("liar", ["", "no", "yes"])
def test_a_peer_finds_out_whether_and_where_others_reach_it(liar: str) -> None:
    """With three hosts to ask, one that lies alone changes nothing."""
    with homes(*Router, publics=4) as bed, nodes(bed, 3, liar) as initial:
        [*at_home, public] = found_by_all([*bed.homes, bed.publics[3]], initial)
        for router, host, found in zip(Router, bed.homes, at_home, strict=True):
            assert found["seconds"] < 3.5, "2 s, and a process on a machine that does other things, too"
            if router is Router.FORWARDING:
                assert not found["client"]
                assert found["addresses"] == [f"/ip4/{host.public}/tcp/{PORT}", f"/ip4/{host.address}/tcp/{PORT}"]
                assert found["said"] == []
            else:
                assert found["client"], router
                assert found["addresses"] == []
                [warning] = found["said"]
                assert f"forward TCP port {PORT} of the router {host.public} to {host.address}" in warning
                assert "port_mapping=True" in warning
                assert "shoal node --relay" in warning
        assert (public["client"], public["said"]) == (False, [])
        assert public["addresses"] == [f"/ip4/{bed.publics[3].address}/tcp/{PORT}"]


def test_one_host_to_ask_decides_and_two_that_disagree_change_nothing() -> None:
    with homes(Router.CONE, publics=2) as bed:
        [home] = bed.homes
        with nodes(bed, 1) as initial:
            assert found_by(home, initial)["client"]
            insists = found_by(home, initial, client_mode=False)
            assert not insists["client"]
            assert insists["addresses"] == [f"/ip4/{home.address}/tcp/{PORT}"]
            assert "stays a node, as it was told to" in insists["said"][0]
        with nodes(bed, 2, "yes") as initial:
            found = found_by(home, initial)
            assert (found["client"], found["said"]) == (False, [])
            assert found["addresses"] == [f"/ip4/{home.address}/tcp/{PORT}"], "and not what the liar says"


def test_ipv6_and_names() -> None:
    with homes(publics=3) as bed:
        own = [f"/ip6/{host.address6}/tcp/{PORT}" for host in bed.publics]
        with running(bed.publics[0], NODE, own[0]) as first, running(bed.publics[1], NODE, own[1], first) as second:
            found = found_by(bed.publics[2], [first, second], host_maddrs=[own[2]])
            assert (found["client"], found["addresses"], found["said"]) == (False, [own[2]], [])


CHANGING = """
import sys, time, shoal
from shoal.reach import asking
asking.LOOK, asking.SOON, asking.LATER = 0.1, 0.2, 0.2
with shoal.DHT(sys.argv[2:], start=True, host_maddrs=[sys.argv[1]]) as dht:
    last = None
    while True:
        async def look(dht, node):
            return [node.is_client, node.client_mode, *(str(a.with_peer(None)) for a in node.visible_addresses())]
        now = dht.run_coroutine(look)
        assert now[0] == dht.client_mode or now != dht.run_coroutine(look)
        if now != last:
            last = now
            print(*now, flush=True)
        time.sleep(0.02)
"""


def test_it_asks_again_when_nobody_reached_it_and_when_its_addresses_change() -> None:
    with homes(Router.CONE, publics=3) as bed, nodes(bed, 2) as initial:
        [home], third = bed.homes, bed.publics[2]
        with home.python(CHANGING, f"/ip4/0.0.0.0/tcp/{PORT}", *initial) as peer:
            try:
                assert peer.stdout is not None
                assert peer.stdout.readline() == "True True\n"
                home.nft("add", "rule", "ip", "nat", "pre", "iifname", "pub", "dnat", "to", home.address)
                opened = f"False False /ip4/{home.public}/tcp/{PORT} /ip4/{home.address}/tcp/{PORT}"
                assert peer.stdout.readline().startswith(opened)
                home.nft("flush", "chain", "ip", "nat", "pre")
                assert peer.stdout.readline() == "True True\n"
            finally:
                peer.kill()
        with third.python(CHANGING, f"/ip4/0.0.0.0/tcp/{PORT}", *initial) as peer:
            try:
                assert peer.stdout is not None
                assert peer.stdout.readline().startswith(f"False False /ip4/{third.address}/tcp/{PORT} ")
                subprocess.run(third.inside("ip", "link", "add", "vpn", "type", "bridge"), check=True)
                subprocess.run(third.inside("ip", "addr", "add", "10.99.0.1/24", "dev", "vpn"), check=True)
                assert f"/ip4/{third.address}/tcp/{PORT} /ip4/10.99.0.1/tcp/{PORT}" in peer.stdout.readline()
            finally:
                peer.kill()


@pytest.mark.long
def test_a_probe_is_right_a_hundred_times() -> None:
    program = """
import asyncio, json, sys
from shoal.p2p.identity import Identity
from shoal.p2p.multiaddr import Multiaddr
from shoal.p2p.node import Node
from shoal.p2p.sockets import SocketTransport
from shoal.reach.probe import probe
async def main():
    identity = Identity()
    node = Node(identity, SocketTransport(identity))
    [own] = [await node.listen(Multiaddr("/ip4/0.0.0.0/tcp/31337"))]
    asked = Multiaddr(sys.argv[1])
    node.learn(asked.peer_id, [asked])
    answers = await asyncio.gather(*(probe(node, asked.peer_id, [own], 60) for _ in range(100)))
    print(json.dumps([[sorted(map(str, a.reached)), a.seen] for a in answers]))
    await node.close()
asyncio.run(main())
"""
    with homes(*Router, publics=2) as bed, nodes(bed, 1) as [asked]:
        hosts = [*zip(Router, bed.homes, strict=True), (None, bed.publics[1])]
        for router, host in hosts:
            with running(host, program, asked) as line:
                answers = json.loads(line)
            right = router in (None, Router.FORWARDING)
            assert len(answers) == 100
            for reached, seen in answers:
                assert seen == host.public
                assert [address.partition("/p2p/")[0] for address in reached] == (
                    [f"/ip4/{host.public}/tcp/{PORT}"] if right else []
                ), router


@pytest.mark.long
def test_the_doctor_names_the_router_and_the_line_to_change() -> None:
    with homes(*Router, publics=3) as bed, nodes(bed, 2) as initial:
        hosts = [*zip(Router, bed.homes, strict=True), (None, bed.publics[2])]
        asked = [host.python(DOCTOR, "doctor", initial[1], "--port", str(PORT), "--json") for _, host in hosts]
        for (router, host), process in zip(hosts, asked, strict=True):
            printed, errors = process.communicate(timeout=60)
            assert printed, errors
            found = {finding["name"]: finding for finding in json.loads(printed)["findings"]}
            kind = {None: "none", Router.SYMMETRIC: "symmetric"}.get(router, "cone")
            assert found["router"]["facts"] == {"kind": kind, "seen_from": host.public}
            if router in (None, Router.FORWARDING):
                assert found["reach"]["facts"]["reached"] == "public"
                assert f"/ip4/{host.public}/tcp/{PORT}" in found["reach"]["found"]
            else:
                assert found["reach"]["facts"]["reached"] == "nobody"
                assert "through a relay, if it knows one, or as a client" in found["reach"]["found"]
                assert "the router maps no ports" in found["port mapping"]["found"]
                assert (
                    f"forward TCP port {PORT} of the router {host.public} to {host.address}" in found["reach"]["advice"]
                )
    with homes(Router.CONE, publics=1) as bed, nodes(bed, 1) as initial:
        printed, _ = bed.homes[0].python(DOCTOR, "doctor", initial[0], "--json").communicate(timeout=60)
        found = {finding["name"]: finding for finding in json.loads(printed)["findings"]}
        assert found["router"]["facts"]["kind"] == "unknown"
        assert "nodes at two hosts" in found["router"]["advice"]


@pytest.mark.long
def test_the_doctor_says_that_a_relay_leads_here_and_asks_it_about_a_peer_behind_it() -> None:
    with (
        homes(Router.CONE, publics=1) as bed,
        running(bed.publics[0], RELAY, f"/ip4/{bed.publics[0].address}/tcp/{PORT}") as relay,
    ):
        circuit = f"{relay}/p2p-circuit/p2p/{relay.rpartition('/')[2]}"  # any peer there
        for address in (relay, circuit):
            printed, errors = bed.homes[0].python(DOCTOR, "doctor", address, "--json").communicate(timeout=60)
            assert printed, errors
            found = {finding["name"]: finding for finding in json.loads(printed)["findings"]}
            assert found["peer"]["level"] == "well"
            assert found["reach"]["facts"]["reached"] == "relayed"
            assert f"through a relay: {relay}" in found["reach"]["found"]
            assert "forward TCP port" in found["reach"]["advice"]

"""A peer at home has the router (miniupnpd, in a namespace) send it a port, for as long as it lives."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.homes import Host, Router, homes
from tests.reach.test_homes import DOCTOR, PEER, PORT, found_by, nodes

CHAINS = """
table inet filter {
    chain miniupnpd { }
    chain prerouting_miniupnpd { }
    chain postrouting_miniupnpd { }
    chain prerouting { type nat hook prerouting priority -101; jump prerouting_miniupnpd; }
}
"""


@contextmanager
def mapping_router(home: Host, protocol: str, folder: Path) -> Iterator[None]:
    """The home's router maps ports for who asks by that protocol."""
    program = os.environ.get("MINIUPNPD") or shutil.which("miniupnpd")
    if program is None:
        pytest.skip("a router that maps ports needs miniupnpd: in PATH, or named by the environment variable MINIUPNPD")
    if protocol == "UPnP" and find_spec("miniupnpc") is None:
        pytest.skip("UPnP needs miniupnpc: pip install 'shoal[nat]'")
    rules, settings = folder / "rules", folder / "miniupnpd.conf"
    rules.write_text(CHAINS)
    home.nft("-f", str(rules))
    speaks = {"natpmp": "no", "upnp": "no", protocol.lower().replace("-", ""): "yes"}
    settings.write_text(
        f"ext_ifname=pub\nlistening_ip=lan\nenable_natpmp={speaks['natpmp']}\nenable_upnp={speaks['upnp']}\n"
        "system_uptime=yes\nuuid=00000000-0000-0000-0000-000000000001\nsecure_mode=yes\n"
        f"lease_file={folder / 'leases'}\nallow 1024-65535 0.0.0.0/0 1024-65535\n"
    )
    command = ["ip", "netns", "exec", home.router, program, "-d", "-f", str(settings), "-P", str(folder / "pid")]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as running:
        try:
            port = "5351" if protocol == "NAT-PMP" else "1900"
            look = ["ip", "netns", "exec", home.router, "ss", "-Hlun", "sport", f"= :{port}"]  # `ss` comes with `ip`
            deadline = time.monotonic() + 20
            while not subprocess.run(look, capture_output=True).stdout:
                assert running.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.05)
            yield
        finally:
            running.terminate()


@pytest.mark.parametrize("protocol", ["NAT-PMP", "UPnP"])
def test_a_port_is_mapped_probed_announced_and_removed(protocol: str, tmp_path: Path) -> None:
    options = {"host_maddrs": [f"/ip4/0.0.0.0/tcp/{PORT}"], "port_mapping": True}
    with homes(Router.CONE, publics=2) as bed:
        [home] = bed.homes
        with nodes(bed, 2) as initial, mapping_router(home, protocol, tmp_path):
            doctor = home.python(DOCTOR, "doctor", initial[0], "--port", str(PORT), "--json")
            findings = json.loads(doctor.communicate(timeout=60)[0])["findings"]
            [mapping] = [finding for finding in findings if finding["name"] == "port mapping"]
            assert mapping["facts"] == {"protocol": protocol, "address": home.public}
            assert mapping["advice"] == f"DHT(host_maddrs=['/ip4/0.0.0.0/tcp/{PORT}'], port_mapping=True)"
            with home.python(PEER, json.dumps(options), *initial) as peer:
                assert peer.stdout is not None
                found = json.loads(peer.stdout.readline())
                assert found["seconds"] < 4.0
                assert (found["client"], found["said"]) == (False, [])
                assert found["addresses"][0] == f"/ip4/{home.public}/tcp/{PORT}"
                mapped = home.nft("list", "chain", "inet", "filter", "prerouting_miniupnpd")
                assert f"dport {PORT} dnat ip to {home.address}:{PORT}" in mapped
                _, errors = peer.communicate(timeout=20)  # its input ends
                assert peer.returncode == 0, errors
            assert "dnat" not in home.nft("list", "chain", "inet", "filter", "prerouting_miniupnpd")


def test_a_router_that_maps_nothing_is_said_to_map_nothing() -> None:
    options = {"host_maddrs": [f"/ip4/0.0.0.0/tcp/{PORT}"], "port_mapping": True}
    with homes(Router.CONE, publics=1) as bed, nodes(bed, 1) as initial:
        found = found_by(bed.homes[0], initial, **options)
    assert found["client"]
    assert "the router maps no port to this peer (NAT-PMP: the router 10.77.0.1 " in found["said"][0]
    assert re.search(r"UPnP: \w+", found["said"][0])

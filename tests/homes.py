"""Homes behind routers, and hosts with public addresses, as network namespaces: a bed for tests of who reaches whom.

                                     publics[0]  publics[1]
                                          |          |
    homes[0] --- its router --------------+----------+---------- its router --- homes[1]

Needs root, iproute2 and nft (in PATH, or the environment variable NFT). netem is not used: a packet takes no time.
"""

from __future__ import annotations

import enum
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

# miniupnpd refuses private and documentation addresses as external ones; nothing leaves these namespaces.
PUBLIC, PUBLIC6, HOME = "52.20.7.", "2a05:d018:7::", "10.77."


class Router(enum.Enum):
    """What the router of a home does, beside giving its public address to what goes out (masquerade)."""

    FORWARDING = "sends all that comes to the home (a forwarded port, a 1:1 NAT)"
    CONE = "keeps the port of what goes out, for all destinations; drops what comes"
    SYMMETRIC = "takes another port for each destination; drops what comes"
    REFUSING = "keeps the port; answers what comes with a reset"


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace that tests run programs in.

    Attributes:
        name: of the namespace.
        address: its own (IPv4).
        public: the one by which others see it: that of its router, if it has one.
        router: the namespace of its router; "" without one.
        address6: its IPv6 address; "" behind a router.
    """

    name: str
    address: str
    public: str
    router: str = ""
    address6: str = ""

    def inside(self, *command: str) -> list[str]:
        """The command, to be run in this host."""
        return ["ip", "netns", "exec", self.name, *command]

    def python(self, program: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Start a Python program (its text) in this host; its output comes by a pipe, as text."""
        command = self.inside(sys.executable, "-u", "-c", program, *arguments)
        options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
        return subprocess.Popen(command, text=True, **options)

    def nft(self, *command: str) -> str:
        """Run nft with that command in its router; returns what it prints."""
        line = ["ip", "netns", "exec", self.router, _nft(), *command]
        return subprocess.run(line, check=True, capture_output=True, text=True).stdout


@dataclass(frozen=True, slots=True)
class Bed:
    """The hosts that a test has."""

    homes: tuple[Host, ...]
    publics: tuple[Host, ...]


@contextmanager
def homes(*routers: Router, publics: int = 2) -> Iterator[Bed]:
    """A home behind each of `routers`, and so many public hosts. Skips the test where they can't be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    if not _nft():
        pytest.skip("home routers need nft: in PATH, or named by the environment variable NFT")
    mine = f"shoal{os.getpid()}"
    at_home = tuple(
        Host(f"{mine}h{i}", f"{HOME}{i}.2", f"{PUBLIC}{i + 1}", router=f"{mine}r{i}") for i in range(len(routers))
    )
    outside = tuple(
        Host(f"{mine}p{i}", f"{PUBLIC}{101 + i}", f"{PUBLIC}{101 + i}", address6=f"{PUBLIC6}{101 + i}")
        for i in range(publics)
    )
    street = f"{mine}s"
    names = [street, *(host.name for host in at_home + outside), *(host.router for host in at_home)]
    try:
        try:
            _ip(f"netns add {name}" for name in names)
            for name in names:
                _ip(["link set lo up"], name)
            _ip(["link add br0 type bridge", "link set br0 up"], street)
            for host in outside:
                _join_street(street, host.name, host.address, host.address6)
            for router, host in zip(routers, at_home, strict=True):
                _build_home(street, router, host)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
        yield Bed(at_home, outside)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def _join_street(street: str, name: str, address: str, address6: str = "") -> None:
    port = f"v{address.rpartition('.')[2]}"
    _ip([f"link add pub netns {name} type veth peer name {port}", f"link set {port} master br0 up"], street)
    commands = [f"addr add {address}/24 dev pub", "link set pub up"]
    _ip(commands + ([f"addr add {address6}/64 dev pub nodad"] if address6 else []), name)


def _build_home(street: str, router: Router, host: Host) -> None:
    _join_street(street, host.router, host.public)
    gate = f"{host.address.rpartition('.')[0]}.1"
    _ip(
        [
            f"link add lan type veth peer name eth0 netns {host.name}",
            f"addr add {gate}/24 dev lan",
            "link set lan up",
        ],
        host.router,
    )
    _ip([f"addr add {host.address}/24 dev eth0", "link set eth0 up", f"route add default via {gate}"], host.name)
    _run(["ip", "netns", "exec", host.router, "sysctl", "-qw", "net.ipv4.ip_forward=1"])
    _run(["ip", "netns", "exec", host.router, _nft(), "-f", "-"], _rules(router, host))


def _rules(router: Router, host: Host) -> str:
    ports = "fully-random" if router is Router.SYMMETRIC else ""
    unasked = "meta l4proto tcp reject with tcp reset" if router is Router.REFUSING else "drop"
    forwarded = f'iifname "pub" dnat to {host.address}' if router is Router.FORWARDING else ""
    return f"""
    table ip nat {{
        chain pre {{ type nat hook prerouting priority -100; {forwarded}
        }}
        chain post {{ type nat hook postrouting priority 100; oifname "pub" masquerade {ports}
        }}
    }}
    table ip filter {{
        chain in {{ type filter hook input priority 0; iifname "pub" ct state new {unasked}
        }}
        chain through {{
            type filter hook forward priority 0
            ct status dnat accept
            iifname "pub" ct state new {unasked}
        }}
    }}
    """


def _nft() -> str:
    return os.environ.get("NFT") or shutil.which("nft") or ""


def _ip(commands: Iterator[str] | Sequence[str], namespace: str = "") -> None:
    _run(["ip", *(["-n", namespace] if namespace else []), "-batch", "-"], "\n".join(commands))


def _run(command: list[str], said: str = "") -> None:
    subprocess.run(command, input=said, check=True, capture_output=True, text=True)

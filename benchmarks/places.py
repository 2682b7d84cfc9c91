"""Network namespaces on one bridge, each with a line that can be cut. Needs root, iproute2 and the kernel's veth."""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_NAME = f"goodput{os.getpid()}x"
_HUB, _BRIDGE = f"{_NAME}hub", "bridge"
_NEW_NETWORK, _NEW_HOST = 0x40000000, 0x04000000  # CLONE_NEWNET, CLONE_NEWUTS


@dataclass(frozen=True)
class Place:
    """Where a process may live.

    Attributes:
        address: its own, to listen at.
        namespace: its network namespace; "" where it shares this process's.
        port: the other end of its line.
    """

    address: str = "127.0.0.1"
    namespace: str = ""
    port: str = ""

    def cut(self) -> None:
        """Nothing passes its line any more, and nobody is told."""
        _run("ip", "-n", _HUB, "link", "set", self.port, "nomaster")

    def heal(self) -> None:
        """All passes again."""
        _run("ip", "-n", _HUB, "link", "set", self.port, "master", _BRIDGE)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _make(number: int) -> Place:
    name, port, address = f"{_NAME}{number}", f"port{number}", f"10.94.7.{number + 1}"
    _run("ip", "netns", "add", name)
    _run("ip", "-n", _HUB, "link", "add", port, "type", "veth", "peer", "name", "line", "netns", name)
    _run("ip", "-n", _HUB, "link", "set", port, "master", _BRIDGE, "up")
    _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "line")
    for device in ("lo", "line"):
        _run("ip", "-n", name, "link", "set", device, "up")
    return Place(address, name, port)


@contextmanager
def places(count: int) -> Iterator[tuple[list[Place], str]]:
    """So many places, each with a line of its own; where these can't be made, all share the loopback. Also says why
    that is, or ""."""
    made: list[Place] = []
    names, why = [], "they need root and the command ip"
    try:
        if os.geteuid() == 0 and shutil.which("ip") is not None:
            names = [_HUB, *(f"{_NAME}{number}" for number in range(count))]
            try:
                _run("ip", "netns", "add", _HUB)
                _run("ip", "-n", _HUB, "link", "add", _BRIDGE, "type", "bridge")
                _run("ip", "-n", _HUB, "link", "set", _BRIDGE, "up")
                for number in range(count):
                    made.append(_make(number))
            except subprocess.CalledProcessError as error:
                why = error.stderr.decode().strip()
        yield (made, "") if len(made) == count else ([Place()] * count, why)
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def enter(place: Place) -> None:
    """Live there: this thread, and those that it starts. The host is called as its address, since libraries tell others
    the host's name."""
    if not place.namespace:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{place.namespace}") as file:
        if libc.setns(file.fileno(), _NEW_NETWORK) or libc.unshare(_NEW_HOST):
            raise OSError(ctypes.get_errno(), f"can't enter the network namespace {place.namespace}")
    socket.sethostname(place.address)

"""Lines of a few Mbit/s for processes on this machine: network namespaces around a bridge. Needs root, iproute2 and the
kernel's token bucket filter."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

SLOWEST, FASTEST = 20, 100  # Mbit/s
_NAME = f"soak{os.getpid()}x"
_HUB = f"{_NAME}hub"
_BRIDGE, _OTHER = "bridge", "other"
_LONGEST_QUEUE = "100ms"


@dataclass(frozen=True)
class Place:
    """Where a process may live.

    Attributes:
        address: its own, to listen at.
        namespace: its network namespace; "" where it shares this process's.
        port: the other end of its line.
        rates: of the line, up and down, in Mbit/s; (0, 0) for as fast as the machine.
    """

    address: str = "127.0.0.1"
    namespace: str = ""
    port: str = ""
    rates: tuple[int, int] = (0, 0)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _slow(where: str, device: str, rate: int) -> None:
    """What leaves `device` passes at that rate."""
    bucket = ("tbf", "rate", f"{rate}mbit", "burst", "64kb", "latency", _LONGEST_QUEUE)
    _run("tc", "-n", where, "qdisc", "add", "dev", device, "root", *bucket)


def _make(number: int, rng: random.Random) -> Place:
    name, port, address = f"{_NAME}{number}", f"port{number}", f"10.93.7.{number + 1}"
    up, down = (rng.randint(SLOWEST, FASTEST) for _ in range(2))
    _run("ip", "netns", "add", name)
    _run("ip", "-n", _HUB, "link", "add", port, "type", "veth", "peer", "name", "line", "netns", name)
    _run("ip", "-n", _HUB, "link", "set", port, "master", _BRIDGE, "up")
    _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "line")
    _run("ip", "-n", name, "link", "set", "lo", "up")
    _run("ip", "-n", name, "link", "set", "line", "up")
    _slow(name, "line", up)
    _slow(_HUB, port, down)
    return Place(address, name, port, (up, down))


def cut(some: Collection[Place]) -> None:
    """Nothing passes any more between these places and all others, and nobody is told."""
    for place in some:
        _run("ip", "-n", _HUB, "link", "set", place.port, "master", _OTHER)


def heal(some: Collection[Place]) -> None:
    """All passes again."""
    for place in some:
        _run("ip", "-n", _HUB, "link", "set", place.port, "master", _BRIDGE)


@contextmanager
def places(count: int, rng: random.Random) -> Iterator[tuple[list[Place], str]]:
    """So many places, each with a line of its own; where these can't be made, all share the loopback. Also says which,
    in words."""
    made: list[Place] = []
    try:
        why = "no root, ip or tc"
        if os.geteuid() == 0 and shutil.which("ip") is not None and shutil.which("tc") is not None:
            try:
                _run("ip", "netns", "add", _HUB)
                for bridge in (_BRIDGE, _OTHER):
                    _run("ip", "-n", _HUB, "link", "add", bridge, "type", "bridge")
                    _run("ip", "-n", _HUB, "link", "set", bridge, "up")
                for number in range(count):
                    made.append(_make(number, rng))
            except subprocess.CalledProcessError as error:
                why = error.stderr.decode().strip()
        if len(made) == count:
            yield made, f"lines of {SLOWEST} to {FASTEST} Mbit/s"
        else:
            yield [Place()] * count, f"loopback, since there are no lines of {SLOWEST} to {FASTEST} Mbit/s here: {why}"
    finally:
        for name in [] if shutil.which("ip") is None else [_HUB, *(f"{_NAME}{number}" for number in range(count))]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

"""Two network namespaces that a test made, joined by a wire that it can cut. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

NAMES = tuple(f"shoal{os.getpid()}{side}" for side in "ab")
ADDRESSES = ("10.91.7.1", "10.91.7.2")


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextmanager
def wired() -> Iterator[None]:
    """The namespaces NAMES, each with its one of ADDRESSES. Skips the test where they can't be made."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    made: list[str] = []
    try:
        try:
            for name in NAMES:
                _run("ip", "netns", "add", name)
                made.append(name)
            _run("ip", "-n", NAMES[0], "link", "add", "wire", "type", "veth", "peer", "name", "wire", "netns", NAMES[1])
            for name, address in zip(NAMES, ADDRESSES, strict=True):
                _run("ip", "-n", name, "addr", "add", f"{address}/24", "dev", "wire")
                _run("ip", "-n", name, "link", "set", "lo", "up")
                _run("ip", "-n", name, "link", "set", "wire", "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        yield
    finally:
        for name in made:
            _run("ip", "netns", "del", name)


def inside(side: int, *command: str) -> list[str]:
    """The command, to be run in that namespace."""
    return ["ip", "netns", "exec", NAMES[side], *command]


def narrow(side: int, mbit: float) -> None:
    """What leaves that namespace passes a line of so many Mbit/s, with a queue as home routers have. Skips the test
    where the kernel has none."""
    try:
        line = ("root", "tbf", "rate", f"{mbit}mbit", "burst", "32kbit", "latency", "50ms")
        _run(*inside(side, "tc", "qdisc", "add", "dev", "wire", *line))
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no narrow lines here: {error}")


def cut() -> None:
    """Nothing passes any more, and nobody is told."""
    _run("ip", "-n", NAMES[0], "link", "set", "wire", "down")

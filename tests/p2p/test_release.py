"""A peer of another protocol version is told which version of Shoal to install."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

import shoal
from shoal.p2p import greeting
from shoal.p2p.errors import PeerUnreachable
from shoal.p2p.greeting import Challenge, LinkHello, decode, encode
from shoal.p2p.release import MAX_RELEASE, RELEASE, how_to_match

# A DHT of another release, which listens and prints its address until its input ends.
OTHER = """
import sys
from shoal.p2p import release
release.RELEASE = "0.2.0"
from shoal.p2p import greeting
greeting.VERSION = 3
import shoal
with shoal.DHT(sys.argv[1:], start=True) as dht:
    print(dht.get_visible_maddrs()[0], flush=True)
    sys.stdin.read()
"""
BOTH = re.escape("it speaks version 3 of Shoal's protocol (Shoal 0.2.0), this peer version 2")
INSTALL = "install the same version on both machines: pip install 'shoal=={}'"


@contextmanager
def peer_of_another_version() -> Iterator[str]:
    command = [sys.executable, "-c", OTHER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()


def test_who_dials_a_newer_peer_hears_what_to_install() -> None:
    with peer_of_another_version() as address, pytest.raises(PeerUnreachable, match=BOTH) as caught:
        shoal.DHT([address], start=True)
    assert INSTALL.format("0.2.0") in str(caught.value)


def test_a_newer_peer_that_dials_hears_so_too() -> None:
    with shoal.DHT(start=True) as dht:
        command = [sys.executable, "-c", OTHER, str(dht.get_visible_maddrs()[0])]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=200)
    assert done.returncode != 0
    assert (
        f"it speaks version 2 of Shoal's protocol (Shoal {RELEASE}), this peer version 3 (Shoal 0.2.0)" in done.stderr
    )
    assert INSTALL.format(RELEASE) in done.stderr


def later(said: Challenge | LinkHello, **changed: object) -> memoryview:
    """As a later version says it, which has further fields."""
    fields = msgspec.to_builtins(msgspec.structs.replace(said, **changed), builtin_types=(bytes,))
    return memoryview(encode([*fields, {"more": [1, 2]}]))


@pytest.mark.parametrize(
    "said",
    [
        Challenge(greeting.MAGIC, greeting.VERSION, bytes(8), bytes(32)),
        LinkHello(greeting.MAGIC, greeting.VERSION, bytes(8), bytes(32), bytes(64)),
    ],
    ids=lambda said: type(said).__name__,
)
def test_a_greeting_with_further_fields_is_read(said: Challenge | LinkHello) -> None:
    assert decode(later(said, release="0.2.0")) == msgspec.structs.replace(said, release="0.2.0")
    with pytest.raises(ValueError, match=r"version 7 of Shoal's protocol \(Shoal 1\.0rc1\), .*'shoal==1\.0rc1'"):
        decode(later(said, version=7, release="1.0rc1"))
    with pytest.raises(
        ValueError, match="version 7 of Shoal's protocol, this peer version 2; install the same version"
    ):
        decode(later(said, version=7))


@pytest.mark.parametrize("release", ["9.9; curl x | sh", "1'", "1\n", "x", "1" * (MAX_RELEASE + 1), 7, None])
def test_what_is_no_release_is_no_greeting(release: object) -> None:
    said = Challenge(greeting.MAGIC, 7, bytes(8), bytes(32))
    with pytest.raises(ValueError, match="not a greeting"):
        decode(later(said, release=release))


def test_the_release_of_this_peer_may_be_said() -> None:
    said = Challenge(greeting.MAGIC, greeting.VERSION, bytes(8), bytes(32), RELEASE)
    assert decode(memoryview(encode(said))) == said
    assert shoal.__version__ == RELEASE
    assert f"'shoal=={RELEASE}'" in how_to_match(RELEASE)

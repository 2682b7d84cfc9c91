"""Threads that meet types of messages for the first time at the same moment; it ends well, or by a signal."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Annotated

import msgspec

from shoal.dht import SchemaValidator
from shoal.dht.records import NO_SUBKEY, DHTRecord, encode_key, encode_value
from shoal.p2p.node import Service
from shoal.transfer.manifest import FORMAT, Manifest

THREADS = 6
Short = Annotated[str, msgspec.Meta(max_length=9)]


class Inner(msgspec.Struct):
    names: tuple[Short, ...] = ()
    counts: dict[Short, Annotated[int, msgspec.Meta(ge=0)]] = {}


class Value(msgspec.Struct, tag="value"):
    one: Annotated[int, msgspec.Meta(ge=0)]
    inner: Inner
    more: tuple[Inner, ...]
    last: Short


MANIFEST = msgspec.msgpack.encode({"digests": b"", "format": FORMAT, "scalars_nbytes": 0, "buffers": [{}]})
VALUE = {"type": "value", "last": "x", "more": [{"names": ["a"]}], "inner": {"counts": {"a": 1}}, "one": 1}
RECORD = DHTRecord(encode_key("key"), NO_SUBKEY, encode_value(VALUE), 1e12)


def manifest() -> None:
    with contextlib.suppress(ValueError):
        Manifest.decode(MANIFEST)


def service() -> None:
    Service("name", Value).decoder.decode(msgspec.msgpack.encode(VALUE))


def schema() -> None:
    assert SchemaValidator({"key": Value}).validate(RECORD)


def all_at_once(action: Callable[[], None]) -> None:
    ready, failed = threading.Barrier(THREADS), []

    def act() -> None:
        ready.wait()
        try:
            for _ in range(20):
                action()
        except BaseException:
            failed.append(action)
            raise

    threads = [threading.Thread(target=act) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


if __name__ == "__main__":
    sys.setswitchinterval(1e-6)
    all_at_once({"manifest": manifest, "service": service, "schema": schema}[sys.argv[1]])

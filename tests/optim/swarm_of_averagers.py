"""Averagers of several peers in one process, over real sockets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import shoal
from shoal.averaging.averager import DecentralizedAverager

A = TypeVar("A", bound=DecentralizedAverager)


@contextmanager
def started(makers: Sequence[Callable[..., A]], **options: Any) -> Iterator[list[A]]:
    """What each maker makes, given `dht`, `prefix` and `start` beside the options; shut down at the end."""
    running: list[Any] = []
    try:
        dhts: list[shoal.DHT] = []
        for _ in makers:
            dhts.append(shoal.DHT(dhts[0].get_visible_maddrs() if dhts else [], start=True))
            running.append(dhts[-1])
        made = []
        for maker, dht in zip(makers, dhts, strict=True):
            made.append(maker(dht=dht, prefix="test", start=True, **options))
            running.append(made[-1])
        yield made
    finally:
        for each in reversed(running):
            each.shutdown()

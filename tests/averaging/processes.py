"""Peers as real processes: starts `worker.py` several times, and stops every one of them whatever happens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.peers import PeerProcess

WORKER = "tests.averaging.worker"


@contextmanager
def running(count: int, elements: int, **averager: Any) -> Iterator[list[PeerProcess]]:
    """`count` workers with a vector of `elements` float32 that have met; killed at the end if they are still there."""
    options: dict[str, Any] = {"elements": elements, "averager": {"prefix": "test", **averager}}
    peers = [PeerProcess(WORKER, options)]
    try:
        peers[0].started()
        options["initial_peers"] = peers[0].addresses
        peers += [PeerProcess(WORKER, options) for _ in range(count - 1)]
        for peer in peers[1:]:
            peer.started()
        yield peers
    finally:
        for peer in peers:
            peer.end()


def all_round(
    peers: list[PeerProcess], values: list[float] | None = None, **options: Any
) -> list[dict[str, Any] | None]:
    """One round of all peers, the i-th with a vector full of `values[i]` (i by default); what each answers."""
    for number, peer in enumerate(peers):
        peer.tell(do="round", value=float(number) if values is None else values[number], **options)
    return [peer.hear() for peer in peers]

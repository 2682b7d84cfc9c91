"""What the ranks of a cluster send and hold: each its share. `benchmarks.clusters` measures it beside single peers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.forked import ForkedProcess

pytestmark = pytest.mark.processes

AT_MOST = 1.05  # times the share


def ask(ranks: list[ForkedProcess], command: str, **given: Any) -> list[Any]:
    """What each answers; they do it at once."""
    for rank in ranks:
        rank.stdin.write(json.dumps({"command": command, **given}) + "\n")
        rank.stdin.flush()
    answers = [json.loads(rank.stdout.readline()) for rank in ranks]
    return [answer["result"] for answer in answers]


@contextmanager
def two_peers(folder: Path, size: int) -> Iterator[list[ForkedProcess]]:
    """The ranks of two clusters of that size, which train a model of 4 million parameters in one run."""
    made: list[ForkedProcess] = []
    try:
        for peer in range(2):
            place = folder / f"{size} ranks, {peer}"
            place.mkdir()
            told = {"kind": "cluster", "size": size, "strands": 4, "folder": str(place), "first": peer * size}
            told |= {"address": "127.0.0.1", "line": "lo", "ranks": 2 * size, "peers": 2}
            for rank in range(size):
                options = json.dumps(told | {"rank": rank})
                made.append(ForkedProcess("benchmarks.workers.cluster_rank", options, talk=True))
        (addresses,) = ask(made[:1], "open", initial_peers=[])
        ask(made[1:], "open", initial_peers=addresses)
        ask(made, "make")
        yield made
    finally:
        for process in made:
            process.kill()
        for process in made:
            process.wait(20.0)
            process.stdin.close()
            process.stdout.close()


def epoch(ranks: list[ForkedProcess]) -> None:
    ask(ranks, "batch")
    ask(ranks, "epoch", at=time.monotonic())


def test_each_of_two_ranks_sends_and_holds_half_of_what_a_single_peer_does(tmp_path: Path) -> None:
    with two_peers(tmp_path, 2) as ranks:
        epoch(ranks)
        before = ask(ranks, "traffic")
        epoch(ranks)
        after = ask(ranks, "traffic")
        assert len(set(ask(ranks, "digest"))) == 1
        memory = ask(ranks, "memory")
    # One of two single peers sends half of the vector twice, holds inputs and outputs, and AdamW keeps two more.
    model = memory[0]["model"]
    assert model > 16e6
    for was, now in zip(before, after, strict=True):
        assert model / 2 < now["sent"] - was["sent"] <= AT_MOST * model / 2
    for one in memory:
        assert one["vectors"] <= AT_MOST * model
        assert one["pieces"] <= AT_MOST * model
        assert one["state"] <= AT_MOST * model

"""One Shoal peer of `benchmarks.timeline`; prints its addresses. Arguments: marks file, width, seconds, epochs."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import shoal
from benchmarks.workers.timeline import TARGET, Marks, make_model, train
from shoal.swarm.protocol.participant import Participant
from shoal.swarm.protocol.peer import Peer
from shoal.swarm.swarm import Swarm


def watch(marks: Marks) -> None:
    """Mark the parts of each round: until its BEGIN, until the first chunk is there, until its COMMIT."""
    seen: dict[str, float] = {}
    average, on_commit = Swarm.average, Peer._on_commit
    on_begin, on_chunk = Participant.on_begin, Participant.on_chunk

    async def marked_average(self: Swarm, *args: Any, **kwargs: Any) -> Any:
        seen["join"] = time.monotonic()
        return await average(self, *args, **kwargs)

    def marked_begin(self: Participant, *args: Any, **kwargs: Any) -> None:
        seen["begin"] = time.monotonic()
        seen.pop("chunk", None)
        marks.add("matchmaking", seen.get("join", seen["begin"]), seen["begin"])
        on_begin(self, *args, **kwargs)

    def marked_chunk(self: Participant, *args: Any, **kwargs: Any) -> None:
        if "chunk" not in seen:
            seen["chunk"] = time.monotonic()
            marks.add("first chunk", seen["begin"], seen["chunk"])
        on_chunk(self, *args, **kwargs)

    def marked_commit(self: Peer, *args: Any, **kwargs: Any) -> None:
        if "begin" in seen:
            marks.add("all-reduce", seen.pop("begin"), time.monotonic())
        on_commit(self, *args, **kwargs)

    Swarm.average = marked_average  # type: ignore[method-assign]
    Participant.on_begin = marked_begin  # type: ignore[method-assign]
    Participant.on_chunk = marked_chunk  # type: ignore[method-assign]
    Peer._on_commit = marked_commit  # type: ignore[method-assign]


def main() -> None:
    """Train; the first line of the input has the initial peers, its end ends the process."""
    path, width, seconds, epochs = sys.argv[1:]
    torch.set_num_threads(1)
    marks, model = Marks(Path(path)), make_model(int(width))
    watch(marks)
    initial_peers = json.loads(sys.stdin.readline())
    with shoal.DHT(initial_peers, start=True) as dht:
        optimizer = shoal.Optimizer(
            dht=dht,
            run_id="timeline",
            target_batch_size=TARGET,
            params=model.parameters(),
            optimizer=lambda params: torch.optim.Adam(params, lr=1e-4),
        )
        print(json.dumps([str(address) for address in dht.get_visible_maddrs()]), flush=True)
        sys.stdin.readline()
        train(model, optimizer, marks, float(seconds), int(epochs))
        print(json.dumps("done"), flush=True)
        sys.stdin.readline()
        optimizer.shutdown()


if __name__ == "__main__":
    main()

"""One hivemind peer of `benchmarks.timeline`; prints its addresses. Arguments: marks file, width, seconds, epochs."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import hivemind  # type: ignore[import-not-found, unused-ignore]
import torch

from benchmarks.workers.timeline import BATCH, TARGET, Marks, make_model, train


def watch(marks: Marks) -> None:
    """Mark the all-reduces (in the averagers' own processes), and the time from allowing one to its beginning."""
    averager = hivemind.averaging.DecentralizedAverager
    aggregate = averager._aggregate_with_group

    async def marked(self: Any, *args: Any, **kwargs: Any) -> Any:
        start = time.monotonic()
        try:
            return await aggregate(self, *args, **kwargs)
        finally:
            what = "all-reduce" if "grad" in self.prefix else "all-reduce of the state"
            marks.add(what, start, time.monotonic())

    averager._aggregate_with_group = marked


def main() -> None:
    """Train; the first line of the input has the initial peers, its end ends the process."""
    path, width, seconds, epochs = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch.set_num_threads(1)
    marks, model = Marks(Path(path)), make_model(int(width))
    watch(marks)
    initial_peers = json.loads(sys.stdin.readline())
    dht = hivemind.DHT(initial_peers=initial_peers, start=True)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="timeline",
        target_batch_size=TARGET,
        batch_size_per_step=BATCH,
        params=list(model.parameters()),
        optimizer=lambda params: torch.optim.Adam(params, lr=1e-4),
        matchmaking_time=2.0,
        averaging_timeout=20.0,
        tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.2, "max_refresh_period": 0.5},
    )
    answers.write(json.dumps([str(address) for address in dht.get_visible_maddrs()]) + "\n")
    sys.stdin.readline()
    train(model, optimizer, marks, float(seconds), int(epochs))
    answers.write(json.dumps("done") + "\n")
    sys.stdin.readline()
    optimizer.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()

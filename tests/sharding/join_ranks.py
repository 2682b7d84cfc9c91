"""Run scenarios of `join_scenarios` on real ranks: python -m tests.sharding.join_ranks RANK FOLDER CALLS."""

from __future__ import annotations

import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

from tests.forked import ForkedProcess

Call = tuple[str, dict[str, Any]]
"""A scenario's name and arguments; one of these is `inputs`, a list with an entry for each rank that takes part."""


def run_ranks(calls: list[Call], folder: Path, timeout: float = 280.0) -> list[list[Any]]:
    """Start as many processes as the largest call needs, and make all calls one after the other.

    Returns:
        The answers by call and rank.
    """
    ranks = max(len(arguments["inputs"]) for _, arguments in calls)
    processes = [
        ForkedProcess(
            "tests.sharding.join_ranks",
            *(str(rank), str(folder), json.dumps(calls)),
            environment={"GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(ranks)
    ]
    try:
        codes = [process.wait(timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    files = [folder / f"{rank}.json" for rank in range(ranks)]
    # Not the codes: after all is answered, torch's gloo now and then aborts while the interpreter goes down.
    assert all(file.exists() for file in files), f"exit codes of the ranks: {codes}"
    answers = [json.loads(file.read_text()) for file in files]
    return [
        [answers[rank][number] for rank in range(len(arguments["inputs"]))]
        for number, (_, arguments) in enumerate(calls)
    ]


def main() -> None:
    """One rank."""
    import torch
    import torch.distributed as dist

    from tests.sharding import join_scenarios

    torch.set_num_threads(1)
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    answers: list[Any] = []
    for number, (name, arguments) in enumerate(json.loads(sys.argv[3])):
        ranks = len(arguments["inputs"])
        if rank >= ranks:
            answers.append(None)
            continue
        # A group of its own for each, so that what hangs or fails leaves the next alone.
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store-{number}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=100),
        )
        dist.barrier()  # all are connected: who is done early may leave
        try:
            answers.append(getattr(join_scenarios, name)(**arguments))
        except Exception:  # noqa: BLE001 - told to the test, which shows it
            answers.append({"failed": traceback.format_exc()})
        dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    main()

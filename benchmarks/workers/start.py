"""One trainer that makes an Optimizer and says what that took.

Argument: `shoal`, `hivemind`, or `torch` for a plain torch optimizer, which each of the others makes too. It answers
when torch is imported, again when the optimizer is made, with the CPU seconds of the parts of Shoal's start, and then
waits until its input ends.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterable
from itertools import pairwise

import torch


def sgd(params: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """What the user would write."""
    return torch.optim.SGD(params, lr=0.1)


def main(side: str) -> None:
    """Runs one start. The library is imported in here, since its import is part of what is measured."""
    answers = sys.stdout
    sys.stdout = sys.stderr
    model = torch.nn.Linear(32, 4)
    print(json.dumps({"result": None}), file=answers, flush=True)
    sys.stdin.readline()
    started = time.monotonic()
    parts: dict[str, float] = {}
    stop: list[Callable[[], object]] = []
    match side:
        case "torch":
            sgd(model.parameters())
        case "shoal":
            cpu = [time.process_time()]
            import shoal

            _ = shoal.DHT, shoal.Optimizer  # names are imported when they are first used
            cpu.append(time.process_time())
            sgd(model.parameters())
            cpu.append(time.process_time())
            dht = shoal.DHT(start=True)
            cpu.append(time.process_time())
            optimizer = shoal.Optimizer(
                dht=dht, run_id="start", target_batch_size=32, params=model.parameters(), optimizer=sgd
            )
            cpu.append(time.process_time())
            spent = [after - before for before, after in pairwise(cpu)]
            parts = {"import": spent[0], "DHT": spent[2], "Optimizer": spent[3]}
            stop = [optimizer.shutdown, dht.shutdown]
        case "hivemind":
            import hivemind

            dht = hivemind.DHT(start=True)
            optimizer = hivemind.Optimizer(
                dht=dht, run_id="start", target_batch_size=32, params=model.parameters(), optimizer=sgd
            )
            stop = [optimizer.shutdown, dht.shutdown]
        case other:
            raise ValueError(f"no library is named {other!r}")
    result = {"seconds": time.monotonic() - started, "cpu": parts}
    print(json.dumps({"result": result}), file=answers, flush=True)
    sys.stdin.read()
    for shutdown in stop:
        shutdown()


if __name__ == "__main__":
    main(sys.argv[1])

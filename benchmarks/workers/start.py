"""One trainer that makes an Optimizer and says what that took. Argument: `shoal` or `hivemind`.

It answers when torch is imported, again when the optimizer is made, and then waits until its input ends.
"""

from __future__ import annotations

import json
import sys
import time

import torch


def sgd(params: object) -> torch.optim.Optimizer:
    """What the user would write."""
    return torch.optim.SGD(params, lr=0.1)  # type: ignore[arg-type]


def main(side: str) -> None:
    """Runs one start. The library is imported in here, since its import is part of what is measured."""
    answers = sys.stdout
    sys.stdout = sys.stderr
    model = torch.nn.Linear(32, 4)
    print(json.dumps({"result": None}), file=answers, flush=True)
    sys.stdin.readline()
    started = time.monotonic()
    match side:
        case "shoal":
            import shoal

            dht = shoal.DHT(start=True)
            optimizer = shoal.Optimizer(
                dht=dht, run_id="start", target_batch_size=32, params=model.parameters(), optimizer=sgd
            )
        case "hivemind":
            import hivemind

            dht = hivemind.DHT(start=True)
            optimizer = hivemind.Optimizer(
                dht=dht, run_id="start", target_batch_size=32, params=model.parameters(), optimizer=sgd
            )
        case other:
            raise ValueError(f"no library is named {other!r}")
    print(json.dumps({"result": time.monotonic() - started}), file=answers, flush=True)
    sys.stdin.read()
    optimizer.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])

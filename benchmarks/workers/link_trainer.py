"""One training peer on an emulated line: prints a JSON line per event of its optimizer and per warning, then ends.

Arguments: one JSON object with `address` (to listen at), `initial_peers`, `megabytes` (of float32 parameters),
`seconds` (to train for), `step` (seconds that a step takes), `options` (of the optimizer).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from typing import Any

import torch

import shoal

STARTED = time.monotonic()


def say(**line: Any) -> None:
    print(json.dumps({"time": time.monotonic(), **line}), flush=True)


class Warnings(logging.Handler):
    """Tells what the library warns of, and whom it gives up."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING or "does not answer" in record.getMessage():
            say(kind="log", level=record.levelname, text=record.getMessage())


def main() -> None:
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    logger = logging.getLogger("shoal")
    logger.setLevel(os.environ.get("SHOAL_LOG", "INFO"))
    logger.addHandler(Warnings())
    if "SHOAL_LOG" in os.environ:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(message)s"))
        logger.addHandler(handler)
    dht = shoal.DHT(given["initial_peers"], start=True, host_maddrs=[f"/ip4/{given['address']}/tcp/0"])
    say(kind="ready", addresses=[str(address) for address in dht.get_visible_maddrs()], peer=str(dht.peer_id))
    torch.manual_seed(0)
    rows = max(1, round(given["megabytes"] * 1e6 / 4 / 1000))
    model = torch.nn.Linear(1000, rows, bias=False)
    optimizer = shoal.Optimizer(
        dht=dht,
        run_id="links",
        batch_size_per_step=16,
        params=model.parameters(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        **given["options"],
    )

    def heard(event: Any) -> None:
        line: dict[str, Any] = {"kind": type(event).__name__}
        if isinstance(event, shoal.EpochReport):
            line |= {
                "epoch": event.epoch,
                "peers": event.num_peers,
                "samples": event.samples,
                "matchmaking": event.matchmaking_seconds,
                "allreduce": event.allreduce_seconds,
                "digest": event.state_digest,
                "sent": event.bytes_sent,
            }
        say(**line)

    optimizer.on_event = heard
    say(kind="made")
    sys.stdin.readline()  # all begin together
    generator = torch.Generator().manual_seed(os.getpid())
    until = time.monotonic() + given["seconds"]
    gradient = torch.zeros_like(model.weight)
    model.weight.grad = gradient
    while time.monotonic() < until:
        began = time.monotonic()
        gradient.normal_(generator=generator)
        model.weight.grad = gradient
        time.sleep(max(0.0, given["step"] - (time.monotonic() - began)))
        optimizer.step()
    say(kind="end", epoch=optimizer.local_epoch)
    optimizer.shutdown()
    dht.shutdown()


if __name__ == "__main__":
    main()

"""One peer of `benchmarks.joining`, of Shoal or hivemind: a JSON line per event and log record, until it is killed.

Arguments: one JSON object with `library`, `address` (to listen at), `initial_peers`, `width` (of the model), `momentum`
(SGD with so much; null: Adam), `step` (seconds that a step takes beside its compute), `inner_steps` (of DiLoCo, or
null), `options` (of the optimizer). The first line of the input begins the training.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

BATCH, INPUTS, OUTPUTS = 16, 64, 8
_answers = os.fdopen(os.dup(1), "w", buffering=1)


def say(kind: str, **line: Any) -> None:
    """One line; `line_bytes` is what has come over the line, with the headers of its packets."""
    received = next(text for text in Path("/proc/net/dev").read_text().splitlines() if "tun0:" in text)
    about = {"kind": kind, "time": time.monotonic(), "line_bytes": int(received.split()[1])}
    _answers.write(json.dumps(about | line) + "\n")


class Told(logging.Handler):
    """Passes on what the library logs, but the events, which are told with their fields."""

    def emit(self, record: logging.LogRecord) -> None:
        if not hasattr(record, "shoal"):
            say("log", level=record.levelname, text=record.getMessage())


def watch_shoal(optimizer: Any, dht: Any) -> Callable[[], None]:
    """Tells the events; returns the function that makes a step."""

    def heard(event: Any) -> None:
        line = {"text": str(event).partition(", tip")[0], "bytes": dht.node.bytes_received}
        if type(event).__name__ == "EpochReport":
            line |= {"epoch": event.epoch, "peers": event.num_peers, "digest": event.state_digest}
            line |= {"round": event.allreduce_seconds}
        say(type(event).__name__, **line)

    optimizer.on_event = heard
    logger = logging.getLogger("shoal")
    logger.setLevel("INFO")
    logger.addHandler(Told())
    return lambda: optimizer.step()


def watch_hivemind(optimizer: Any, dht: Any) -> Callable[[], None]:
    """Tells each download of the state, and each epoch with the size of the group that averaged its gradients."""
    averager, average = optimizer.state_averager, optimizer._average_gradients_and_load_into_optimizer
    download = averager.load_state_from_peers
    downloads, group = 0, 1

    def downloaded(**kwargs: Any) -> None:
        nonlocal downloads
        downloads += 1
        began = time.monotonic()
        download(**kwargs)
        taken = f"the state of epoch {optimizer.local_epoch} in {time.monotonic() - began:.1f} s"
        say("DownloadReport", text=f"load_state_from_peers: {taken}")

    def averaged(control: Any) -> None:
        nonlocal group
        average(control)
        if control is not None and control.done() and not control.cancelled() and control.exception() is None:
            group = len(control.result())

    def step() -> None:
        nonlocal group
        epoch, before, group = optimizer.local_epoch, downloads, 1
        optimizer.step()
        if optimizer.local_epoch > epoch and downloads == before:
            text = f"epoch {optimizer.local_epoch}: a group of {group}"
            say("EpochReport", text=text, epoch=optimizer.local_epoch, peers=group, round=0.0, digest="")

    averager.load_state_from_peers = downloaded
    optimizer._average_gradients_and_load_into_optimizer = averaged
    return step


def main() -> None:
    given = json.loads(sys.argv[1])
    os.dup2(2, 1)  # what a library prints is no line
    library: Any = importlib.import_module(given["library"])
    started = time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    width, options, momentum = given["width"], given["options"], given["momentum"]
    model = nn.Sequential(
        nn.Linear(INPUTS, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.Linear(width, OUTPUTS),
    )
    torch.seed()
    dht = library.DHT(initial_peers=given["initial_peers"], host_maddrs=[f"/ip4/{given['address']}/tcp/0"], start=True)
    say("ready", started=started, addresses=[str(address) for address in dht.get_visible_maddrs()])
    if given["inner_steps"]:
        options["outer"] = library.DiLoCo(inner_steps=given["inner_steps"])
    optimizer = library.Optimizer(
        dht=dht,
        run_id="joining",
        batch_size_per_step=BATCH,
        params=list(model.parameters()),
        optimizer=lambda params: (
            torch.optim.SGD(params, lr=1e-4, momentum=momentum) if momentum else torch.optim.Adam(params, lr=1e-4)
        ),
        **options,
    )
    step = {"shoal": watch_shoal, "hivemind": watch_hivemind}[given["library"]](optimizer, dht)
    say("made")
    sys.stdin.readline()
    while True:
        model(torch.randn(BATCH, INPUTS)).square().mean().backward()
        time.sleep(given["step"])
        step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()

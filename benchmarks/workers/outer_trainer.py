"""One peer of a run with or without an outer optimizer: trains, and says a JSON line at its start and at its end.

Its argument is a JSON object:
    initial_peers: addresses.
    seed: of the batches that this peer draws.
    mode: of `MODES`.
    rate: the inner learning rate.
    nesterov: the outer learning rate and momentum, where the mode has both.
    samples: of an epoch of all peers; inner_steps: of an epoch of each; one of the two is None.
    in_step: whether a peer makes one step in each epoch and waits for the others; else it goes on, as trainers do.
    peers: how many make a round.
    weights: a file of the parameters to begin with.
    until: the samples of all peers at which the run ends; seconds: after which this peer ends; one of the two is None.
    pause: seconds that a step takes at least.
    upload: bytes per second that this peer sends at most, or None.
    elements: of a vector that is trained in place of the demo's GPT, or None.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
from torch import nn

import shoal
from shoal.cli.demo import model as recipe
from shoal.cli.demo.script import load_text
from shoal.compression import Blockwise4Bit, Compression, TopK

BATCH = 8  # samples of a step of one peer


def mode_of(name: str, steps: int | None, rate: float, momentum: float) -> dict[str, Any]:
    """The arguments of `shoal.Optimizer` of that mode."""
    nesterov = shoal.outer.Nesterov(lr=rate, momentum=momentum)
    four_bits, sparse = Blockwise4Bit(), Compression.of(parts=TopK(), results=Blockwise4Bit())
    match name:
        case "synchronous":
            return {}
        case "local updates":
            return {"use_local_updates": True}
        case "DiLoCo":
            return {"outer": shoal.DiLoCo(inner_steps=steps, optimizer=nesterov)}
        case "DiLoCo, overlapped":
            return {"outer": shoal.DiLoCo(inner_steps=steps, optimizer=nesterov, overlap="free", mix="keep")}
        case "DiLoCo, 4 bits":
            outer = shoal.DiLoCo(inner_steps=steps, optimizer=nesterov)
            return {"outer": outer, "grad_compression": four_bits, "error_feedback": 1.0}
        case "DiLoCo, top-k":
            outer = shoal.DiLoCo(inner_steps=steps, optimizer=shoal.outer.SGD(lr=1.0))
            return {"outer": outer, "grad_compression": sparse, "error_feedback": 1.0}
    raise ValueError(f"no mode {name!r}")


class Vector(nn.Module):
    """A model that costs nothing to compute."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.zeros(elements))

    def loss(self) -> torch.Tensor:
        return self.weights[:1].sum()


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def main() -> None:
    """Trains until the run or the time is over."""
    given = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    model: Any = Vector(given["elements"]) if given["elements"] else recipe.GPT()
    text, rest = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in load_text())
    if given["weights"]:
        model.load_state_dict(torch.load(given["weights"], weights_only=True))
    generator = torch.Generator().manual_seed(given["seed"])
    address = ["/ip4/127.0.0.1/tcp/0"]
    with shoal.DHT(given["initial_peers"], start=True, host_maddrs=address, upload_limit=given["upload"]) as dht:
        optimizer = shoal.Optimizer(
            dht=dht,
            run_id=given["mode"],
            target_batch_size=given["samples"],
            batch_size_per_step=BATCH,
            params=model.parameters(),
            optimizer=lambda p: torch.optim.AdamW(p, lr=given["rate"], betas=(0.9, 0.95), weight_decay=0.05),
            min_peers=given["peers"],
            matchmaking_time=30.0,
            averaging_timeout=60.0,
            **mode_of(given["mode"], given["inner_steps"], *given["nesterov"]),
        )
        say(addresses=[str(at) for at in dht.get_visible_maddrs()])
        sent, steps, began, first = 0, 0, time.monotonic(), 0.0

        def heard(event: object) -> None:
            nonlocal sent
            sent += event.bytes_sent if isinstance(event, shoal.EpochReport) else 0

        optimizer.on_event = heard
        until, seconds = given["until"] or float("inf"), given["seconds"] or float("inf")
        while float(optimizer.tip.split(":")[1]) < until and time.monotonic() - began < seconds:
            if not first and optimizer.local_epoch == 1:  # all are there
                first, began, steps, sent = time.monotonic(), time.monotonic(), 0, 0
            if given["elements"]:
                model.loss().backward()
                time.sleep(given["pause"])
            else:
                model.loss(*recipe.random_windows(text, BATCH, generator)).backward()
            epoch = optimizer.local_epoch
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            while given["in_step"] and optimizer.local_epoch == epoch:
                time.sleep(0.002)
                optimizer.step(batch_size=0)
        took = time.monotonic() - began
        optimizer.finish()
        loss = 0.0
        if not given["elements"]:
            with torch.no_grad():
                if optimizer.outer_optimizer is not None:  # what the run has learned is the anchor
                    state = optimizer.state_dict()["shoal"]["drift"]["anchor"]
                    for parameter, anchor in zip(model.parameters(), state, strict=True):
                        parameter.copy_(anchor)
                loss = float(model.loss(*recipe.spread_windows(rest)))
        say(loss=loss, sent=sent, steps=steps, seconds=took, tip=optimizer.tip)
        if given["save"]:
            torch.save(model.state_dict(), given["save"])
        optimizer.shutdown()


if __name__ == "__main__":
    main()

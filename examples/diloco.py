"""How much a small GPT learns per token and per byte, trained by several peers in four ways, one after the other.

    python -m examples.diloco                           # four runs of two peers; draws runs/diloco/loss.png
    python -m examples.diloco --modes diloco --peers 4

Synchronous training averages gradients after each batch. DiLoCo averages what many inner steps have done; in 4 bits, or
in the largest 64 of 4,096 elements, it sends less still, and error feedback makes up later for what was left out. All
runs begin with the same parameters and see as many tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shoal
from examples.train import CHARACTERS, CONTEXT, GPT, draw_batch, read_text
from shoal.compression import Blockwise4Bit, Compression, TopK

BATCH, HELD_OUT = 16, 64 * CONTEXT  # samples in a step of one peer; bytes of the text that nobody trains on
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {},
    "diloco": {"outer": shoal.DiLoCo()},
    "4-bit": {"outer": shoal.DiLoCo(), "grad_compression": Blockwise4Bit(), "error_feedback": 1.0},
    "top-k": {
        "outer": shoal.DiLoCo(optimizer=shoal.outer.SGD(lr=1.0)),
        "grad_compression": Compression.of(parts=TopK(), results=Blockwise4Bit()),
        "error_feedback": 1.0,
    },
}


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(inputs).view(-1, CHARACTERS), targets.reshape(-1))


def train(mode: str, seed: int, tokens: int, samples: int, inner_steps: int, peers: int, initial: list[str]) -> None:
    """One peer of one run. Says its address, and what the run has cost and learned after each epoch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, text = GPT(), read_text(None)
    held_out = text[-HELD_OUT - 1 :].long()
    inputs, targets = held_out[:-1].view(-1, CONTEXT), held_out[1:].view(-1, CONTEXT)
    torch.manual_seed(1 + seed)
    sent = 0

    def told(event: object) -> None:
        nonlocal sent
        if isinstance(event, shoal.EpochReport):
            sent += event.bytes_sent

    with shoal.DHT(initial, start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"]) as dht:
        chosen = MODES[mode]
        optimizer = shoal.Optimizer(
            dht=dht,
            run_id=mode,
            target_batch_size=samples if mode == "synchronous" else BATCH * inner_steps * peers,
            batch_size_per_step=BATCH,
            params=model.parameters(),
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
            min_peers=peers,
            **chosen,
        )
        optimizer.on_event = told
        print(json.dumps({"address": str(dht.get_visible_maddrs()[0])}), flush=True)
        epoch, began = -1, time.monotonic()
        while True:
            seen = float(optimizer.tip.split(":")[1]) * CONTEXT
            if optimizer.local_epoch != epoch:
                epoch = optimizer.local_epoch
                with torch.no_grad():
                    loss = float(loss_of(model, inputs, targets))
                line = {"tokens": seen, "bytes": sent, "loss": loss, "seconds": time.monotonic() - began}
                print(json.dumps(line), flush=True)
            if seen >= tokens:
                break
            loss_of(model, *draw_batch(text[: -HELD_OUT - 1], BATCH)).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        optimizer.finish()


def run(mode: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """All peers of one run; what the first of them has said."""
    started: list[subprocess.Popen[str]] = []
    addresses: list[str] = []
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    try:
        for seed in range(options.peers):
            sizes = [options.tokens, options.samples, options.inner_steps, options.peers]
            command = [sys.executable, "-m", "examples.diloco", "--peer", json.dumps([mode, seed, *sizes, addresses])]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
            started.append(process)
            assert process.stdout is not None
            addresses = addresses or [json.loads(process.stdout.readline())["address"]]
        assert started[0].stdout is not None
        lines = [json.loads(line) for line in started[0].stdout]
        if not lines or any(process.wait() for process in started):
            sys.exit(f"{mode}: a peer has failed, see above")
        return lines
    finally:
        for process in started:
            process.kill()
            process.communicate()


def draw(found: dict[str, list[dict[str, float]]], to: Path) -> None:
    """Loss against tokens of all peers, and against the bytes that one peer has sent."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    for mode, lines in found.items():
        losses = [line["loss"] for line in lines]
        left.plot([line["tokens"] / 1e6 for line in lines], losses, label=mode)
        right.plot([line["bytes"] / 1e6 for line in lines], losses, label=mode)
    left.set(xlabel="million tokens, of all peers", ylabel="held-out loss")
    right.set(xlabel="MB sent by a peer", xscale="symlog")
    left.legend()
    to.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(to, dpi=120)


def main() -> None:
    """Starts the runs one after the other, and draws what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of all peers, in each run")
    parser.add_argument("--samples", type=int, default=64, help="of an epoch of the synchronous run")
    parser.add_argument("--inner-steps", type=int, default=16, help="of a peer in an epoch of the others")
    parser.add_argument("--out", type=Path, default=Path("runs/diloco"))
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        train(*json.loads(options.peer))
        return
    found: dict[str, list[dict[str, float]]] = {}
    for mode in options.modes:
        found[mode] = run(mode, options)
        last = found[mode][-1]
        print(
            f"{mode:12} loss {last['loss']:.3f} after {last['tokens'] / 1e6:.2f} million tokens; a peer has sent "
            f"{last['bytes'] / 1e6:,.1f} MB; {last['seconds']:.0f} s",
            flush=True,
        )
    draw(found, options.out / "loss.png")
    print(f"drawn: {options.out / 'loss.png'}")


if __name__ == "__main__":
    main()

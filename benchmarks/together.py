"""What Muon for matrices and AdamW for the rest learns beside AdamW: loss by tokens and by CPU seconds.

    python -m benchmarks.together [--epochs 150] [--seeds 3]

The demo's GPT is trained by one peer (`shoal.Optimizer`), with 16 samples in each epoch and the demo's schedule. Each
side has its learning rate tuned on a seed of its own, which is not among those that are reported. Both sides see the
same batches. The loss is that of held-out text, in nats per byte.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import shoal
from benchmarks.outer import RESULTS
from benchmarks.report import Figure, describe, environment, figure_table, number, publish, table
from shoal.cli.demo import model as recipe
from shoal.cli.demo.script import load_text

SHARES = (0.25, 0.5, 0.75, 1.0)  # of the epochs, at which the loss is measured
RATES = {"AdamW": (1.5e-3, 3e-3, 6e-3), "Muon and AdamW": (2e-2, 4e-2, 8e-2)}
BETAS, DECAY, RATE_OF_REST = (0.9, 0.95), 0.05, 6e-3  # those of the demo
TUNING_SEED, BATCH = 100, 16

Make = Callable[[Any], torch.optim.Optimizer]

NOTE = """\
One process with one thread, on a machine of 2 cores. *CPU seconds* are those of training, with forward and backward
passes, without evaluations. *±* is the standard error of the mean over seeds, which draw other parameters and
batches."""


def make_of(side: str, rate: float) -> Make:
    """The optimizer of a side: all parameters by AdamW, or the matrices between embedding and head by Muon."""

    def is_hidden_matrix(name: str, parameter: torch.Tensor) -> bool:
        return parameter.ndim == 2 and name not in ("embedding.weight", "head.weight")

    def muon_and_adamw(params: Any) -> torch.optim.Optimizer:
        matrices, rest = shoal.Together.divide(params, is_hidden_matrix)
        return shoal.Together(
            torch.optim.Muon(matrices, lr=rate, weight_decay=DECAY),
            torch.optim.AdamW(rest, lr=RATE_OF_REST, betas=BETAS, weight_decay=DECAY),
        )

    if side == "AdamW":
        return lambda params: torch.optim.AdamW(params, lr=rate, betas=BETAS, weight_decay=DECAY)
    return muon_and_adamw


def trained(text: torch.Tensor, rest: torch.Tensor, make: Make, epochs: int, seed: int) -> list[tuple[float, float]]:
    """(loss, seconds) after each share of the epochs."""
    torch.manual_seed(seed)
    model = recipe.GPT()
    generator = torch.Generator().manual_seed(seed)
    held_out = recipe.spread_windows(rest)
    moments = {round(share * epochs) for share in SHARES}
    found, seconds = [], 0.0
    with shoal.DHT(start=True) as dht:
        optimizer = shoal.Optimizer(
            dht=dht,
            run_id="together",
            target_batch_size=BATCH,
            batch_size_per_step=BATCH,
            params=model.named_parameters(),
            optimizer=make,
            scheduler=recipe.scheduler_factory(epochs),
        )
        while optimizer.local_epoch < epochs:
            began = time.process_time()
            loss = model.loss(*recipe.random_windows(text, BATCH, generator))
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            seconds += time.process_time() - began
            if optimizer.local_epoch in moments:
                with torch.no_grad():
                    found.append((float(model.loss(*held_out)), seconds))
        optimizer.shutdown()
    return found


def with_error(values: list[float], digits: int) -> str:
    """The mean, with its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} ± {error:.{digits}f}"


def main() -> None:
    """Tunes both sides, trains both with each seed in turn, and publishes the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    facts = environment()
    text, rest = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in load_text())
    tuned: dict[str, float] = {}
    tried: dict[str, dict[str, float]] = {}
    for side, rates in RATES.items():
        losses = {rate: trained(text, rest, make_of(side, rate), given.epochs, TUNING_SEED)[-1][0] for rate in rates}
        tuned[side] = min(losses, key=lambda rate: losses[rate])
        tried[side] = {f"{rate:g}": loss for rate, loss in losses.items()}
        print(side, tried[side], flush=True)
    found: dict[str, list[list[tuple[float, float]]]] = {side: [] for side in RATES}
    for seed in range(given.seeds):
        for side in RATES:
            found[side].append(trained(text, rest, make_of(side, tuned[side]), given.epochs, seed))
            print(side, seed, found[side][-1], flush=True)
    tokens = BATCH * recipe.CONTEXT
    rows = []
    for index, share in enumerate(SHARES):
        for side, runs in found.items():
            made = round(share * given.epochs)
            rows.append([
                f"{made * tokens / 1e6:.2f} million ({made} epochs)",
                side,
                with_error([run[index][0] for run in runs], 3),
                with_error([run[index][1] for run in runs], 1),
            ])  # fmt: skip
    means = {side: [statistics.mean(run[-1][n] for run in runs) for n in (0, 1)] for side, runs in found.items()}
    (plain, plain_seconds), (muon, muon_seconds) = means["AdamW"], means["Muon and AdamW"]
    figures = [
        Figure("loss at the end with AdamW, less that with Muon and AdamW", plain - muon, ""),
        Figure("CPU seconds with Muon and AdamW, of those with AdamW", muon_seconds / plain_seconds, ""),
    ]
    told = "; ".join(f"{side}: {rate:g} of {', '.join(tried[side])}" for side, rate in tuned.items())
    parts = [
        "# Muon for matrices and AdamW for the rest, beside AdamW",
        describe(facts),
        NOTE,
        f"Learning rates, tuned: {told}; the rest beside Muon: {RATE_OF_REST:g}.",
        table(["tokens", "optimizer", "held-out loss", "CPU seconds"], rows),
        figure_table(figures),
    ]
    data = {"environment": facts, "tuned": tuned, "tried": tried, "runs": found}
    print(number(plain - muon, 3))
    publish(RESULTS, "together", "\n\n".join(parts), data)


if __name__ == "__main__":
    main()

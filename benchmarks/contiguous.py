"""Whole training loops, by how the optimizer holds the parameters: `zero_grad`, forward, backward, clipping, `step`.

    python -m benchmarks.contiguous [--rows 100x128 …] [--threads 1 2] [--blocks 200] [--sides torch-fused Shoal]

The sides, each with a model, gradients and state of its own:

- torch fused, torch foreach: the torch.optim class on separate parameters;
- contiguous-params: the reference package with `fused=True` and `set_to_none=False`, without which it does not train.
  It is no dependency of Shoal: `pip install --no-deps contiguous-params==1.0.0`, or it is left out;
- A: a prototype. `zero_grad` sets `.grad` to None; before the step (or clipping) one `torch._foreach_copy_` gathers the
  gradients, and the fused kernel steps one flat parameter;
- B: a prototype. Gradients are views of a flat one for good, and `zero_grad` is one `zero_()` of it. Neither knows
  parameters without gradients;
- Shoal: `ContiguousParams`, as its README uses it.

A block is as many loops of each side as take some milliseconds. Sides take turns in it, another one first in each, so
what slows the machine slows all. The tables show medians over the blocks: of a loop's CPU time, all threads together,
and of the ratios of two sides in the same block. Every raw figure is in the JSON file.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from benchmarks.contiguous_operations import has_reference
from benchmarks.networks import Loss, gpt, linears, resnet18
from benchmarks.report import Figure, describe, environment, figure_table, publish, table
from shoal import ContiguousParams

Made = tuple[nn.Module, Loss]


@dataclass(frozen=True)
class Row:
    """A network and how it is trained."""

    name: str
    make: Callable[[], Made]
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    clips: bool = False
    faster_than_torch: float = 0.0  # what is promised over torch fused; 0: nothing


ROWS = {
    "100x128": Row("100 Linear(128), AdamW", partial(linears, 100, 128), faster_than_torch=1.05),
    "100x32": Row("100 Linear(32), AdamW", partial(linears, 100, 32), faster_than_torch=1.15),
    "500x64": Row("500 Linear(64), AdamW", partial(linears, 500, 64), faster_than_torch=1.15),
    "10x1000": Row("10 Linear(1000), AdamW", partial(linears, 10, 1000)),
    "gpt": Row("GPT, 24 layers of 64, AdamW", gpt, faster_than_torch=1.05),
    "resnet18": Row("ResNet-18, SGD, clipping", resnet18, partial(torch.optim.SGD, lr=0.01, momentum=0.9), clips=True),
}


class Side:
    """A model that is trained in one of the ways: torch's, with the options that are given."""

    def __init__(self, row: Row, **options: Any) -> None:
        torch.manual_seed(0)
        self.model, self._loss = row.make()
        self._row = row
        self._parameters = list(self.model.parameters())
        self.stepped = self.hold()
        self.optimizer = row.optimizer(self.stepped, **options)

    def hold(self) -> list[Tensor]:
        """What the optimizer is given."""
        return list(self._parameters)

    def zero_grad(self) -> None:
        """Before the backward pass."""
        self.optimizer.zero_grad()

    def gather(self) -> None:
        """After the backward pass."""

    def loop(self) -> None:
        """One step of training."""
        self.zero_grad()
        self._loss().backward()  # type: ignore[no-untyped-call]
        self.gather()
        if self._row.clips:
            clip_grad_norm_(self.stepped, 1.0)
        self.optimizer.step()


class Reference(Side):
    """contiguous-params."""

    def hold(self) -> list[Tensor]:
        """Its buffer."""
        self._holder = importlib.import_module("contiguous_params").ContiguousParams(self._parameters)
        held: list[Tensor] = self._holder.contiguous()
        return held

    def zero_grad(self) -> None:
        """Zeroes the buffer."""
        self.optimizer.zero_grad(set_to_none=False)


class Shoal(Side):
    """Shoal's."""

    def hold(self) -> list[Tensor]:
        """Its flat parameters."""
        self._holder = ContiguousParams(self._parameters)
        return self._holder.contiguous()


class Gathered(Side):
    """The prototype A."""

    def hold(self) -> list[Tensor]:
        """One flat parameter with a flat gradient."""
        flat = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in self._parameters]))
        flat.grad = torch.zeros_like(flat)
        sizes = [parameter.numel() for parameter in self._parameters]
        self._views = []
        values, grads = torch.split(flat.detach(), sizes), torch.split(flat.grad, sizes)
        for parameter, value, grad in zip(self._parameters, values, grads, strict=True):
            parameter.data = value.view(parameter.shape)
            self._views.append(grad.view(parameter.shape))
        return [flat]

    def zero_grad(self) -> None:
        """None, as torch does."""
        for parameter in self._parameters:
            parameter.grad = None

    def gather(self) -> None:
        """One copy into the flat gradient."""
        torch._foreach_copy_(self._views, [parameter.grad for parameter in self._parameters])  # type: ignore[misc]


class Views(Gathered):
    """The prototype B."""

    def hold(self) -> list[Tensor]:
        """The gradients are views for good."""
        held = super().hold()
        for parameter, view in zip(self._parameters, self._views, strict=True):
            parameter.grad = view
        return held

    def zero_grad(self) -> None:
        """One kernel."""
        grad = self.stepped[0].grad
        assert grad is not None
        grad.zero_()

    def gather(self) -> None:
        """They are there."""


SIDES: dict[str, Callable[[Row], Side]] = {
    "torch fused": partial(Side, fused=True),
    "torch foreach": partial(Side, foreach=True),
    "contiguous-params": partial(Reference, fused=True),
    "A": partial(Gathered, fused=True),
    "B": partial(Views, fused=True),
    "Shoal": Shoal,
}


def milliseconds(side: Side, loops: int) -> float:
    """CPU time of a loop."""
    start = time.process_time()
    for _ in range(loops):
        side.loop()
    return 1000 * (time.process_time() - start) / loops


def measure(row: Row, names: list[str], blocks: int, least: float) -> dict[str, list[float]]:
    """Milliseconds of a loop per side, one figure per block of at least `least` ms a side."""
    sides = {name: SIDES[name](row) for name in names}
    for side in sides.values():  # state is made, kernels are picked, memory is paged in
        milliseconds(side, 5)
    loops = max(1, round(least / milliseconds(sides["Shoal"], 5)))
    taken: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    order = list(names)
    for _ in range(blocks):
        order.append(order.pop(0))
        for name in order:
            taken[name].append(milliseconds(sides[name], loops))
    gc.enable()
    return taken


def ratio(above: list[float], below: list[float]) -> float:
    """The median of ratios of the same block."""
    return statistics.median(a / b for a, b in zip(above, below, strict=True))


def figures(result: dict[str, Any]) -> list[Figure]:
    """What is promised of a row."""
    taken, label = result["milliseconds"], f"{result['row']}, {result['threads']} threads"
    others = {name: statistics.median(values) for name, values in taken.items() if name != "Shoal"}
    best = min(others, key=lambda name: others[name])
    found = [Figure(f"{label}: Shoal / {best}, the best of the others", ratio(taken["Shoal"], taken[best]), "<= 1.04")]
    if "torch fused" in taken:
        bound = ROWS[result["key"]].faster_than_torch
        name = f"{label}: torch fused / Shoal"
        found.append(Figure(name, ratio(taken["torch fused"], taken["Shoal"]), f">= {bound}" if bound else ""))
    return found


def report(results: list[dict[str, Any]], facts: dict[str, Any], names: list[str]) -> str:
    """The page of results."""
    rows = [
        [result["row"], str(result["threads"])]
        + [f"{statistics.median(result['milliseconds'][name]):.2f}" for name in names]
        for result in results
    ]
    return "\n\n".join(
        [
            "# Training loops on contiguous parameters",
            describe(facts),
            "CPU ms of a loop, medians:",
            table(["", "threads", *names], rows),
            figure_table([figure for result in results for figure in figures(result)]),
        ]
    )


def main() -> None:
    """All rows, with 1 and 2 threads."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=[*ROWS], default=[*ROWS])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--blocks", type=int, default=200)
    parser.add_argument("--least", type=float, default=10.0, help="ms of a side in a block")
    parser.add_argument("--sides", nargs="+", choices=[*SIDES], default=[*SIDES], help="Shoal is always one of them")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    names = [name for name in SIDES if name == "Shoal" or name in arguments.sides]
    if "contiguous-params" in names and not has_reference():
        names.remove("contiguous-params")
    facts = environment() | {"blocks": arguments.blocks}
    results = []
    for threads in arguments.threads:
        torch.set_num_threads(threads)
        for key in arguments.rows:
            taken = measure(ROWS[key], names, arguments.blocks, arguments.least)
            results.append({"row": ROWS[key].name, "key": key, "threads": threads, "milliseconds": taken})
            medians = ", ".join(f"{name} {statistics.median(values):.2f}" for name, values in taken.items())
            print(f"{key}, {threads} threads: {medians}; " + "; ".join(f"{f.value:.3f}" for f in figures(results[-1])))
    publish(arguments.results, "contiguous", report(results, facts, names), {"environment": facts, "results": results})


if __name__ == "__main__":
    main()

"""Optimizer step, clip_grad_norm_ and zero_grad: on separate tensors, with the reference package, and with Shoal.

    python -m benchmarks.contiguous_operations [--rows a b c d] [--optimizers AdamW …] [--rounds 30] [--threads 2]
                                    [--compile-limit 500]

The sides, each with parameters, gradients and state of its own:

- loop, foreach, fused: the torch.optim class with that implementation;
- compiled: `torch.compile`d `optimizer.step`. Left out for models of more than `--compile-limit` tensors, since
  compiling takes minutes there;
- reference: `contiguous_params.ContiguousParams`, with the optimizer as its README makes it, and with `fused=True`. It
  is no dependency of Shoal: `pip install --no-deps contiguous-params==1.0.0`, or it is left out;
- Shoal: `shoal.ContiguousParams`, the optimizer as its README makes it: no options;
- kernel: torch's fused kernel alone, on flat arrays of as many elements: what no optimizer that uses it can be below.

Sides take turns, operation by operation, so what slows the machine slows all; who begins changes from round to round.
A "step" finds none of its memory in the caches, as after a backward pass of a model larger than they are. "Step again"
is the third in a row, with as much in the caches as fits: as after the backward pass of a small model.
The *floor* is the bytes that an operation must move, at the rate at which torch copies as many bytes here. Medians
count; every raw figure is in the JSON file.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.report import Figure, describe, environment, figure_table, publish, table
from benchmarks.shapes import ROWS, Shape
from shoal import ContiguousParams

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
    "SGD, momentum": (torch.optim.SGD, {"lr": 1e-3, "momentum": 0.9}),
    "Adam": (torch.optim.Adam, {}),
    "AdamW": (torch.optim.AdamW, {}),
}
# Reads and writes of one value per element: parameter, gradient, moments; parameter and moments written.
PASSES = {"SGD, momentum": 5, "Adam": 7, "AdamW": 7, "clip": 3, "zero": 1}
# Whole arrays that these are passes over.
ARRAYS = {"SGD, momentum": 3, "Adam": 4, "AdamW": 4, "clip": 1, "zero": 1}
OPERATIONS = ("step", "step again", "clip", "zero", "set to None")
REPEATS = 3  # steps one after the other, of which the last is "step again"
SIDES = ("loop", "foreach", "fused", "compiled", "reference", "reference, fused", "Shoal", "kernel")


class Side:
    """One way to hold and step the parameters of a model."""

    def __init__(self, name: str, shapes: list[Shape], optimizer: str, device: torch.device) -> None:
        self.name = name
        self._device = device
        self._parameters = [nn.Parameter(torch.randn(shape, device=device) * 0.01) for shape in shapes]
        optimizer_class, options = OPTIMIZERS[optimizer]
        self._holder: Any = None  # the reference has its gradients in the buffer's .grad, and loses them with None
        stepped: list[Tensor] = list(self._parameters)
        implementation: dict[str, bool] = {}
        if name == "Shoal":
            self._holder = ContiguousParams(self._parameters)
        elif name.startswith("reference"):
            self._holder = importlib.import_module("contiguous_params").ContiguousParams(self._parameters)
        if self._holder is not None:
            stepped = self._holder.contiguous()
        if name in ("foreach", "fused"):
            implementation = {name: True}
        elif name == "reference, fused":
            implementation = {"fused": True}
        elif name == "loop":
            implementation = {"foreach": False}
        if not name.startswith("reference"):
            torch.stack([parameter.sum() for parameter in self._parameters]).sum().backward()  # type: ignore[no-untyped-call]
        self._gradients = [parameter.grad for parameter in self._parameters]
        self._stepped = stepped
        self._optimizer = optimizer_class(stepped, **options, **implementation)  # type: ignore[arg-type]
        self._step = torch.compile(self._optimizer.step) if name == "compiled" else self._optimizer.step

    def operation(self, name: str) -> Callable[[], object] | None:
        """What is timed under that name; None if this side cannot."""
        if name == "step":
            return self._step
        if name == "clip":
            return lambda: clip_grad_norm_(self._stepped, 1.0)
        if name == "zero":
            return lambda: self._optimizer.zero_grad(set_to_none=False)
        return None if self.name.startswith("reference") else lambda: self._optimizer.zero_grad()

    def refill(self) -> None:
        """Gradients as after a backward pass."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            assert gradient is not None
            parameter.grad = gradient.fill_(0.01)

    def timed(self, name: str) -> float | None:
        """Seconds of one operation."""
        operation = self.operation(name)
        return None if operation is None else seconds_of(operation, self._device)

    def seconds_to_validate(self) -> float:
        """Of one `buffer_is_valid()`."""
        start = time.perf_counter()
        self._holder.buffer_is_valid()
        return time.perf_counter() - start


class Kernel:
    """torch's fused kernel alone."""

    name = "kernel"

    def __init__(self, shapes: list[Shape], optimizer: str, device: torch.device) -> None:
        self._device = device
        numel = sum(int(torch.Size(shape).numel()) for shape in shapes)
        arrays = [[torch.full((numel,), 0.01, device=device)] for _ in range(ARRAYS[optimizer])]
        options: dict[str, Any] = {"lr": 1e-3, "maximize": False, "weight_decay": 0.0, "grad_scale": None}
        if optimizer == "SGD, momentum":
            options |= {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "is_first_step": False, "found_inf": None}
            self._step = partial(torch._fused_sgd_, *arrays, **options)
        else:
            options |= {"amsgrad": False, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "found_inf": None}
            kernel = torch._fused_adam_ if optimizer == "Adam" else torch._fused_adamw_
            self._step = partial(kernel, *arrays, [], [torch.ones((), device=device)], **options)

    def refill(self) -> None:
        """Nothing: nobody changes its gradients."""

    def timed(self, name: str) -> float | None:
        """Seconds of one operation."""
        return seconds_of(self._step, self._device) if name == "step" else None


def seconds_of(operation: Callable[[], object], device: torch.device) -> float:
    """How long it takes, on the device too."""
    synchronize(device)
    start = time.perf_counter()
    operation()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    """Waits for what was launched."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def copy_rate(nbytes: int, device: torch.device) -> float:
    """Bytes read and written per second by a copy that touches `nbytes` in all."""
    source, target = (torch.zeros(max(1, nbytes // 8), device=device) for _ in range(2))
    seconds = [seconds_of(partial(target.copy_, source), device) for _ in range(12)]
    return 2 * source.numel() * 4 / statistics.median(seconds[2:])


def floors(shapes: list[Shape], optimizer: str, device: torch.device) -> dict[str, float]:
    """Seconds per operation that no implementation can be below while memory is the limit."""
    nbytes = 4 * sum(int(torch.Size(shape).numel()) for shape in shapes)
    return {
        operation: PASSES[work] * nbytes / copy_rate(ARRAYS[work] * nbytes, device)
        for operation, work in (("step", optimizer), ("clip", "clip"), ("zero", "zero"))
    }


def has_reference() -> bool:
    """Whether the reference package is installed."""
    try:
        importlib.import_module("contiguous_params")
    except ImportError:
        print("without the reference: pip install --no-deps contiguous-params==1.0.0 would add it")
        return False
    return True


def measure(
    shapes: list[Shape], optimizer: str, sides: list[str], rounds: int, device: torch.device
) -> tuple[dict[str, dict[str, list[float]]], list[float]]:
    """Seconds per side and operation, one per round; and those of Shoal's look at its validity."""
    contenders: list[Side | Kernel] = [Side(name, shapes, optimizer, device) for name in sides if name != "kernel"]
    contenders.append(Kernel(shapes, optimizer, device))
    ours = next(contender for contender in contenders if isinstance(contender, Side) and contender.name == "Shoal")
    seconds: dict[str, dict[str, list[float]]] = {name: {operation: [] for operation in OPERATIONS} for name in sides}
    validity: list[float] = []
    for turn in range(rounds + 3):
        contenders.append(contenders.pop(0))
        for contender in contenders:
            contender.refill()
        for operation in ("clip", "step", "step again", "zero", "set to None"):
            for contender in contenders:
                if operation == "step again":
                    taken = [contender.timed("step") for _ in range(REPEATS)][-1]
                else:
                    taken = contender.timed(operation)
                if taken is not None and turn >= 3:  # state is made, compiled and paged in in the first
                    seconds[contender.name][operation].append(taken)
        if turn >= 3:
            validity.append(ours.seconds_to_validate())
    return seconds, validity


def trace(path: Path, sides: list[str], device: torch.device) -> None:
    """A Chrome trace (chrome://tracing, ui.perfetto.dev) of one round of Adam on model (a)."""
    contenders = [Side(name, ROWS["a"][1](), "Adam", device) for name in sides]
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    for warm in (True, False):
        profiler = profile(activities=activities)
        with profiler:
            for contender in contenders:
                contender.refill()
                for operation in ("clip", "step", "zero"):
                    with record_function(f"{contender.name}: {operation}"):
                        contender.timed(operation)
        if not warm:
            profiler.export_chrome_trace(str(path))


def plot(path: Path, results: list[dict[str, Any]]) -> None:
    """Steps: seconds over the floor, per model and optimizer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(11, 4.5), layout="constrained")
    width = 0.8 / len(SIDES)
    for number, side in enumerate(SIDES):
        found = [(place, result) for place, result in enumerate(results) if side in result["median"]]
        axes.bar(
            [place + (number - len(SIDES) / 2 + 0.5) * width for place, _ in found],
            [result["median"][side]["step"] / result["floor"]["step"] for _, result in found],
            width,
            label=side,
        )
    axes.set_yscale("log")
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(
        range(len(results)), [f"({result['row']})\n{result['optimizer']}" for result in results], fontsize=7
    )
    axes.set_ylabel("time of a step / floor")
    axes.legend(ncols=len(SIDES), fontsize=7, loc="upper center", bbox_to_anchor=(0.5, 1.1))
    figure.savefig(path, dpi=130)


def figures(results: list[dict[str, Any]]) -> list[Figure]:
    """What is promised of these numbers, on the CPU."""
    found = []
    for result in results:
        median, label = result["median"], f"({result['row']}) {result['optimizer']}"
        ours = median["Shoal"]["step"]
        best = min((median[side]["step"], side) for side in median if side not in ("Shoal", "kernel"))
        found.append(Figure(f"{label}: step of {best[1]}, the best of the others / Shoal's", best[0] / ours, ">= 1"))
        if result["row"] in ("a", "b") and "fused" in median:
            bound = {"a": ">= 3", "b": ">= 20"}[result["row"]]
            for name, bound_of_it in (("step", ""), ("step again", bound)):
                fused = median["fused"][name]
                found.append(
                    Figure(f"{label}: {name} of torch fused / Shoal's", fused / median["Shoal"][name], bound_of_it)
                )
                found.append(
                    Figure(f"{label}: {name} of torch fused / the kernel alone", fused / median["kernel"][name], "")
                )
        if result["row"] in ("c", "d"):
            found.append(Figure(f"{label}: Shoal's step / floor", ours / result["floor"]["step"], "<= 1.3"))
    return found


def milliseconds(value: float | None) -> str:
    """Three digits."""
    return "-" if value is None else f"{1000 * value:.3g}"


def operation_table(results: list[dict[str, Any]], operation: str) -> str:
    """One operation: models and optimizers down, sides across."""
    rows = []
    for result in results:
        medians = [result["median"].get(side, {}).get(operation) for side in SIDES]
        cells = [milliseconds(value) for value in [*medians, result["floor"].get(operation)]]
        rows.append([f"({result['row']}) {result['optimizer']}", *cells])
    return table(["ms", *SIDES, "floor"], rows)


def run(arguments: argparse.Namespace, device: torch.device) -> tuple[list[dict[str, Any]], list[str]]:
    """All rows on one device."""
    sides = [side for side in SIDES if not side.startswith("reference") or has_reference()]
    results = []
    for row in arguments.rows:
        shapes = ROWS[row][1]()
        fitting = [side for side in sides if side != "compiled" or len(shapes) <= arguments.compile_limit]
        for optimizer in arguments.optimizers:
            floor = floors(shapes, optimizer, device)
            torch.compiler.reset()
            seconds, validity = measure(shapes, optimizer, fitting, arguments.rounds, device)
            gc.collect()
            median = {
                side: {name: statistics.median(values) for name, values in of_side.items() if values}
                for side, of_side in seconds.items()
            }
            results.append(
                {"device": str(device), "row": row, "optimizer": optimizer, "tensors": len(shapes), "floor": floor}
                | {"median": median, "validity": statistics.median(validity), "seconds": seconds}
            )
            print(
                f"({row}) {optimizer}: " + ", ".join(f"{side} {1000 * median[side]['step']:.3g} ms" for side in median)
            )
    return results, [side for side in sides if side not in ("compiled", "kernel")]


def report(results: list[dict[str, Any]], facts: dict[str, Any], device: torch.device) -> str:
    """The page of results of one device."""
    models = ", ".join(f"({row}) {name}" for row, (name, _) in ROWS.items())
    cost = ", ".join(
        f"({result['row']}) {1e6 * result['validity']:.0f} µs" for result in results if result["optimizer"] == "Adam"
    )
    titles = {
        "step": "Step",
        "step again": "Step again: the third in a row, on what is in the caches",
        "clip": "clip_grad_norm_",
        "zero": "zero_grad(set_to_none=False)",
        "set to None": "zero_grad(), which frees nothing on flat memory",
    }
    parts = [f"# Contiguous parameters on {device.type}", describe(facts), f"Models: {models}. Medians in ms."]
    if device.type == "cpu":
        parts.append(figure_table(figures(results)))
    for operation, title in titles.items():
        parts += [f"## {title}", operation_table(results, operation)]
    parts.append(f"`buffer_is_valid()`: {cost}.")
    return "\n\n".join(parts)


def main() -> None:
    """Runs on the CPU, and on CUDA where there is one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=[*ROWS], default=[*ROWS])
    parser.add_argument("--optimizers", nargs="+", choices=[*OPTIMIZERS], default=[*OPTIMIZERS])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--compile-limit", type=int, default=500, help="most tensors that a step is compiled for")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for device in map(torch.device, ["cpu"] + (["cuda"] if torch.cuda.is_available() else [])):
        facts = environment() | {"threads": arguments.threads, "rounds": arguments.rounds}
        results, sides = run(arguments, device)
        name = "contiguous_operations" if device.type == "cpu" else "contiguous_operations-cuda"
        publish(arguments.results, name, report(results, facts, device), {"environment": facts, "results": results})
        plot(arguments.results / f"{name}.png", results)
        trace(arguments.results / f"{name}.trace.json.gz", sides, device)


if __name__ == "__main__":
    main()

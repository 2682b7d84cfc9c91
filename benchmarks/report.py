"""From measurements to medians and tables: rich for the terminal, markdown and JSON for the results folder."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markdown import Markdown

INSTRUCTIONS = ("avx2", "avx512f", "aes", "vaes")  # that make ciphers, digests and sums faster


@dataclass(frozen=True)
class Figure:
    """One figure, often a ratio of medians, and what the project promises of it."""

    name: str
    value: float
    bound: str  # ">= 3" or "<= 1.5"; empty where nothing is promised

    @property
    def met(self) -> bool | None:
        """Whether the promise holds; None where there is none."""
        if not self.bound:
            return None
        sign, limit = self.bound.split()
        return self.value >= float(limit) if sign == ">=" else self.value <= float(limit)


def median(values: Iterable[float | None]) -> float | None:
    """The median of what is there; None when nothing is."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def environment() -> dict[str, Any]:
    """What the figures depend on and a reader can't know."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    known = {word for line in lines if line.startswith("flags") for word in line.split()}
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "cpu": cpu[0] if cpu else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "instructions": " ".join(name for name in INSTRUCTIONS if name in known) or "-",
        "load_average_at_start": round(os.getloadavg()[0], 2),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cryptography": version("cryptography"),
    }


def describe(facts: dict[str, Any]) -> str:
    """The environment as one line."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in facts.items())


def number(value: float | None, digits: int = 2) -> str:
    """A figure of a table; a dash for what was not measured."""
    return "-" if value is None else f"{value:.{digits}f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A markdown table, its first column to the left and the others to the right."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def paired(above: Iterable[float | None], below: Iterable[float | None]) -> float | None:
    """The median of the ratios of what was measured side by side; None where one of two, or everything, is missing."""
    pairs = zip(above, below, strict=True)
    return median(a / b for a, b in pairs if a is not None and b)


def figure_table(figures: Iterable[Figure], head: str = "figure (of medians)") -> str:
    """The figures with their promises."""
    verdict = {None: "", True: "yes", False: "**no**"}
    return table(
        [head, "value", "promised", "met"],
        [[figure.name, number(figure.value), figure.bound, verdict[figure.met]] for figure in figures],
    )


def publish(folder: Path, name: str, text: str, data: dict[str, Any]) -> None:
    """Prints the report, and writes it as `name`.md and its figures as `name`.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.md").write_text(text + "\n")
    (folder / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    Console(width=130).print(Markdown(text))
    print(f"written to {folder / name}.md and .json")

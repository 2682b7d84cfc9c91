"""Round trips of the typed tree, and inputs that are nearly trees: `python -m tests.soak.trees`.

Every input must be refused with a ValueError, or be a tree whose encoding is not larger than the bounds say. The
largest input, the longest time and the most memory for one are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import time
import tracemalloc
import warnings
from collections.abc import Iterator

from hypothesis import HealthCheck, Phase, given, settings
from torch import Tensor

from shoal.optim import tree
from tests.optim.test_tree import test_it_comes_out_as_it_went_in as comes_out_as_it_went_in
from tests.optim.test_tree import trees

SEEDS = 4000  # encoded trees that inputs are made of
Encoded = tuple[bytes, list[Tensor]]


def generated(count: int) -> list[Encoded]:
    """So many encoded trees, with their tensors."""
    made: list[Encoded] = []

    @settings(max_examples=count, deadline=None, database=None, derandomize=True, phases=[Phase.generate])
    @given(trees)
    def collect(value: object) -> None:
        places: list[Tensor] = []
        made.append((tree.encode(value, places), places))

    collect()
    return made


def inputs(seeds: list[Encoded], count: int, chance: random.Random) -> Iterator[Encoded]:
    """Encoded trees with bytes changed, removed, doubled, put in; cut short, or joined to others."""
    for _ in range(count):
        encoded, places = chance.choice(seeds)
        data = bytearray(encoded)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(len(data) + 1)
            match chance.randrange(7):
                case 0:
                    data[at : at + 1] = bytes([chance.randrange(256)])
                case 1:
                    data[at : at + chance.randint(1, 4)] = b""
                case 2:
                    data[at:at] = data[at : at + chance.randint(1, 40)]
                case 3:  # the heads of long arrays, maps, texts, extensions
                    head = chance.choice([0xDC, 0xDD, 0xDE, 0xDF, 0xDB, 0xC6, 0xC9, 0x9F, 0x91])
                    data[at:at] = bytes([head, *chance.randbytes(chance.randrange(5))])
                case 4:
                    del data[at:]
                case 5:
                    other = chance.choice(seeds)[0]
                    data[at:at] = other[: chance.randint(0, len(other))]
                case 6:
                    data[at : at + 1] = bytes([chance.randrange(32)])  # kinds and small numbers
            data = data or bytearray(b"\x90")
        yield bytes(data), places


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.soak.trees")
    parser.add_argument("--examples", type=int, default=100_000)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")

    began = time.perf_counter()
    checks = list(HealthCheck)
    settings(max_examples=asked.examples, deadline=None, database=None, suppress_health_check=checks)(
        comes_out_as_it_went_in
    )()
    print(f"{asked.examples} round trips in {time.perf_counter() - began:.0f} s", flush=True)

    seeds, chance = generated(SEEDS), random.Random(asked.seed)
    refused, slowest, largest, began = 0, 0.0, 0, time.perf_counter()
    for data, places in inputs(seeds, asked.inputs, chance):
        start = time.perf_counter()
        try:
            value = tree.decode(data, places)
        except ValueError:
            refused += 1
        else:
            tree.encode(value, [])
        slowest, largest = max(slowest, time.perf_counter() - start), max(largest, len(data))
    print(
        f"{asked.inputs} inputs of up to {largest} bytes in {time.perf_counter() - began:.0f} s: {refused} refused, "
        f"{asked.inputs - refused} were trees; the slowest took {1e3 * slowest:.1f} ms",
        flush=True,
    )

    tracemalloc.start()
    most = 0
    for data, places in inputs(seeds, asked.inputs // 100, chance):
        tracemalloc.reset_peak()
        before, _ = tracemalloc.get_traced_memory()
        with contextlib.suppress(ValueError):
            tree.decode(data, places)
        most = max(most, tracemalloc.get_traced_memory()[1] - before)
    print(f"one input took at most {most / 1e3:.0f} kB of Python's memory")
    print(
        f"bounds: {tree.MAX_BYTES >> 20} MiB, {tree.MAX_NODES} values, {tree.MAX_DEPTH} levels, whole numbers of "
        f"{tree.MAX_INT_BYTES} bytes"
    )


if __name__ == "__main__":
    main()

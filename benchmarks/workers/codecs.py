"""One process that encodes and decodes with one library, in one thread. Argument: `shoal` or `hivemind`.

It answers JSON lines: {"command": "measure" | "errors", "codec": …, "values": …, "elements": …, "repeats": …}.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

CHUNK = 1 << 18  # elements of a Shoal round's chunks: 1 MiB of float32
Encode = Callable[[torch.Tensor], Any]
Decode = Callable[[Any], torch.Tensor]
Side = Callable[[str], tuple[Encode, Decode, Callable[[Any], int], int]]


def shoal_side() -> Side:
    """Encode, decode and size of a codec of Shoal, and how many elements are encoded at once."""
    from shoal import compression

    def side(codec: str) -> tuple[Encode, Decode, Callable[[Any], int], int]:
        made = getattr(compression, codec)()

        def encode(chunk: torch.Tensor) -> tuple[memoryview, int]:
            return made.encode(chunk), chunk.numel()

        return encode, lambda sent: made.decode(sent[0], torch.float32, sent[1]), lambda sent: len(sent[0]), CHUNK

    return side


def hivemind_side() -> Side:
    """The same of hivemind, which is given the whole vector."""
    from hivemind import compression  # type: ignore[import-not-found, unused-ignore]

    def side(codec: str) -> tuple[Encode, Decode, Callable[[Any], int], int]:
        made = getattr(compression, codec)()

        def encode(tensor: torch.Tensor) -> Any:
            return made.compress(tensor, compression.CompressionInfo.from_tensor(tensor))

        return encode, made.extract, lambda sent: len(sent.buffer), 1 << 62

    return side


def values_of(kind: str, elements: int) -> torch.Tensor:
    """The same numbers in every process."""
    generator = torch.Generator().manual_seed(0)
    normal = torch.randn(elements, generator=generator)
    match kind:
        case "normal":
            return normal
        case "heavy":  # Student's t with 3 degrees of freedom
            return normal / torch.randn(elements, 3, generator=generator).square().mean(1).sqrt()
        case "sparse":  # one in 20 is not 0
            return normal * (torch.rand(elements, generator=generator) < 0.05)
        case "shifted":
            return normal * 0.01 + 1
    raise ValueError(f"no values are named {kind!r}")


def cut(values: torch.Tensor, at_once: int) -> list[torch.Tensor]:
    """Consecutive parts of so many elements."""
    return [values[start : start + at_once] for start in range(0, len(values), at_once)]


def measure(side: Side, codec: str, values: torch.Tensor, repeats: int) -> dict[str, float]:
    """Median seconds to encode, and to decode and add to a sum, as a reducer does; one run before is thrown away."""
    encode, decode, _, at_once = side(codec)
    parts = cut(values, at_once)
    sums = cut(torch.zeros_like(values), at_once)
    encoding, decoding = [], []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        sent = [encode(part) for part in parts]
        between = time.perf_counter()
        for total, one in zip(sums, sent, strict=True):
            total.add_(decode(one), alpha=0.5)
        decoding.append(time.perf_counter() - between)
        encoding.append(between - started)
    return {"encode": statistics.median(encoding[1:]), "decode": statistics.median(decoding[1:])}


def errors(side: Side, codec: str, values: torch.Tensor) -> dict[str, float]:
    """Mean square and largest error of an element, and bytes for each."""
    encode, decode, size, at_once = side(codec)
    sent = [encode(part) for part in cut(values, at_once)]
    error = torch.cat([decode(one).float() for one in sent]).double().sub_(values)
    nbytes = sum(size(one) for one in sent)
    return {
        "mean_square": error.square().mean().item(),
        "largest": error.abs().max().item(),
        "bytes_per_element": nbytes / len(values),
    }


def main(library: str) -> None:
    """Answers until its input ends."""
    answers = sys.stdout
    sys.stdout = sys.stderr
    torch.set_num_threads(1)
    side = {"shoal": shoal_side, "hivemind": hivemind_side}[library]()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            values = values_of(request["values"], request["elements"])
            result = (
                measure(side, request["codec"], values, request["repeats"])
                if request["command"] == "measure"
                else errors(side, request["codec"], values)
            )
        except Exception:  # noqa: BLE001 - it is answered, and the driver raises it
            print(json.dumps({"error": traceback.format_exc()}), file=answers, flush=True)
        else:
            print(json.dumps({"result": result}), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

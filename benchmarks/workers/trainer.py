"""One peer that trains: with `shoal.Optimizer`, with `hivemind.Optimizer`, or alone with torch. Argument: which."""

from __future__ import annotations

import gc
import sys
import sysconfig
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.workers.link import answer

CONTEXT, EMBEDDING, CHARACTERS = 16, 32, 256
WIDTHS = {"0.3M": 256, "6.3M": 2150, "10M": 2790, "25M": 4640, "33M": 5400}
HELD_OUT = 4096


@cache
def read_text() -> Tensor:
    """The bytes of the standard library's top-level modules."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def draw(size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Contexts and the characters that follow them, from random places."""
    text = read_text()
    starts = torch.randint(len(text) - CONTEXT, (size, 1), generator=generator)
    windows = text[starts + torch.arange(CONTEXT + 1)].long()
    return windows[:, :-1], windows[:, -1]


def make_model(size: str) -> nn.Module:
    """Predicts the next character; the same first parameters everywhere."""
    torch.manual_seed(0)
    width = WIDTHS[size]
    return nn.Sequential(
        nn.Embedding(CHARACTERS, EMBEDDING),
        nn.Flatten(),
        nn.Linear(CONTEXT * EMBEDDING, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, CHARACTERS),
    )


class Alone:
    """What the loop needs of an optimizer, where one process makes the whole epoch."""

    def __init__(self, params: Any, target_batch_size: int, batch_size: int) -> None:
        self._inner = torch.optim.Adam(params, lr=1e-3)
        self._steps = -(-target_batch_size // batch_size)
        self._made = 0
        self.local_epoch = 0

    def step(self) -> None:
        self._made += 1
        if self._made % self._steps == 0:
            for group in self._inner.param_groups:
                torch._foreach_div_([p.grad for p in group["params"]], float(self._steps))
            self._inner.step()
            self._inner.zero_grad()
            self.local_epoch += 1

    def zero_grad(self) -> None:
        """Gradients are summed in `.grad` until the step."""

    def shutdown(self) -> None:
        """Nothing runs."""


class Trainer:
    """Trains one run after another.

    Args:
        library: "shoal", "hivemind" or "alone".
    """

    def __init__(self, library: str) -> None:
        self._library = library
        self._dht: Any = None
        self._optimizer: Any = None

    def open(self, initial_peers: list[str], threads: int) -> list[str]:
        """Start the DHT. So many threads compute."""
        torch.set_num_threads(threads)
        if self._library == "alone":
            return []
        if self._library == "shoal":
            import shoal as library
        else:
            import hivemind as library  # type: ignore[import-not-found, unused-ignore, no-redef]
        self._module: Any = library
        self._dht = library.DHT(initial_peers=initial_peers, start=True)
        return [str(address) for address in self._dht.get_visible_maddrs()]

    def begin(self, run_id: str, size: str, target: int, batch_size: int, seed: int, options: dict[str, Any]) -> int:
        """A new model and optimizer; returns the number of parameters."""
        self._model = make_model(size)
        self._generator = torch.Generator().manual_seed(seed)
        self._batch_size = batch_size
        self._clears = not options.get("reuse_grad_buffers", False)
        if self._library == "alone":
            self._optimizer = Alone(self._model.parameters(), target, batch_size)
        else:
            self._optimizer = self._module.Optimizer(
                dht=self._dht,
                run_id=run_id,
                target_batch_size=target,
                batch_size_per_step=batch_size,
                params=list(self._model.parameters()),
                optimizer=lambda params: torch.optim.Adam(params, lr=1e-3),
                **options,
            )
        return sum(parameter.numel() for parameter in self._model.parameters())

    def train(self, at: float, epochs: int, step_seconds: float) -> list[dict[str, float]]:
        """Train until this peer is at that epoch; what each epoch took, in seconds.

        The forward and backward pass of a step take `step_seconds`: they are real, and what is left is slept, as if
        another device made them.
        """
        time.sleep(max(0.0, at - time.monotonic()))
        optimizer, records = self._optimizer, []
        begun, computed, blocked, steps = time.monotonic(), 0.0, 0.0, 0
        epoch = optimizer.local_epoch
        while optimizer.local_epoch < epochs:
            started = time.monotonic()
            inputs, targets = draw(self._batch_size, self._generator)
            nn.functional.cross_entropy(self._model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            time.sleep(max(0.0, started + step_seconds - time.monotonic()))
            ready = time.monotonic()
            optimizer.step()
            if self._clears:
                optimizer.zero_grad()
            now = time.monotonic()
            computed, blocked, steps = computed + ready - started, blocked + now - ready, steps + 1
            if optimizer.local_epoch != epoch:
                records.append(
                    {"epochs": optimizer.local_epoch - epoch, "seconds": now - begun, "compute": computed}
                    | {"blocked": blocked, "steps": steps}
                )
                begun, computed, blocked, steps, epoch = now, 0.0, 0.0, 0, optimizer.local_epoch
        return records

    def evaluate(self) -> float:
        """Nats per character at places that are the same for all."""
        inputs, targets = draw(HELD_OUT, torch.Generator().manual_seed(1 << 20))
        with torch.no_grad():
            return float(nn.functional.cross_entropy(self._model(inputs), targets))

    def end(self) -> None:
        """Leave the run."""
        if self._optimizer is not None:
            self._optimizer.shutdown()
            self._optimizer = None
            gc.collect()  # optimizers refer to themselves: the next run shall not find the memory of the last one taken

    def close(self) -> None:
        """Leave everything."""
        self.end()
        if self._dht is not None:
            self._dht.shutdown()

    def handle(self, command: str, **arguments: Any) -> Any:
        """The methods above, by name."""
        if command not in ("open", "begin", "train", "evaluate", "end"):
            raise ValueError(f"no command is named {command!r}")
        return getattr(self, command)(**arguments)


if __name__ == "__main__":
    trainer = Trainer(sys.argv[1])
    answer(trainer.handle, trainer.close)

"""Two peers in this process train some epochs, of which the functions are recorded that one passes; prints JSON."""

from __future__ import annotations

import argparse
import functools
import json
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

import shoal
from benchmarks.structure import describe

PACKAGE = Path(shoal.__file__).parent
BATCH, STEPS = 8, 2  # samples of a step, steps of each peer in an epoch
WARM_UP = 3  # epochs of both peers before the first that is recorded
MOST_EPOCHS = 50  # in which both must have found each other
TIMEOUT = 60.0  # seconds for an epoch
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")  # functions to Python 3.11, not to a reader


class Recorder:
    """What `threading.setprofile` and `sys.setprofile` call; keeps the code of every call while it is `on`."""

    def __init__(self) -> None:
        self.on = False
        self.codes: set[CodeType] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.on and event == "call":
            self.codes.add(frame.f_code)

    def functions(self) -> dict[str, list[str]]:
        """The functions of Shoal that were called, by file. A function within another counts as one of its own, a
        comprehension does not."""
        found: dict[str, set[str]] = {}
        for code in self.codes:
            path = Path(code.co_filename)
            if path.is_relative_to(PACKAGE) and code.co_name not in (*COMPREHENSIONS, "<module>"):
                name = f"{code.co_qualname}:{code.co_firstlineno}"
                found.setdefault(str(path.relative_to(PACKAGE)), set()).add(name)
        return {file: sorted(names) for file, names in sorted(found.items())}


class Peer:
    """A model, its DHT and its optimizer.

    Args:
        known: addresses of another peer; none for the first.
    """

    def __init__(self, known: list[str]) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 1))
        self.dht = shoal.DHT(known, start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
        self.optimizer = shoal.Optimizer(
            dht=self.dht,
            run_id="walk",
            target_batch_size=2 * STEPS * BATCH,
            batch_size_per_step=BATCH,
            params=self.model.parameters(),
            optimizer=functools.partial(torch.optim.Adam, lr=0.01),
        )
        self.partners: list[int] = []  # how many peers each epoch had
        self.errors: list[BaseException] = []
        self.optimizer.on_event = self._heard

    def _heard(self, event: object) -> None:
        self.partners.append(getattr(event, "num_peers", 0))

    def epoch(self) -> None:
        """Train until the next epoch is committed and applied."""
        before = self.optimizer.local_epoch
        try:
            while self.optimizer.local_epoch == before:
                self.model(torch.randn(BATCH, 10)).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self.errors.append(error)

    def close(self) -> None:
        """Leave the run."""
        self.optimizer.shutdown()
        self.dht.shutdown()


def one_epoch(peers: list[Peer]) -> bool:
    """One epoch of both; whether they made it together."""
    threads = [threading.Thread(target=peer.epoch, name=f"trainer {n}") for n, peer in enumerate(peers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
        if thread.is_alive():
            raise TimeoutError(f"an epoch took longer than {TIMEOUT} s")
    for peer in peers:
        if peer.errors:
            raise peer.errors[0]
    return all(peer.partners[-1:] == [2] for peer in peers)


def main() -> None:
    """Parses the command line, trains, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, required=True, help="how many are recorded, each by itself")
    options = parser.parse_args()
    torch.set_num_threads(1)
    recorder = Recorder()
    threading.setprofile(recorder)  # before the reactor's thread starts
    sys.setprofile(recorder)
    first = Peer([])
    peers = [first, Peer([str(address) for address in first.dht.get_visible_maddrs()])]
    walked = []
    try:
        together = 0
        for _ in range(MOST_EPOCHS):
            together = together + 1 if one_epoch(peers) else 0
            if together == WARM_UP:
                break
        else:
            raise RuntimeError(f"the peers did not make {WARM_UP} epochs together in {MOST_EPOCHS}")
        for _ in range(MOST_EPOCHS):
            recorder.codes.clear()
            recorder.on = True
            complete = one_epoch(peers)
            recorder.on = False
            if complete:
                walked.append(recorder.functions())
            if len(walked) == options.epochs:
                break
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
        for peer in peers:
            peer.close()
    print(json.dumps({"epochs": walked, "structure": describe(PACKAGE)}))


if __name__ == "__main__":
    main()

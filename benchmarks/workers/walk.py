"""Peers train some epochs, of which the functions are recorded that one passes; prints JSON.

In most cases two peers are in this process. In the case of strands the first peer is a cluster of two ranks, and each
process is a rank, or the other peer: they meet in a folder.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

import shoal
from benchmarks.structure import describe

PACKAGE = Path(shoal.__file__).parent
BATCH, STEPS = 8, 2  # samples of a step, steps of each peer in an epoch
WARM_UP = 3  # epochs of both peers before the first that is recorded
MOST_EPOCHS = 50  # in which both must have found each other
TIMEOUT = 60.0  # seconds for an epoch
LOOPBACK = ["/ip4/127.0.0.1/tcp/0"]
CASES: dict[str, list[dict[str, Any]]] = {
    "one process": [{}],
    "offload, delayed": [{"offload_optimizer": True, "delay_optimizer_step": True, "delay_grad_averaging": True}],
    "DiLoCo": [{"outer": shoal.DiLoCo(inner_steps=STEPS), "target_batch_size": None}],
    "two runs": [{}, {}],
}
"""The options of each run that a peer of this process is in."""
STRANDS, RANKS = 4, 2
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
    """A model for each run, and its optimizer; and their DHT.

    Args:
        known: addresses of another peer; none for the first.
        runs: the options of each run.
        backwards: this peer trains the last run first.
    """

    def __init__(self, known: list[str], runs: Sequence[dict[str, Any]], *, backwards: bool = False) -> None:
        self.dht = shoal.DHT(known, start=True, host_maddrs=LOOPBACK)
        self.partners: list[int] = []  # how many peers each epoch had
        self.errors: list[BaseException] = []
        self.trained = [
            make(self.dht, f"walk {number}", options, 2 * STEPS * BATCH, self._heard)
            for number, options in enumerate(runs)
        ]
        if backwards:
            self.trained.reverse()

    def _heard(self, event: object) -> None:
        self.partners.append(getattr(event, "num_peers", 0))

    def epoch(self) -> None:
        """Make this peer's steps of an epoch of each run, and wait until the epochs are committed and applied."""
        before = [optimizer.local_epoch for _, optimizer in self.trained]
        try:
            for _ in range(STEPS):
                for model, optimizer in self.trained:
                    step(model, optimizer)
            for (_, optimizer), epoch in zip(self.trained, before, strict=True):
                wait_for_end(optimizer, epoch)
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self.errors.append(error)

    def close(self) -> None:
        """Leave the runs."""
        for _, optimizer in self.trained:
            optimizer.shutdown()
        self.dht.shutdown()


def make(
    dht: shoal.DHT, run_id: str, options: dict[str, Any], target: int, hear: Callable[[Any], None] | None
) -> tuple[nn.Module, Any]:
    """A tiny model, and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 20), nn.Tanh(), nn.Linear(20, 1))
    given: dict[str, Any] = {"target_batch_size": target, "batch_size_per_step": BATCH, **options}
    optimizer = shoal.Optimizer(
        dht=dht,
        run_id=run_id,
        params=model.parameters(),
        optimizer=functools.partial(torch.optim.Adam, lr=0.01),
        **given,
    )
    if hear is not None:
        optimizer.on_event = hear
    return model, optimizer


def step(model: nn.Module, optimizer: Any) -> None:
    """Train on a batch."""
    model(torch.randn(BATCH, 10)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def wait_for_end(optimizer: Any, epoch: int) -> None:
    """Make steps without samples until the optimizer has applied the next epoch's result."""
    deadline = time.monotonic() + TIMEOUT
    while optimizer.local_epoch <= epoch and time.monotonic() < deadline:
        time.sleep(0.001)
        optimizer.step(batch_size=0)


def one_epoch(peers: list[Peer]) -> bool:
    """One epoch of both; whether they made it together."""
    for peer in peers:
        peer.partners.clear()
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
    return all(len(peer.partners) >= len(peer.trained) and set(peer.partners) == {2} for peer in peers)


def walk_here(runs: Sequence[dict[str, Any]], recorder: Recorder, epochs: int) -> list[dict[str, list[str]]]:
    """What each of so many epochs of two peers in this process passes."""
    first = Peer([], runs)
    known = [str(address) for address in first.dht.get_visible_maddrs()]
    peers = [first, Peer(known, runs, backwards=True)]
    walked: list[dict[str, list[str]]] = []
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
            if len(walked) == epochs:
                break
    finally:
        stop_recording()
        for peer in peers:
            peer.close()
    return walked


def walk_rank(rank: int, folder: Path, recorder: Recorder, epochs: int) -> list[dict[str, list[str]]]:
    """What each of so many epochs passes at a rank of a cluster; with rank -1, at the single process beside it."""
    if rank >= 0:
        dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=RANKS)
    number = RANKS if rank < 0 else rank

    def meet(when: str) -> None:
        (folder / f"{when} {number}").touch()
        deadline = time.monotonic() + TIMEOUT
        while not all((folder / f"{when} {each}").exists() for each in range(RANKS + 1)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all processes have come to {when!r}")
            time.sleep(0.001)

    address = folder / "address"
    if rank:
        meet("opened")
    dht = shoal.DHT([address.read_text()] if rank else [], start=True, host_maddrs=LOOPBACK)
    if not rank:
        address.write_text(str(dht.get_visible_maddrs()[0]))
        meet("opened")
    options = {"cluster": shoal.Cluster(strands=STRANDS), "min_peers": 2}
    model, optimizer = make(dht, "walk", options, (RANKS + 1) * STEPS * BATCH, None)
    walked: list[dict[str, list[str]]] = []
    try:
        for epoch in range(WARM_UP + epochs):
            meet(f"epoch {epoch}")
            recorder.codes.clear()
            recorder.on = True
            for _ in range(STEPS):
                step(model, optimizer)
            wait_for_end(optimizer, epoch)
            recorder.on = False
            if epoch >= WARM_UP:
                walked.append(recorder.functions())
        meet("done")
    finally:
        stop_recording()
        optimizer.shutdown()
        dht.shutdown()
    return walked


def stop_recording() -> None:
    """No call is looked at from now on."""
    sys.setprofile(None)
    threading.setprofile(None)


def main() -> None:
    """Parses the command line, trains, prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, required=True, help="how many are recorded, each by itself")
    parser.add_argument("--case", choices=[*CASES, "strands"], default="one process")
    parser.add_argument("--rank", type=int, default=0, help="of the cluster; -1 is the other peer")
    parser.add_argument("--folder", type=Path, help="where the processes of the case of strands meet")
    parser.add_argument("--structure", action="store_true", help="describe the source, too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    recorder = Recorder()
    threading.setprofile(recorder)  # before the reactor's thread starts
    sys.setprofile(recorder)
    if options.case == "strands":
        walked = walk_rank(options.rank, options.folder, recorder, options.epochs)
    else:
        walked = walk_here(CASES[options.case], recorder, options.epochs)
    structure = describe(PACKAGE) if options.structure else None
    print(json.dumps({"epochs": walked, "structure": structure}))


if __name__ == "__main__":
    main()

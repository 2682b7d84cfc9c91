"""An honest trainer as a process of its own: trains until it is told to stop, and says one JSON line per epoch."""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3

import shoal
from shoal.flat import bytes_of
from shoal.optim.reports import Event

RUN_ID = "attacked"
TARGET = 256
WIDTH = 2048  # so that every peer reduces a few chunks


def make_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(16, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 1))


def make_optimizer(dht: shoal.DHT, model: torch.nn.Module, strands: int = 1, **differing: Any) -> shoal.Optimizer:
    """As all peers of the run make it, honest or not; with `strands`, each is a cluster of one rank."""
    arguments: dict[str, Any] = {
        "matchmaking_time": 3.0,
        "averaging_timeout": 30.0,
        "next_chunk_timeout": 5.0,
        "averager_opts": {"request_timeout": 5.0},
    }
    if strands > 1:
        arguments["cluster"] = shoal.Cluster(strands=strands)
    return shoal.Optimizer(
        dht=dht,
        run_id=RUN_ID,
        target_batch_size=TARGET,
        params=model.parameters(),
        optimizer=lambda params: torch.optim.SGD(params, lr=0.003),
        **(arguments | differing),
    )


class Honest:
    """A model in training.

    Args:
        initial_peers: of the DHT.
        batch, pause: each step has so many samples, and takes so many seconds at least.
        strands: of the run.
        mode: more arguments of the optimizer.
        dht: more arguments of the DHT.
    """

    def __init__(
        self,
        initial_peers: list[str],
        batch: int = 8,
        pause: float = 0.1,
        strands: int = 1,
        mode: Mapping[str, Any] | None = None,
        **dht: Any,
    ) -> None:
        self.batch, self.pause, self.stopped, self.loss = batch, pause, threading.Event(), 0.0
        self._lines = threading.Lock()
        self.dht = shoal.DHT(initial_peers, start=True, **dht)
        self.model = make_model()
        self.optimizer = make_optimizer(self.dht, self.model, strands, **(mode or {}))
        self.optimizer.on_event = self.heard

    def say(self, **line: Any) -> None:
        with self._lines:
            print(json.dumps(line), flush=True)

    def heard(self, event: Event) -> None:
        """An event of the optimizer, which comes in the thread that trains."""
        if not isinstance(event, shoal.EpochReport | shoal.DownloadReport):
            return
        line = {"time": time.time(), "epoch": event.epoch, "digest": event.state_digest, "cpu": time.process_time()}
        if isinstance(event, shoal.EpochReport):
            self.say(event="epoch", tip=event.tip, peers=event.num_peers, samples=event.samples, loss=self.loss, **line)
        else:
            self.say(event="download", tip=self.optimizer.tip, **line)

    def stepped(self) -> None:
        """Called after each step."""

    def train(self) -> None:
        """Until told to stop. Opens a file in each step, as trainers that load data do."""
        generator = torch.Generator().manual_seed(int.from_bytes(self.dht.peer_id.key[:4], "big"))
        while not self.stopped.is_set():
            inputs = torch.randn(self.batch, 16, generator=generator)
            error = self.model(inputs) - inputs[:, :1].sin()
            loss = (error * error).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.loss = float(loss.detach())
            time.sleep(self.pause)
            Path(os.devnull).read_bytes()
            self.optimizer.step(batch_size=self.batch)
            self.stepped()

    def digest(self) -> str:
        """Of the parameters as they are."""
        state = blake3()
        for parameter in self.model.parameters():
            state.update(bytes_of(parameter.detach().contiguous()))
        return state.hexdigest()

    def end(self) -> None:
        self.say(event="end", time=time.time(), epoch=self.optimizer.local_epoch, digest=self.digest())
        self.optimizer.shutdown()
        self.dht.shutdown()


def main() -> None:
    options = json.loads(sys.argv[1])
    logging.basicConfig(filename=options["log"], level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    torch.set_num_threads(1)
    if descriptors := options.get("descriptors"):
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    run(Honest(options["initial_peers"], strands=options["strands"]))


def run(honest: Honest) -> None:
    """Train until a line comes on stdin."""
    addresses = [str(address) for address in honest.dht.get_visible_maddrs()]
    honest.say(addresses=addresses, peer=str(honest.dht.peer_id))

    def obey() -> None:
        sys.stdin.readline()
        honest.stopped.set()

    threading.Thread(target=obey, daemon=True).start()
    try:
        honest.train()
    except Exception as error:
        logging.exception("the trainer has ended")
        honest.say(event="ended", time=time.time(), error=f"{type(error).__name__}: {error}"[:300])
        os._exit(1)  # as it would in a script: nothing is tidied up
    honest.end()


if __name__ == "__main__":
    main()

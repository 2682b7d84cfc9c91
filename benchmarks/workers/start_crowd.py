"""Replicas of a small training that are forked from this process, which has imported all that they need.

Arguments: the mode, `synchronous` or `DiLoCo`, and the number of replicas. It answers `start` with the events of all
until each has made some epochs together with all others, and `restart`, which kills one and forks another at once, with
the events of the new one until an epoch counts its samples.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

import shoal
from benchmarks.workers.link import answer

STEPS, BATCH, WIDTH = 10, 16, 1024  # micro-steps of a replica in an epoch, or inner steps
COMPUTE = 0.1  # seconds of a micro-step, beside a real forward and backward pass
EPOCHS = 4
PATIENCE = 60.0  # seconds for one start

Event = dict[str, Any]


class Replica:
    """What a forked process does.

    Args:
        name: its name in the events.
        events: a pipe for one JSON object a line, which all replicas write to.
        options: arguments of `shoal.Optimizer` for the mode.
    """

    def __init__(self, name: str, events: int, options: dict[str, Any]) -> None:
        self._name, self._events, self._options = name, events, options

    def tell(self, event: str, **fields: Any) -> None:
        """Writes an event: less than PIPE_BUF bytes, so that lines do not mix."""
        cpu = time.clock_gettime(time.CLOCK_PROCESS_CPUTIME_ID)
        row = {"replica": self._name, "event": event, "time": time.time(), "cpu": cpu, **fields}
        os.write(self._events, json.dumps(row).encode() + b"\n")

    def train(self, address: str | None) -> None:
        """Trains until it is killed, or the process that has forked it has ended."""
        parent = os.getppid()
        torch.manual_seed(0)
        layers = [torch.nn.Linear(64, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1)]
        model = torch.nn.Sequential(*layers)
        torch.seed()
        self.tell("model made")
        dht = shoal.DHT(initial_peers=[] if address is None else [address], start=True)
        self.tell("DHT made", address=str(dht.get_visible_maddrs()[0]))
        params, adam = model.parameters(), lambda params: torch.optim.AdamW(params, lr=1e-3)
        optimizer = shoal.Optimizer(
            dht=dht, run_id="start", batch_size_per_step=BATCH, params=params, optimizer=adam, **self._options
        )
        self.tell("Optimizer made")
        optimizer.on_event = lambda event: self._heard(event, optimizer)
        steps = 0
        while os.getppid() == parent:
            time.sleep(COMPUTE)
            batch = torch.randn(BATCH, 64)
            (model(batch).squeeze(1) - batch.square().mean(1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps == 1:
                self.tell("first step")

    def _heard(self, event: object, optimizer: Any) -> None:
        match event:
            case shoal.DownloadReport():
                self.tell("downloaded")
            case shoal.EpochReport():
                pilot = optimizer._epoch._pilot  # no event says whose samples an epoch counts
                begin = pilot.averaged.outcome.begin
                weights = {member.key: weight for member, weight in zip(begin.members, begin.weights, strict=True)}
                self.tell(
                    "epoch",
                    peers=event.num_peers,
                    own=weights.get(pilot.me, 0.0),
                    round=event.round_seconds,
                    allreduce=event.allreduce_seconds,
                    step=event.step_seconds,
                )


class Crowd:
    """The replicas, seen from the process that forks them."""

    def __init__(self, mode: str, count: int) -> None:
        self._count = count
        self._options: dict[str, Any] = {"target_batch_size": STEPS * BATCH * count}
        if mode == "DiLoCo":
            self._options = {"outer": shoal.DiLoCo(inner_steps=STEPS)}
        reader, self._writer = os.pipe()
        self._lines = os.fdopen(reader)
        self._pids: dict[str, int] = {}
        self._address: str | None = None
        self._lives = 0

    def handle(self, command: str) -> dict[str, Any]:
        """Answers one command: since when the events count, and the events."""
        return {"start": self._start, "restart": self._restart}[command]()

    def _start(self) -> dict[str, Any]:
        began = time.time()
        self._fork("0")
        events = self._follow(lambda event: event["event"] == "DHT made")
        self._address = events[-1]["address"]
        for number in range(1, self._count):
            self._fork(str(number))
        together = dict.fromkeys(self._pids, 0)

        def all_have(event: Event) -> bool:
            together[event["replica"]] += event.get("peers") == self._count
            return min(together.values()) >= EPOCHS

        return {"began": began, "events": events + self._follow(all_have)}

    def _restart(self) -> dict[str, Any]:
        victim, self._lives = list(self._pids)[1], self._lives + 1  # the first is the one whose address the others have
        began = time.time()
        self._kill(victim)
        name = f"life {self._lives}"
        self._fork(name)
        events = self._follow(lambda event: event["replica"] == name and bool(event.get("own")))
        return {"began": began, "events": [event for event in events if event["replica"] == name]}

    def _follow(self, is_last: Callable[[Event], bool]) -> list[Event]:
        events = []
        deadline = time.time() + PATIENCE
        for line in self._lines:
            events.append(json.loads(line))
            if is_last(events[-1]):
                return events
            if time.time() > deadline:
                break
        raise TimeoutError(f"replicas did not come together in {PATIENCE:g} s")

    def _fork(self, name: str) -> None:
        self._pids[name] = pid = os.fork()
        if pid:
            return
        try:
            Replica(name, self._writer, self._options).train(self._address)
        except BaseException:  # noqa: BLE001 - nothing of the process that was forked may run on here
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(1)

    def _kill(self, name: str) -> None:
        pid = self._pids.pop(name)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def close(self) -> None:
        """Kills all replicas."""
        for name in list(self._pids):
            self._kill(name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])  # torch's first optimizer imports many modules
    _ = shoal.DHT, shoal.Optimizer  # names are imported when they are first used
    gc.freeze()  # else each replica copies what it shares with this process as soon as it looks at it
    crowd = Crowd(sys.argv[1], int(sys.argv[2]))
    answer(crowd.handle, crowd.close)

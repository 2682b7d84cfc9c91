"""One training peer as a process of its own: obeys JSON lines on stdin, answers with JSON lines.

It can begin and end any number of trainings, each with a new DHT, so that tests share the start of the process.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import logging
import os
import signal
import sys
import threading
import time
from typing import Any

import torch
from blake3 import blake3

import shoal
from examples.admission import membership_from
from shoal.compression import compression_by_spec
from shoal.flat import bytes_of
from shoal.optim import terms as machines
from shoal.optim.reports import Event
from shoal.outer.exact_sgd import ExactSGD
from tests.cluster.killed import die_when_committed, die_when_downloading, die_when_sending, die_when_stepping
from tests.optim.models import OPTIMIZERS, OUTSIDE, SCHEDULERS, backward, fixed_batch, flat, make_model
from tests.telling import say

FACTORIES = {
    "GradientAverager": shoal.GradientAverager,
    "PowerSGDGradientAverager": functools.partial(shoal.PowerSGDGradientAverager, averager_rank=2),
}
REAL_MACHINE = machines.this_machine


class Log(logging.Handler):
    """Keeps the warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


class Nudges:
    """After each of the first `steps` of a local optimizer, its parameters or a statistic are a little larger than
    they should be: so does a machine that rounds in another way."""

    def __init__(self, what: str, steps: int) -> None:
        self.what, self.steps = what, steps

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.steps <= 0:
            return
        self.steps -= 1
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                tensor = parameter if self.what == "parameters" else optimizer.state[parameter][self.what]
                tensor.data.mul_(1.0001)


class Training:
    """A model, its optimizer and its DHT.

    Args:
        initial_peers: of the DHT.
        run: what differs between tests: see `make_optimizer`.
    """

    def __init__(self, initial_peers: list[str], run: dict[str, Any]) -> None:
        self.log = Log()
        logging.getLogger("shoal").addHandler(self.log)
        client, identity = run.pop("dht_client", False), run.pop("identity", None)
        listen = [f"/ip4/127.0.0.1/tcp/{run.pop('port', 0)}"]
        self.dht = shoal.DHT(initial_peers, start=True, host_maddrs=listen, client_mode=client, identity_path=identity)
        self.model = make_model(run.pop("seed", 0), run.pop("width", 20))
        self.extra = torch.full((3,), run.pop("extra", 0.0))
        self.extras: list[list[float]] = []  # what that was after each epoch
        self.nudges = Nudges(*run.pop("nudge", ["", 0]))
        download_seconds, outside = run.pop("download_seconds", 0.0), run.pop("outside", "none")
        started = time.perf_counter()
        try:
            self.optimizer = self.make_optimizer(**run)
        except BaseException:
            self.dht.shutdown()
            raise
        self.start_seconds = time.perf_counter() - started
        self.schedule = OUTSIDE[outside](self.optimizer)
        if download_seconds:
            self.slow_down_downloads(download_seconds)
        self.events: list[dict[str, Any]] = []
        self.forks: list[dict[str, Any]] = []
        self.optimizer.on_event = self.heard
        self.thread: threading.Thread | None = None
        self.stop_at: float = float("inf")
        self.poisoned = 0
        self.hold_seconds = 0.0
        self.dies = False  # when it coordinates
        self.errors: list[str] = []

    def make_optimizer(
        self,
        *,
        optimizer: str = "sgd",
        scheduler: str = "none",
        codec: str = "none",
        target: int | None = 64,
        run_id: str = "test",
        machine: str = "",
        state_codec: str = "none",
        load_codec: str = "none",
        **arguments: Any,
    ) -> shoal.Optimizer:
        machines.this_machine = (lambda: machine) if machine else REAL_MACHINE
        if arguments.pop("shares_extra", False):
            arguments["extra_tensors"] = [self.extra]
        if admission := arguments.pop("admission", None):
            url, code = admission
            arguments["membership"] = membership_from(url, code, self.dht.peer_id)
        if inner_steps := arguments.pop("inner_steps", 0):
            arguments["outer"] = shoal.DiLoCo(inner_steps=inner_steps)
        if own := arguments.pop("own_averager", ""):
            arguments["grad_averager_factory"] = FACTORIES[own]
        made = shoal.Optimizer(
            dht=self.dht,
            run_id=run_id,
            target_batch_size=target,
            params=self.model.parameters(),
            optimizer=OPTIMIZERS[optimizer],
            scheduler=SCHEDULERS[scheduler],
            grad_compression=compression_by_spec(codec),
            state_averaging_compression=compression_by_spec(state_codec),
            load_state_compression=compression_by_spec(load_codec),
            **arguments,
        )
        made.optimizer.register_step_post_hook(self.nudges)
        return made

    def slow_down_downloads(self, seconds: float) -> None:
        """As if this peer's link were so slow that a state takes so long to come."""
        download = self.optimizer._run.download

        def slow(*args: Any, **kwargs: Any) -> Any:
            state = download(*args, **kwargs)
            time.sleep(seconds)
            return state

        self.optimizer._run.download = slow  # type: ignore[method-assign]

    def heard(self, event: Event) -> None:
        if isinstance(event, shoal.ForkReport):
            self.forks.append(dataclasses.asdict(event))
        if not isinstance(event, shoal.EpochReport | shoal.DownloadReport):
            return
        kind = "epoch" if isinstance(event, shoal.EpochReport) else "download"
        line = {"kind": kind, "time": time.monotonic(), "epoch": event.epoch, "digest": event.state_digest}
        if isinstance(event, shoal.EpochReport):
            line |= {"peers": event.num_peers, "coordinator": event.coordinator, "samples": event.samples}
            line |= {"sent": event.bytes_sent}
        self.events.append(line)

    def backward(self, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        backward(self.model, inputs, outputs, clear=not self.optimizer.reuse_grad_buffers)

    def fixed(self, share: tuple[int, int], epochs: int, parts: int = 1) -> None:
        """This peer's share of the fixed batches up to that epoch, each in so many steps."""
        start, stop = share
        for epoch in range(self.optimizer.local_epoch, epochs):
            inputs, outputs = fixed_batch(epoch)
            size = (stop - start) // parts
            for part in range(parts):
                first, last = start + part * size, stop if part == parts - 1 else start + (part + 1) * size
                self.backward(inputs[first:last], outputs[first:last])
                self.optimizer.step(batch_size=last - first)
            while self.optimizer.local_epoch == epoch:
                self.optimizer.step(batch_size=0)
                time.sleep(0.001)
            self.extras.append(self.extra.tolist())

    def delayed(self, share: tuple[int, int], epochs: int) -> None:
        """The same, but waiting only until the end of an epoch has begun in the background."""
        start, stop = share
        for epoch in range(epochs):
            inputs, outputs = fixed_batch(epoch)
            self.backward(inputs[start:stop], outputs[start:stop])
            self.optimizer.step(batch_size=stop - start)
            while self.optimizer.local_epoch + self.optimizer._epoch.is_busy <= epoch:
                self.optimizer.step(batch_size=0)
                time.sleep(0.001)
        while self.optimizer.local_epoch < epochs:
            self.optimizer.step(batch_size=0)
            time.sleep(0.001)

    def assist(self) -> None:
        """Lend a hand until told to stop."""
        while self.optimizer.local_epoch < self.stop_at:
            self.optimizer.step()

    def train(self, batch: int, pause: float) -> None:
        """Train on random batches, each taking at least `pause` seconds, until told to stop."""
        generator = torch.Generator().manual_seed(hash(self.dht.peer_id.key) % 2**31)
        while self.optimizer.local_epoch < self.stop_at:
            inputs = torch.randn(batch, 10, generator=generator)
            self.backward(inputs, inputs[:, :1])
            if self.poisoned:
                self.poisoned -= 1
                next(self.model.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]
            time.sleep(pause)
            if self.hold_seconds:
                ctypes.PyDLL(None).usleep(round(1e6 * self.hold_seconds))  # which keeps the GIL, as a compiler may
                self.hold_seconds = 0.0
            if self.dies and self.coordinates():
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                self.optimizer.step(batch_size=batch)
                self.schedule.step()
            except shoal.AveragingError as error:
                self.errors.append(str(error))
                return

    def coordinates(self) -> bool:
        swarm = self.optimizer._run.swarm
        return swarm.peer.participant.coordinator() == swarm.me

    def begin_to_train(self, batch: int, pause: float) -> None:
        self.stop_at = float("inf")
        target, args = (self.train, (batch, pause)) if batch else (self.assist, ())
        self.thread = threading.Thread(target=target, args=args)
        self.thread.start()

    def stop(self, epoch: int | None) -> None:
        """Train on until `epoch`, or stop now."""
        self.stop_at = 0 if epoch is None else epoch
        if self.thread is not None:
            self.thread.join()
            self.thread = None

    def state(self) -> dict[str, Any]:
        """Digests of all that must be equal at all peers."""
        statistics = blake3()
        inner = self.optimizer.state_dict()["state"]
        for index in sorted(key for key in inner if isinstance(key, int)):
            for name, value in sorted(inner[index].items()):
                statistics.update(name.encode())
                statistics.update(bytes_of(value.detach().contiguous()))
        scheduler = self.optimizer.scheduler
        return {
            "epoch": self.optimizer.local_epoch,
            "parameters_digest": blake3(bytes_of(flat(self.model))).hexdigest(),
            "statistics": statistics.hexdigest(),
            "scheduler": None if scheduler is None else {k: repr(v) for k, v in scheduler.state_dict().items()},
            "extra": self.extra.tolist(),
            "rate": repr(self.optimizer.param_groups[0]["lr"]),
        }

    def end(self) -> None:
        self.stop(None)
        self.optimizer.shutdown()
        self.dht.shutdown()
        logging.getLogger("shoal").removeHandler(self.log)


def main() -> None:
    torch.set_num_threads(1)
    logging.basicConfig()
    logging.getLogger().handlers[0].setLevel(logging.ERROR)  # what is expected is kept, not printed
    say(addresses=[], peer="")
    training: Training | None = None
    for line in sys.stdin:
        command = json.loads(line)
        if command["do"] == "begin":
            try:
                training = Training(command["initial_peers"], command["run"])
            except (shoal.AveragingError, ValueError) as error:
                say(error=str(error))
                continue
            addresses = [str(address) for address in training.dht.get_visible_maddrs()]
            say(addresses=addresses, peer=str(training.dht.peer_id), seconds=training.start_seconds)
            continue
        assert training is not None
        match command["do"]:
            case "fixed":
                training.fixed(command["share"], command["epochs"], command.get("parts", 1))
                say(parameters=flat(training.model).tolist(), **training.state())
            case "delayed":
                training.delayed(command["share"], command["epochs"])
                say(parameters=flat(training.model).tolist(), **training.state())
            case "role":
                me, dht = training.optimizer._run.swarm.me, training.dht
                own = type(training.optimizer._rounds.averager).__name__
                sizes = list(training.optimizer._run.swarm.rules.sizes)
                say(
                    own=own,
                    sizes=sizes,
                    role=me.role.value,
                    addresses=list(me.addresses),
                    listens=bool(dht.get_visible_maddrs()),
                )
            case "save":
                torch.save(
                    {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}, command["to"]
                )
                say(ok=True)
            case "load":
                saved = torch.load(command["of"], weights_only=True)
                training.model.load_state_dict(saved["model"])
                training.optimizer.load_state_dict(saved["optimizer"])
                say(epoch=training.optimizer.local_epoch)
            case "extras":
                say(extras=training.extras)
            case "train":
                training.begin_to_train(command["batch"], command["pause"])
                say(ok=True)
            case "stop":
                training.stop(command.get("epoch"))
                say(**training.state())
            case "finish":
                training.stop(command["epoch"])
                training.optimizer.finish()
                say(**training.state())
            case "poison":
                training.poisoned = command["steps"]
                say(ok=True)
            case "coordinator":
                say(peer=str(training.optimizer._run.swarm.peer.participant.coordinator().peer))
            case "hold":
                training.hold_seconds = command["seconds"]
                say(ok=True)
            case "die":
                match command["phase"]:
                    case "in the round":
                        die_when_sending(in_strand=False, is_time=lambda: True)
                    case "committed":
                        die_when_committed(lambda: True)
                    case "stepping":
                        die_when_stepping(lambda: True, ExactSGD if command["outer"] else torch.optim.AdamW)
                    case "downloading":
                        die_when_downloading()
                say(ok=True)
            case "die as coordinator":
                training.dies = True
                say(ok=True)
            case "report":
                alive = training.thread is not None and training.thread.is_alive()
                say(
                    events=training.events,
                    log=training.log.lines,
                    errors=training.errors,
                    training=alive,
                    tip=training.optimizer.tip,
                    forks=training.forks,
                )
            case "end":
                training.end()
                training = None
                say(ok=True)


main()

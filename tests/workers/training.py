"""A training peer: it can begin and end any number of trainings, each with a new DHT, so that tests share the start of
the process."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import logging
import threading
import time
from typing import Any, Literal, TypedDict

import torch
from blake3 import blake3

import shoal
from examples.admission import membership_from
from shoal.compression import compression_by_spec
from shoal.flat import bytes_of
from shoal.optim import terms as machines
from shoal.optim.reports import Event
from shoal.outer.exact_sgd import ExactSGD
from shoal.swarm.protocol import peer as protocol_peer
from tests.forked import SETTLE_SECONDS
from tests.optim.models import OPTIMIZERS, OUTSIDE, SCHEDULERS, backward, fixed_batch, flat, make_model
from tests.telling import die
from tests.workers.digests import digest_of
from tests.workers.killed import die_in

FACTORIES = {
    "GradientAverager": shoal.GradientAverager,
    "PowerSGDGradientAverager": functools.partial(shoal.PowerSGDGradientAverager, averager_rank=2),
}
REAL_MACHINE = machines.this_machine


Phase = Literal["in the run's round", "committed", "stepping", "downloading"]


class State(TypedDict):
    """Digests of all that must be equal at all peers."""

    epoch: int
    parameters_digest: str
    statistics: str
    scheduler: dict[str, str] | None
    extra: list[float]
    rate: str


class Trained(State):
    """And the parameters themselves."""

    parameters: list[float]


class Report(TypedDict):
    """What a peer has seen so far."""

    events: list[dict[str, Any]]
    forks: list[dict[str, Any]]
    log: list[str]
    errors: list[str]
    training: bool
    tip: str


class Terms(TypedDict):
    """What a peer is in its run."""

    own: str
    sizes: list[int]
    role: str
    addresses: list[str]
    listens: bool


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
        initial_peers, port, identity, dht_client: of the DHT.
        given: what else the optimizer is given.
        seed, width: of the model.
        nudge: see Nudges.
        download_seconds: how long the peer's link takes for a state, in addition.
        machine: that it says to be; "" for the one that it is.
        awaits_others: wait for members that may not have been found yet, as users' peers do.
        trace: the file for its trace; "": it writes none.
    """

    def __init__(
        self,
        initial_peers: list[str],
        given: dict[str, Any],
        *,
        port: int = 0,
        identity: str | None = None,
        dht_client: bool = False,
        seed: int = 0,
        width: int = 20,
        optimizer: str = "sgd",
        scheduler: str = "none",
        outside: str = "none",
        target: int | None = 64,
        codec: str = "none",
        state_codec: str = "none",
        load_codec: str = "none",
        extra: float = 0.0,
        shares_extra: bool = False,
        nudge: tuple[str, int] = ("", 0),
        download_seconds: float = 0.0,
        machine: str = "",
        admission: tuple[str, str] | None = None,
        inner_steps: int = 0,
        own_averager: str = "",
        awaits_others: bool = False,
        trace: str = "",
    ) -> None:
        protocol_peer.SETTLE_SECONDS = SETTLE_SECONDS if awaits_others else 0.0
        self._log = Log()
        logging.getLogger("shoal").addHandler(self._log)
        listen = [f"/ip4/127.0.0.1/tcp/{port}"]
        self.dht = shoal.DHT(
            initial_peers, start=True, host_maddrs=listen, client_mode=dht_client, identity_path=identity
        )
        self._model = make_model(seed, width)
        self._extra = torch.full((3,), extra)
        self._extras: list[list[float]] = []  # what that was after each epoch
        machines.this_machine = (lambda: machine) if machine else REAL_MACHINE
        if shares_extra:
            given["extra_tensors"] = [self._extra]
        if inner_steps:
            given["outer"] = shoal.DiLoCo(inner_steps=inner_steps)
        if own_averager:
            given["grad_averager_factory"] = FACTORIES[own_averager]
        try:
            if admission is not None:
                given["membership"] = membership_from(*admission, self.dht.peer_id)
            self._optimizer = shoal.Optimizer(
                dht=self.dht,
                target_batch_size=target,
                params=self._model.parameters(),
                optimizer=OPTIMIZERS[optimizer],
                scheduler=SCHEDULERS[scheduler],
                grad_compression=compression_by_spec(codec),
                state_averaging_compression=compression_by_spec(state_codec),
                load_state_compression=compression_by_spec(load_codec),
                **{"run_id": "test", **given},
            )
        except BaseException:
            self.dht.shutdown()
            raise
        self._optimizer.optimizer.register_step_post_hook(Nudges(*nudge))
        self._schedule = OUTSIDE[outside](self._optimizer)
        if download_seconds:
            self._slow_down_downloads(download_seconds)
        self._events: list[dict[str, Any]] = []
        self._forks: list[dict[str, Any]] = []
        self._optimizer.on_event = shoal.Trace(trace, then=self._heard) if trace else self._heard
        self._thread: threading.Thread | None = None
        self._stop_at: float = float("inf")
        self._poisoned = 0
        self._hold_seconds = 0.0
        self._dies = False  # when it coordinates
        self._errors: list[str] = []

    def _slow_down_downloads(self, seconds: float) -> None:
        """As if this peer's link were so slow that a state takes so long to come."""
        download = self._optimizer._run.download

        def slow(*args: Any, **kwargs: Any) -> Any:
            state = download(*args, **kwargs)
            time.sleep(seconds)
            return state

        self._optimizer._run.download = slow  # type: ignore[method-assign]

    def _heard(self, event: Event) -> None:
        if isinstance(event, shoal.ForkReport):
            self._forks.append(dataclasses.asdict(event))
        if not isinstance(event, shoal.EpochReport | shoal.DownloadReport):
            return
        kind = "epoch" if isinstance(event, shoal.EpochReport) else "download"
        line = {"kind": kind, "time": time.monotonic(), "epoch": event.epoch, "digest": event.state_digest}
        if isinstance(event, shoal.EpochReport):
            line |= {"peers": event.num_peers, "coordinator": event.coordinator, "samples": event.samples}
            line |= {"sent": event.bytes_sent}
        self._events.append(line)

    def _backward(self, inputs: torch.Tensor, outputs: torch.Tensor) -> None:
        backward(self._model, inputs, outputs, clear=not self._optimizer.reuse_grad_buffers)

    def fixed(self, share: tuple[int, int], epochs: int, parts: int = 1) -> Trained:
        """This peer's share of the fixed batches up to that epoch, each in so many steps."""
        start, stop = share
        for epoch in range(self._optimizer.local_epoch, epochs):
            inputs, outputs = fixed_batch(epoch)
            size = (stop - start) // parts
            for part in range(parts):
                first, last = start + part * size, stop if part == parts - 1 else start + (part + 1) * size
                self._backward(inputs[first:last], outputs[first:last])
                self._optimizer.step(batch_size=last - first)
            while self._optimizer.local_epoch == epoch:
                self._optimizer.step(batch_size=0)
                time.sleep(0.001)
            self._extras.append(self._extra.tolist())
        return self._trained()

    def delayed(self, share: tuple[int, int], epochs: int) -> Trained:
        """The same, but waiting only until the end of an epoch has begun in the background."""
        start, stop = share
        for epoch in range(epochs):
            inputs, outputs = fixed_batch(epoch)
            self._backward(inputs[start:stop], outputs[start:stop])
            self._optimizer.step(batch_size=stop - start)
            while self._optimizer.local_epoch + self._optimizer._epoch.is_busy <= epoch:
                self._optimizer.step(batch_size=0)
                time.sleep(0.001)
        while self._optimizer.local_epoch < epochs:
            self._optimizer.step(batch_size=0)
            time.sleep(0.001)
        return self._trained()

    def _assist(self) -> None:
        """Lend a hand until told to stop."""
        while self._optimizer.local_epoch < self._stop_at:
            self._optimizer.step()

    def _train(self, batch: int, pause: float) -> None:
        """Train on random batches, each taking at least `pause` seconds, until told to stop."""
        generator = torch.Generator().manual_seed(hash(self.dht.peer_id.key) % 2**31)
        while self._optimizer.local_epoch < self._stop_at:
            inputs = torch.randn(batch, 10, generator=generator)
            self._backward(inputs, inputs[:, :1])
            if self._poisoned:
                self._poisoned -= 1
                next(self._model.parameters()).grad.fill_(float("nan"))  # type: ignore[union-attr]
            time.sleep(pause)
            if self._hold_seconds:
                ctypes.PyDLL(None).usleep(round(1e6 * self._hold_seconds))  # which keeps the GIL, as a compiler may
                self._hold_seconds = 0.0
            if self._dies and self._coordinates():
                die()
            try:
                self._optimizer.step(batch_size=batch)
                self._schedule.step()
            except shoal.AveragingError as error:
                self._errors.append(str(error))
                return

    def _coordinates(self) -> bool:
        swarm = self._optimizer._run.swarm
        return swarm.peer.participant.coordinator() == swarm.me

    def train(self, batch: int = 8, pause: float = 0.0) -> None:
        """Begin to train on random batches, each taking at least `pause` seconds; without any, to lend a hand."""
        self._stop_at = float("inf")
        target, args = (self._train, (batch, pause)) if batch else (self._assist, ())
        self._thread = threading.Thread(target=target, args=args)
        self._thread.start()

    def stop(self, epoch: int = 0) -> State:
        """Train on until `epoch`, or stop now."""
        self._halt(epoch)
        return self._state()

    def finish(self, epoch: int) -> State:
        self._halt(epoch)
        self._optimizer.finish()
        return self._state()

    def poison(self, steps: int) -> None:
        """The gradients of so many steps are not finite."""
        self._poisoned = steps

    def hold(self, seconds: float) -> None:
        """No thread of this process runs for so long, in its next step."""
        self._hold_seconds = seconds

    def die_in(self, phase: Phase, outer: bool = False) -> None:
        """SIGKILL itself when it comes to that phase, of an epoch of inner steps with `outer`."""
        die_in(phase, steps=ExactSGD if outer else torch.optim.AdamW)

    def die_as_coordinator(self) -> None:
        """SIGKILL itself before a step, once it coordinates."""
        self._dies = True

    def coordinator(self) -> str:
        return str(self._optimizer._run.swarm.peer.participant.coordinator().peer)

    def terms(self) -> Terms:
        swarm = self._optimizer._run.swarm
        return Terms(
            own=type(self._optimizer._rounds.averager).__name__,
            sizes=list(swarm.rules.sizes),
            role=swarm.me.role.value,
            addresses=list(swarm.me.addresses),
            listens=bool(self.dht.get_visible_maddrs()),
        )

    def save(self, to: str) -> None:
        torch.save({"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}, to)

    def load(self, of: str) -> int:
        """Returns the epoch of what was saved."""
        saved = torch.load(of, weights_only=True)
        self._model.load_state_dict(saved["model"])
        self._optimizer.load_state_dict(saved["optimizer"])
        return self._optimizer.local_epoch

    def extras(self) -> list[list[float]]:
        """What the extra tensor was after each epoch."""
        return self._extras

    def report(self) -> Report:
        return Report(
            events=self._events,
            forks=self._forks,
            log=self._log.lines,
            errors=self._errors,
            training=self._thread is not None and self._thread.is_alive(),
            tip=self._optimizer.tip,
        )

    def end(self) -> None:
        self._halt(0)
        self._optimizer.shutdown()
        self.dht.shutdown()
        logging.getLogger("shoal").removeHandler(self._log)

    def _halt(self, epoch: int) -> None:
        self._stop_at = epoch
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _state(self) -> State:
        statistics = blake3()
        inner = self._optimizer.state_dict()["state"]
        for index in sorted(key for key in inner if isinstance(key, int)):
            for name, value in sorted(inner[index].items()):
                statistics.update(name.encode())
                statistics.update(bytes_of(value.detach().contiguous()))
        scheduler = self._optimizer.scheduler
        return State(
            epoch=self._optimizer.local_epoch,
            parameters_digest=digest_of(self._model.parameters()),
            statistics=statistics.hexdigest(),
            scheduler=None if scheduler is None else {k: repr(v) for k, v in scheduler.state_dict().items()},
            extra=self._extra.tolist(),
            rate=repr(self._optimizer.param_groups[0]["lr"]),
        )

    def _trained(self) -> Trained:
        return Trained(parameters=flat(self._model).tolist(), **self._state())

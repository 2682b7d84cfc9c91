"""A peer that trains and is watched."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from pathlib import Path
from typing import Any, TypedDict

import torch

import shoal
from shoal.dht.messages import Sender
from shoal.dht.protocol import Protocol
from shoal.health.record import name_of
from shoal.optim import vitals
from shoal.p2p.multiaddr import Multiaddr
from tests.optim.models import make_model

OWN = (
    "number", "epoch", "loss", "samples", "samples_per_second", "members", "version", "torch", "device",
    "epoch_seconds", "step_seconds", "samples_behind", "target",
)  # fmt: skip
PARTS = ("sent", "received", "members")


class Spent(TypedDict):
    """CPU seconds of the process, and bytes over its connections."""

    cpu: float
    bytes: int


class Monitored:
    """A model, its optimizer, and a thread that trains until it is told to stop.

    Args:
        pause: at least so many seconds for each step.
        period: so often it says how it is.
        version: of Shoal, that it says to run.
        tells_port: where nobody listens, as behind a router: it says to listen there.
    """

    def __init__(
        self,
        initial_peers: list[str],
        *,
        run_id: str = "test",
        target: int = 64,
        pause: float = 0.05,
        period: float = 1.0,
        version: str | None = None,
        tells_port: int | None = None,
        identity: str | None = None,
        client: bool = False,
        membership: str | None = None,
    ) -> None:
        patched = vars(vitals)
        patched["PERIOD_SECONDS"] = period
        if version is not None:
            patched["RELEASE"] = version
        if tells_port is not None:
            told = Multiaddr(f"/ip4/127.0.0.1/tcp/{tells_port}")

            def tell(own: Protocol, latest: bool) -> None:
                own._visible = own._own = [told.with_peer(own.node.peer_id)]
                own._sender = Sender(False, (str(told),))

            Protocol._look_at_addresses = tell  # type: ignore[assignment, method-assign]
        self.dht = shoal.DHT(initial_peers, start=True, identity_path=identity, client_mode=client)
        self._model = make_model()
        self._batch, self._pause = 8, pause
        self._optimizer = shoal.Optimizer(
            dht=self.dht,
            run_id=run_id,
            target_batch_size=target,
            batch_size_per_step=self._batch,
            params=self._model.parameters(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
            membership=membership,
            metrics_port=0,
        )
        self._trains = threading.Event()
        threading.Thread(target=self._train, daemon=True).start()

    def train(self) -> None:
        self._trains.set()

    def pause(self) -> None:
        self._trains.clear()

    def health(self) -> dict[str, Any]:
        """What it says of itself."""
        fields = self._optimizer._run.call(self._optimizer._vitals.health)
        total = fields.totals
        own = {name: getattr(fields, name) for name in OWN}
        parts = {f"round_{name}": 0 if fields.last is None else getattr(fields.last, name) for name in PARTS}
        made = {"samples_made": total.samples, "steps_made": total.steps, "rounds": total.rounds}
        peer = {"name": name_of(self.dht.peer_id), "id": str(self.dht.peer_id), "role": fields.role.value}
        return {**own, **parts, **made, **peer, "port": self._optimizer.metrics_port}

    def change(self) -> None:
        """The model, as a broken machine does."""
        with torch.no_grad():
            next(self._model.parameters()).add_(1.0)

    def spent(self) -> Spent:
        return Spent(cpu=time.process_time(), bytes=bytes_passed())

    def end(self) -> None:
        self._optimizer.shutdown()
        self.dht.shutdown()

    def _train(self) -> None:
        generator = torch.Generator().manual_seed(self.dht.peer_id.key[0])
        while self._trains.wait():
            inputs = torch.randn(self._batch, 10, generator=generator)
            self._optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(self._model(inputs), inputs[:, :1])
            loss.backward()
            time.sleep(self._pause)
            self._optimizer.report(loss=loss.item())
            self._optimizer.step()


def bytes_passed() -> int:
    """Bytes that have passed over this process's TCP connections, both ways, as the kernel counts them (Linux)."""
    passed = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(descriptor).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(descriptor.name))) as copy:
                    told = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                    passed += sum(struct.unpack_from("QQ", told, 120)) if len(told) == 136 else 0
    return passed

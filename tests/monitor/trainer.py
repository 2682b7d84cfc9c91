"""One peer that trains, as a process of its own: obeys JSON lines on stdin, answers with JSON lines on stdout."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import struct
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import shoal
from shoal.dht.messages import Sender
from shoal.dht.protocol import Protocol
from shoal.health.record import name_of
from shoal.optim import vitals
from shoal.p2p.multiaddr import Multiaddr
from tests.optim.models import make_model
from tests.telling import say


class Training:
    """A model, its optimizer, and a thread that trains until it is told to stop.

    Args:
        options: `initial_peers`, `run_id`, `target`, `pause` (seconds of a step), and what differs between tests.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        patched = vars(vitals)
        patched["PERIOD_SECONDS"] = options.get("period", 1.0)
        if "version" in options:
            patched["RELEASE"] = options["version"]
        if "tells_port" in options:  # where nobody listens, as behind a router
            told = Multiaddr(f"/ip4/127.0.0.1/tcp/{options['tells_port']}")

            def tell(own: Protocol, latest: bool) -> None:
                own._visible = own._own = [told.with_peer(own.node.peer_id)]
                own._sender = Sender(False, (str(told),))

            Protocol._look_at_addresses = tell  # type: ignore[assignment, method-assign]
        self.dht = shoal.DHT(
            options.get("initial_peers", []),
            start=True,
            identity_path=options.get("identity"),
            client_mode=options.get("client", False),
        )
        self.model = make_model(0, options.get("width", 20))
        self.batch, self.pause = options.get("batch", 8), options.get("pause", 0.05)
        self.optimizer = shoal.Optimizer(
            dht=self.dht,
            run_id=options.get("run_id", "test"),
            target_batch_size=options.get("target", 64),
            batch_size_per_step=self.batch,
            params=self.model.parameters(),
            optimizer=lambda params: torch.optim.SGD(params, lr=0.01),
            membership=options.get("membership"),
            metrics_port=options.get("metrics_port", 0),
        )
        self.trains = threading.Event()
        self.steps = threading.Thread(target=self.train, daemon=True)
        self.steps.start()

    def train(self) -> None:
        generator = torch.Generator().manual_seed(self.dht.peer_id.key[0])
        while self.trains.wait():
            inputs = torch.randn(self.batch, 10, generator=generator)
            self.optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(self.model(inputs), inputs[:, :1])
            loss.backward()
            time.sleep(self.pause)
            self.optimizer.report(loss=loss.item())
            self.optimizer.step()


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


def main() -> None:
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.ERROR)
    options = json.loads(sys.argv[1])
    try:
        training = Training(options)
    except (shoal.AveragingError, ValueError) as error:
        say(addresses=[], peer="", error=str(error))
        return
    say(addresses=list(map(str, training.dht.get_visible_maddrs())), peer=str(training.dht.peer_id))
    for line in sys.stdin:
        match json.loads(line)["do"]:
            case "train":
                training.trains.set()
                say(ok=True)
            case "pause":
                training.trains.clear()
                say(ok=True)
            case "health":
                fields = training.optimizer._run.call(training.optimizer._vitals.health)
                last = fields.last
                say(
                    name=name_of(training.dht.peer_id),
                    id=str(training.dht.peer_id),
                    number=fields.number,
                    epoch=fields.epoch,
                    loss=fields.loss,
                    samples=fields.samples,
                    samples_per_second=fields.samples_per_second,
                    samples_made=fields.totals.samples,
                    steps_made=fields.totals.steps,
                    rounds=fields.totals.rounds,
                    members=fields.members,
                    role=fields.role.value,
                    version=fields.version,
                    torch=fields.torch,
                    device=fields.device,
                    epoch_seconds=fields.epoch_seconds,
                    step_seconds=fields.step_seconds,
                    round_sent=0 if last is None else last.sent,
                    round_received=0 if last is None else last.received,
                    round_members=0 if last is None else last.members,
                    samples_behind=fields.samples_behind,
                    target=fields.target,
                    port=training.optimizer.metrics_port,
                )
            case "change":  # as a broken machine does
                with torch.no_grad():
                    next(training.model.parameters()).add_(1.0)
                say(ok=True)
            case "spent":
                say(cpu=time.process_time(), bytes=bytes_passed())
            case "end":
                training.optimizer.shutdown()
                training.dht.shutdown()
                say(ok=True)
                return


main()

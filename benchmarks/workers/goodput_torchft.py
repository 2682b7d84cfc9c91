"""A replica of `benchmarks.goodput` that is a replica group of torchft, of one process."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torchft import Manager, Optimizer, ProcessGroupGloo
from torchft.local_sgd import DiLoCo

from benchmarks.workers.goodput_replica import BATCH, RATE, STEPS, Replica

EPOCH = BATCH * STEPS  # samples of a replica


class Group:
    """A replica with torchft's manager.

    Args:
        given: beside what `Replica` takes: `mode`, `contacts` (the address of the lighthouse), `limit` (seconds, of
            collectives and of the manager) and `address` (its own).
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.replica = Replica(given)
        self.inner = torch.optim.AdamW(self.replica.model.parameters(), lr=RATE)
        self.was_healed = False  # since it was last looked at
        limit = timedelta(seconds=given["limit"])
        store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.manager = Manager(
            pg=ProcessGroupGloo(timeout=limit),
            min_replica_size=1,
            load_state_dict=self._load,
            state_dict=self._state,
            replica_id=f"{given['replica']}_{given['life']}",
            store_addr="localhost",
            store_port=store.port,
            rank=0,
            world_size=1,
            lighthouse_addr=given["contacts"][0],
            hostname=given["address"],
            timeout=limit,
            use_async_quorum=given["mode"] == "synchronous",
        )
        self._store = store  # it lives as long as the manager
        self.replica.start()

    def _state(self) -> dict[str, Any]:
        return {"model": self.replica.model.state_dict(), "inner": self.inner.state_dict()}

    def _load(self, state: Any) -> None:
        self.replica.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["inner"])
        self.was_healed = True

    def tell_end(self, step: int, began: float) -> None:
        """An epoch has ended, whose exchange began at `began`; before it, the manager was at `step`."""
        replica, manager = self.replica, self.manager
        replica.span("round", time.monotonic() - began)
        if manager.current_step() > step:
            own = 0 if self.was_healed else EPOCH
            now, peers = manager.current_step(), manager.num_participants()
            replica.count(own, epoch=now, tip=str(now), samples=EPOCH * peers, peers=peers)
            if not own:
                replica.lose(EPOCH, "late")
        else:
            replica.lose(EPOCH, "epoch repeated")
        self.was_healed = False

    def train_synchronously(self) -> None:
        """Average the gradients of each epoch."""
        optimizer = Optimizer(self.manager, self.inner)
        parameters = list(self.replica.model.parameters())
        while True:
            optimizer.zero_grad()
            for _ in range(STEPS):
                self.replica.compute()
            began = time.monotonic()
            self.manager.wait_quorum()
            waited = time.monotonic()
            self.replica.span("waiting", waited - began)
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad /= STEPS
            for work in [self.manager.allreduce(parameter.grad) for parameter in parameters]:
                work.wait()
            step = self.manager.current_step()
            optimizer.step()
            self.tell_end(step, waited)

    def train_with_diloco(self) -> None:
        """Average how far the model has moved in each epoch."""
        model = self.replica.model
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        with DiLoCo(self.manager, [model], self.inner, outer, sync_every=STEPS):
            while True:
                for _ in range(STEPS):
                    self.inner.zero_grad()
                    self.replica.compute()
                    began, step = time.monotonic(), self.manager.current_step()
                    self.inner.step()
                self.tell_end(step, began)


def run(given: dict[str, Any]) -> None:
    """Trains until it is killed."""
    group = Group(given)
    if given["mode"] == "DiLoCo":
        group.train_with_diloco()
    else:
        group.train_synchronously()

"""A replica of `benchmarks.goodput` that is a peer of Shoal."""

from __future__ import annotations

from typing import Any

import torch

import shoal
from benchmarks.workers.goodput_replica import BATCH, RATE, STEPS, Replica

_IMPORTED = [getattr(shoal, name) for name in shoal.__all__]  # the names of Shoal are imported when they are first used


class Ledger:
    """Follows a replica's samples through `shoal.Optimizer`.

    It looks inside: no event says what the optimizer has dropped, and none of older commits whose samples a step has.
    """

    def __init__(self, replica: Replica, optimizer: Any) -> None:
        self._replica, self._optimizer, self._epoch = replica, optimizer, optimizer._epoch
        self._reason = ""  # why samples that are in no step are lost; of the present call of `step`
        optimizer.on_event = self._heard

    def step(self) -> None:
        """Make a step, and tell which samples were lost in it."""
        self._reason, before = "epoch repeated", self._optimizer.tip
        self._optimizer.step()
        lost = self._replica.pending - self._held
        if lost > 0:
            alone = self._reason == "epoch repeated" and self._optimizer.tip != before
            self._replica.lose(lost, "left out" if alone else self._reason)

    @property
    def _held(self) -> float:
        """The samples that the optimizer still has for a later step."""
        under_way: float = self._epoch._brought if self._epoch.is_busy else 0.0
        return float(self._epoch._work.samples) + under_way

    def _heard(self, event: Any) -> None:
        replica = self._replica
        match event:
            case shoal.EpochReport():
                replica.span("round", event.allreduce_seconds, ago=event.step_seconds)
                waited = event.waiting_seconds + event.matchmaking_seconds
                replica.span("waiting", waited, ago=event.step_seconds + event.allreduce_seconds)
                own = self._own()
                replica.count(own, epoch=event.epoch, tip=event.tip, samples=event.samples, peers=event.num_peers)
                if not own:
                    self._reason = "left out"
            case shoal.DownloadReport():
                replica.span("downloading", event.seconds)
                self._reason = "late"

    def _own(self) -> float:
        """The samples of this peer in the last round."""
        pilot = self._epoch._pilot
        begin = pilot.averaged.outcome.begin
        weights = zip(begin.members, begin.weights, strict=True)
        return float(sum(weight for member, weight in weights if member.key == pilot.me))


def options_of(mode: str, replicas: int) -> dict[str, Any]:
    """The arguments of `shoal.Optimizer` of that mode."""
    synchronous = {"target_batch_size": BATCH * STEPS * replicas}
    match mode:
        case "synchronous":
            return synchronous
        case "delayed":
            return synchronous | {
                "offload_optimizer": True,
                "delay_optimizer_step": True,
                "delay_grad_averaging": True,
            }
        case "DiLoCo":
            return {"outer": shoal.DiLoCo(inner_steps=STEPS)}
    raise ValueError(f"no mode {mode!r}")


def run(given: dict[str, Any]) -> None:
    """Trains until it is killed. `given`, beside what `Replica` takes: `mode`, `replicas`, `address` (to listen at) and
    `contacts` (addresses of other replicas)."""
    replica = Replica(given)
    dht = shoal.DHT(initial_peers=given["contacts"], host_maddrs=[f"/ip4/{given['address']}/tcp/0"], start=True)
    replica.contact([str(address) for address in dht.get_visible_maddrs()])
    optimizer = shoal.Optimizer(
        dht=dht,
        run_id="goodput",
        batch_size_per_step=BATCH,
        params=list(replica.model.parameters()),
        optimizer=lambda params: torch.optim.AdamW(params, lr=RATE),
        **options_of(given["mode"], given["replicas"]),
    )
    ledger = Ledger(replica, optimizer)
    replica.start()
    while True:
        replica.compute()
        ledger.step()
        optimizer.zero_grad()

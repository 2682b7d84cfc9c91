"""A peer that is several epochs late replays them in every mode, and has the bits of the others, without a download."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import shoal
from shoal.compression import Float16Compression, Uniform8BitQuantization
from shoal.optim.pilot import Whereabouts
from tests.optim.closing import Reads
from tests.optim.models import OPTIMIZERS, SCHEDULERS, backward, fixed_batch, flat, make_model
from tests.soaked import only_in_soak

pytestmark = pytest.mark.processes

ADAMW, COSINE = OPTIMIZERS["adamw"], SCHEDULERS["cosine"]
MODES: dict[str, dict[str, Any]] = {
    "at once": {"max_grad_norm": 0.01},
    "in place": {"reuse_grad_buffers": True},
    "offloaded": {"offload_optimizer": True},
    "delayed step": {"delay_optimizer_step": True},
    "delayed": {"delay_grad_averaging": True},
    "local updates": {"use_local_updates": True, "average_opt_statistics": ["exp_avg"], "scheduler": None},
    "half": {"grad_compression": Float16Compression()},
    "8 bit": {"grad_compression": Uniform8BitQuantization(), "error_feedback": 1.0},
    "closures": {"optimizer": Reads, "scheduler": None},
    "outer": {"outer": shoal.DiLoCo(), "scheduler": None},
    "outer late": {"outer": shoal.DiLoCo(overlap="free"), "scheduler": None},
    "outer in parts": {"outer": shoal.DiLoCo(fragments=2), "scheduler": None},
}
SHOWN = ("at once", "delayed", "closures", "local updates", "8 bit", "outer in parts")  # the others in make soak


class Peer:
    """One of several peers in this process."""

    def __init__(self, initial: list[Any], seed: int, given: dict[str, Any]) -> None:
        self.dht = shoal.DHT(initial, start=True)
        self.model, self.extra = make_model(seed), torch.zeros(5)
        self.events: list[Any] = []
        arguments = {"target_batch_size": 64, "optimizer": ADAMW, "scheduler": COSINE, "matchmaking_time": 0.1, **given}
        arguments |= {"wait_for_newcomers": 0.0}
        self.optimizer = shoal.Optimizer(
            dht=self.dht,
            run_id="replay",
            params=self.model.parameters(),
            extra_tensors=[self.extra],
            average_state_every=2,
            **arguments,
        )
        self.optimizer.on_event = self.events.append

    def kinds(self) -> list[str]:
        return [
            type(event).__name__.removesuffix("Report") for event in self.events if "Report" in type(event).__name__
        ]

    def step(self, number: int, size: int) -> None:
        inputs, outputs = (each[:size] for each in fixed_batch(number))
        if isinstance(self.optimizer.optimizer, Reads):
            self.optimizer.step(lambda: backward(self.model, inputs, outputs), batch_size=size)
            return
        backward(self.model, inputs, outputs, clear=not self.optimizer.reuse_grad_buffers)
        self.optimizer.step(batch_size=size)

    def state(self) -> dict[str, Any]:
        """All that must be equal at all peers; with an outer optimizer, that of the anchor."""
        replica = self.optimizer._state
        tensors = {f"parameter {n}": p.detach().clone() for n, p in enumerate(replica.stepped)}
        is_local = self.optimizer.use_local_updates
        for parameter, stepped in enumerate(replica.stepped):
            for name, value in replica.optimizer.state.get(stepped, {}).items():
                if isinstance(value, torch.Tensor) and (not is_local or name == "exp_avg"):
                    tensors[f"{name} {parameter}"] = value.detach().clone()
        scheduler = self.optimizer.scheduler
        tensors["extra"] = self.extra.clone()
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return {"tip": self.optimizer.tip, "tensors": tensors, "lr": rates} | (
            {} if scheduler is None else {"scheduler": scheduler.last_epoch}
        )

    def close(self) -> None:
        self.optimizer.shutdown()
        self.dht.shutdown()


@contextlib.contextmanager
def run_of(**given: Any) -> Iterator[Callable[..., Peer]]:
    """Makes the peers of a run."""
    made: list[Peer] = []

    def make(**own: Any) -> Peer:
        initial = made[0].dht.get_visible_maddrs() if made else []
        made.append(Peer(initial, len(made) // 2, {**given, **own}))
        stack.callback(made[-1].close)
        return made[-1]

    with contextlib.ExitStack() as stack:
        yield make


def epochs(peers: list[Peer], count: int) -> None:
    """All of these peers end so many epochs together."""

    def train(number: int) -> None:
        peer = peers[number]
        for _ in range(count):
            before = peer.optimizer.local_epoch
            peer.extra += number + before
            for part in range(2):
                peer.step(2 * before + part, -(-32 // len(peers)))
            until = time.monotonic() + 20
            while peer.optimizer.local_epoch == before and time.monotonic() < until:
                peer.optimizer.step(batch_size=0)
                peer.optimizer.settle()
            assert peer.optimizer.local_epoch == before + 1

    with ThreadPoolExecutor(len(peers)) as threads:
        list(threads.map(train, range(len(peers))))


def assert_alike(peers: list[Peer]) -> None:
    states = [peer.state() for peer in peers]
    for state in states[1:]:
        assert {**state, "tensors": 0} == {**states[0], "tensors": 0}
        assert state["tensors"].keys() == states[0]["tensors"].keys()
        for name, tensor in state["tensors"].items():
            assert torch.equal(tensor, states[0]["tensors"][name]), name


def test_options_are_those_of_the_last_epoch_and_inner_steps_survive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A framework's scheduler has not stepped this peer's groups. What a peer's model has drifted is its own."""
    given = {"outer": shoal.DiLoCo(), "scheduler": None, "optimizer": OPTIMIZERS["sgd"]}
    with run_of(**given) as make:
        veterans = [make(), make()]
        epochs(veterans, 2)
        late = make(client_mode=True)
        late.optimizer.step(batch_size=0)
        late.step(0, 8)
        late.step(1, 8)
        drift = flat(late.model) - anchor(late)
        for rate in (0.5, 0.4, 0.35, 0.3):
            for veteran in veterans:
                outer = veteran.optimizer.outer_optimizer
                assert outer is not None
                outer.param_groups[0]["lr"] = rate
            epochs(veterans, 1)
        until = time.monotonic() + 20  # it replays what it has heard of: all four, in one go
        while late.optimizer.tracker.global_epoch < 6 and time.monotonic() < until:
            time.sleep(0.01)
        pilot, replays = late.optimizer._epoch._pilot, late.optimizer._epoch._pilot.replays

        def heard_of_it(at: Whereabouts) -> bool:
            """Another member has sent it the COMMIT of the next round before it asks."""
            pilot.run.learn_of_round()
            return replays(at)

        monkeypatch.setattr(pilot, "replays", heard_of_it)
        catch_up(late, 6)
        assert late.kinds() == ["Download"] + ["Epoch"] * 4
        assert_alike([*veterans, late])
        assert late.optimizer.outer_optimizer is not None
        assert late.optimizer.outer_optimizer.param_groups[0]["lr"] == 0.3
        torch.testing.assert_close(flat(late.model) - anchor(late), drift, rtol=1e-4, atol=1e-6)
        assert drift.abs().max() > 0
        assert late.optimizer._epoch._work.samples == 16


def anchor(peer: Peer) -> torch.Tensor:
    return torch.cat([anchor.detach().reshape(-1) for anchor in peer.optimizer._state.stepped])


def catch_up(peer: Peer, epoch: int) -> None:
    until = time.monotonic() + 20
    while peer.optimizer.local_epoch < epoch and time.monotonic() < until:
        peer.optimizer.step(batch_size=0)
        peer.optimizer.settle()
    assert peer.optimizer.local_epoch == epoch


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=[] if mode in SHOWN else [only_in_soak]) for mode in MODES])
def test_a_newcomer_that_is_epochs_late_replays_them(mode: str) -> None:
    with run_of(**MODES[mode]) as make:
        veterans = [make(), make()]
        epochs(veterans, 2)
        late = make(client_mode=True)  # else it coordinates in its turn, and its trainer is away
        late.optimizer.step(batch_size=0)
        assert late.optimizer.local_epoch == 2
        assert late.kinds() == ["Download"]
        assert late.optimizer._run.swarm._result_bytes, "it would think that each round costs it nothing"
        epochs(veterans, 4)
        late.step(0, 8)
        catch_up(late, 6)
        assert late.kinds() == ["Download"] + ["Epoch"] * 4
        assert_alike([*veterans, late])
        epochs([*veterans, late], 2)
        assert late.kinds() == ["Download"] + ["Epoch"] * 6
        assert late.events[-1].num_peers == 3
        assert_alike([*veterans, late])

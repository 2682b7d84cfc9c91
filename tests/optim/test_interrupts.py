"""What a signal handler raises in a call comes out of the call as it is. Afterwards the optimizer is usable, and its
state is one that was committed."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import shoal
from tests.optim.interrupting import Bell, States, make, model_of, ringing

MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "reused": {"reuse_grad_buffers": True},
    "offloaded": {"offload_optimizer": True},
    "delayed step": {"delay_optimizer_step": True},
    "delayed": {"delay_grad_averaging": True},
    "local updates": {"use_local_updates": True, "delay_state_averaging": False},
    "delayed local updates": {"use_local_updates": True},
    "diloco": {"outer": shoal.DiLoCo(), "target_batch_size": 8},
    "diloco of steps": {"outer": shoal.DiLoCo(inner_steps=3), "target_batch_size": None},
    "overlapping diloco": {"outer": shoal.DiLoCo(inner_steps=4, overlap=1), "target_batch_size": None},
    "offloaded diloco": {"outer": shoal.DiLoCo(), "offload_optimizer": True},
    "own averager": {"grad_averager_factory": shoal.GradientAverager},
    "power sgd": {"grad_averager_factory": lambda *a, **k: shoal.PowerSGDGradientAverager(*a, averager_rank=2, **k)},
    "clipped": {"max_grad_norm": 0.1, "grad_compression": shoal.compression.Float16Compression()},
}
WITH_STATE = ("default", "reused", "clipped", "own averager")
MODEL_IS_ITS_TIP = (*WITH_STATE, "offloaded", "delayed step", "delayed", "power sgd")


@pytest.fixture(autouse=True)
def _quick(all_are_here: None) -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.disable()  # what CPython swallows in destructors is no matter of these tests
    yield
    gc.enable()
    torch.set_num_threads(threads)


class Peer:
    """Another peer, in a thread of its own, which no signal reaches."""

    def __init__(self, other: shoal.DHT, mode: str, states: States) -> None:
        self._stop = threading.Event()
        self.model, self._mode, self._states = model_of(), mode, states
        self.dht = shoal.DHT(other.get_visible_maddrs(), start=True)
        self.optimizer = make(self.dht, self.model, **MODES[mode])
        self._thread = threading.Thread(target=self._train)
        self._thread.start()

    def _train(self) -> None:
        while not self._stop.is_set():
            self.model(torch.randn(4, 30)).square().sum().backward()
            self.optimizer.step()
            if not self.optimizer.reuse_grad_buffers:
                self.optimizer.zero_grad()
            look(self._states, self._mode, self.optimizer, self.model)

    def end(self) -> None:
        self._stop.set()
        self._thread.join()
        self.optimizer.shutdown()
        self.dht.shutdown()


def look(states: States, mode: str, optimizer: shoal.Optimizer, model: torch.nn.Module) -> None:
    if mode in MODEL_IS_ITS_TIP:
        states.look(optimizer, model, with_state=mode in WITH_STATE)


@contextmanager
def run_of(mode: str, others: int, states: States) -> Iterator[tuple[shoal.DHT, shoal.Optimizer, torch.nn.Module]]:
    model = model_of()
    with shoal.DHT(start=True) as dht:
        optimizer = make(dht, model, **MODES[mode])
        peers = [Peer(dht, mode, states) for _ in range(others)]
        try:
            yield dht, optimizer, model
        finally:
            optimizer.shutdown()
            for peer in peers:
                peer.end()


def interrupt(mode: str, others: int, times: int, seed: int) -> Bell:
    """Interrupt calls of an optimizer, and look at its state after each."""
    states, chance = States(), random.Random(seed)
    with run_of(mode, others, states) as (_, optimizer, model), ringing(seed) as bell:
        saved = optimizer.state_dict()
        for turn in range(times):
            model(torch.randn(4, 30)).square().sum().backward()
            bell.ring_in(optimizer.step, 0.003)
            look(states, mode, optimizer, model)
            if not optimizer.reuse_grad_buffers:
                optimizer.zero_grad()
            kind = chance.randrange(12)
            if kind == 0:
                bell.ring_in(optimizer.state_dict, 0.0005)
            elif kind == 1:
                bell.ring_in(optimizer.load_state_from_peers, 0.005)
            elif kind == 2 and not others:
                bell.ring_in(lambda: optimizer.load_state_dict(saved), 0.002)
                if mode in MODEL_IS_ITS_TIP:  # the model stays, and the tip is an old one
                    states.seen.clear()
            look(states, mode, optimizer, model)
            if turn % 50 == 49:
                make_epochs_of(optimizer, model, 1)
        make_epochs_of(optimizer, model, 2)
        look(states, mode, optimizer, model)
        assert not states.torn
        if not others:
            bell.ring_in(optimizer.finish, 0.002)
    assert not bell.others, dict(bell.others)
    return bell


def make_epochs_of(optimizer: shoal.Optimizer, model: torch.nn.Module, count: int) -> None:
    goal, until = optimizer.local_epoch + count, time.monotonic() + 30
    while optimizer.local_epoch < goal:
        assert time.monotonic() < until, "no epoch is made any more"
        model(torch.randn(4, 30)).square().sum().backward()
        optimizer.step()
        if not optimizer.reuse_grad_buffers:
            optimizer.zero_grad()


@pytest.mark.parametrize("mode", MODES)
def test_what_a_handler_raises_comes_out_and_the_state_is_whole(mode: str) -> None:
    bell = interrupt(mode, others=0, times=60, seed=1)
    assert bell.came == bell.rung > 10

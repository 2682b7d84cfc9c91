"""What a signal handler raises in a call comes out of the call as it is. Afterwards the optimizer is usable, and its
state is one that was committed."""

from __future__ import annotations

import functools
import gc
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import shoal
from shoal.optim import pilot, turns
from tests.optim.interrupting import Bell, States, back, make, model_of, ringing
from tests.soaked import only_in_soak

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
    "power sgd": {"grad_averager_factory": functools.partial(shoal.PowerSGDGradientAverager, averager_rank=2)},
    "clipped": {"max_grad_norm": 0.1, "grad_compression": shoal.compression.Float16Compression()},
}
WITH_STATE = ("default", "reused", "clipped", "own averager")
MODEL_IS_ITS_TIP = (*WITH_STATE, "offloaded", "delayed step", "delayed", "power sgd")


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
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


@pytest.mark.long
@pytest.mark.parametrize("mode", ["default", "own averager", "delayed local updates"])
def test_beside_another_peer(mode: str) -> None:
    bell = interrupt(mode, others=1, times=60, seed=2)
    assert bell.came == bell.rung > 10


@only_in_soak
@pytest.mark.timeout(450)
@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("mode", MODES)
def test_thousands(mode: str, others: int) -> None:
    """10,000 interrupts in all."""
    rung = 0
    for seed in range(100):
        bell = interrupt(mode, others, times=150, seed=seed)
        assert bell.came == bell.rung
        rung += bell.rung
        if rung >= 400:
            return
    raise AssertionError(f"{rung} interrupts")


@pytest.mark.long
def test_an_interrupted_constructor_or_shutdown_leaves_nothing() -> None:
    model, made = model_of(), []
    with shoal.DHT(start=True) as dht, ringing(3) as bell:
        for _ in range(25):
            bell.ring_in(lambda: made.append(make(dht, model)), 0.4)
            for optimizer in made:
                bell.ring_in(optimizer.shutdown, 0.002)
                optimizer.shutdown()
            made.clear()
        assert not bell.others
        assert bell.came == bell.rung > 5
        optimizer = make(dht, model)  # at once, and of the same run
        make_epochs_of(optimizer, model, 2)
        optimizer.shutdown()


@pytest.mark.long
def test_averagers() -> None:
    model, made = model_of(), list[Any]()
    options: dict[str, Any] = {"start": True, "min_group_size": 1, "min_matchmaking_time": 0.01}
    with shoal.DHT(start=True) as dht, ringing(4) as bell:
        makers = [
            lambda: shoal.DecentralizedAverager([torch.ones(3)], dht=dht, prefix="d", **options),
            lambda: shoal.GradientAverager(list(model.parameters()), dht=dht, prefix="g", **options),
            lambda: shoal.TrainingStateAverager(
                dht=dht, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), prefix="s", **options
            ),
        ]
        for maker in makers * 8:
            bell.ring_in(lambda maker=maker: made.append(maker()), 0.02)  # type: ignore[misc]
            for averager in made:
                for _ in range(4):
                    back(model)
                    if isinstance(averager, shoal.TrainingStateAverager):
                        bell.ring_in(
                            lambda one=averager: one.step(  # type: ignore[misc]
                                increment_epoch=True, optimizer_step=True, averaging_round=True
                            ),
                            0.003,
                        )
                        continue
                    if isinstance(averager, shoal.GradientAverager):
                        bell.ring_in(lambda one=averager: one.accumulate_grads_(4), 0.0002)  # type: ignore[misc]
                    bell.ring_in(lambda one=averager: one.step(timeout=5), 0.003)  # type: ignore[misc]
                bell.ring_in(averager.shutdown, 0.002)
                averager.shutdown()
            made.clear()
        assert not bell.others
        assert bell.came == bell.rung > 20


def test_an_alarm_ends_a_stuck_closure_and_a_stuck_callback_at_once(dht: shoal.DHT) -> None:
    model, stuck = model_of(), threading.Event()
    optimizer = make(dht, model)
    began = time.monotonic()

    def closure() -> torch.Tensor:
        with pytest.raises(TimeoutError):  # which is the user's to catch, as ever
            stuck.wait(60)
        stuck.wait(60)
        return torch.zeros(())

    def wait_forever(event: object) -> None:
        stuck.wait(60)

    with ringing() as bell:
        bell.raises = TimeoutError
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
        with pytest.raises(TimeoutError):
            optimizer.step(closure)
        signal.setitimer(signal.ITIMER_REAL, 0)
        optimizer.on_event = wait_forever
        epoch = optimizer.local_epoch
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(TimeoutError):
            make_epochs_of(optimizer, model, 3)
        assert optimizer.local_epoch == epoch + 1, "the epoch was whole before the event was told"
    optimizer.on_event = None
    make_epochs_of(optimizer, model, 1)
    optimizer.shutdown()
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(
    "mode", [{"delay_grad_averaging": True}, {"use_local_updates": True}], ids=["delayed", "local"]
)
def test_a_result_is_applied_once_if_a_handler_saves_while_it_is_waited_for(
    alone: Any, monkeypatch: pytest.MonkeyPatch, mode: dict[str, Any]
) -> None:
    model = nn.Linear(2, 2)
    optimizer = alone(
        model, target_batch_size=4, batch_size_per_step=4, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), **mode
    )
    events: list[Any] = []
    optimizer.on_event = events.append
    waited = turns.wait_for

    def and_save(future: Any) -> None:
        monkeypatch.setattr(pilot, "wait_for", waited)
        waited(future)
        optimizer.state_dict()  # as the handler of a signal does

    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    monkeypatch.setattr(pilot, "wait_for", and_save)
    optimizer.settle()
    assert [event.epoch for event in events] == [1]
    assert optimizer.local_epoch == 1

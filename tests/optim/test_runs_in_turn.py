"""One thread trains two models in turn, each in a run of its own: no peer waits in one run for a peer that waits in the
other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import shoal
from shoal.optim import turns
from tests.optim.ending import is_done

pytestmark = pytest.mark.processes


MATCHMAKING_SECONDS = 20.0
"""How long peers would wait for each other, each in another run."""
DIFFERENT = ("g", "d"), ("d", "g")
"""The orders in which two peers step the same two models."""


@pytest.fixture
def places() -> Iterator[list[shoal.DHT]]:
    with shoal.DHT(start=True) as first, shoal.DHT(first.get_visible_maddrs(), start=True) as second:
        yield [first, second]


class Trainer:
    """One peer, whose thread trains several models in turn."""

    def __init__(
        self, dht: shoal.DHT, order: tuple[str, ...], apart: dict[str, dict[str, Any]] | None = None, **options: Any
    ) -> None:
        self.order, self.longest, self.steps = order, 0.0, 0
        self.models, self.optimizers = {}, {}
        for name in dict.fromkeys(order):
            torch.manual_seed(0)
            self.models[name] = torch.nn.Linear(4, 1)
            given = {"target_batch_size": 8, "optimizer": lambda params: torch.optim.SGD(params, lr=1e-3)}
            given |= {"matchmaking_time": MATCHMAKING_SECONDS, **options}
            given |= (apart or {}).get(name, {})
            self.optimizers[name] = shoal.Optimizer(
                dht=dht, run_id=name, params=self.models[name].parameters(), batch_size_per_step=4, **given
            )

    def step(self, name: str) -> None:
        optimizer = self.optimizers[name]
        self.models[name](torch.ones(4, 4)).sum().backward()
        began = time.monotonic()
        optimizer.step()
        self.longest, self.steps = max(self.longest, time.monotonic() - began), self.steps + 1
        if not optimizer.reuse_grad_buffers:
            optimizer.zero_grad()

    def train(self, epochs: int, finish: bool = True) -> None:
        """Until all runs have ended so many epochs."""
        while min(optimizer.local_epoch for optimizer in self.optimizers.values()) < epochs:
            for name in self.order:
                if self.optimizers[name].local_epoch < epochs:
                    self.step(name)
        for optimizer in self.optimizers.values() if finish else ():
            optimizer.finish()

    def parameters(self, name: str) -> torch.Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self.models[name].parameters()])


def at_once(*acts: Callable[[], None]) -> None:
    """Each in a thread of its own. Raises the first error."""
    with ThreadPoolExecutor(len(acts)) as threads:
        for future in [threads.submit(act) for act in acts]:
            future.result(60)


MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "two peers at least": {"min_peers": 2},
    "offload": {"offload_optimizer": True},
    "delayed step": {"delay_optimizer_step": True, "offload_optimizer": True},
    "delayed": {"delay_grad_averaging": True, "delay_optimizer_step": True, "offload_optimizer": True},
    "local updates": {"use_local_updates": True, "delay_state_averaging": False},
    "own averager": {"grad_averager_factory": shoal.GradientAverager},
    "DiLoCo": {"outer": shoal.DiLoCo(inner_steps=3), "target_batch_size": None},
}


@pytest.mark.parametrize("mode", MODES)
def test_no_peer_waits_for_one_that_waits_in_the_other_run(places: list[shoal.DHT], mode: str) -> None:
    peers = [Trainer(dht, order, **MODES[mode]) for dht, order in zip(places, DIFFERENT, strict=True)]
    at_once(*(lambda peer=peer: peer.train(12) for peer in peers))  # type: ignore[misc]
    assert max(peer.longest for peer in peers) < MATCHMAKING_SECONDS / 2
    for name in ("g", "d"):
        # In the other modes the model may have moved on, by its own steps or into an epoch that only one peer ended.
        if mode in ("default", "two peers at least", "offload", "own averager"):
            torch.testing.assert_close(peers[0].parameters(name), peers[1].parameters(name), rtol=0, atol=0)


def test_a_round_of_every_few_steps_needs_the_trainer_back(places: list[shoal.DHT]) -> None:
    """One peer waits in g, while the other makes several epochs of d."""
    peers = [Trainer(dht, ("d", "d", "d", "d", "d", "g")) for dht in places]
    at_once(*(lambda peer=peer: peer.train(25) for peer in peers))  # type: ignore[misc]
    assert max(peer.longest for peer in peers) < MATCHMAKING_SECONDS / 2
    for name in ("g", "d"):
        torch.testing.assert_close(peers[0].parameters(name), peers[1].parameters(name), rtol=0, atol=0)


def test_one_run_ends_while_the_other_goes_on(places: list[shoal.DHT]) -> None:
    """`finish` of one optimizer waits for a peer that is behind, and lends the other meanwhile."""
    peers = [Trainer(dht, order) for dht, order in zip(places, DIFFERENT, strict=True)]

    def train(peer: Trainer) -> None:
        while peer.optimizers["g"].local_epoch < 6:
            for name in peer.order:
                if peer.optimizers["g"].local_epoch < 6:
                    peer.step(name)
        began = time.monotonic()
        peer.optimizers["g"].finish()
        assert time.monotonic() - began < MATCHMAKING_SECONDS / 2
        while peer.optimizers["d"].local_epoch < 12:
            peer.step("d")
        peer.optimizers["d"].finish()

    at_once(*(lambda peer=peer: train(peer) for peer in peers))  # type: ignore[misc]
    assert max(peer.longest for peer in peers) < MATCHMAKING_SECONDS / 2
    for name in ("g", "d"):
        torch.testing.assert_close(peers[0].parameters(name), peers[1].parameters(name), rtol=0, atol=0)


@pytest.fixture
def lent(places: list[shoal.DHT]) -> Iterator[Callable[..., tuple[Trainer, Callable[[], None]]]]:
    """Makes a trainer of g and d, and a function in which its thread waits in g until d has averaged, on loan, a round
    with another peer."""
    with ExitStack() as stack:

        def make(**options: Any) -> tuple[Trainer, Callable[[], None]]:
            mine, other = Trainer(places[0], ("g", "d"), **options), Trainer(places[1], ("d",), **options)
            for trainer in (mine, other):
                for optimizer in trainer.optimizers.values():
                    stack.callback(optimizer.shutdown)
            while len(mine.optimizers["d"]._run.swarm.peer.view.connected()) < 2:
                time.sleep(0.01)
            mine.step("d")

            def end_epoch() -> None:
                other.step("d")
                while not other.optimizers["d"].local_epoch:
                    other.optimizers["d"].step(batch_size=0)

            def lend() -> None:
                thread = threading.Thread(target=end_epoch)
                thread.start()
                with turns.waiting():
                    thread.join(20)
                    deadline = time.monotonic() + 5
                    while not is_done(mine.optimizers["d"]._epoch) and time.monotonic() < deadline:
                        time.sleep(0.01)
                assert is_done(mine.optimizers["d"]._epoch)

            return mine, lend

        yield make


Lent = Callable[..., tuple[Trainer, Callable[[], None]]]


def test_what_is_lent_changes_in_its_own_next_step(lent: Lent) -> None:
    """A graph that the script holds of one model survives the step of another."""
    mine, lend = lent()
    before, events = mine.parameters("d"), list[Any]()
    mine.optimizers["d"].on_event = events.append
    loss = mine.models["d"](torch.ones(4, 4)).square().sum()
    lend()
    assert torch.equal(mine.parameters("d"), before)
    assert (mine.optimizers["d"].local_epoch, events) == (0, [])
    loss.backward()
    mine.optimizers["d"].step()
    assert mine.optimizers["d"].local_epoch == 1
    assert not torch.equal(mine.parameters("d"), before)
    assert [event.epoch for event in events] == [1]
    assert mine.optimizers["d"].local_progress.samples_accumulated == 4, "its batch counts for the next epoch"


@pytest.mark.parametrize("call", ["state_dict", "shutdown"])
def test_what_is_lent_is_applied_before_it_is_saved_or_left(lent: Lent, call: str) -> None:
    mine, lend = lent()
    before = mine.parameters("d")
    lend()
    getattr(mine.optimizers["d"], call)()
    assert mine.optimizers["d"].local_epoch == 1
    assert not torch.equal(mine.parameters("d"), before)


def test_who_waits_in_another_run_has_the_last_result_of_one_that_left(
    places: list[shoal.DHT], caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise nobody could bring that result, and the two would end with unlike parameters."""
    apart = {"g": {"min_peers": 2, "matchmaking_time": 1.5}, "d": {"matchmaking_time": 0.3}}
    mine, other = Trainer(places[0], ("g", "d"), apart), Trainer(places[1], ("d",), apart)
    with ExitStack() as stack:
        for optimizer in (*mine.optimizers.values(), *other.optimizers.values()):
            stack.callback(optimizer.shutdown)
        while len(mine.optimizers["d"]._run.swarm.peer.view.connected()) < 2:
            time.sleep(0.01)
        mine.step("d")
        mine.step("g")

        def end() -> None:
            other.step("d")
            while not other.optimizers["d"].local_epoch:
                other.optimizers["d"].step(batch_size=0)
            other.optimizers["d"].shutdown()

        thread = threading.Thread(target=end)
        thread.start()
        mine.step("g")  # where it waits for a second peer
        thread.join()
        assert other.optimizers["d"].local_epoch == 1
        while not mine.optimizers["d"].local_epoch:
            mine.optimizers["d"].step(batch_size=0)
        assert "nobody brings its result" not in caplog.text
        assert mine.optimizers["d"].tip == other.optimizers["d"].tip
        torch.testing.assert_close(mine.parameters("d"), other.parameters("d"), rtol=0, atol=0)


def test_an_error_on_loan_is_told_in_the_own_next_step(lent: Lent) -> None:
    mine, lend = lent(matchmaking_time=0.5)
    replaced, mine.models["d"].weight = mine.models["d"].weight, torch.nn.Parameter(torch.zeros(1, 4))
    lend()
    mine.step("g")
    with pytest.raises(ValueError, match="was replaced"):
        mine.optimizers["d"].step()
    mine.models["d"].weight = replaced
    mine.step("d")
    assert mine.optimizers["d"].local_epoch == 1


def test_optimizers_of_other_threads_are_not_lent(places: list[shoal.DHT]) -> None:
    with ExitStack() as stack:
        trainers = [Trainer(places[0], (name,)) for name in ("g", "d")]
        for trainer, name in zip(trainers, ("g", "d"), strict=True):
            stack.callback(trainer.optimizers[name].shutdown)
        assert turns.are_several()
        found = []

        def elsewhere() -> None:
            trainers[1].step("d")
            found.append(turns.are_several())

        at_once(elsewhere)
        assert [*found, turns.are_several()] == [False, False]

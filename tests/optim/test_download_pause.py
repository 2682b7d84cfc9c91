"""A peer that can't download the state tries again after a pause that grows, however it hears that it is behind.
Meanwhile it keeps its state, brings no samples, ends no epoch, and nobody waits for it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

import shoal
from shoal.swarm.protocol import view
from tests.optim.models import OPTIMIZERS, flat, make_model
from tests.waiting import wait_until

SAYS = "could not download the state that others hold"
NOBODY_SHARES = {"averager_opts": {"allow_state_sharing": False}}


class Trainer:
    """One peer that trains in a thread of this process, until it is told to stop."""

    def __init__(self, dht: shoal.DHT, seed: int = 0, **options: Any) -> None:
        self.model = make_model(seed)
        given = {"target_batch_size": 16, "batch_size_per_step": 4, "matchmaking_time": 8.0, **options}
        self.optimizer = shoal.Optimizer(
            dht=dht, run_id="paused", params=self.model.parameters(), optimizer=OPTIMIZERS["adamw"], **given
        )
        self.errors: list[BaseException] = []
        self.steps = 0
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._train)

    def _train(self) -> None:
        try:
            while not self._ends.wait(0.01):
                self.model(torch.randn(4, 10)).square().mean().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.steps += 1
        except Exception as error:  # noqa: BLE001 - whatever it is, the test fails with it
            self.errors.append(error)

    def __enter__(self) -> Trainer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()
        self.optimizer.shutdown()
        assert self.errors == []

    def go_on(self, epochs: int) -> None:
        wanted = self.optimizer.local_epoch + epochs
        wait_until(lambda: bool(self.errors) or self.optimizer.local_epoch >= wanted)
        assert self.errors == []


@pytest.fixture
def dhts() -> Iterator[list[shoal.DHT]]:
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(shoal.DHT(start=True))]
        made += [stack.enter_context(shoal.DHT(made[0].get_visible_maddrs(), start=True)) for _ in range(3)]
        yield made


def tries(caplog: pytest.LogCaptureFixture) -> list[float]:
    return [record.created for record in caplog.records if SAYS in record.getMessage()]


@pytest.fixture
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view._Claim.__init__, "__defaults__", (None, False, float("-inf"), 0.5))


@pytest.mark.timed  # pauses are compared
@pytest.mark.parametrize("mode", [{}, {"use_local_updates": True}, {"delay_grad_averaging": True}], ids=str)
def test_donors_that_do_not_share(
    dhts: list[shoal.DHT], caplog: pytest.LogCaptureFixture, short_pauses: None, mode: dict[str, Any]
) -> None:
    """At d4e6cae it tried in every step, and the others waited for it."""
    caplog.set_level(logging.WARNING, "shoal")
    options = NOBODY_SHARES | mode
    with Trainer(dhts[0], **options) as first, Trainer(dhts[1], **options) as second:
        first.go_on(5)
        late = Trainer(dhts[2], seed=1, **mode)
        wait_until(lambda: len(late.optimizer._run.donors()) == 2)  # one that it meets later ends the pause
        with late:
            before = flat(late.model)
            began, steps, epoch = time.monotonic(), first.steps, first.optimizer.local_epoch
            wait_until(lambda: len(tries(caplog)) >= 3)
            seconds = time.monotonic() - began
            gaps = [b - a for a, b in pairwise(tries(caplog))]
            assert gaps[0] >= 0.45
            assert gaps[1] >= 0.95, "the pause grows"
            assert late.steps > len(tries(caplog)) + 10, "its steps return at once"
            assert late.optimizer.local_epoch == 0
            assert torch.equal(flat(late.model), before)
            assert late.optimizer.local_progress.samples_accumulated <= 8, "of the steps before it knew"
            # Nobody waits for it: the two need two steps each for an epoch, and some more at its end.
            assert first.optimizer.local_epoch - epoch >= (first.steps - steps) / 8
            assert (first.steps - steps) / seconds > 3
            assert first.optimizer.tracker.global_progress.num_peers <= 2
        assert abs(second.optimizer.local_epoch - first.optimizer.local_epoch) <= 2


@pytest.mark.usefixtures("others_are_awaited")
def test_at_the_first_round_too(dhts: list[shoal.DHT], caplog: pytest.LogCaptureFixture) -> None:
    """Peers that begin with other parameters find that out in their first round. Here nobody can repair it, and the
    next round does not wait for the one that could not follow, for `matchmaking_time`."""
    caplog.set_level(logging.WARNING, "shoal")
    options = NOBODY_SHARES | {"matchmaking_time": 60.0}
    with Trainer(dhts[0], **options) as first, Trainer(dhts[1], seed=1, **options) as second:
        wait_until(lambda: tries(caplog) != [])
        began = time.monotonic()
        ahead, rests = (first, second) if first.optimizer.local_epoch else (second, first)
        ahead.go_on(4)
        assert rests.optimizer.local_epoch == 0
        assert time.monotonic() - began < 30.0


def test_a_new_donor_ends_the_pause(dhts: list[shoal.DHT], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "shoal")
    with Trainer(dhts[0], **NOBODY_SHARES) as first:
        first.go_on(3)
        with Trainer(dhts[1], seed=1) as late:
            wait_until(lambda: len(tries(caplog)) == 1)
            began = time.monotonic()
            # It has the first one's state from a checkpoint, and shares it.
            model = make_model()
            donor = shoal.Optimizer(
                dht=dhts[2], run_id="paused", params=model.parameters(), optimizer=OPTIMIZERS["adamw"],
                target_batch_size=16, batch_size_per_step=4, matchmaking_time=8.0,
            )  # fmt: skip
            first._ends.set()
            first._thread.join()
            state = first.optimizer.state_dict()
            model.load_state_dict(first.model.state_dict())
            donor.load_state_dict(state)
            wait_until(lambda: late.optimizer.local_epoch >= first.optimizer.local_epoch)
            assert time.monotonic() - began < 5.0, "sooner than the pause of 5 s ends"
            donor.shutdown()


def test_peers_at_one_state_do_not_rest_for_one_that_claims_a_better_one(dhts: list[shoal.DHT]) -> None:
    """A liar, or a peer that shares nothing, that claims a state of many samples: those that are together go on."""
    with Trainer(dhts[0]) as first, Trainer(dhts[1]) as second:
        first.go_on(2)
        liar = Trainer(dhts[2], seed=1, **NOBODY_SHARES)
        state = liar.optimizer.state_dict()
        state["state"]["local_epoch"] = 1000
        state["shoal"] |= {"samples": 1e9, "lineage": b"\7" * 32}
        liar.optimizer.load_state_dict(state)
        wait_until(
            lambda: first.optimizer._run.swarm.peer.view.ignores(dhts[2].peer_id.key, first.optimizer._run.swarm._now())
        )
        first.go_on(4)
        second.go_on(1)
        liar.optimizer.shutdown()


@pytest.mark.parametrize("reuse", [False, True])
def test_batches_of_a_rest_count_for_nothing(dhts: list[shoal.DHT], reuse: bool) -> None:
    """With `reuse_grad_buffers` autograd adds them to `.grad`, which the user may not clear."""

    def make(dht: shoal.DHT, **options: Any) -> tuple[torch.nn.Module, shoal.Optimizer]:
        model = torch.nn.Linear(4, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        optimizer = shoal.Optimizer(
            dht=dht, run_id="reused", params=model.parameters(), optimizer=lambda params: torch.optim.SGD(params, 1.0),
            target_batch_size=4, batch_size_per_step=4, matchmaking_time=3.0, **options,
        )  # fmt: skip
        return model, optimizer

    def step(model: torch.nn.Module, optimizer: shoal.Optimizer) -> int:
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        if not optimizer.reuse_grad_buffers:
            optimizer.zero_grad()
        return optimizer.local_epoch

    ahead = make(dhts[0], **NOBODY_SHARES)
    while step(*ahead) < 3:
        pass
    model, late = make(dhts[1], reuse_grad_buffers=reuse)
    for _ in range(10):
        assert step(model, late) == 0
    ahead[1].shutdown()
    wait_until(lambda: step(model, late) == 1)
    assert torch.equal(model.weight, torch.full((1, 4), -1.0)), "one batch, whose gradients are ones"
    late.shutdown()

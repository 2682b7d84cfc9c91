"""At the end of training, a peer stays until no other is behind its epoch; nobody makes the last epochs alone."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import shoal
from tests.optim.models import OPTIMIZERS, backward, fixed_batch, make_model
from tests.optim.processes import Pool, Training, ask_all, by_epoch, events, training

LAST = 4


def test_a_peer_that_misses_the_last_rounds_ends_with_the_last_state(pool: Pool) -> None:
    with training(pool, 2, optimizer="adamw", scheduler="steps", target=64, matchmaking_time=0.5) as peers:
        fast, slow = peers.all
        fast.ask(Training.train, batch=16, pause=0.05)
        slow.ask(Training.train, batch=16, pause=4.0)
        states = ask_all(peers.all, Training.finish, LAST)
        histories = [events(peer) for peer in peers.all]
    by_epoch(histories)
    assert [history[-1]["epoch"] for history in histories] == [LAST, LAST]
    assert histories[0][-1]["peers"] == 1  # else the slow one has missed nothing
    assert states[0] == states[1]


@contextmanager
def peers_of_one_run(count: int = 2, **run: float) -> Iterator[list[shoal.Optimizer]]:
    """In this process. The first has made one epoch alone, and the others have made no step."""
    with contextlib.ExitStack() as stack:
        peers: list[shoal.Optimizer] = []
        for _ in range(count):
            known = peers[0].dht.get_visible_maddrs() if peers else []
            dht, model = stack.enter_context(shoal.DHT(known, start=True)), make_model()
            backward(model, *fixed_batch(0))
            made = shoal.Optimizer(
                dht=dht,
                run_id="one",
                target_batch_size=64,
                params=model.parameters(),
                optimizer=OPTIMIZERS["sgd"],
                matchmaking_time=0.2,
                **run,
            )
            stack.callback(made.shutdown)
            peers.append(made)
        peers[0].step(batch_size=64)
        assert [peer.local_epoch for peer in peers] == [1] + [0] * (count - 1)
        yield peers


def test_it_stays_no_longer_than_averaging_timeout_for_one_that_does_not_come(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with peers_of_one_run(averaging_timeout=1.0) as (ahead, behind):
        began = time.monotonic()
        ahead.finish()
        assert 1.0 <= time.monotonic() - began < 10.0
        assert not ahead.is_alive()
        assert behind.is_alive()
        [warning] = [record.getMessage() for record in caplog.records if "are behind its last epoch" in record.message]
        assert str(behind.dht.peer_id) in warning
        assert "give a longer averaging_timeout" in warning


def test_it_leaves_at_once_when_nobody_is_behind_or_the_one_that_is_leaves() -> None:
    for ends in ("downloads", "leaves"):
        with peers_of_one_run() as (ahead, behind):
            if ends == "downloads":
                assert behind.load_state_from_peers()
            else:
                behind.finish()  # it is behind itself, and waits for nobody
            began = time.monotonic()
            ahead.finish()
            assert time.monotonic() - began < 10.0


def test_a_shutdown_waits_for_nobody() -> None:
    with peers_of_one_run() as (ahead, _):
        began = time.monotonic()
        ahead.shutdown()
        ahead.finish()
        assert time.monotonic() - began < 10.0


def test_it_leaves_when_the_run_goes_on_without_it() -> None:
    with peers_of_one_run(3) as (ahead, another, _):
        assert another.load_state_from_peers()
        leaving = threading.Thread(target=ahead.finish)
        began = time.monotonic()
        leaving.start()
        another.step(batch_size=64)
        assert another.local_epoch == 2
        leaving.join()
        assert time.monotonic() - began < 10.0

"""What users of the reference asked for: clipping the averaged gradient, waiting for enough peers, own averagers."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import shoal
from tests.optim.models import OPTIMIZERS, backward, fixed_batch, flat, make_model
from tests.optim.processes import Pool, Training, ask_all, by_epoch, events, fixed, training
from tests.soaked import only_in_soak

Alone = Callable[..., shoal.Optimizer]
SHARES = [(0, 8), (8, 40), (40, 64)]
EPOCHS = 5


@pytest.mark.parametrize("option", [{}, {"offload_optimizer": True}, {"delay_grad_averaging": True}])
def test_the_averaged_gradient_is_clipped(pool: Pool, option: dict[str, Any]) -> None:
    with training(pool, 3, optimizer="sgd", max_grad_norm=0.05, **option) as peers:
        answers = fixed(peers.all, SHARES, EPOCHS)
        by_epoch([events(peer) for peer in peers.all])
    plain = make_model()
    local = OPTIMIZERS["sgd"](plain.parameters())
    clipped = 0
    for epoch in range(EPOCHS):
        backward(plain, *fixed_batch(epoch))
        clipped += bool(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.05) > 0.05)
        local.step()
    assert clipped, "there was nothing to clip"
    assert all(answer == answers[0] for answer in answers)
    torch.testing.assert_close(torch.tensor(answers[0]["parameters"]), flat(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("least", [{"min_peers": 2}, {"averager_opts": {"min_group_size": 2}}], ids=str)
def test_no_epoch_ends_before_enough_peers_are_there(
    dht: shoal.DHT, caplog: pytest.LogCaptureFixture, least: dict[str, Any]
) -> None:
    def make(place: shoal.DHT) -> tuple[Any, shoal.Optimizer]:
        model = make_model()
        return model, shoal.Optimizer(
            dht=place,
            run_id="enough",
            target_batch_size=32,
            params=model.parameters(),
            optimizer=OPTIMIZERS["sgd"],
            matchmaking_time=1.0,
            averaging_timeout=30.0,
            **least,
        )

    model, first = make(dht)
    start = flat(model)
    backward(model, *fixed_batch(0))
    for _ in range(2):
        began = time.monotonic()
        with caplog.at_level(logging.WARNING, "shoal"):
            first.step(batch_size=32)
        assert 0.9 <= time.monotonic() - began < 20.0
    assert "1 peers are here, and min_peers=2" in caplog.text
    assert first.local_epoch == 0
    assert torch.equal(flat(model), start)
    assert first.tracker.local_progress.samples_accumulated == 64, "what was accumulated is kept"
    with shoal.DHT(dht.get_visible_maddrs(), start=True) as elsewhere:
        other_model, second = make(elsewhere)

        def steps(optimizer: shoal.Optimizer) -> None:
            while optimizer.local_epoch == 0:
                optimizer.step(batch_size=0)

        with ThreadPoolExecutor(2) as threads:
            list(threads.map(steps, (first, second)))
        assert torch.equal(flat(model), flat(other_model))
        assert not torch.equal(flat(model), start)
        second.shutdown()
    first.shutdown()


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "option"),
    [
        ("GradientAverager", {"delay_grad_averaging": True}),
        ("PowerSGDGradientAverager", {}),
        pytest.param("GradientAverager", {}, marks=only_in_soak),
        pytest.param("PowerSGDGradientAverager", {"delay_grad_averaging": True}, marks=only_in_soak),
    ],
)
def test_an_averager_of_ones_own(pool: Pool, kind: str, option: dict[str, Any]) -> None:
    with training(pool, 3, optimizer="sgd", own_averager=kind, **option) as peers:
        answers = fixed(peers.all, SHARES, EPOCHS)
        histories = [events(peer) for peer in peers.all]
        roles = ask_all(peers.all, Training.terms)
    assert all([event["kind"] for event in history] == ["epoch"] * EPOCHS for history in histories)
    by_epoch(histories)
    assert all((role["own"], role["sizes"]) == (kind, []) for role in roles), "the run averaged gradients too"
    assert all(answer == answers[0] for answer in answers)
    plain = make_model()
    local = OPTIMIZERS["sgd"](plain.parameters())
    for epoch in range(EPOCHS):
        backward(plain, *fixed_batch(epoch))
        local.step()
    distance = (torch.tensor(answers[0]["parameters"]) - flat(plain)).abs().max()
    assert distance < 1e-5 if kind == "GradientAverager" else 1e-5 < distance < 0.1


def test_something_else_than_an_averager(dht: shoal.DHT) -> None:
    with pytest.raises(ValueError, match=r"grad_averager_factory made a str: make a shoal\.GradientAverager"):
        shoal.Optimizer(
            dht=dht,
            run_id="other",
            target_batch_size=8,
            params=make_model().parameters(),
            optimizer=OPTIMIZERS["sgd"],
            grad_averager_factory=lambda *args, **kwargs: "averager",
        )

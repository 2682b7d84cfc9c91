"""Peers that split a batch end where one process with the whole batch ends, and bit-identical to each other."""

from __future__ import annotations

import pytest
import torch

from tests.optim.models import OPTIMIZERS, SCHEDULERS, backward, fixed_batch, flat, fused, make_model, train_alone
from tests.optim.processes import Peers, Pool, Training, fixed, training

EPOCHS = 20
SHARES = [(0, 8), (8, 24), (24, 36), (36, 64)]


def train_fixed(peers: Peers, parts: tuple[int, ...] = (1, 1, 1, 1)) -> tuple[torch.Tensor, list[list[str]]]:
    """EPOCHS epochs of the fixed batches; the parameters, and each peer's digests by epoch."""
    answers = fixed(peers.all, SHARES, EPOCHS, parts)
    digests = []
    for peer, answer in zip(peers.all, answers, strict=True):
        assert answer["epoch"] == EPOCHS
        events = peer.ask(Training.report)["events"]
        assert [event["kind"] for event in events] == ["epoch"] * EPOCHS, "an epoch was not one round of all four"
        rounds = [(event["epoch"], event["peers"], event["samples"]) for event in events]
        assert rounds == [(epoch, 4, 64) for epoch in range(1, EPOCHS + 1)]
        digests.append([event["digest"] for event in events])
    assert len({(a["parameters_digest"], a["statistics"], repr(a["scheduler"]), a["rate"]) for a in answers}) == 1
    return torch.tensor(answers[0]["parameters"]), digests


@pytest.mark.parametrize(
    ("optimizer", "scheduler"), [pytest.param("sgd", "none", marks=pytest.mark.long), ("adamw", "cosine")]
)
def test_four_peers_train_like_one_process(pool: Pool, optimizer: str, scheduler: str) -> None:
    with training(pool, 4, optimizer=optimizer, scheduler=scheduler) as peers:
        together, digests = train_fixed(peers, parts=(1, 2, 3, 1))
    assert all(other == digests[0] for other in digests)
    assert len(set(digests[0])) == EPOCHS
    alone = train_alone(optimizer, scheduler, EPOCHS)
    start = flat(make_model())
    moved = (alone - start).abs().max()
    assert moved > 0.1, "the training did nothing"
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_peers_are_bit_identical_through_a_lossy_codec(pool: Pool) -> None:
    with training(pool, 4, optimizer="adamw", scheduler="steps", codec="float16") as peers:
        together, digests = train_fixed(peers)
    assert all(other == digests[0] for other in digests)
    assert not torch.equal(together, train_alone("adamw", "steps", EPOCHS)), "the codec lost nothing: was it used?"


@pytest.mark.parametrize(("optimizer", "scheduler"), [("sgd", "steps"), ("adamw", "cosine")])
def test_one_peer_alone_is_bit_equal_to_torch_with_its_fused_kernel(
    alone: object, optimizer: str, scheduler: str
) -> None:
    """The same kernels on tensors of the same shapes, whatever the batch size: 1/24 is no binary number."""
    assert callable(alone)
    model = make_model()
    shoal_optimizer = alone(
        model, target_batch_size=24, optimizer=OPTIMIZERS[optimizer], scheduler=SCHEDULERS[scheduler]
    )
    other = make_model()
    local = fused(OPTIMIZERS[optimizer](other.parameters()))
    schedule = SCHEDULERS[scheduler](local)  # type: ignore[misc]
    for epoch in range(12):
        backward(model, *fixed_batch(epoch))
        shoal_optimizer.step(batch_size=24)
        assert shoal_optimizer.local_epoch == epoch + 1
        backward(other, *fixed_batch(epoch))
        local.step()
        schedule.step()
        assert torch.equal(flat(model), flat(other)), epoch
        assert shoal_optimizer.param_groups[0]["lr"] == local.param_groups[0]["lr"]
